"""What configs declare about number formats: compared with the tensors, never trusted, never fatal."""

import json
import shutil
import time
import warnings

import numpy as np
import pytest
from fixtures_io import (
    FIXTURES,
    QUANTISED,
    UNQUANTISED,
    assert_same_bits,
    layer_tensors,
    layers_of,
    moe_config,
    tensors_of,
    with_quantised,
    written,
)

from checkpoints import layer_formats, load_layer, load_layers
from checkpoints.declared import read_declared

P = "backbone.layers.1."
CONFIG = moe_config(
    hidden_size=64, moe_intermediate_size=80, moe_shared_expert_intermediate_size=96, n_routed_experts=4
)
MIXED = {"quant_algo": "MIXED_PRECISION"}
NVFP4, FP8 = {"quant_algo": "NVFP4", "group_size": 16}, {"quant_algo": "FP8"}
UP = "backbone.layers.1.mixer.experts.2.up_proj"


def declared(folder, config=None, beside=None):
    """What is declared in a folder with these contents of config.json's quantization_config and the other file."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({} if config is None else {"quantization_config": config}))
    (folder / "hf_quant_config.json").write_text(json.dumps({} if beside is None else {"quantization": beside}))
    return read_declared(folder)


@pytest.mark.parametrize("name", [*QUANTISED, *UNQUANTISED])
def test_no_fixture_contradicts_its_configs(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_layers(FIXTURES / name)
    for layer in layers_of(name):
        formats = layer_formats(FIXTURES / name, layer)
        assert all(one.agrees for one in formats.values())
        if name in QUANTISED and isinstance(layer, int):
            said = "NVFP4" if formats["experts_up_proj"].published.startswith("NVFP4") else "FP8"
            assert formats["experts_up_proj"].declared == said


@pytest.mark.parametrize("where", ["config", "beside"])
@pytest.mark.parametrize("prefix", ["backbone.", "model.", "language_model.backbone.", ""])
def test_a_table_of_modules_is_found_in_either_file_and_under_any_prefix_R40(tmp_path, where, prefix):
    table = {
        f"{prefix}layers.1.mixer.experts": NVFP4,
        f"{prefix}layers.1.mixer.experts.2.down_proj": {"quant_algo": "W4A16_NVFP4"},
        f"{prefix}layers.1.mixer.shared_experts.up_proj": FP8,
    }
    exclude = {"exclude_modules": [f"{prefix}layers.1.mixer.gate", "mtp*"]}
    found = declared(tmp_path, **{where: MIXED | exclude | {"quantized_layers": table}})
    assert found.of(UP) == found.of("model.layers.1.mixer.experts.2.down_proj") == "NVFP4"
    assert found.of("backbone.layers.1.mixer.shared_experts.up_proj") == "FP8"
    assert found.of("backbone.layers.1.mixer.gate", router=True) == "unquantised"
    assert found.of("mtp.layers.1.mixer.experts.0.up_proj") == "unquantised"
    assert found.of("backbone.layers.1.mixer.fc1_latent_proj") is None  # A table may be incomplete.
    assert found.of("backbone.layers.11.mixer.experts.2.up_proj") is None


def test_what_is_said_of_all_modules_does_not_mean_the_router(tmp_path):
    for number, (config, format) in enumerate(
        [
            ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "FP8"),
            ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
            ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "FP8"),
            ({"quant_method": "awq"}, "AWQ"),
        ]
    ):
        found = declared(tmp_path / str(number), config)
        assert (found.of(UP), found.of("backbone.layers.1.mixer.gate", router=True)) == (format, None)


def test_groups_and_patterns_of_compressed_tensors(tmp_path):
    weights = {"num_bits": 8, "type": "float"}
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "a": {"targets": ["Linear"], "weights": weights},
            "b": {"targets": ["re:.*up_proj$"], "weights": weights | {"num_bits": 4}},
            "c": {"targets": ["backbone.layers.1.mixer.fc1_latent_proj"], "weights": weights | {"type": "int"}},
        },
        "ignore": ["re:.*shared_experts.*", "lm_head"],
    }
    found = declared(tmp_path, config)
    assert found.of(UP) == "NVFP4"
    assert found.of("backbone.layers.1.mixer.experts.2.down_proj") == "FP8"
    assert found.of("backbone.layers.1.mixer.shared_experts.up_proj") == "unquantised"
    assert found.of("backbone.layers.1.mixer.fc1_latent_proj") == "8-bit int"


def test_names_that_the_exporter_damaged_are_read_up_to_the_damage(tmp_path):
    damaged = {"exclude_modules": [f"{UP}.\0backbone.pt_name_sentinel", "\0", ""]}
    assert declared(tmp_path, beside=NVFP4 | damaged).of(UP) == "unquantised"


def test_nested_configs_are_read(tmp_path):
    for key in ("text_config", "llm_config"):
        (tmp_path / "config.json").write_text(json.dumps({key: {"quantization_config": FP8}}))
        assert read_declared(tmp_path).of(UP) == "FP8"


@pytest.mark.parametrize(
    "config",
    [
        *(None, 1, "FP8", [], [FP8], {}, {"quant_algo": 3}, {"quant_algo": None}, {"quantized_layers": [UP]}),
        *({"quantized_layers": {UP: None}}, {"quantized_layers": {UP: {"quant_algo": []}}}, {"ignore": "mtp*"}),
        *({"ignore": [None, 3, {}]}, {"config_groups": []}, {"config_groups": {"a": None, "b": {"targets": 1}}}),
        *({"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": "8"}}}}, {"ignore": ["re:("]}),
        {"ignore": ["re:(a+)+$", "re:.*.*.*.*x", "re:" + "(" * 5000]},
    ],
)
def test_oddities_declare_nothing_and_never_fail(tmp_path, config):
    found = declared(tmp_path, config, config)
    started = time.perf_counter()
    assert found.of(UP) is None and found.of("a" * 60 + "!") is None
    assert time.perf_counter() - started < 1


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b"\xff\xfe", b'{"a": ' + b"[" * 100_000])
def test_a_file_that_is_no_json_is_told_and_the_layer_loads(tmp_path, raw):
    tensors = with_quantised(layer_tensors(P, CONFIG), "nvfp4")
    folder = written(tmp_path, tensors, CONFIG)
    (folder / "hf_quant_config.json").write_bytes(raw)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weights, _ = load_layer(folder, 1)
    assert_same_bits(weights.experts_up_proj.packed[3], tensors[f"{P}mixer.experts.3.up_proj.weight"])
    told = [str(one.message) for one in caught if one.category is UserWarning]
    assert len(told) == (0 if raw == b"[1]" else 1)
    assert all("hf_quant_config.json cannot be read" in one for one in told)


@pytest.mark.parametrize("said, there", [(FP8, "nvfp4"), (NVFP4, "fp8_tensor"), (NVFP4, None), (FP8, None)])
def test_tensors_of_another_kind_than_declared_are_told_once_and_loaded(tmp_path, said, there):
    tensors = layer_tensors(P, CONFIG)
    tensors = tensors if there is None else with_quantised(tensors, there, "proj")
    folder = written(tmp_path, tensors, CONFIG | {"quantization_config": said})
    with pytest.warns(UserWarning, match=r"^Layer 1: the number formats .* are not those of the tensors") as caught:
        weights, _ = load_layer(folder, 1)
    (told,) = caught
    assert told.filename == __file__  # It points at the caller.
    assert str(told.message).count(", declared ") == 3 and "and 7 more" in str(told.message)
    assert f"declared {said['quant_algo']}" in str(told.message)
    assert (weights.experts_up_proj.shape, weights.nbytes) == ((4, 80, 64), sum(a.nbytes for a in tensors.values()))
    one = layer_formats(folder, 1)["experts_up_proj"]
    assert (one.agrees, one.declared, len(one.contradicted)) == (False, said["quant_algo"], 4)


def test_one_module_of_many_that_was_declared_otherwise_is_named(tmp_path):
    tensors = with_quantised(layer_tensors(P, CONFIG), "nvfp4", ".experts.")
    folder = written(tmp_path, tensors, CONFIG)
    (folder / "hf_quant_config.json").write_text(
        json.dumps({"quantization": NVFP4 | {"exclude_modules": ["*.shared_experts.*", UP]}})
    )
    with pytest.warns(UserWarning) as caught:
        load_layer(folder, 1)
    assert str(caught[0].message).endswith(f"loaded: {UP} is NVFP4 (ModelOpt), declared unquantised.")


@pytest.mark.parametrize("name", ["mixed_modelopt_latent", "w4a16_modelopt_direct"])
@pytest.mark.parametrize("only", ["config.json", "hf_quant_config.json"])
def test_a_layer_loads_the_same_with_either_file_or_none_R40(tmp_path, name, only):
    folder, layer = tmp_path / "checkpoint", next(iter(layers_of(name)))
    shutil.copytree(FIXTURES / name, folder)
    config = json.loads((folder / "config.json").read_text())
    if only == "hf_quant_config.json":
        del config["quantization_config"]
        (folder / "config.json").write_text(json.dumps(config))
    else:
        (folder / "hf_quant_config.json").unlink()
    weights, _ = load_layer(folder, layer)
    codes = tensors_of(folder)[f"{layers_of(name)[layer]['prefix']}mixer.experts.7.down_proj.weight"]
    assert_same_bits(np.asarray(weights.experts_down_proj.packed[7]), codes)
