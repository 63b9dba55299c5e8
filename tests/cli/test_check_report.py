"""`nemotron-moe check --report`: what it writes of a layer's weights."""

import json
import shutil

import fixtures_io
import ml_dtypes
import numpy as np
import pytest

import nemotron_moe as nm
from checkpoints.safetensors_file import SafetensorsFile
from nemotron_moe.cli import main

NAME, LAYER = "mixed_modelopt_latent", 1


@pytest.fixture
def quick(monkeypatch):
    """One way of computing; all of them are in tests/layer/test_check.py."""
    accuracy = nm.accuracy
    monkeypatch.setattr(nm, "accuracy", lambda *args: accuracy(*args, dtypes=("bfloat16",)), raising=False)


def sibling_of(folder, tmp_path, scale=1.0):
    """The checkpoint's layer, dequantised by the numbers that came with the fixture where there are any."""
    weights, config = nm.load_layer(folder, LAYER, dtype="float32")
    prefix, shards = f"backbone.layers.{LAYER}.", {}
    tensors = {
        "norm.weight": weights.norm, "mixer.gate.weight": weights.gate,
        "mixer.gate.e_score_correction_bias": weights.gate_bias,
        **{f"mixer.{name}_latent_proj.weight": getattr(weights, f"{name}_latent_proj") for name in ("fc1", "fc2")},
        **{f"mixer.shared_experts.{name}.weight": getattr(weights, f"shared_experts_{name}")
           for name in ("up_proj", "down_proj")},
        **{f"mixer.experts.{expert}.{name}.weight": getattr(weights, f"experts_{name}")[expert]
           for name in ("up_proj", "down_proj") for expert in range(config.n_routed_experts)},
    }  # fmt: skip
    for name, leaf in tensors.items():
        array = np.asarray(leaf) * (scale if "proj" in name else 1)
        shards[prefix + name] = array if "bias" in name else array.astype(ml_dtypes.bfloat16)
    published = json.loads((folder / "config.json").read_text())
    published.pop("quantization_config", None)
    return fixtures_io.write_checkpoint(tmp_path / "sibling", {"model-00001-of-00001.safetensors": shards}, published)


def test_the_report_says_how_each_weight_is_stored(quick, tmp_path, capsys):
    folder, file = fixtures_io.FIXTURES / NAME, tmp_path / "out.json"
    sibling = sibling_of(folder, tmp_path)
    arguments = [
        "check",
        str(folder),
        "--layer",
        str(LAYER),
        "--report",
        str(file),
        "--sibling",
        str(sibling),
        "--json",
    ]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["passed"]
    report = json.loads(file.read_text())
    assert (report["checkpoint"], report["layer"], report["sibling"]) == (str(folder), LAYER, str(sibling))
    weights = nm.load_layer(folder, LAYER)[0]
    tensors = report["tensors"]
    assert tensors.keys() == weights.items().keys()
    up, shared, gate = (tensors[name] for name in ("experts_up_proj", "shared_experts_up_proj", "gate"))
    assert (up["published"], up["format"], up["declared"], up["agrees"]) == ("NVFP4 (ModelOpt)", "nvfp4", "NVFP4", True)
    assert up["bytes"] == weights.experts_up_proj.nbytes and set(up["scales"]) == {
        "scale",
        "global_scale",
        "input_scale",
    }
    assert 0 < up["scales"]["global_scale"]["least"] <= up["scales"]["global_scale"]["largest"]
    assert (shared["published"], shared["format"]) == ("FP8 per tensor", "fp8_tensor")
    assert (gate["published"], gate["scales"], gate["dequantised"]) == ("BF16", {}, False)
    for name, row in tensors.items():
        # The sibling is the dequantised weight, rounded to bfloat16.
        limit = 0.0 if name in ("norm", "gate", "gate_bias") else float(ml_dtypes.finfo(ml_dtypes.bfloat16).eps)
        assert row["error"]["relative"] <= limit, name
    assert {"bfloat16 xla", "bfloat16 xla fp8_static", "bfloat16 xla nvfp4_static"} <= report["accuracy"].keys()
    assert list(tmp_path.iterdir()) != [] and not list(tmp_path.glob("*.unfinished"))


def test_what_json_has_no_number_for_is_null(monkeypatch, tmp_path):
    from nemotron_moe import layer_report

    report = {"relative": float("inf"), "least": [float("nan"), 1.0]}
    monkeypatch.setattr(layer_report, "layer_report", lambda *args, **kwargs: report)
    layer_report.write_report(tmp_path / "out.json", "path", 1, None, None)
    assert json.loads((tmp_path / "out.json").read_text()) == {"relative": None, "least": [None, 1.0]}


def test_nothing_is_left_of_a_report_that_cannot_be_written(monkeypatch, tmp_path):
    from nemotron_moe import layer_report

    monkeypatch.setattr(layer_report, "layer_report", lambda *args, **kwargs: {})
    (tmp_path / "out.json").mkdir()
    with pytest.raises(OSError):
        layer_report.write_report(tmp_path / "out.json", "path", 1, None, None)
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_an_error_against_the_sibling_is_seen(quick, tmp_path):
    """The sibling's projections are doubled, so each quantised one is half of its: an error of one half, no angle."""
    from nemotron_moe.layer_report import layer_report

    folder = fixtures_io.FIXTURES / NAME
    weights, config = nm.load_layer(folder, LAYER)
    report = layer_report(str(folder), LAYER, weights, config, sibling=str(sibling_of(folder, tmp_path, 2.0)))
    error = report["tensors"]["experts_down_proj"]["error"]
    np.testing.assert_allclose([error["relative"], error["cosine"], error["shrinkage"]], [0.5, 1.0, -0.5], rtol=2**-8)


def test_one_damaged_expert_of_many_is_named(quick, tmp_path):
    """One scale of expert 11 is doubled in a copy; the other experts are as the sibling has them, but for rounding."""
    from nemotron_moe.layer_report import layer_report

    folder, damaged, worst = fixtures_io.FIXTURES / NAME, tmp_path / "damaged", 11
    shutil.copytree(folder, damaged)
    name = f"backbone.layers.{LAYER}.mixer.experts.{worst}.up_proj.weight_scale_2"
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    shard = damaged / index[name]
    with SafetensorsFile(shard) as file:
        tensors = {key: file.read(key) for key in file.tensors}
    shard.unlink()
    fixtures_io.write_safetensors(shard, {**tensors, name: 2 * tensors[name]})
    weights, config = nm.load_layer(damaged, LAYER)
    report = layer_report(str(damaged), LAYER, weights, config, sibling=str(sibling_of(folder, tmp_path)))
    up, down = (report["tensors"][f"experts_{one}_proj"] for one in ("up", "down"))
    eps = float(ml_dtypes.finfo(ml_dtypes.bfloat16).eps)
    assert up["error"]["expert"] == worst and len(up["experts"]["relative"]) == config.n_routed_experts
    assert [number for number, error in enumerate(up["experts"]["relative"]) if error > eps] == [worst]
    assert up["error"]["relative"] == up["experts"]["relative"][worst] == pytest.approx(1.0, rel=eps)
    assert max(down["experts"]["relative"]) == down["error"]["relative"] <= eps
    scale = up["experts"]["scales"]["global_scale"]
    assert scale["least"] == scale["largest"] == np.asarray(weights.experts_up_proj.global_scale).tolist()
    inner = np.asarray(weights.experts_up_proj.scale[worst]).astype(np.float32)
    assert up["experts"]["scales"]["scale"]["largest"][worst] == inner.max()
    assert report["tensors"]["gate"]["experts"] is report["tensors"]["gate"]["error"]["expert"] is None


def test_what_is_wrong_is_told_before_anything_is_loaded_or_written(monkeypatch, tmp_path_factory, tmp_path, capsys):
    other = tmp_path_factory.mktemp("other")
    published = json.loads((fixtures_io.FIXTURES / NAME / "config.json").read_text()) | {"routed_scaling_factor": 2.5}
    published.pop("quantization_config", None)
    sibling = sibling_of(fixtures_io.FIXTURES / NAME, other)
    (sibling / "config.json").write_text(json.dumps(published))
    monkeypatch.setattr(nm, "load_layer", lambda *args: pytest.fail("it was loaded"), raising=False)
    folder = str(fixtures_io.FIXTURES / NAME)
    check = ["check", folder, "--layer", str(LAYER)]
    for arguments, message in (
        (["--sibling", folder], "--sibling wants --report FILE"),
        (["--report", str(tmp_path / "no" / "out.json")], "there is no folder"),
        (["--report", str(tmp_path)], "a folder; wanted the name of a file in it"),
        (["--report", str(tmp_path / "out.json"), "--sibling", folder], "is quantised itself"),
        (["--report", str(tmp_path / "out.json"), "--sibling", str(fixtures_io.FIXTURES / "bf16_latent")], "layer"),
        (["--report", str(tmp_path / "out.json"), "--sibling", str(sibling)], "routed_scaling_factor 2.5, not 5.0"),
    ):
        assert main(check + arguments) == 2
        assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
