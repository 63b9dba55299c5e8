"""Loading layers: values, dtypes, and formats that are not read; test_load_quantised.py has those that are."""

import shutil

import fixtures_io
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fixtures_io import (
    FIXTURES,
    assert_holds,
    assert_same_bits,
    layer_tensors,
    moe_config,
    stacked_by_hand,
    written,
)

from checkpoints import CheckpointError, list_moe_layers, load_layer, load_layers
from nemotron_moe.weights import abstract_weights

LAYERS = [(name, layer) for name in fixtures_io.UNQUANTISED for layer in fixtures_io.layers_of(name)]
P = "backbone.layers.1."


# Values.


@pytest.mark.quick
@pytest.mark.parametrize("name, layer", LAYERS)
def test_fixtures_load_with_the_bits_of_the_file_R02(name, layer):
    row = fixtures_io.layers_of(name)[layer]
    weights, config = load_layer(FIXTURES / name, layer)
    assert_holds(weights, stacked_by_hand(fixtures_io.tensors_of(FIXTURES / name), row["prefix"]))
    assert weights.gate_bias.dtype == jnp.float32
    sizes = (config.hidden_size, config.moe_latent_size, config.moe_intermediate_size, config.n_routed_experts)
    assert sizes == (row["H"], row["X"], row["I"], row["E"])
    assert jax.tree.map(lambda leaf: leaf.shape, weights) == jax.tree.map(
        lambda leaf: leaf.shape, abstract_weights(config)
    )


@pytest.mark.parametrize("latent", [None, 0, 32])
def test_the_latent_projections_exist_only_in_a_latent_layer_R18(tmp_path, latent):
    config = moe_config(moe_latent_size=latent)
    weights, _ = load_layer(written(tmp_path, layer_tensors(P, config), config), 1)
    assert (weights.fc1_latent_proj is not None) == (weights.fc2_latent_proj is not None) == bool(latent)
    assert len(jax.tree.leaves(weights)) == (9 if latent else 7)


def test_router_and_shared_expert_have_the_full_width_and_experts_the_latent_R19(tmp_path):
    config = moe_config(
        hidden_size=64,
        moe_latent_size=32,
        n_routed_experts=16,
        num_experts_per_tok=6,
        moe_intermediate_size=80,
        moe_shared_expert_intermediate_size=112,
    )
    weights, _ = load_layer(written(tmp_path, layer_tensors(P, config), config), 1)
    assert weights.gate.shape == (16, 64)
    assert weights.shared_experts_up_proj.shape == (112, 64)
    assert weights.experts_up_proj.shape == (16, 80, 32)
    assert weights.experts_down_proj.shape == (16, 32, 80)
    assert weights.fc1_latent_proj.shape == (32, 64)
    assert weights.fc2_latent_proj.shape == (64, 32)


@pytest.mark.parametrize("prefix", ["backbone.", "model.", "language_model.backbone."])
def test_the_layer_is_the_same_under_every_prefix_R75(tmp_path, prefix):
    config = moe_config()
    tensors = layer_tensors(f"{prefix}layers.1.", config)
    weights, _ = load_layer(written(tmp_path, tensors, config), 1)
    assert_holds(weights, stacked_by_hand(layer_tensors(P, config), P))


def test_both_prefixes_at_once_are_refused_R75(tmp_path):
    config = moe_config()
    both = layer_tensors(P, config) | layer_tensors("model.layers.1.", config, seed=1)
    with pytest.raises(CheckpointError, match=r"backbone\.layers\.1 and model\.layers\.1"):
        load_layer(written(tmp_path, both, config), 1)


def test_the_same_experts_load_stacked_and_one_by_one(tmp_path):
    config = moe_config()
    tensors = layer_tensors(P, config)
    wanted = stacked_by_hand(tensors, P)
    stacked = {name: array for name, array in tensors.items() if ".experts." not in name}
    stacked |= {f"{P}mixer.experts.{name}": wanted[f"experts_{name}"] for name in ("up_proj", "down_proj")}
    weights, _ = load_layer(written(tmp_path, stacked, config), 1)
    assert_holds(weights, wanted)


def test_ten_experts_stack_in_the_order_of_their_numbers_not_of_their_names(tmp_path):
    config = moe_config(n_routed_experts=12)
    tensors = layer_tensors(P, config)
    weights, _ = load_layer(written(tmp_path, tensors, config), 1)
    for expert in (2, 10, 11):
        assert_same_bits(weights.experts_up_proj[expert], tensors[f"{P}mixer.experts.{expert}.up_proj.weight"])


def test_a_layer_loads_beside_multi_token_prediction_and_that_loads_by_name_R81(tmp_path):
    config = moe_config(num_nextn_predict_layers=1)
    own, mtp = layer_tensors(P, config), layer_tensors("mtp.layers.1.", config, seed=1)
    extra = {
        name: np.zeros(16, np.float32) for name in ("mtp.layers.0.enorm.weight", "mtp.layers.1.final_layernorm.weight")
    }
    folder = written(tmp_path, own | mtp | extra, config)
    assert list_moe_layers(folder) == [1, "mtp.layers.1"]
    assert_holds(load_layer(folder, 1)[0], stacked_by_hand(own, P))
    assert_holds(load_layer(folder, "mtp.layers.1")[0], stacked_by_hand(mtp, "mtp.layers.1."))


def test_layers_are_listed_in_the_order_of_their_numbers(tmp_path):
    names = ["mtp.layers.10", "backbone.layers.10", "mtp.layers.2", "backbone.layers.2"]
    tensors = {f"{name}.mixer.gate.weight": np.zeros(1, np.float32) for name in names}
    assert list_moe_layers(written(tmp_path, tensors)) == [2, 10, "mtp.layers.2", "mtp.layers.10"]


def test_several_layers_load_as_each_does_alone():
    folder = FIXTURES / "bf16_latent"
    every = load_layers(folder)
    assert list(every) == list_moe_layers(folder) == [0, 2, "mtp.layers.1"]
    for layer, (weights, config) in every.items():
        alone, its_config = load_layer(folder, layer)
        assert config == its_config
        assert_holds(weights, {field: np.asarray(array) for field, array in alone.items().items()})
    assert list(load_layers(folder, [2])) == [2]
    assert load_layers(folder, []) == {}


# Dtypes.


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16", "float32"])
def test_dtype_applies_to_all_but_the_gate_bias_and_never_narrows_the_gate(tmp_path, stored, dtype):
    config = moe_config()
    tensors = layer_tensors(P, config, dtype=stored)
    weights, _ = load_layer(written(tmp_path, tensors, config), 1, dtype=dtype)
    for field, array in stacked_by_hand(tensors, P).items():
        narrowed_gate = field == "gate" and stored == np.float32
        keep = dtype is None or field == "gate_bias" or narrowed_gate
        assert_same_bits(weights.items()[field], array if keep else array.astype(jnp.dtype(dtype)))


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16])
def test_a_gate_bias_in_16_bits_is_widened(tmp_path, stored):
    config, name = moe_config(), f"{P}mixer.gate.e_score_correction_bias"
    tensors = layer_tensors(P, config)
    tensors[name] = tensors[name].astype(stored)
    weights, _ = load_layer(written(tmp_path, tensors, config), 1, dtype="bfloat16")
    assert_same_bits(weights.gate_bias, tensors[name].astype(np.float32))


def test_experts_of_different_dtypes_are_named(tmp_path):
    tensors, name = layer_tensors(P, moe_config()), f"{P}mixer.experts.5.up_proj.weight"
    tensors[name] = tensors[name].astype(np.float32)
    with pytest.raises(CheckpointError, match=r"experts\.5\.up_proj\.weight is F32 but \S*experts\.0\S* is BF16"):
        load_layer(written(tmp_path, tensors), 1)


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float32])
def test_a_value_beyond_the_asked_dtype_is_named_not_made_infinite(tmp_path, stored):
    tensors, name = layer_tensors(P, moe_config(), dtype=stored), f"{P}mixer.experts.5.up_proj.weight"
    tensors[name][3, 4] = 1e6
    folder = written(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"experts\.5\.up_proj\.weight has values that overflow float16"):
        load_layer(folder, 1, dtype=np.float16)
    assert load_layer(folder, 1, dtype=np.float32)[0].experts_up_proj[5, 3, 4] == np.float32(tensors[name][3, 4])


@pytest.mark.parametrize("dtype", ["float64", "int8", "float8_e4m3fn", "bool", "'bf16'"])
def test_a_dtype_that_the_layer_cannot_compute_in_is_refused(dtype):
    with pytest.raises(ValueError, match=rf"dtype is {dtype}; wanted one of bfloat16"):
        load_layer(FIXTURES / "bf16_direct", 1, dtype=dtype.strip("'"))


# Formats that are not read.


@pytest.mark.parametrize(
    "dtype, message",
    [
        (np.int8, "of dtype I8"),
        (np.float64, "of dtype F64"),
        (ml_dtypes.float8_e5m2, "of dtype F8_E5M2"),
        (np.uint8, "of dtype U8"),
    ],
)
def test_a_weight_of_another_dtype_is_named(tmp_path, dtype, message):
    tensors, name = layer_tensors(P, moe_config()), f"{P}mixer.shared_experts.up_proj.weight"
    tensors[name] = tensors[name].astype(dtype)
    with pytest.raises(CheckpointError, match=rf"shared_experts\.up_proj\.weight is {message}; load_layer reads"):
        load_layer(written(tmp_path, tensors), 1)


def test_activation_scales_beside_unquantised_weights_are_ignored_and_weight_scales_are_not(tmp_path):
    tensors, scale = layer_tensors(P, moe_config()), np.ones((), np.float32)
    modules = [name.removesuffix(".weight") for name in tensors if "proj" in name]
    stray = {f"{module}.input_scale": scale for module in modules} | {
        "backbone.layers.0.mixer.in_proj.input_scale": scale
    }
    folder = written(tmp_path, tensors | stray)
    assert_holds(load_layer(folder, 1)[0], stacked_by_hand(tensors, P))
    shutil.rmtree(folder)
    folder = written(tmp_path, tensors | {f"{P}mixer.experts.3.up_proj.weight_scale": scale})
    with pytest.raises(
        CheckpointError, match=r"surplus: backbone\.layers\.1\.mixer\.experts\.3\.up_proj\.weight_scale\."
    ):
        load_layer(folder, 1)
