"""Every published kind of config.json, read into one MoEConfig per layer, and what is refused."""

import json
import re

import numpy as np
import pytest
from fixtures_io import FIXTURES, layers_of
from published_configs import CONFIGS, LAYERS, LIGHTNING, MOE, NANO, OMNI, PUZZLE, PUZZLE_SIZES, SUPER, ULTRA, words

from nemotron_moe.config import MoEConfig
from nemotron_moe.hf_config import MoELayers, moe_layers_from_hf, pick_layer
from nemotron_moe.weights import abstract_weights

NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/config.json"))
DROP = object()


def edited(config, **changes):
    return {key: value for key, value in (config | changes).items() if value is not DROP}


def refusal(config, **changes):
    with pytest.raises(ValueError) as error:
        moe_layers_from_hf(edited(config, **changes) if isinstance(config, dict) else config)
    return str(error.value)


@pytest.mark.parametrize("as_folder", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_fixture_configs_give_the_layers_of_the_manifest(name, as_folder):
    path = FIXTURES / name
    wanted = {
        layer: MoEConfig(
            hidden_size=row["H"],
            moe_intermediate_size=row["I"],
            num_experts_per_tok=row["K"],
            moe_shared_expert_intermediate_size=row["S"],
            n_routed_experts=row["E"],
            moe_latent_size=row["X"],
            routed_scaling_factor=row["scale"],
            n_group=row["n_group"],
            topk_group=row["topk_group"],
            norm_topk_prob=row["norm_topk_prob"],
            layer_norm_epsilon=row["eps"],
        )
        for layer, row in layers_of(name).items()
    }
    found = moe_layers_from_hf(path if as_folder else str(path / "config.json"))
    assert found == wanted
    assert list(found) == list(wanted)


def test_all_fixtures_are_looked_at():
    assert len(NAMES) == 12


@pytest.mark.quick
@pytest.mark.parametrize("name", CONFIGS)
def test_published_configs_have_their_moe_layers_in_order(name):
    mtp = [] if name == "nano" else ["mtp.layers.1"]
    assert list(moe_layers_from_hf(CONFIGS[name])) == [*MOE[name], *mtp]


@pytest.mark.quick
@pytest.mark.parametrize(
    "config, sizes",
    [
        (NANO, (2688, 1856, 128, 6, 3712, None, 2.5)),
        (LIGHTNING, (2688, 1856, 128, 6, 3712, None, 2.5)),
        (SUPER, (4096, 2688, 512, 22, 5376, 1024, 5.0)),
        (ULTRA, (8192, 5120, 512, 22, 10240, 2048, 5.0)),
    ],
)
def test_published_configs_have_their_sizes_C1_C2(config, sizes):
    names = ("hidden_size", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok")
    names += ("moe_shared_expert_intermediate_size", "moe_latent_size", "routed_scaling_factor")
    assert set(moe_layers_from_hf(config).values()) == {MoEConfig(**dict(zip(names, sizes, strict=True)))}


def test_puzzle_has_a_width_and_top_k_for_each_layer_C3():
    layers = moe_layers_from_hf(PUZZLE)
    found = {layer: (config.moe_intermediate_size, config.num_experts_per_tok) for layer, config in layers.items()}
    assert found == PUZZLE_SIZES | {"mtp.layers.1": (2688, 22)}
    assert {(config.hidden_size, config.expert_width) for config in layers.values()} == {(4096, 1024)}


@pytest.mark.parametrize("nested", ["llm_config", "text_config"])
def test_a_nested_text_config_is_found(nested):
    omni = {"model_type": "something_omni", "hidden_size": 5, nested: NANO}
    assert moe_layers_from_hf(omni) == moe_layers_from_hf(NANO) == moe_layers_from_hf(OMNI)


@pytest.mark.parametrize("model", ["nano", "super", "ultra"])
@pytest.mark.parametrize(
    "vocabulary",
    [
        {},
        {"mamba": "linear_attention", "attention": "full_attention"},
        {"moe": "E", "mamba": "M", "attention": "*"},
    ],
)
def test_vocabularies_of_layer_lists_agree(model, vocabulary):
    config = edited(CONFIGS[model], hybrid_override_pattern=DROP, layers_block_type=words(model, **vocabulary))
    assert moe_layers_from_hf(config) == moe_layers_from_hf(CONFIGS[model])


def test_a_pattern_string_agrees_with_the_list():
    pattern = "".join(words("ultra", moe="E", mamba="M", attention="*"))
    config = edited(ULTRA, layers_block_type=DROP, hybrid_override_pattern=pattern)
    assert moe_layers_from_hf(config) == moe_layers_from_hf(ULTRA)


def test_the_list_wins_over_the_pattern():
    config = edited(NANO, num_hidden_layers=3, layers_block_type=["moe", "mlp", "moe"])
    assert list(moe_layers_from_hf(config)) == [0, 2]


def test_block_configs_win_over_the_list():
    assert moe_layers_from_hf(PUZZLE | {"layers_block_type": ["moe"] * 88}) == moe_layers_from_hf(PUZZLE)


@pytest.mark.parametrize("empty", [None, [], ""])
def test_an_empty_list_is_no_list(empty):
    assert moe_layers_from_hf(NANO | {"layers_block_type": empty}) == moe_layers_from_hf(NANO)


@pytest.mark.parametrize("unset", [DROP, None, 0])
@pytest.mark.parametrize(
    "key, value, field",
    [
        ("moe_intermediate_size", 1344, "moe_intermediate_size"),
        ("num_experts_per_tok", 7, "num_experts_per_tok"),
        ("n_routed_experts", 256, "n_routed_experts"),
        ("moe_latent_size", 640, "moe_latent_size"),
        ("moe_shared_expert_intermediate_size", 777, "moe_shared_expert_intermediate_size"),
    ],
)
def test_a_size_that_a_block_leaves_open_is_the_models_C3(key, value, field, unset):
    blocks = [dict(block) for block in PUZZLE["block_configs"]]
    blocks[3] = edited(blocks[3], **{key: unset})
    layers = moe_layers_from_hf(PUZZLE | {key: value, "block_configs": blocks})
    assert getattr(layers[3], field) == value
    assert layers[5] == moe_layers_from_hf(PUZZLE)[5]


def test_a_blocks_number_of_experts_may_differ_C3():
    blocks = [block | {"n_routed_experts": 64} if n == 1 else block for n, block in enumerate(PUZZLE["block_configs"])]
    layers = moe_layers_from_hf(PUZZLE | {"block_configs": blocks})
    assert (layers[1].n_routed_experts, layers[3].n_routed_experts) == (64, 512)


@pytest.mark.parametrize("latent, wanted", [(None, None), (DROP, None), (0, None), (32, 32)])
def test_latent_null_absent_or_zero_is_a_direct_moe_R18(latent, wanted):
    config = moe_layers_from_hf(edited(SUPER, moe_latent_size=latent))[1]
    assert config.moe_latent_size == wanted
    projections = {"fc1_latent_proj", "fc2_latent_proj"} & set(abstract_weights(config).items())
    assert len(projections) == (2 if wanted else 0)


@pytest.mark.parametrize("name", CONFIGS)
def test_experts_have_two_matrices_and_no_gate_matrix_R22(name):
    names = set(abstract_weights(moe_layers_from_hf(CONFIGS[name])[1]).items())
    assert {name for name in names if name.startswith("experts_")} == {"experts_up_proj", "experts_down_proj"}
    assert {name for name in names if "proj" in name and not name.startswith(("fc", "experts"))} == {
        "shared_experts_up_proj",
        "shared_experts_down_proj",
    }


@pytest.mark.parametrize(
    "mtp, layers",
    [
        ({"num_nextn_predict_layers": 0, "mtp_layers_block_type": ["full_attention", "moe"]}, []),
        ({"num_nextn_predict_layers": None, "mtp_layers_block_type": ["full_attention", "moe"]}, []),
        ({"mtp_hybrid_override_pattern": "*E"}, []),
        ({"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["full_attention", "moe"]}, ["mtp.layers.1"]),
        ({"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "E*E"}, ["mtp.layers.0", "mtp.layers.2"]),
        ({"num_nextn_predict_layers": 1}, ["mtp.layers.1"]),
        ({"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention"]}, []),
        ({"num_nextn_predict_layers": 1, "mtp_block_configs": [{"block_type": "moe"}]}, ["mtp.layers.0"]),
    ],
)
def test_mtp_blocks_are_layers_of_their_own_only_where_mtp_is_on(mtp, layers):
    assert [layer for layer in moe_layers_from_hf(NANO | mtp) if isinstance(layer, str)] == layers


def test_router_groups_are_n_group_and_not_mambas_n_groups():
    config = moe_layers_from_hf(NANO | {"n_group": 4, "topk_group": 2, "n_groups": 8})[1]
    assert (config.n_group, config.topk_group) == (4, 2)
    assert moe_layers_from_hf(edited(NANO, n_group=DROP, topk_group=None))[1].n_group == 1


def test_unnormalised_weights_are_kept_so():
    assert moe_layers_from_hf(NANO | {"norm_topk_prob": False})[1].norm_topk_prob is False
    assert moe_layers_from_hf(edited(NANO, norm_topk_prob=DROP))[1].norm_topk_prob is True


@pytest.mark.parametrize(
    "epsilons, wanted",
    [
        ({"layer_norm_epsilon": 1e-3, "rms_norm_eps": 1e-4, "norm_eps": 1e-6}, 1e-3),
        ({"layer_norm_epsilon": None, "rms_norm_eps": 1e-4, "norm_eps": 1e-6}, 1e-4),
        ({"layer_norm_epsilon": DROP, "norm_eps": 1e-6}, 1e-6),
        ({"layer_norm_epsilon": DROP, "norm_eps": DROP}, 1e-5),
    ],
)
def test_epsilon_is_read_in_order(epsilons, wanted):
    assert moe_layers_from_hf(edited(NANO, **epsilons))[1].layer_norm_epsilon == wanted


@pytest.mark.parametrize("width", [3712, None, DROP])
def test_no_shared_expert(width):
    config = edited(NANO, n_shared_experts=0, moe_shared_expert_intermediate_size=width)
    assert moe_layers_from_hf(config)[1].moe_shared_expert_intermediate_size is None
    assert moe_layers_from_hf(edited(NANO, n_shared_experts=DROP))[1].moe_shared_expert_intermediate_size == 3712


@pytest.mark.parametrize(
    "changes, mentions",
    [
        ({"mlp_hidden_act": "silu"}, ["mlp_hidden_act", "'silu'", "'relu2'"]),
        ({"mlp_hidden_act": ""}, ["mlp_hidden_act", "''"]),
        ({"mlp_bias": True}, ["mlp_bias", "True"]),
        ({"use_bias": True}, ["use_bias", "True"]),
        ({"residual_in_fp32": True}, ["residual_in_fp32", "True"]),
        ({"residual_in_fp32": "false"}, ["residual_in_fp32", "'false'"]),
        ({"n_shared_experts": 2}, ["n_shared_experts", "2", "moe_shared_expert_intermediate_size"]),
        ({"n_shared_experts": False}, ["n_shared_experts", "False"]),
        ({"hidden_size": "2688"}, ["hidden_size", "'2688'", "layer 1"]),
        ({"hidden_size": 2688.0}, ["hidden_size", "2688.0"]),
        ({"hidden_size": False}, ["hidden_size", "False"]),
        ({"moe_latent_size": False}, ["moe_latent_size", "False"]),
        ({"moe_latent_size": "0"}, ["moe_latent_size", "'0'"]),
        ({"num_experts_per_tok": 129}, ["num_experts_per_tok", "129", "128"]),
        ({"n_group": 0}, ["n_group", "0"]),
        ({"norm_topk_prob": "true"}, ["norm_topk_prob", "'true'"]),
        ({"routed_scaling_factor": {"__float__": "Infinity"}}, ["routed_scaling_factor", "Infinity"]),
        ({"layer_norm_epsilon": "1e-5"}, ["layer_norm_epsilon", "'1e-5'"]),
        ({"model_type": "mixtral"}, ["'mixtral'", "nemotron_h"]),
        ({"model_type": DROP}, ["model_type None"]),
        ({"model_type": ["nemotron_h"]}, ["['nemotron_h']"]),
        ({"num_hidden_layers": 51}, ["num_hidden_layers", "51", "52"]),
        ({"num_hidden_layers": "52"}, ["num_hidden_layers", "'52'"]),
        ({"num_nextn_predict_layers": True}, ["num_nextn_predict_layers", "True"]),
        ({"num_nextn_predict_layers": -1}, ["num_nextn_predict_layers", "-1"]),
        ({"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*X"}, ["mtp_hybrid", "'X'"]),
        ({"hybrid_override_pattern": "MEX"}, ["hybrid_override_pattern", "'X'", "position 2"]),
        ({"hybrid_override_pattern": 52}, ["hybrid_override_pattern", "52"]),
        ({"layers_block_type": ["moe", "MoE"]}, ["layers_block_type", "'MoE'", "position 1"]),
        ({"layers_block_type": ["moe", 3]}, ["layers_block_type", "3", "position 1"]),
        ({"layers_block_type": [["moe"]]}, ["layers_block_type", "['moe']"]),
        ({"block_configs": [{"moe_intermediate_size": 5}]}, ["block_configs", "None", "position 0"]),
        ({"hybrid_override_pattern": "M-*-" * 13}, ["no MoE layer", "13 mamba", "26 mlp", "13 attention"]),
    ],
)
def test_what_the_layer_is_not_made_for_is_refused(changes, mentions):
    message = refusal(NANO, **changes)
    for mention in mentions:
        assert mention in message


def test_missing_keys_are_listed_together():
    gone = {"hidden_size": DROP, "n_routed_experts": None, "moe_intermediate_size": 0, "routed_scaling_factor": DROP}
    message = refusal(NANO, **gone)
    assert all(key in message for key in gone)
    message = refusal(NANO, **gone, hybrid_override_pattern=DROP)
    assert all(key in message for key in (*gone, "hybrid_override_pattern", "layers_block_type", "block_configs"))
    assert "moe_shared_expert_intermediate_size" in refusal(NANO, moe_shared_expert_intermediate_size=0)


def test_a_layer_with_a_hole_is_named_C3():
    blocks = [{"block_type": "moe"} if layer == 8 else block for layer, block in enumerate(PUZZLE["block_configs"])]
    message = refusal(PUZZLE, block_configs=blocks)
    assert "moe_intermediate_size, num_experts_per_tok" in message
    assert "layer 8" in message


def test_what_was_seen_is_said_of_a_nested_config_of_another_model():
    message = refusal({"model_type": "llava", "text_config": {"model_type": "llama"}, "llm_config": 3})
    assert "'llava'" in message
    assert "text_config.model_type 'llama'" in message


@pytest.mark.parametrize("infinity", ["Infinity", '{"__float__": "Infinity"}'])
def test_both_infinities_are_read(tmp_path, infinity):
    text = json.dumps(NANO)[:-1] + f', "time_step_limit": [0.0, {infinity}]}}'
    (tmp_path / "config.json").write_text(text)
    assert moe_layers_from_hf(tmp_path) == moe_layers_from_hf(NANO)


@pytest.mark.parametrize(
    "content, mention",
    [
        (b"{", "Expecting"),
        (b'{"\xff": 1}', "decode"),
        (b"", "Expecting"),
        (b"[1]", "wanted a JSON object"),
        (b'{"model_type": "nemotron_h", "hidden_size": 1, "hidden_size": 2}', "'hidden_size' more than once"),
        (b'{"a": ' + b"[" * 100_000, "recursion"),
        (b'{"model_type": "gpt2"}', "'gpt2'"),
    ],
    ids=["cut", "not text", "empty", "list", "duplicate key", "deep", "other model"],
)
def test_a_bad_file_is_named(tmp_path, content, mention):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    for given in (tmp_path, str(path)):
        message = refusal(given)
        assert str(path) in message
        assert mention in message


def test_a_missing_file_is_named(tmp_path):
    assert str(tmp_path / "config.json") in refusal(tmp_path)
    assert re.search("nowhere: No such file", refusal(tmp_path / "nowhere"))


@pytest.mark.parametrize("config", [None, 3, [NANO]])
def test_what_is_neither_dict_nor_path_is_refused(config):
    assert f"is a {type(config).__name__}" in refusal(config)


@pytest.mark.parametrize("layer", [3, np.int64(3), np.uint8(3)])
def test_a_layer_is_picked_by_number(layer):
    assert MoEConfig.from_hf(PUZZLE, layer) == moe_layers_from_hf(PUZZLE)[3]


def test_a_layer_is_picked_by_name():
    assert MoEConfig.from_hf(PUZZLE, "mtp.layers.1").num_experts_per_tok == 22


def test_none_will_do_where_all_layers_are_alike():
    assert MoEConfig.from_hf(NANO) == moe_layers_from_hf(NANO)[1]
    mtp = {"mtp_block_configs": [{"block_type": "moe", "moe_intermediate_size": 8}]}
    assert MoEConfig.from_hf(SUPER | mtp).moe_intermediate_size == 2688
    only_mtp = {"hybrid_override_pattern": "M*" * 44}
    assert MoEConfig.from_hf(SUPER | only_mtp).moe_intermediate_size == 2688


@pytest.mark.parametrize(
    "config, layer, mentions",
    [
        (PUZZLE, None, ["14 kinds", "layer=", "1, 3, ..., 87, mtp.layers.1"]),
        (NANO, 0, ["layer 0", "'mamba'", "1, 3, ..., 49, 51"]),
        (NANO, np.int64(5), ["layer 5 ", "'attention'"]),
        (NANO, np.True_, ["wanted a number or a name"]),
        (NANO, np.array([1]), ["array([1])", "wanted a number or a name"]),
        (SUPER, "mtp.layers.0", ["'mtp.layers.0'", "'attention'"]),
        (NANO, 52, ["layer 52", "does not exist"]),
        (NANO, -1, ["layer -1", "does not exist"]),
        (NANO, "mtp.layers.1", ["'mtp.layers.1'", "does not exist"]),
        (NANO, True, ["True", "wanted a number or a name"]),
        (NANO, 1.0, ["1.0", "wanted a number or a name"]),
        (NANO | {"hybrid_override_pattern": "ME" * 2 + "-" * 48}, 7, ["'mlp'", "are 1, 3."]),
    ],
)
def test_a_layer_that_is_not_moe_is_refused_with_what_it_is(config, layer, mentions):
    with pytest.raises(ValueError) as error:
        MoEConfig.from_hf(config, layer)
    for mention in mentions:
        assert mention in str(error.value)


def test_a_layer_is_picked_from_a_plain_dict_too():
    config = moe_layers_from_hf(NANO)[1]
    assert pick_layer({1: config}, 1) is config
    with pytest.raises(ValueError, match="layer 0 does not exist"):
        pick_layer({1: config}, 0)


def test_layers_are_read_only_and_print_briefly():
    layers = moe_layers_from_hf(NANO)
    assert isinstance(layers, MoELayers)
    with pytest.raises(TypeError):
        layers[0] = layers[1]
    with pytest.raises(TypeError):
        layers.others[1] = "moe"
    assert repr(layers) == "MoELayers(1, 3, ..., 49, 51)"
    assert len(layers) + len(layers.others) == LAYERS["nano"]
