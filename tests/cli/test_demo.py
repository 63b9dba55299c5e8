"""The demonstration proves the layer right, and notices one changed byte."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from fixtures_io import FIXTURES, expected, tensors_of
from make_demo_data import KEPT, SOURCE, make

from checkpoints.safetensors_file import SafetensorsFile
from nemotron_moe import cli, demo

pytestmark = pytest.mark.quick
FILES = demo._files(demo.FOLDER)


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of the packaged data, from which `nemotron-moe demo` now runs."""
    folder = tmp_path / "demo"
    shutil.copytree(demo.FOLDER, folder)
    monkeypatch.setattr(demo, "run_demo", functools.partial(demo.run_demo, folder))
    return folder


@pytest.fixture
def without_running(monkeypatch):
    """The layer is loaded, but not run: where only the sums can tell, there is no need to wait for it."""
    monkeypatch.setattr(demo, "ALLOWED", {})


def change(path, position, flip=1):
    data = bytearray(path.read_bytes())
    data[position] ^= flip
    path.write_bytes(data)


def test_the_packaged_demo_passes_and_says_all(capsys, monkeypatch):
    monkeypatch.setattr(demo, "run_demo", functools.cache(demo.run_demo))
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["demo"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.splitlines()[-1] == "PASS"
    for part in (
        *("moe_latent_size", "experts_up_proj", "[16, 48, 32]", "49,152", "float32", "bfloat16", "compile"),
        *("\ndevice: cpu\n", "Hugging Face", "float64 oracle", "37 of 37 tokens", "########"),
    ):
        assert part in out, part
    assert out.splitlines()[1] == str(demo.FOLDER / demo.CHECKPOINT)
    lines = [line for number, line in enumerate(out.splitlines()) if number != 1]
    assert max(map(len, lines)) <= 80 and not [line for line in lines if line.endswith(" ")]
    # Nothing is shown as right that was not compared.
    assert len(re.findall(r"(?m)(absolute|relative)  ok$", out)) == 12

    assert cli.main(["demo", "--json"]) == 0
    out, err = capsys.readouterr()
    shown = json.loads(out, parse_constant=pytest.fail)
    assert err == "" and shown["passed"] is True and shown["changed_files"] == [] and shown["failure"] is None
    assert [run["dtype"] for run in shown["runs"]] == ["float32", "bfloat16"]
    for run in shown["runs"]:
        assert run["passed"] and sum(run["load"]) == 37 * 6 and run["compile_seconds"] > run["run_seconds"] > 0
        assert all(row["error"] <= row["allowed"] for row in run["comparisons"])
        rows = {(row["stage"], row["against"]) for row in run["comparisons"]}
        assert {("block_out", "Hugging Face"), ("block_out", "float64 oracle")} <= rows


def test_the_sums_cover_every_data_file_and_are_right():
    assert list(demo.changed_files(demo.FOLDER)) == []
    there = {path.relative_to(demo.FOLDER).as_posix() for path in demo.FOLDER.rglob("*") if path.is_file()}
    assert there - set(FILES) == {"README.md", "SHA256SUMS"}
    assert len([name for name in FILES if name.startswith("checkpoint/model-")]) == 4
    assert sum((demo.FOLDER / name).stat().st_size for name in FILES) < 700_000


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", [0.0, 0.01, 0.5, 0.99, 1.0], ids="at{}".format)
def test_one_changed_byte_anywhere_fails_and_is_named(copy, without_running, capsys, name, place):
    size = (copy / name).stat().st_size
    change(copy / name, int(place * (size - 1)))
    assert cli.main(["demo"]) == 1
    out, err = capsys.readouterr()
    assert err == "" and f"{name} is not as it was packaged" in out and out.splitlines()[-1] == "FAIL"


def test_one_changed_byte_anywhere_in_the_sums_fails(copy, without_running, monkeypatch):
    monkeypatch.setattr(demo, "sums", functools.cache(demo.sums))
    original = (copy / demo.SUMS).read_bytes()
    for position in range(len(original)):
        for flip in (1, 7, 32):  # 7 makes a carriage return of a newline, 32 changes the case of a letter.
            changed = bytearray(original)
            changed[position] ^= flip
            (copy / demo.SUMS).write_bytes(changed)
            assert any(demo.changed_files(copy)), (position, flip)
    assert cli.main(["demo"]) == 1


def test_a_missing_or_empty_data_file_fails(copy, without_running, capsys):
    (copy / demo.RECORDED).unlink()
    assert cli.main(["demo"]) == 1
    assert demo.RECORDED in capsys.readouterr().out
    (copy / demo.RECORDED).write_bytes(b"")
    assert cli.main(["demo", "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    # What could be loaded is still shown.
    assert (
        shown["changed_files"] == [demo.RECORDED] and demo.RECORDED in shown["failure"] and len(shown["weights"]) == 9
    )


def _largest(path, tensor):
    """The position in the file of the top byte of the tensor's largest element (little endian)."""
    with SafetensorsFile(path) as file:
        info, array = file.tensors[tensor], file.read(tensor)
    index = int(np.argmax(np.abs(array.astype(np.float64))))
    return info.start + (index + 1) * array.dtype.itemsize - 1


def _errors(report):
    return {(run.dtype, row.stage, row.against): row for run in report.runs for row in run.comparisons}


def test_a_changed_weight_shows_in_the_numbers_against_hugging_face_only(copy):
    path = copy / "checkpoint" / "model-00001-of-00004.safetensors"
    change(path, _largest(path, "backbone.layers.0.mixer.fc2_latent_proj.weight"), flip=0x80)  # The sign.
    (copy / demo.SUMS).write_text(demo.sums(copy))
    report = demo.run_demo()
    assert report.changed == () and report.failure is None and not report.passed
    assert {key for key, row in _errors(report).items() if not row.passed} == {
        ("float32", "block_out", "Hugging Face"),
        ("bfloat16", "block_out", "Hugging Face"),
    }


@pytest.mark.parametrize("key", demo.RECORDED_KEYS)
def test_a_changed_recorded_number_shows_in_the_numbers(copy, monkeypatch, key):
    monkeypatch.setattr(demo, "ALLOWED", {name: demo.ALLOWED[name] for name in _dtypes_of(key)})
    monkeypatch.setattr(demo.nm, "self_check", lambda *_, **__: _NO_ORACLE)
    path = copy / demo.RECORDED
    change(path, _largest(path, key), flip=0x40)
    report = demo.run_demo()
    assert report.changed == (demo.RECORDED,) and report.failure is None
    (run,) = report.runs
    # In bfloat16 a token may go elsewhere and is not compared: there only the sum is sure to tell.
    assert not run.passed or (run.dtype, run.same_experts) == ("bfloat16", 36)


_NO_ORACLE = demo.nm.CheckReport(errors={}, tolerance=0.0, same_experts=1.0, unexplained=0, load=())


def _dtypes_of(key):
    return ["bfloat16"] if "bf16" in key else ["float32"]


def test_the_data_come_from_the_fixture(tmp_path):
    make(tmp_path)
    assert demo.sums(tmp_path) == demo.sums(demo.FOLDER)
    source, packaged = tensors_of(FIXTURES / SOURCE), tensors_of(demo.FOLDER / demo.CHECKPOINT)
    assert packaged.keys() == {name for name in source if name.startswith(KEPT)}
    assert all(packaged[name].tobytes() == source[name].tobytes() for name in packaged)
    recorded = demo._read_recorded(demo.FOLDER / demo.RECORDED)
    assert all(recorded[key].tobytes() == expected(SOURCE)[f"layers.0.{key}"].tobytes() for key in demo.RECORDED_KEYS)
    assert recorded["x.bf16"].dtype == ml_dtypes.bfloat16


def test_the_command_needs_no_network_and_less_than_a_minute():
    code = (
        "import sys\n"
        "def refuse(event, _):\n"
        "    assert not event.startswith('socket.'), event\n"
        "sys.addaudithook(refuse)\n"
        "from nemotron_moe.cli import main\n"
        "sys.exit(main(['demo']))\n"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr, done.stdout[-5:]) == (0, "", "PASS\n")
