"""MoEConfig as a value: hashable, printable, kept by JSON, and refusing sizes that make no layer."""

import dataclasses
import json

import jax
import pytest

from nemotron_moe.config import MoEConfig

SIZES = {"hidden_size": 64, "moe_intermediate_size": 80, "n_routed_experts": 16, "num_experts_per_tok": 4}


def make(**changes):
    return MoEConfig(**(SIZES | changes))


def test_equal_values_are_equal_and_hash_alike_C51():
    assert make(moe_latent_size=32) == make(moe_latent_size=32)
    assert hash(make(moe_latent_size=32)) == hash(make(moe_latent_size=32))
    assert make() != make(moe_latent_size=32)
    assert repr(make(routed_scaling_factor=2)) == repr(make(routed_scaling_factor=2.0))


def test_a_config_survives_json_C51():
    config = make(moe_latent_size=32, n_group=4, topk_group=2, norm_topk_prob=False, routed_scaling_factor=2.5)
    assert MoEConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config


def test_a_config_prints_every_field_C51():
    printed = repr(make())
    assert all(f"{field.name}=" in printed for field in dataclasses.fields(MoEConfig))


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().hidden_size = 3


def test_an_equal_config_as_static_argument_does_not_trace_again_C51():
    traced = []

    def scale(x, config):
        traced.append(config.num_experts_per_tok)
        return x * config.num_experts_per_tok

    jitted = jax.jit(scale, static_argnames="config")
    results = [int(jitted(1, config=make(num_experts_per_tok=top_k))) for top_k in (4, 4, 5)]
    assert (results, traced) == ([4, 4, 5], [4, 5])


def test_experts_are_as_wide_as_the_latent_if_there_is_one():
    assert make().expert_width == 64
    assert make(moe_latent_size=32).expert_width == 32


@pytest.mark.parametrize("experts, top_k", [(513, 33), (600, 600), (1, 1)])
def test_no_limit_of_512_experts_or_32_choices_C4(experts, top_k):
    assert make(n_routed_experts=experts, num_experts_per_tok=top_k).num_experts_per_tok == top_k


@pytest.mark.parametrize(
    "changes, mentions",
    [
        ({"num_experts_per_tok": 17}, ["num_experts_per_tok", "17", "16"]),
        ({"num_experts_per_tok": 0}, ["num_experts_per_tok", "0"]),
        ({"n_routed_experts": -8}, ["n_routed_experts", "-8"]),
        ({"hidden_size": 0}, ["hidden_size", "0"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
        ({"hidden_size": 64.0}, ["hidden_size", "64.0"]),
        ({"hidden_size": None}, ["hidden_size", "None"]),
        ({"n_group": True}, ["n_group", "True"]),
        ({"moe_latent_size": 0}, ["moe_latent_size", "0"]),
        ({"moe_shared_expert_intermediate_size": False}, ["moe_shared_expert_intermediate_size", "False"]),
        ({"n_group": 3}, ["n_group", "3", "16"]),
        ({"n_group": 16, "topk_group": 16}, ["n_group", "16", "at least 2"]),
        ({"n_group": 4, "topk_group": 5}, ["topk_group", "5", "4"]),
        ({"n_group": 8, "topk_group": 1}, ["num_experts_per_tok", "topk_group", "only 2"]),
        ({"norm_topk_prob": 1}, ["norm_topk_prob", "1"]),
        ({"routed_scaling_factor": 0.0}, ["routed_scaling_factor", "0.0"]),
        ({"routed_scaling_factor": True}, ["routed_scaling_factor", "True"]),
        ({"routed_scaling_factor": "2.5"}, ["routed_scaling_factor", "'2.5'"]),
        ({"layer_norm_epsilon": float("nan")}, ["layer_norm_epsilon", "nan"]),
        ({"layer_norm_epsilon": float("inf")}, ["layer_norm_epsilon", "inf"]),
    ],
)
def test_sizes_that_make_no_layer_are_refused_with_their_numbers_C4(changes, mentions):
    with pytest.raises(ValueError) as error:
        make(**changes)
    for mention in mentions:
        assert mention in str(error.value)


@pytest.mark.parametrize("groups, kept", [(1, 1), (8, 2), (8, 8), (4, 1)])
def test_groups_that_hold_enough_experts_are_accepted(groups, kept):
    assert make(n_group=groups, topk_group=kept).n_group == groups
