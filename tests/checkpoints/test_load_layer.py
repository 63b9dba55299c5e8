"""Loading layers: values, names, number formats, folders; faults in all of them."""

import json
import re
import shutil

import fixtures_io
import jax
import jax.numpy as jnp
import ml_dtypes
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

from checkpoints import CheckpointError, layer_files, list_moe_layers, load_layer, load_layers
from nemotron_moe.weights import MoEWeights, abstract_weights

LAYERS = [(name, layer) for name in fixtures_io.UNQUANTISED for layer in fixtures_io.layers_of(name)]
FORMATS = {
    "fp8_modelopt_direct": "FP8 per tensor",
    "nvfp4_modelopt_direct": "NVFP4 (ModelOpt)",
    "nvfp4_modelopt_latent": "NVFP4 (ModelOpt)",
    "mixed_modelopt_latent": "NVFP4 (ModelOpt)",
    "w4a16_modelopt_direct": "NVFP4 (ModelOpt, weights only)",
    "nvfp4_ct_direct": "NVFP4 (compressed-tensors)",
    "fp8_ct_channel_latent": "FP8 per channel",
    "fp8_block_direct": "FP8 per block",
}
P = "backbone.layers.1."


def written(tmp_path, tensors, config=None, shards=2):
    return write_checkpoint(tmp_path / "checkpoint", shuffled(tensors, shards), config or moe_config())


def assert_holds(weights: MoEWeights, wanted: dict[str, np.ndarray]) -> None:
    assert weights.items().keys() == wanted.keys()
    for field, array in wanted.items():
        assert_same_bits(weights.items()[field], array)


# Values.


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


@pytest.mark.parametrize("dtype", ["float64", "int8", "float8_e4m3fn", "bool"])
def test_a_dtype_that_the_layer_cannot_compute_in_is_refused(dtype):
    with pytest.raises(ValueError, match=rf"dtype is {dtype}; wanted one of bfloat16"):
        load_layer(FIXTURES / "bf16_direct", 1, dtype=dtype)


# Quantised files.


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_layer_is_refused_by_tensor_and_format(name):
    layer, row = next(iter(fixtures_io.layers_of(name).items()))
    with pytest.raises(CheckpointError, match=re.escape(f" is {FORMATS[name]}; ")) as caught:
        load_layer(FIXTURES / name, layer)
    named = str(caught.value).split(" is ")[0]
    assert named in fixtures_io.tensors_of(FIXTURES / name) and named.startswith(row["prefix"])


def test_the_unquantised_mtp_layer_of_a_quantised_checkpoint_loads():
    weights, _ = load_layer(FIXTURES / "mixed_modelopt_latent", "mtp.layers.1")
    assert weights.experts_up_proj.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "dtype, message",
    [
        (np.int8, "of dtype I8"),
        (np.float64, "of dtype F64"),
        (ml_dtypes.float8_e5m2, "of dtype F8_E5M2"),
        (ml_dtypes.float8_e4m3fn, "FP8 without a scale"),
        (np.uint8, "of dtype U8"),
    ],
)
def test_a_weight_of_another_dtype_is_named(tmp_path, dtype, message):
    tensors, name = layer_tensors(P, moe_config()), f"{P}mixer.shared_experts.up_proj.weight"
    tensors[name] = tensors[name].astype(dtype)
    with pytest.raises(CheckpointError, match=rf"shared_experts\.up_proj\.weight is {message};"):
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


# Names.


@pytest.mark.parametrize("name", [path.name for path in sorted((FIXTURES / "broken").iterdir())])
def test_a_broken_directory_is_refused_with_what_its_problem_asks_to_mention_R77_R78(name):
    folder = FIXTURES / "broken" / name
    quantised = (folder / "hf_quant_config.json").exists()
    with pytest.raises(CheckpointError) as caught:
        load_layer(folder, 0)
    message = str(caught.value)
    wanted = ["NVFP4", ".weight"] if quantised else json.loads((folder / "problem.json").read_text())["mention"]
    assert all(text in message for text in wanted), message
    assert ("incomplete" in message) == (name in ("lfs_pointer", "missing_shard"))


def test_a_missing_expert_is_named_R77(tmp_path):
    tensors = layer_tensors(P, moe_config())
    del tensors[f"{P}mixer.experts.6.down_proj.weight"]
    with pytest.raises(CheckpointError, match=r"missing: backbone\.layers\.1\.mixer\.experts\.6\.down_proj\.weight\.$"):
        load_layer(written(tmp_path, tensors), 1)


def test_a_surplus_expert_is_named_R77(tmp_path):
    tensors = layer_tensors(P, moe_config(n_routed_experts=9))
    tensors = {name: array[:8] if "gate" in name else array for name, array in tensors.items()}
    with pytest.raises(CheckpointError, match=r"surplus: (\S*experts\.8\.\S*_proj\.weight(, |\.$)){2}"):
        load_layer(written(tmp_path, tensors), 1)


def test_another_expert_is_no_near_match_R77(tmp_path):
    tensors = layer_tensors(P, moe_config())
    tensors[f"{P}mixer.experts.8.down_proj.weight"] = tensors.pop(f"{P}mixer.experts.6.down_proj.weight")
    with pytest.raises(
        CheckpointError, match=r"missing: \S*\.6\.down_proj\.weight; surplus: \S*\.8\.down_proj\.weight\.$"
    ):
        load_layer(written(tmp_path, tensors), 1)


def test_a_misspelt_name_is_given_its_near_match_R77(tmp_path):
    tensors = layer_tensors(P, moe_config())
    tensors[f"{P}mixer.experts.3.dwon_proj.weight"] = tensors.pop(f"{P}mixer.experts.3.down_proj.weight")
    with pytest.raises(
        CheckpointError, match=r"missing: \S*\.3\.down_proj\.weight \(is it \S*\.3\.dwon_proj\.weight\?\)"
    ):
        load_layer(written(tmp_path, tensors), 1)


def test_long_lists_of_names_are_cut_R77(tmp_path):
    tensors = layer_tensors(P, moe_config(n_routed_experts=40))
    folder = written(tmp_path, tensors, moe_config(n_routed_experts=60))
    with pytest.raises(
        CheckpointError, match=r"missing: (\S+, ){9}\S+ and 30 more; wrongly shaped: (.*wanted \[60.*){2}"
    ) as caught:
        load_layer(folder, 1)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    "name",
    [
        "norm.weight",
        "mixer.gate.weight",
        "mixer.gate.e_score_correction_bias",
        "mixer.experts.7.up_proj.weight",
        "mixer.shared_experts.down_proj.weight",
    ],
)
def test_a_wrongly_shaped_tensor_is_named_with_both_shapes(tmp_path, name):
    tensors = layer_tensors(P, moe_config())
    right = list(tensors[P + name].shape)
    tensors[P + name] = np.concatenate([tensors[P + name]] * 2, axis=-1)
    wrong = [*right[:-1], 2 * right[-1]]
    with pytest.raises(CheckpointError, match=re.escape(f"wrongly shaped: {P}{name} {wrong} (wanted {right}).")):
        load_layer(written(tmp_path, tensors), 1)


def test_a_transposed_expert_is_wrongly_shaped(tmp_path):
    tensors, name = layer_tensors(P, moe_config()), f"{P}mixer.experts.0.up_proj.weight"
    tensors[name] = tensors[name].T
    with pytest.raises(CheckpointError, match=r"experts\.0\.up_proj\.weight \[16, 12\] \(wanted \[12, 16\]\)"):
        load_layer(written(tmp_path, tensors), 1)


def test_experts_given_stacked_and_one_by_one_are_surplus(tmp_path):
    tensors = layer_tensors(P, moe_config())
    tensors[f"{P}mixer.experts.up_proj"] = stacked_by_hand(tensors, P)["experts_up_proj"]
    with pytest.raises(CheckpointError, match=r"surplus: (\S*experts\.\d\.up_proj\.weight(, |\.)){8}"):
        load_layer(written(tmp_path, tensors), 1)


@pytest.mark.parametrize(
    "layer, message",
    [
        (0, "no MoE layer 0; its MoE layers are 1, 3"),
        (99, "layer 99"),
        (-1, "layer -1"),
        ("3", "layer '3'"),
        ("mtp.layers.1", "'mtp.layers.1'"),
        (True, "is True; wanted"),
        (1.0, "is 1.0; wanted"),
        (None, "is None; wanted"),
    ],
)
def test_what_is_no_moe_layer_is_refused_with_the_list(layer, message):
    for call in (load_layer, layer_files):
        with pytest.raises(ValueError, match=message):
            call(FIXTURES / "bf16_direct", layer)


def test_numpy_integers_name_layers():
    assert load_layer(FIXTURES / "bf16_direct", np.int64(3))[1].hidden_size == 64


def test_a_layer_that_the_config_does_not_call_moe_is_refused(tmp_path):
    folder = written(tmp_path, layer_tensors(P, moe_config()), moe_config(layers=("moe", "mamba")))
    with pytest.raises(ValueError, match="mamba"):
        load_layer(folder, 1)


# Folders.


def test_only_the_shards_of_the_layer_are_needed_and_listed_from_the_index_alone(tmp_path):
    folder = tmp_path / "partial"
    shutil.copytree(FIXTURES / "bf16_direct", folder)
    assert layer_files(folder, 3) == ["model-00003-of-00003.safetensors"]
    for shard in ("model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"):
        (folder / shard).unlink()
    weights, _ = load_layer(folder, 3)
    assert_holds(weights, stacked_by_hand(fixtures_io.tensors_of(folder), "backbone.layers.3."))
    (folder / "model-00003-of-00003.safetensors").unlink()
    assert layer_files(folder, 3) == ["model-00003-of-00003.safetensors"]
    assert layer_files(folder, 1) == ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"]
    assert list_moe_layers(folder) == [1, 3]


def test_one_file_needs_no_index(tmp_path):
    config = moe_config()
    tensors = layer_tensors(P, config)
    folder = write_checkpoint(tmp_path, {"model.safetensors": tensors}, config)
    (folder / "model.safetensors.index.json").unlink()
    assert (list_moe_layers(folder), layer_files(folder, 1)) == ([1], ["model.safetensors"])
    assert_holds(load_layer(str(folder), 1)[0], stacked_by_hand(tensors, P))


def hub_cache(tmp_path, *commits):
    """The hub's cache: blobs, and snapshots of links to them."""
    repository = tmp_path / "models--org--name"
    (repository / "blobs").mkdir(parents=True)
    for file in (FIXTURES / "bf16_direct").glob("*.*"):
        shutil.copy(file, repository / "blobs" / f"blob-{file.name}")
        for commit in commits:
            (repository / "snapshots" / commit).mkdir(parents=True, exist_ok=True)
            (repository / "snapshots" / commit / file.name).symlink_to(f"../../blobs/blob-{file.name}")
    return repository


def test_the_hubs_cache_folder_and_its_snapshot_folder_load(tmp_path):
    repository = hub_cache(tmp_path, "abc")
    wanted = stacked_by_hand(fixtures_io.tensors_of(FIXTURES / "bf16_direct"), P)
    for folder in (repository, repository / "snapshots" / "abc"):
        assert_holds(load_layer(folder, 1)[0], wanted)


def test_of_several_snapshots_main_is_taken_and_without_it_they_are_listed(tmp_path):
    repository = hub_cache(tmp_path, "abc", "def")
    shutil.rmtree(repository / "snapshots" / "abc")
    (repository / "snapshots" / "abc").mkdir()
    with pytest.raises(CheckpointError, match=r"2 snapshots.*abc, def"):
        load_layer(repository, 1)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("def\n")
    assert load_layer(repository, 1)[1].hidden_size == 64


def test_a_link_whose_target_was_not_downloaded_is_a_missing_shard(tmp_path):
    repository = hub_cache(tmp_path, "abc")
    (repository / "blobs" / "blob-model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-00002-of-00003\.safetensors.*incomplete"):
        load_layer(repository, 1)


def test_a_hub_name_gets_the_commands_that_download_one_layer():
    name = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
    for call in (list_moe_layers, load_layers):
        with pytest.raises(CheckpointError) as caught:
            call(name)
        assert f"`hf download {name} config.json model.safetensors.index.json --local-dir" in str(caught.value)
        assert re.search(r"`nemotron-moe info \S+ --layer N --files`", str(caught.value))


def test_other_paths_that_are_no_checkpoint_are_named(tmp_path):
    (tmp_path / "empty").mkdir()
    lone = tmp_path / "lone.safetensors"
    fixtures_io.write_safetensors(lone, layer_tensors(P, moe_config()))
    for path, message in {
        tmp_path / "nothing": "nothing is not a folder",
        "../org/name": r"\.\./org/name is not a folder\.$",
        tmp_path / "empty": r"neither model\.safetensors\.index\.json nor any \.safetensors file",
        lone: r"lone\.safetensors is a file; pass the checkpoint's folder",
        tmp_path: r"has no config\.json",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            load_layer(path, 1)


def test_wrong_arguments_are_refused_before_anything_is_opened():
    mesh = jax.make_mesh((8,), ("ep",))
    for arguments, message in [
        ({"layers": 1}, r"layers is 1; wanted a list, as in \[1\]"),
        ({"layers": "mtp.layers.1"}, "wanted a list"),
        ({"progress": True}, "progress is True; wanted a function"),
        ({"mesh": mesh.abstract_mesh}, "mesh is AbstractMesh"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_layers("no/where", **arguments)
