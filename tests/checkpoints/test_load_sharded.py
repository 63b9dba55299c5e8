"""Loading onto meshes, and what each process reads of the files."""

import builtins
import io
import os
import socket
import subprocess
import sys

import fixtures_io
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
from jax.sharding import AxisType

from checkpoints import load_layer, load_layers
from checkpoints.directory import Checkpoint
from checkpoints.find import find_layer
from checkpoints.slices import plan_reads, read_slices
from nemotron_moe.config import MoEConfig
from nemotron_moe.sharding import ShardingRules
from nemotron_moe.weights import abstract_weights

pytestmark = pytest.mark.devices

P = "backbone.layers.1."
MESHES = {
    "8 devices": ((8,), ("x",), ShardingRules(experts="x")),
    "1 device": ((1,), ("x",), ShardingRules(experts="x", expert_inner=None, shared_inner="x")),
    "2 devices, inner widths": ((2,), ("x",), ShardingRules(expert_inner="x", shared_inner="x")),
    "(2, 2) experts and inner widths": (
        (2, 2),
        ("x", "y"),
        ShardingRules(experts="x", expert_inner="y", shared_inner="y"),
    ),
    "(2, 2) experts over both": ((2, 2), ("x", "y"), ShardingRules(experts=("y", "x"))),
    "8 devices, replicated": ((8,), ("x",), None),
}


def mesh_of(shape, names, axis_type):
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return jax.sharding.Mesh(devices, names, axis_types=(axis_type,) * len(names))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("case", MESHES)
@pytest.mark.parametrize("name", ["bf16_latent", "fused3d_direct"])
def test_every_mesh_gets_the_same_bits_in_the_shardings_it_asks_for_R82(name, case, axis_type):
    shape, names, rules = MESHES[case]
    layer, row = next(iter(fixtures_io.layers_of(name).items()))
    mesh = mesh_of(shape, names, axis_type)
    weights, config = load_layer(FIXTURES / name, layer, mesh=mesh, rules=rules)
    wanted = stacked_by_hand(fixtures_io.tensors_of(FIXTURES / name), row["prefix"])
    for field, like in abstract_weights(config, mesh=mesh, rules=rules).items().items():
        leaf = weights.items()[field]
        assert leaf.sharding == like.sharding
        assert_same_bits(leaf, wanted[field])
        for shard in leaf.addressable_shards:
            assert_same_bits(shard.data, wanted[field][shard.index])


@pytest.mark.quick
@pytest.mark.parametrize("case", MESHES)
def test_conversion_and_sharding_together_equal_conversion_alone(case):
    shape, names, rules = MESHES[case]
    folder = FIXTURES / "bf16_direct"
    sharded, _ = load_layer(folder, 1, dtype="float32", mesh=mesh_of(shape, names, AxisType.Auto), rules=rules)
    alone, _ = load_layer(folder, 1, dtype="float32")
    for field, leaf in sharded.items().items():
        assert_same_bits(leaf, np.asarray(alone.items()[field]))


@pytest.mark.parametrize("case", MESHES)
def test_each_byte_is_read_once_however_many_devices_hold_it(case):
    shape, names, rules = MESHES[case]
    steps = []
    weights, _ = load_layer(
        FIXTURES / "bf16_latent",
        0,
        mesh=mesh_of(shape, names, AxisType.Auto),
        rules=rules,
        progress=lambda done, total: steps.append((done, total)),
    )
    assert steps[-1] == (weights.nbytes, weights.nbytes)


def test_without_a_mesh_weights_go_to_the_default_device():
    device = jax.devices()[3]
    with jax.default_device(device):
        weights, _ = load_layer(FIXTURES / "bf16_direct", 1)
    assert {leaf.device for leaf in jax.tree.leaves(weights)} == {device}


def test_sizes_that_the_mesh_does_not_divide_are_named_before_reading():
    mesh, steps = mesh_of((3,), ("x",), AxisType.Auto), []
    with pytest.raises(ValueError, match=r"experts_up_proj has 8 .* 3 devices"):
        load_layer(
            FIXTURES / "bf16_direct",
            1,
            mesh=mesh,
            rules=ShardingRules(experts="x"),
            progress=lambda *step: steps.append(step),
        )
    assert not steps


def four_layers(tmp_path):
    config = moe_config(layers=("moe",) * 4, n_routed_experts=128, hidden_size=8, moe_intermediate_size=8)
    tensors = {}
    for layer in range(4):
        tensors |= layer_tensors(f"backbone.layers.{layer}.", config, seed=layer)
    return write_checkpoint(tmp_path, shuffled(tensors, 3), config), tensors


def test_each_shard_is_opened_once_per_call_R73(tmp_path, monkeypatch):
    folder, tensors = four_layers(tmp_path)
    opened = []

    class Counted(io.FileIO):
        def __init__(self, path, *mode):
            opened.append(str(path))
            super().__init__(path, *mode)

    def counted_open(path, *rest, plain=builtins.open, **more):
        opened.append(str(path))
        return plain(path, *rest, **more)

    monkeypatch.setattr(io, "FileIO", Counted)
    monkeypatch.setattr(builtins, "open", counted_open)
    loaded = load_layers(folder)
    assert sum(path.endswith(".safetensors") for path in opened) == 3
    for layer, (weights, _) in loaded.items():
        wanted = stacked_by_hand(tensors, f"backbone.layers.{layer}.")
        assert_same_bits(weights.experts_down_proj, wanted["experts_down_proj"])


def read_by(folder, layer, parts_of):
    """What a process reads whose devices hold `parts_of(field, shape)` of each field: arrays, and bytes by field."""
    with Checkpoint(folder) as checkpoint:
        found = find_layer(checkpoint, layer)
        wanted = {field: parts_of(field, leaf.shape) for field, leaf in abstract_weights(found.config).items().items()}
        reads = plan_reads(found.sources, wanted)
        arrays = read_slices(reads, wanted, found.stored, lambda nbytes: None)
        counted = sum(file.bytes_read for file in {id(read.source.file): read.source.file for read in reads}.values())
        assert counted == sum(read.nbytes for read in reads)
        return arrays, {field: sum(read.nbytes for read in reads if read.source.leaf == field) for field in wanted}


def whole(shape):
    return tuple((0, size) for size in shape)


def test_an_expert_parallel_rank_reads_its_experts_only_R73(tmp_path):
    folder, tensors = four_layers(tmp_path)
    wanted = stacked_by_hand(tensors, "backbone.layers.2.")
    for rank in range(4):
        mine = (rank * 32, rank * 32 + 32)

        def parts(field, shape, mine=mine):
            return [(mine, *whole(shape[1:]))] if field.startswith("experts_") else [whole(shape)]

        arrays, read = read_by(folder, 2, parts)
        for (field, part), array in arrays.items():
            assert_same_bits(array, wanted[field][tuple(slice(*bound) for bound in part)])
            assert read[field] == array.nbytes
        experts = sum(read[field] for field in ("experts_up_proj", "experts_down_proj"))
        assert experts <= 0.3 * (wanted["experts_up_proj"].nbytes + wanted["experts_down_proj"].nbytes)


def test_parts_that_split_rows_and_columns_are_each_read_once(tmp_path):
    folder, tensors = four_layers(tmp_path)
    wanted = stacked_by_hand(tensors, "backbone.layers.0.")

    def halves(field, shape):
        axis = {"experts_up_proj": 1, "experts_down_proj": 2}.get(field)
        if axis is None:
            return [whole(shape)]
        return [(*whole(shape[:axis]), half, *whole(shape[axis + 1 :])) for half in ((0, 4), (4, 8))]

    arrays, read = read_by(folder, 0, halves)
    for (field, part), array in arrays.items():
        assert_same_bits(array, wanted[field][tuple(slice(*bound) for bound in part)])
    assert read == {field: array.nbytes for field, array in wanted.items()}

    def top_half(field, shape):
        return halves(field, shape)[:1]

    _, read = read_by(folder, 0, top_half)
    assert read["experts_up_proj"] == wanted["experts_up_proj"].nbytes // 2


PROCESS = """
import sys
import jax, numpy as np
from checkpoints import load_layer
from nemotron_moe.sharding import ShardingRules

folder, port, rank = sys.argv[1:]
jax.distributed.initialize(f"localhost:{port}", 2, int(rank))
totals = []
weights, _ = load_layer(
    folder, 2, mesh=jax.make_mesh((4,), ("x",)), rules=ShardingRules(experts="x"),
    progress=lambda done, total: totals.append((done, total)),
)
shards = weights.experts_up_proj.addressable_shards
parts = {str(shard.index[0]): np.asarray(shard.data).tobytes().hex() for shard in shards}
print(totals[-1], weights.gate.is_fully_replicated, sorted(parts.items()))
"""


def test_each_of_two_processes_reads_and_holds_its_half_of_the_experts(tmp_path):
    folder, tensors = four_layers(tmp_path)
    wanted = stacked_by_hand(tensors, "backbone.layers.2.")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(folder), port, str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    experts = wanted["experts_up_proj"].nbytes + wanted["experts_down_proj"].nbytes
    rest = sum(array.nbytes for array in wanted.values()) - experts
    for rank, output in enumerate(outputs):
        mine = [slice(rank * 64 + start, rank * 64 + start + 32, None) for start in (0, 32)]
        parts = sorted((str(part), wanted["experts_up_proj"][part].tobytes().hex()) for part in mine)
        read = rest + experts // 2
        assert output.strip() == f"{(read, read)} True {parts}"


def test_the_config_returned_is_the_layers_own():
    for layer, row in fixtures_io.layers_of("puzzle_bf16").items():
        config = load_layer(FIXTURES / "puzzle_bf16", layer)[1]
        assert config == MoEConfig.from_hf(FIXTURES / "puzzle_bf16", layer=layer)
        assert config.moe_intermediate_size == row["I"]
