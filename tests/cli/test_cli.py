"""The commands `info` and `check`, and how errors are told."""

import dataclasses
import importlib.metadata
import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fixtures_io import FIXTURES, tensors_of, write_checkpoint

import nemotron_moe as nm
from nemotron_moe import cli
from nemotron_moe.description import describe

ROOT = Path(__file__).parents[2]
LATENT = str(FIXTURES / "bf16_latent")
pytestmark = pytest.mark.quick


@pytest.fixture
def run(capsys):
    """Runs the command in this process: (status, stdout, stderr)."""

    def run(*arguments):
        try:
            status = cli.main([str(argument) for argument in arguments])
        except SystemExit as error:
            status = error.code
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def run_json(run):
    """Runs the command with --json; it succeeds, and stdout is one JSON object, with neither NaN nor infinity."""

    def run_json(*arguments, status=0):
        seen, out, err = run(*arguments, "--json")
        assert (seen, err) == (status, "")
        return json.loads(out, parse_constant=pytest.fail)

    return run_json


def test_info_lists_the_released_models(run, run_json):
    status, out, _ = run("info")
    assert status == 0 and all(name in out for name in nm.presets.MODELS)
    models = run_json("info")["models"]
    assert list(models) == list(nm.presets.MODELS)
    assert models["super"]["parameters"] == describe("super").model.total.parameters
    assert models["super"]["moe_layers"][-1] == "mtp.layers.1"


@pytest.mark.parametrize("name", list(nm.presets.MODELS))
def test_info_of_a_model_is_its_description_within_80_columns(run, run_json, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = run("info", name)
    assert status == 0 and out == f"{describe(name)!r}\n" == run("info", name.upper())[1]
    assert max(map(len, out.splitlines())) <= 80
    assert run_json("info", name) == json.loads(json.dumps(dataclasses.asdict(describe(name))))


def test_info_of_a_checkpoint_folder_its_config_file_and_a_hub_cache_is_the_same(run_json, tmp_path):
    wanted = json.loads(json.dumps(dataclasses.asdict(describe(LATENT))))
    assert run_json("info", LATENT) == run_json("info", f"{LATENT}/config.json") == wanted
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    shutil.copy(f"{LATENT}/config.json", snapshot)
    assert run_json("info", tmp_path / "models--org--name") == wanted


def test_info_of_one_layer_shows_its_configuration_and_weights(run, run_json):
    shown = run_json("info", LATENT, "--layer", 0)
    config = nm.MoEConfig.from_hf(LATENT, layer=0)
    assert shown["layer"] == 0 and nm.MoEConfig(**shown["config"]) == config
    wanted = {name: list(leaf.shape) for name, leaf in nm.abstract_weights(config).items().items()}
    assert {weight["name"]: weight["shape"] for weight in shown["weights"]} == wanted
    assert run_json("info", "super", "--layer", "mtp.layers.1")["layer"] == "mtp.layers.1"
    status, out, _ = run("info", LATENT, "--layer", "mtp.layers.1")
    assert status == 0 and all(text in out for text in ("moe_latent_size", "[16, 48, 32]", "mtp.layers.1"))


def test_info_files_needs_only_the_index(run, run_json, tmp_path):
    for name in ("config.json", "model.safetensors.index.json"):
        shutil.copy(FIXTURES / "bf16_latent" / name, tmp_path)
    wanted = ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"]
    assert run("info", tmp_path, "--layer", 2, "--files") == (0, "\n".join([*wanted, ""]), "")
    assert run_json("info", tmp_path, "--layer", 2, "--files") == {"files": wanted}


@pytest.mark.parametrize("layer", [0, "mtp.layers.1"])
def test_check_of_a_layer_passes(run, run_json, layer):
    status, out, _ = run("check", LATENT, "--layer", layer)
    assert status == 0 and out.splitlines()[-1] == "PASS"
    assert max(map(len, out.replace(LATENT, "").splitlines())) <= 80
    shown = run_json("check", LATENT, "--layer", layer, "--dtype", "bfloat16")
    assert shown["passed"] and shown["layer"] == layer and shown["dtype"] == "bfloat16"
    # It did run in that dtype: no float32 result is so far off, and none in bfloat16 is nearer.
    assert 1e-5 < shown["errors"]["block_out"] < shown["tolerance"]
    assert sum(shown["load"]) == 64 * 6
    assert sum(weight["bytes"] for weight in shown["weights"]) == nm.load_layer(LATENT, layer)[0].nbytes


def test_check_of_a_layer_that_holds_nan_fails(run, run_json, tmp_path, monkeypatch):
    tensors = tensors_of(FIXTURES / "bf16_latent")
    tensors["backbone.layers.0.mixer.fc2_latent_proj.weight"][3, 5] = np.nan
    config = json.loads((FIXTURES / "bf16_latent" / "config.json").read_text())
    write_checkpoint(tmp_path, {"model.safetensors": tensors}, config)
    report = nm.self_check(*nm.load_layer(tmp_path, 0))
    monkeypatch.setattr(nm, "self_check", lambda *_, **__: report)
    assert run_json("check", tmp_path, "--layer", 0, status=1)["errors"]["block_out"] is None
    status, out, _ = run("check", tmp_path, "--layer", 0)
    assert status == 1 and out.splitlines()[-1] == "FAIL" and "TOO LARGE" in out


@pytest.mark.parametrize(
    "same, unexplained, words",
    [
        (64, 0, ["64 of 64 tokens go to the oracle's experts."]),
        (63, 0, ["63 of 64 tokens go to the oracle's experts.", "The other 1 is a near tie that rounding explains."]),
        (61, 3, ["61 of 64 tokens go", "3 go elsewhere without a rounding that explains it: FAIL"]),
        (61, 1, ["61 of 64 tokens go", "2 are near ties", "1 goes elsewhere without a rounding"]),
    ],
)
def test_check_counts_the_tokens_that_go_elsewhere(same, unexplained, words):
    from nemotron_moe.cli_output import _same_experts

    report = nm.CheckReport(errors={}, tolerance=1.0, same_experts=same / 64, unexplained=unexplained, load=())
    lines = _same_experts(report, 64)
    assert len(lines) == len(words) and all(word in line for word, line in zip(words, lines, strict=True))


def test_a_layer_of_many_experts_gets_few_bars():
    from nemotron_moe.cli_output import _load

    table = _load([3] * 500 + [0] * 12)[1]
    assert table.row_count == 32
    labels, counts, bars = (list(column.cells) for column in table.columns)
    assert (labels[0], labels[-1]) == ("0-15", "496-511")
    assert (counts[0], counts[-1]) == ("48", "12") and len(bars[0]) == 4 * len(bars[-1])


ERRORS = [
    ((), "COMMAND"),
    (("infp",), "infp"),
    (("info", "nano", "--layr", "3"), "--layr"),
    (("info", "supr"), "'supr'", "nano, lightning, super, ultra, puzzle", "Did you mean super?"),
    (("info", "/nowhere/at/all"), "/nowhere/at/all"),
    (("info", "nvidia/model"), "hf download nvidia/model config.json"),
    (("info", __file__), "test_cli.py", "JSON"),
    (("info", FIXTURES), f"{FIXTURES} is no checkpoint", "config.json"),
    (("info", "."), f"{Path.cwd()} is no checkpoint", "config.json"),
    (("info", "nano", "--layer", "0"), "layer 0", "mamba"),
    (("info", "nano", "--layer", "mtp.layers.1"), "mtp.layers.1", "does not exist"),
    (("info", "nano", "--layer", "-1"), "'-1'"),
    (("info", "--layer", "3"), "--layer wants a model"),
    (("info", "--files"), "--files wants"),
    (("info", LATENT, "--files"), "--files wants"),
    (("info", LATENT, "--layer", "1"), "layer 1 is of kind 'attention', not MoE"),
    (("info", LATENT, "--layer", "1", "--files"), "layer 1 is of kind 'attention', not MoE"),
    (("info", "super", "--layer", "mtp"), "'mtp' does not exist", "Did you mean mtp.layers.1?"),
    (("info", "super", "--layer", "1", "--files"), "has no weights"),
    (("check", "Super", "--layer", "1"), "Super is a preset", "no weights", "downloaded checkpoint"),
    (("check", LATENT), "--layer"),
    (("check", LATENT, "--layer", "0", "--dtype", "float64"), "float64", "bfloat16"),
    (("check", LATENT, "--layer", "1"), "layer 1 is of kind 'attention', not MoE"),
    (("check", LATENT, "--layer", "mtp.layers.7"), "mtp.layers.7"),
    (("check", "nvidia/model", "--layer", "1"), "hf download"),
    (("check", __file__, "--layer", "1"), "is a file"),
    (("check", FIXTURES / "broken" / "missing_shard", "--layer", "0"), "model-00001-of-00003.safetensors"),
    (("check", FIXTURES / "broken" / "lfs_pointer", "--layer", "0"), "LFS"),
    (("check", FIXTURES / "broken" / "misspelled_key", "--layer", "0"), "experts.2.up_porj"),
    (("check", FIXTURES / "broken" / "both_prefixes", "--layer", "0"), "model.layers.0"),
]


@pytest.mark.parametrize("arguments, words", [(row[0], row[1:]) for row in ERRORS], ids=lambda value: str(value)[-40:])
@pytest.mark.parametrize("as_json", [False, True])
def test_an_error_is_one_line(run, arguments, words, as_json):
    status, out, err = run(*arguments, *(["--json"] if as_json and arguments else []))
    assert (status, out) == (2, "")
    assert err.startswith("nemotron-moe: ") and err.count("\n") == 1 and err.endswith("\n")
    assert all(word in err for word in words), err


@pytest.mark.parametrize(
    "error, status, message",
    [
        (KeyboardInterrupt(), 130, "nemotron-moe: interrupted.\n"),
        (MemoryError("Unable to allocate 9 GiB"), 2, "nemotron-moe: not enough memory: Unable to allocate 9 GiB\n"),
        (MemoryError(), 2, "nemotron-moe: not enough memory\n"),
        (
            PermissionError(13, "Permission denied", "/x/config.json"),
            2,
            "nemotron-moe: /x/config.json: Permission denied\n",
        ),
        (OSError("no space"), 2, "nemotron-moe: no space\n"),
        (
            RuntimeError("Unable to initialize backend\n  'cuda'"),
            2,
            "nemotron-moe: Unable to initialize backend 'cuda'\n",
        ),
        (ValueError("h is wrong.\nPass another."), 2, "nemotron-moe: h is wrong. Pass another.\n"),
    ],
)
def test_whatever_happens_below_becomes_one_line(run, monkeypatch, error, status, message):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(nm, "load_layer", fail)
    assert run("check", LATENT, "--layer", 0) == (status, "", message)


def test_help_teaches_with_commands_that_exist(run):
    status, out, _ = run("--help")
    assert status == 0
    examples = [line.split("   ")[0] for line in out.splitlines() if line.startswith("  nemotron-moe ")]
    assert {shlex.split(example)[1] for example in examples} == {"demo", "info", "check", "bench"}
    for example in examples:
        assert callable(cli._parser().parse_args(shlex.split(example)[1:]).run)
    for command in ("demo", "info", "check", "bench"):
        assert run(command, "--help")[0] == 0


def test_version(run):
    assert run("--version")[1].split() == [
        *("nemotron-moe", importlib.metadata.version("nemotron-moe") + ","),
        *("jax", importlib.metadata.version("jax")),
    ]


def test_the_installed_command_is_this_one():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="nemotron-moe")
    assert script.load() is cli.main


def test_a_gpu_plugin_that_does_not_start_costs_one_line(run, caplog):
    run("info", "nano")
    logger = logging.getLogger("jax._src.xla_bridge")
    try:
        raise RuntimeError("cuDNN not found.")
    except RuntimeError:
        logger.exception("Exception when calling %s", "initialize()")
    logger.warning("as it %s", "was")
    assert [record.getMessage() for record in caplog.records] == [
        "Exception when calling initialize(): cuDNN not found.",
        "as it was",
    ]
    assert "Traceback" not in caplog.text


def _python_m(*arguments, **options):
    # -S and the packages by path: site-packages' .pth files, and with them an editable installation, do not count.
    packages = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))
    environment = {**os.environ, "PYTHONPATH": packages, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-S", "-W", "error", "-m", "nemotron_moe", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, timeout=120, **options)


def test_it_runs_from_the_source_tree_without_installation():
    done = _python_m("check", LATENT, "--layer", "0", "--json", capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["passed"] is True


def test_a_reader_who_leaves_early_is_no_error():
    read, write = os.pipe()
    os.close(read)
    try:
        for options in ([], ["--json"]):
            done = _python_m("info", "puzzle", *options, stdout=write, stderr=subprocess.PIPE)
            assert (done.returncode, done.stderr) == (141, b"")
        # argparse itself says nothing of a broken pipe where stdout is not buffered.
        done = _python_m("--help", stdout=write, stderr=subprocess.PIPE)
        assert done.returncode in (0, 141) and done.stderr == b""
        done = _python_m("info", "nani", stdout=subprocess.PIPE, stderr=write)
        assert (done.returncode, done.stdout) == (141, b"")
    finally:
        os.close(write)
