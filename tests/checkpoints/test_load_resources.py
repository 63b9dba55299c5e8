"""What a load costs and leaves behind: memory, open files, progress."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from fixtures_io import (
    FIXTURES,
    assert_same_bits,
    layer_tensors,
    moe_config,
    shuffled,
    stacked_by_hand,
    write_checkpoint,
)

from checkpoints import CheckpointError, load_layer, load_layers
from checkpoints.bench import CASES, SHARDS
from checkpoints.progress import reporting

P = "backbone.layers.1."


@pytest.fixture
def folder(tmp_path):
    return write_checkpoint(tmp_path / "checkpoint", shuffled(layer_tensors(P, moe_config()), 3), moe_config())


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def run(*arguments: str) -> str:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, check=True, capture_output=True, text=True
    ).stdout


def test_peak_host_memory_is_below_1_3_layers_and_each_shard_is_opened_once_R73():
    lines = [
        json.loads(line) for line in run("-m", "checkpoints.bench", "--experts", "32", "--rounds", "1").splitlines()
    ]
    assert {line["case"] for line in lines} == set(CASES) and {line["cache"] for line in lines} == {"cold", "warm"}
    for line in lines:
        # A peak far below the layer would mean that the measurement missed it.
        assert 0.8 < line["peak_over_layer"] < 1.3, line
        assert line["opens"] == SHARDS, line
        if "float32" not in line["case"]:
            assert line["loaded_bytes"] == pytest.approx(line["bytes"], rel=0.01)


def test_import_and_listing_start_no_backend_and_need_no_torch():
    script = f"""
import sys, checkpoints
from jax._src import xla_bridge
checkpoints.list_moe_layers({str(FIXTURES / "bf16_direct")!r})
assert not xla_bridge.backends_are_initialized()
checkpoints.load_layer({str(FIXTURES / "bf16_direct")!r}, 1)
print({{"torch", "safetensors", "transformers", "rich"}} & {{name.split(".")[0] for name in sys.modules}})
"""
    assert run("-c", script).strip() == "set()"


def test_on_the_cpu_the_arrays_that_were_filled_become_the_leaves(folder):
    """Without this, the peak would be twice the layer."""
    from checkpoints.slices import _empty

    for size in (1, 1000, 100_000):
        array = _empty((size,), np.dtype(np.float32))
        assert jax.device_put(array).unsafe_buffer_pointer() == array.ctypes.data


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_overwriting_the_files_after_the_load_changes_no_leaf(folder, dtype):
    weights, _ = load_layer(folder, 1, dtype=dtype)
    before = {field: np.array(leaf) for field, leaf in weights.items().items()}
    for shard in folder.glob("*.safetensors"):
        with shard.open("r+b") as file:
            file.write(b"\x5a" * shard.stat().st_size)
            file.flush()
            os.fsync(file.fileno())
    with open("/proc/self/maps") as maps:
        assert str(folder) not in maps.read()
    for field, array in before.items():
        assert_same_bits(weights.items()[field], array)


@pytest.mark.devices
def test_donating_a_leaf_leaves_the_others_alone(folder):
    wanted = stacked_by_hand(layer_tensors(P, moe_config()), P)
    mesh = jax.make_mesh((8,), ("x",))
    weights, _ = load_layer(folder, 1, mesh=mesh)
    doubled = jax.jit(lambda leaf: leaf + leaf, donate_argnums=0)(weights.experts_up_proj)
    for shard in doubled.addressable_shards:  # All devices began with the same host array.
        assert_same_bits(shard.data, wanted["experts_up_proj"] + wanted["experts_up_proj"])
    assert_same_bits(weights.experts_down_proj, wanted["experts_down_proj"])


def test_an_interrupted_load_leaves_nothing_behind(folder):
    load_layer(folder, 1)
    files, before = sorted(os.listdir(folder)), open_files()

    def interrupt(done, total):
        assert open_files() > before
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_layer(folder, 1, progress=interrupt)
    assert open_files() == before
    assert sorted(os.listdir(folder)) == files
    assert_same_bits(
        load_layer(folder, 1)[0].gate_bias, stacked_by_hand(layer_tensors(P, moe_config()), P)["gate_bias"]
    )


def test_a_refused_load_leaves_no_file_open():
    load_layer(FIXTURES / "bf16_direct", 1)
    before = open_files()
    for broken in (FIXTURES / "broken").iterdir():
        if broken.name == "uncalibrated_experts":
            continue
        with pytest.raises(CheckpointError):
            load_layer(broken, 0)
    assert open_files() == before


def test_progress_counts_the_bytes_of_the_files_up_to_the_total():
    steps = []
    loaded = load_layers(FIXTURES / "bf16_latent", progress=lambda done, total: steps.append((done, total)))
    size = sum(weights.nbytes for weights, _ in loaded.values())
    assert {total for _, total in steps} == {size}
    assert [done for done, _ in steps] == sorted({done for done, _ in steps})
    assert steps[-1] == (size, size)
    assert len(steps) == sum(
        len(layer_tensors("", moe_config(n_routed_experts=16, moe_latent_size=32))) for _ in loaded
    )


def test_a_bar_is_shown_on_a_terminal_from_1_gib_on_and_never_else(monkeypatch, capsys):
    def shown(total):
        with reporting(None, total) as step:
            step(total)
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err

    assert shown(2 << 30) == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # Makes rich take stderr for a terminal.
    assert "Loading" in shown(1 << 30)
    assert shown((1 << 30) - 1) == ""
