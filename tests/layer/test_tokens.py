"""Tokens: masks, permutations, leading dimensions, none at all."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import bound
from layers import BOTH, TINY_D, TINY_L, block, mixer, random_tokens, random_weights

import nemotron_moe as nm

few = hypothesis.settings(max_examples=20, deadline=None)


@pytest.mark.parametrize("name", BOTH)
def test_masked_rows_are_nothing_R61(name):
    """5 real and 3 padding rows of NaN: the real rows have the bits of the run without NaN, the rest counts nowhere."""
    config = BOTH[name]
    weights, h = random_weights(config), random_tokens(config, 8)
    token_mask = jnp.arange(8) < 5
    poisoned = jnp.where(token_mask[:, None], h, jnp.nan)
    for layer in (block, mixer):
        out, aux = layer(poisoned, weights, config=config, token_mask=token_mask, return_aux=True)
        clean = layer(h, weights, config=config)
        np.testing.assert_array_equal(out[:5], clean[:5])
        assert not np.asarray(out[5:]).any()
        assert int(aux.load.sum()) == 5 * config.num_experts_per_tok
        assert (np.asarray(aux.routing.ids[5:]) == -1).all()

    def loss(h, weights):
        return jnp.square(nm.moe_block(h, weights, config, token_mask=token_mask)).sum()

    dh, dweights = jax.jit(jax.grad(loss, (0, 1)))(poisoned, weights)
    assert not np.asarray(dh[5:]).any()
    alone = jax.jit(jax.grad(lambda h, w: jnp.square(nm.moe_block(h, w, config)).sum(), (0, 1)))(h[:5], weights)
    np.testing.assert_allclose(dh[:5], alone[0], rtol=1e-5, atol=1e-5 * float(jnp.abs(alone[0]).max()))
    for name, leaf in dweights.items().items():
        wanted = np.asarray(alone[1].items()[name])
        np.testing.assert_allclose(leaf, wanted, rtol=1e-4, atol=1e-5 * (np.abs(wanted).max() + 1e-30), err_msg=name)


@pytest.mark.quick
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
def test_no_tokens_R57(name, shape):
    config = BOTH[name]
    weights, h = random_weights(config), jnp.zeros((*shape, config.hidden_size))
    for layer in (block, mixer):
        out, aux = layer(h, weights, config=config, return_aux=True)
        assert out.shape == h.shape
        assert aux.routing.ids.shape == (*shape, config.num_experts_per_tok)
        assert int(aux.load.sum()) == 0
    dh, dweights = jax.jit(jax.grad(lambda h, w: nm.moe_block(h, w, config).sum(), (0, 1)))(h, weights)
    assert dh.shape == h.shape
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(dweights))


@pytest.mark.parametrize("name", BOTH)
def test_any_leading_dimensions(name):
    config = BOTH[name]
    weights, h = random_weights(config), random_tokens(config, 12)
    flat, flat_aux = block(h, weights, config=config, return_aux=True)
    for leading in [(3, 4), (1, 12), (2, 3, 2), (12, 1)]:
        out, aux = block(h.reshape(*leading, -1), weights, config=config, return_aux=True)
        np.testing.assert_array_equal(out.reshape(flat.shape), flat)
        assert aux.routing.ids.shape == (*leading, config.num_experts_per_tok)
        assert aux.routing.logits.shape == (*leading, config.n_routed_experts)
        assert aux.margin.shape == leading
        np.testing.assert_array_equal(aux.load, flat_aux.load)
    one = block(h[0], weights, config=config)
    assert one.shape == h[0].shape
    assert np.linalg.norm(one - flat[0]) <= 1e-5 * np.linalg.norm(flat[0])


@few
@hypothesis.given(seed=st.integers(0, 2**31), name=st.sampled_from(list(BOTH)), half=st.booleans())
def test_permuted_tokens_permute_the_output_bit_for_bit(seed, name, half):
    config, dtype = BOTH[name], jnp.bfloat16 if half else jnp.float32
    weights, h = random_weights(config, dtype=dtype), random_tokens(config, 37, seed=seed, dtype=dtype)
    order = np.random.default_rng(seed).permutation(37)
    out = block(h, weights, config=config)
    np.testing.assert_array_equal(block(h[order], weights, config=config), out[order])


@few
@hypothesis.given(seed=st.integers(0, 2**31), name=st.sampled_from(list(BOTH)))
def test_permuted_experts_with_gate_and_bias_change_nothing(seed, name):
    config = BOTH[name]
    weights, h = random_weights(config), random_tokens(config, 11, seed=seed)
    order = np.random.default_rng(seed).permutation(config.n_routed_experts)
    permuted = dataclasses.replace(
        weights,
        gate=weights.gate[order],
        gate_bias=weights.gate_bias[order],
        experts_up_proj=weights.experts_up_proj[order],
        experts_down_proj=weights.experts_down_proj[order],
    )
    out, aux = block(h, weights, config=config, return_aux=True)
    again, again_aux = block(h, permuted, config=config, return_aux=True)
    np.testing.assert_array_equal(order[again_aux.routing.ids], aux.routing.ids)
    np.testing.assert_array_equal(again_aux.load, np.asarray(aux.load)[order])
    # A GPU's product may round a logit differently at another place among the experts.
    places = 0.0 if jax.default_backend() == "cpu" else bound(jnp.float32, config.hidden_size, 1.0)
    np.testing.assert_allclose(again, out, rtol=0, atol=places * float(jnp.abs(out).max()))


@pytest.mark.parametrize("name", BOTH)
def test_thousand_random_routings_lose_nothing_C22(name):
    """Skewed routings down to all tokens on one expert: every row is computed, against the oracle."""
    config = BOTH[name]
    weights, rng = random_weights(config), np.random.default_rng(22)
    tokens, experts, top_k = 8, config.n_routed_experts, config.num_experts_per_tok
    h = random_tokens(config, tokens)
    step = jax.jit(lambda ids: nm.moe_block(h, weights, config, routing=nm.Routing(ids=ids), return_aux=True))
    worst = 0.0
    for trial in range(1000):
        reachable = experts if trial % 3 else 1 + trial % experts
        ids = rng.integers(0, reachable, (tokens, top_k)) if trial else np.zeros((tokens, top_k))
        out, aux = step(jnp.asarray(ids, jnp.int32))
        assert int(aux.load.sum()) == tokens * top_k
        if trial % 10 == 0:
            wanted = nm.reference.moe_block(h, weights, config, ids=ids)["block_out"]
            worst = max(worst, np.linalg.norm(out - wanted) / np.linalg.norm(wanted))
    assert worst < 1e-5


def test_one_token_is_a_row_of_many_C24_C27():
    for config in (TINY_D, TINY_L):
        weights, h = random_weights(config), random_tokens(config, 64)
        many = np.asarray(block(h, weights, config=config))
        for tokens in (1, 2, 3, 8, 17, 63):
            some = np.asarray(block(h[:tokens], weights, config=config))
            assert np.abs(some - many[:tokens]).max() <= 1e-5 * np.abs(many[:tokens]).max(), tokens


def test_bucketing_bounds_compilations_R88():
    weights = random_weights(TINY_L)
    step = jax.jit(lambda h, weights, token_mask: nm.moe_block(h, weights, TINY_L, token_mask=token_mask))
    h = np.asarray(random_tokens(TINY_L, 64))
    whole = np.asarray(block(jnp.asarray(h), weights, config=TINY_L))
    for tokens in range(1, 65):
        padded, token_mask = nm.pad_to_bucket(h[:tokens])
        assert padded.shape[0] == nm.bucket_size(tokens)
        out = np.asarray(step(padded, weights, token_mask))[:tokens]
        assert np.abs(out - whole[:tokens]).max() <= 1e-5 * np.abs(whole).max()
    assert step._cache_size() <= 7
    assert [nm.bucket_size(tokens) for tokens in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]
    padded, token_mask = nm.pad_to_bucket(jnp.ones((2, 3, 8), jnp.bfloat16))
    assert isinstance(padded, jax.Array) and padded.shape == (2, 4, 8) and padded.dtype == jnp.bfloat16
    assert token_mask.tolist() == [[True, True, True, False]] * 2
    with pytest.raises(ValueError, match=r"\[\.\.\., tokens, hidden\]"):
        nm.pad_to_bucket(np.ones(8))
