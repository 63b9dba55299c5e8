"""Tokens: masks, leading dimensions, few or none, token counts in buckets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import FLOAT32_LAYER, relative
from layers import BOTH, TINY_D, TINY_L, block, mixer, random_tokens, random_weights

import nemotron_moe as nm


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
    assert relative(dh[:5], alone[0]) <= FLOAT32_LAYER
    for name, leaf in dweights.items().items():
        assert relative(leaf, alone[1].items()[name]) <= FLOAT32_LAYER, name


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
    assert relative(one, flat[0]) <= FLOAT32_LAYER


def test_one_token_is_a_row_of_many_C24_C27():
    for config in (TINY_D, TINY_L):
        weights, h = random_weights(config), random_tokens(config, 64)
        many = np.asarray(block(h, weights, config=config))
        for tokens in (1, 2, 3, 8, 17, 63):
            some = np.asarray(block(h[:tokens], weights, config=config))
            assert relative(some, many[:tokens]) <= FLOAT32_LAYER, tokens


def test_bucketing_bounds_compilations_R88():
    weights = random_weights(TINY_L)
    step = jax.jit(lambda h, weights, token_mask: nm.moe_block(h, weights, TINY_L, token_mask=token_mask))
    h = np.asarray(random_tokens(TINY_L, 64))
    whole = np.asarray(block(jnp.asarray(h), weights, config=TINY_L))
    for tokens in range(1, 65):
        padded, token_mask = nm.pad_to_bucket(h[:tokens])
        assert padded.shape[0] == nm.bucket_size(tokens)
        out = np.asarray(step(padded, weights, token_mask))[:tokens]
        assert relative(out, whole[:tokens]) <= FLOAT32_LAYER
    assert step._cache_size() <= 7
    assert [nm.bucket_size(tokens) for tokens in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]
    padded, token_mask = nm.pad_to_bucket(jnp.ones((2, 3, 8), jnp.bfloat16))
    assert isinstance(padded, jax.Array) and padded.shape == (2, 4, 8) and padded.dtype == jnp.bfloat16
    assert token_mask.tolist() == [[True, True, True, False]] * 2
    with pytest.raises(ValueError, match=r"\[\.\.\., tokens, hidden\]"):
        nm.pad_to_bucket(np.ones(8))
