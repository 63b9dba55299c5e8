"""The whole layer on the Hopper kernels, in the interpreter where there is no such GPU: what XLA computes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import BFLOAT16_LAYER, relative
from kernels.hopper import hopper
from layers import random_tokens, random_weights

import nemotron_moe as nm
from nemotron_moe import dense

# As small as the kernels take, all four of them.
DIRECT = nm.MoEConfig(
    hidden_size=128,
    n_routed_experts=128,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    moe_shared_expert_intermediate_size=64,
    routed_scaling_factor=2.5,
)
LATENT = dataclasses.replace(DIRECT, hidden_size=192, moe_latent_size=128)
CONFIGS = {"direct": DIRECT, "latent": LATENT}


@pytest.fixture(autouse=True)
def kernel_for_the_shared_expert(monkeypatch):
    """At few tokens too."""
    monkeypatch.setattr(dense, "FEWEST_ROWS", 1)


def run(config, h, **options):
    return jax.jit(functools.partial(nm.moe_block, config=config, **options))(h, bfloat16(config))


def bfloat16(config):
    return random_weights(config, dtype=jnp.bfloat16)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_layer_is_that_of_xla(config):
    h = random_tokens(config, 8, dtype=jnp.bfloat16)
    want, aux = run(config, h, implementation="xla", return_aux=True)
    with hopper():
        assert {step.implementation for step in nm.explain(config, tokens=8).steps} == {"mosaic", "compare"}
        got, mine = run(config, h, return_aux=True)
        got, ids, load = (np.asarray(x) for x in (got, mine.routing.ids, mine.load))
    np.testing.assert_array_equal(ids, aux.routing.ids)
    np.testing.assert_array_equal(load, aux.load)
    assert relative(got, want) < BFLOAT16_LAYER


def test_masked_tokens_may_hold_nan_and_give_zero_R61():
    h = random_tokens(DIRECT, 5, dtype=jnp.bfloat16)
    mask = jnp.array([True, False, True, True, False])
    want = run(DIRECT, h, implementation="xla", token_mask=mask)
    with hopper():
        got = np.asarray(run(DIRECT, jnp.where(mask[:, None], h, jnp.nan), token_mask=mask))
    assert not got[[1, 4]].any()
    assert relative(got, want) < BFLOAT16_LAYER


def test_every_token_to_the_same_experts_loses_no_row_C22():
    h = random_tokens(DIRECT, 21, dtype=jnp.bfloat16)
    routing = nm.Routing(ids=jnp.tile(jnp.array([[3, 127]]), (21, 1)))
    want = run(DIRECT, h, implementation="xla", routing=routing)
    with hopper():
        got = np.asarray(run(DIRECT, h, routing=routing))
    assert relative(got, want) < BFLOAT16_LAYER


def test_the_gradient_is_that_of_xla():
    h = random_tokens(DIRECT, 8, dtype=jnp.bfloat16)
    all_weights = bfloat16(DIRECT)

    def gradient(implementation):
        def loss(h, up, shared_up):
            weights = dataclasses.replace(all_weights, experts_up_proj=up, shared_experts_up_proj=shared_up)
            return nm.moe_block(h, weights, DIRECT, implementation=implementation).astype(jnp.float32).sum()

        arguments = h, all_weights.experts_up_proj, all_weights.shared_experts_up_proj
        return [np.asarray(g) for g in jax.jit(jax.grad(loss, (0, 1, 2)))(*arguments)]

    want = gradient("xla")
    with hopper():
        got = gradient(None)
    for mine, theirs in zip(got, want, strict=True):
        assert relative(mine, theirs) < BFLOAT16_LAYER
