"""Parameters, bytes and FLOPs before anything is loaded, against the published totals."""

import dataclasses
import json
import math

import pytest
from fixtures_io import FIXTURES, layers_of, tensors_of
from published_configs import CONFIGS, OMNI

from nemotron_moe.config import MoEConfig
from nemotron_moe.description import Size, describe
from nemotron_moe.presets import MODELS, NANO, PUZZLE, SUPER, ULTRA

TINY = MoEConfig(
    hidden_size=64,
    moe_intermediate_size=80,
    n_routed_experts=16,
    num_experts_per_tok=4,
    moe_shared_expert_intermediate_size=112,
    moe_latent_size=32,
)


@pytest.mark.quick
@pytest.mark.parametrize("config, total", [(NANO, 1_297_468_032), (SUPER, 2_873_102_336), (ULTRA, 10_942_947_328)])
def test_a_block_has_its_published_number_of_parameters(config, total):
    assert describe(config).model.total.parameters == total


@pytest.mark.parametrize("config, routed", [(NANO, 1_277_165_568), (SUPER, 2_818_572_288)])
def test_routed_experts_are_counted_in_their_own_width_R23(config, routed):
    assert describe(config).model.routed.parameters == routed


@pytest.mark.parametrize("name, layers, total", [("nano", 23, 31.6e9), ("super", 40, 120.7e9), ("ultra", 48, 549.3e9)])
def test_moe_layers_are_most_of_the_model_R23(name, layers, total):
    found = describe(name)
    one = found.layers[0].sizes.total
    assert found.model.total.parameters == layers * one.parameters
    assert 0.9 * total < found.model.total.parameters < total


def test_super_routed_experts_take_under_a_third_in_nvfp4():
    routed = describe(SUPER).model.routed
    assert routed.bf16 == 2 * 2_818_572_288
    assert routed.fp8 == 2_818_572_288 + 2 * 512 * 4
    # Widths of the release: [2688, 512] + [2688, 64] bytes up, [1024, 1344] + [1024, 168] down, and a float32 each.
    assert routed.nvfp4 == 512 * (2688 * (512 + 64) + 1024 * (1344 + 168) + 2 * 4)
    assert (round(routed.nvfp4 / 1e9, 1), round(routed.bf16 / 1e9, 1)) == (1.6, 5.6)


def test_nano_nvfp4_has_the_widths_of_the_release():
    sizes = describe(NANO).model
    assert sizes.routed.nvfp4 == 128 * (1856 * (1344 + 168) + 2688 * (928 + 116) + 2 * 4)
    assert sizes.shared.nvfp4 == 3712 * (1344 + 168) + 2688 * (1856 + 232) + 2 * 4


def test_ultra_nvfp4_has_the_widths_of_the_release():
    sizes = describe(ULTRA).model
    assert sizes.routed.nvfp4 == 512 * (5120 * (1024 + 128) + 2048 * (2560 + 320) + 2 * 4)
    assert sizes.shared.nvfp4 == sizes.shared.fp8 == 2 * 10240 * 8192 + 2 * 4


@pytest.mark.parametrize("config", [NANO, SUPER, ULTRA, TINY])
def test_router_latent_and_norm_are_never_quantised(config):
    sizes = describe(config).model
    experts, hidden, latent = config.n_routed_experts, config.hidden_size, config.moe_latent_size or 0
    assert sizes.router.bf16 == sizes.router.fp8 == sizes.router.nvfp4 == 2 * experts * hidden + 4 * experts
    assert sizes.latent.bf16 == sizes.latent.fp8 == sizes.latent.nvfp4 == 2 * 2 * latent * hidden
    assert sizes.norm.bf16 == sizes.norm.fp8 == sizes.norm.nvfp4 == 2 * hidden


@pytest.mark.parametrize("name", MODELS)
def test_parts_make_the_total(name):
    for sizes in (layer.sizes for layer in describe(name).layers):
        parts = (sizes.routed, sizes.shared, sizes.latent, sizes.router, sizes.norm)
        assert sum(parts, start=Size()) == sizes.total


@pytest.mark.parametrize("config", [NANO, SUPER, TINY])
def test_a_token_meets_its_own_experts_only_R23(config):
    sizes = describe(config).model
    top_k, inner, width = config.num_experts_per_tok, config.moe_intermediate_size, config.expert_width
    assert sizes.routed.active_parameters == 2 * top_k * inner * width
    assert sizes.routed.flops_per_token == 4 * top_k * inner * width
    for part in (sizes.shared, sizes.latent, sizes.router):
        assert part.active_parameters == part.parameters
        assert part.flops_per_token == 2 * part.parameters
    assert sizes.norm.flops_per_token == 0
    assert sizes.router.parameters == config.n_routed_experts * config.hidden_size


def test_mtp_is_counted_apart_and_stays_bfloat16_in_quantised_releases():
    found, mtp = describe("super"), describe("super").mtp
    assert found.layers[-1].layer == "mtp.layers.1"
    assert mtp.total.parameters == describe(SUPER).model.total.parameters
    assert mtp.total.nvfp4 == mtp.total.fp8 == mtp.total.bf16 == describe(SUPER).model.total.bf16
    assert found.model.total.bf16 == 40 * mtp.total.bf16
    assert describe("nano").mtp is None


def test_puzzle_is_the_sum_of_its_unlike_layers_C3():
    wanted = sum(describe(config).model.total.nvfp4 for layer, config in PUZZLE.items() if isinstance(layer, int))
    assert describe("puzzle").model.total.nvfp4 == wanted


@pytest.mark.parametrize("name", CONFIGS)
def test_a_preset_name_a_parsed_config_and_layers_give_the_same(name):
    assert describe(name) == describe(CONFIGS[name]) == describe(MODELS[name])


def test_a_nested_config_is_described():
    assert describe(OMNI) == describe("nano")


@pytest.mark.parametrize("name", ["bf16_direct", "bf16_latent", "puzzle_bf16", "fused3d_direct"])
def test_bytes_are_those_in_the_files(name):
    tensors = tensors_of(FIXTURES / name)
    found = {layer.layer: layer.sizes.total for layer in describe(FIXTURES / name).layers}
    wanted = {}
    for layer, row in layers_of(name).items():
        wanted[layer] = sum(array.nbytes for key, array in tensors.items() if key.startswith(row["prefix"]))
        # The last MTP layer's folder also holds the norm that follows the MTP module.
        wanted[layer] -= sum(array.nbytes for key, array in tensors.items() if key == f"{layer}.final_layernorm.weight")
    assert {layer: size.bf16 for layer, size in found.items()} == wanted


@pytest.mark.parametrize(
    "name, column",
    [("fp8_modelopt_direct", "fp8"), ("nvfp4_modelopt_direct", "nvfp4"), ("nvfp4_modelopt_latent", "nvfp4")],
)
def test_quantised_bytes_are_those_in_the_files(name, column):
    tensors = tensors_of(FIXTURES / name)
    for layer in describe(FIXTURES / name).layers:
        prefix = f"{layers_of(name)[layer.layer]['prefix']}mixer.experts."
        stored = [array.nbytes for key, array in tensors.items() if key.startswith(prefix) and "input_scale" not in key]
        assert sum(stored) == getattr(layer.sizes.routed, column)


def test_a_row_that_16_does_not_divide_has_a_scale_for_its_rest():
    config = dataclasses.replace(TINY, moe_intermediate_size=19, moe_latent_size=None)
    assert describe(config).model.routed.nvfp4 == 16 * (19 * (32 + 4) + 64 * (10 + 2) + 2 * 4)


def test_a_layer_without_shared_expert_has_none_to_count():
    sizes = describe(dataclasses.replace(TINY, moe_shared_expert_intermediate_size=None)).model
    assert sizes.shared == Size()


def test_a_description_survives_json():
    found = describe("super")
    read = json.loads(json.dumps(dataclasses.asdict(found)))
    assert read["layers"][0]["layer"] == 1
    assert read["layers"][0]["config"] == dataclasses.asdict(SUPER)
    assert read["model"]["routed"]["nvfp4"] == found.model.routed.nvfp4


def test_a_description_prints_as_a_table():
    text = str(describe("lightning"))
    assert text == repr(describe("lightning"))
    rows = [line.split() for line in text.splitlines()]
    # One row for the 23 layers that are alike, one for MTP, which is not quantised.
    assert sum("1,297,468,032" in row for row in rows) == 2
    assert "23 layers: 1, ..., 51 " in text and rows[-1] == ["without", "mtp.layers.1"]
    mtp = next(row for row in rows if row[:1] == ["mtp.layers.1"])
    assert mtp[1:8] == ["2688", "-", "1856", "3712", "6", "of", "128"]
    assert f"{23 * 1_277_165_568:,}" in next(row for row in rows if row[:1] == ["routed"])
    assert not [row for row in rows if row[:1] == ["latent"]]
    assert all(max(map(len, str(describe(name)).splitlines())) <= 80 for name in MODELS)
    assert math.prod(text.count(word) for word in ("BF16", "FP8", "NVFP4", "16.5 GB")) > 0


def test_one_puzzle_row_for_each_kind_of_layer():
    lines = str(describe("puzzle")).splitlines()
    assert len([line for line in lines if " of 512" in line]) == 15


@pytest.mark.parametrize("name", ["nani", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"])
def test_a_string_that_is_neither_preset_nor_path_lists_the_presets(name):
    with pytest.raises(ValueError, match=f"'{name}'.*nano, lightning, super, ultra, puzzle"):
        describe(name)


def test_a_bad_config_keeps_its_own_message(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        describe(str(tmp_path))
    with pytest.raises(ValueError, match="'mixtral'"):
        describe({"model_type": "mixtral"})
