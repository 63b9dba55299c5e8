"""What the layer is made of: the scale once, the shared expert with weight 1, relu^2 without a gate, the latent."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import FLOAT32_LAYER, bound, relative
from layers import BOTH, TINY_D, TINY_L, block, mixer, random_tokens, random_weights

import nemotron_moe as nm


def without_shared(config):
    return dataclasses.replace(config, moe_shared_expert_intermediate_size=None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scaling_factor_is_applied_once_R08(dtype):
    """Every expert returns the vector of ones, so the routed part is the scaling factor: 2.5, or 5.0 before fc2."""
    for config, factor in ((TINY_D, 2.5), (TINY_L, 5.0)):
        config = without_shared(config)
        experts, inner, width = config.n_routed_experts, config.moe_intermediate_size, config.expert_width
        # up reads coordinate 0, which is made 1 for every token; down spreads it to all outputs.
        up = jnp.zeros((experts, inner, width)).at[:, 0, 0].set(1)
        down = jnp.zeros((experts, width, inner)).at[:, :, 0].set(1)
        weights = dataclasses.replace(random_weights(config), experts_up_proj=up, experts_down_proj=down)
        if config.moe_latent_size:
            identity = jnp.eye(config.hidden_size)
            weights = dataclasses.replace(
                weights, fc1_latent_proj=identity[: config.moe_latent_size], fc2_latent_proj=identity[:, :width]
            )
        x = random_tokens(config, 9).at[:, 0].set(1).astype(dtype)
        out = np.asarray(mixer(x, weights.astype(dtype), config=config)).astype(np.float64)
        # Two sums over the token's experts, and one rounding after the combine, fc2 and the last sum each.
        limit = bound(dtype, 2 * config.num_experts_per_tok, factor, roundings=3)
        np.testing.assert_allclose(out[:, :width], factor, rtol=0, atol=limit)


def test_experts_are_relu_squared_without_a_gate_R22():
    """up = identity rows and x = (-1, 2) give the activation (0, 4); doubling x multiplies the experts' output by 4."""
    z = jnp.asarray([[-1.0, 2.0]])
    plan = nm.make_plan(jnp.zeros((1, 1), jnp.int32), 1)
    out = nm.routed_experts(z, jnp.ones((1, 1)), plan, jnp.eye(2)[None], jnp.eye(2)[None])
    assert np.asarray(out).tolist() == [[0.0, 4.0]]
    for name, config in BOTH.items():
        config = without_shared(config)
        weights, x = random_weights(config), random_tokens(config, 9)
        routing = nm.route(x, weights.gate, weights.gate_bias, config)
        once = mixer(x, weights, config=config, routing=routing)
        twice = mixer(2 * x, weights, config=config, routing=routing)
        np.testing.assert_array_equal(twice, 4 * once, err_msg=name)


def test_router_and_shared_expert_do_not_see_the_latent_C2():
    weights, x = random_weights(TINY_L), random_tokens(TINY_L, 9)
    other = dataclasses.replace(
        weights, fc1_latent_proj=-weights.fc1_latent_proj, fc2_latent_proj=2 * weights.fc2_latent_proj
    )
    _, aux = mixer(x, weights, config=TINY_L, return_aux=True)
    _, other_aux = mixer(x, other, config=TINY_L, return_aux=True)
    np.testing.assert_array_equal(aux.routing.logits, other_aux.routing.logits)
    np.testing.assert_array_equal(aux.routing.ids, other_aux.routing.ids)
    silent = {"experts_down_proj": jnp.zeros_like(weights.experts_down_proj)}
    np.testing.assert_array_equal(
        mixer(x, dataclasses.replace(weights, **silent), config=TINY_L),
        mixer(x, dataclasses.replace(other, **silent), config=TINY_L),
    )


def test_sizes_of_the_weights_R18_R19():
    shapes = {name: leaf.shape for name, leaf in nm.abstract_weights(TINY_L).items().items()}
    assert shapes == {
        "norm": (64,),
        "gate": (16, 64),
        "gate_bias": (16,),
        "fc1_latent_proj": (32, 64),
        "fc2_latent_proj": (64, 32),
        "experts_up_proj": (16, 80, 32),
        "experts_down_proj": (16, 32, 80),
        "shared_experts_up_proj": (112, 64),
        "shared_experts_down_proj": (64, 112),
    }
    direct = nm.abstract_weights(TINY_D).items()
    assert not {"fc1_latent_proj", "fc2_latent_proj"} & set(direct)
    assert direct["experts_up_proj"].shape == (8, 48, 64)


def test_per_layer_sizes_compile_once_for_each_shape_C3():
    """A stack of layers with different width, experts and top-k, as in Puzzle: one program for each distinct layer."""
    configs = [
        TINY_L,
        dataclasses.replace(TINY_L, moe_intermediate_size=48, num_experts_per_tok=4),
        dataclasses.replace(TINY_L, n_routed_experts=8),
        dataclasses.replace(TINY_L),
    ]
    step = jax.jit(lambda h, weights, config: nm.moe_block(h, weights, config), static_argnames="config")
    h = random_tokens(TINY_L, 5)
    wanted = np.asarray(h, np.float64)
    for seed, config in enumerate(configs):
        weights = random_weights(config, seed)
        wanted = nm.reference.moe_block(h, weights, config)["block_out"]
        h = step(h, weights, config=config)
        assert relative(h, wanted) < FLOAT32_LAYER
    assert step._cache_size() == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rms_norm_C5(dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((5, 256)) * np.array([[1.0], [1e4], [1e-4], [0.0], [30.0]]), dtype)
    gamma = jnp.asarray(rng.uniform(0.5, 1.5, 256), jnp.float32)
    out = np.asarray(nm.rms_norm(x, gamma, 1e-5)).astype(np.float64)
    wide = np.asarray(x).astype(np.float64)
    exact = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * np.asarray(gamma)
    # Under the root, the sum of 256 squares in pairs takes log2(256) steps.
    assert np.abs(out - exact).max() <= bound(dtype, 8, np.abs(exact).max())
    assert not out[3].any()
    assert out.any(1).tolist() == [True, True, True, False, True]


def test_float16_squares_in_float32_P4():
    """up gives 300, whose square is past float16's largest number by itself, while the layer's output is small."""
    x = jnp.full((3, 64), 4.6875, jnp.float16)  # 300 / 64, exact
    up, down = jnp.ones((2, 48, 64), jnp.float16), jnp.full((2, 64, 48), 2**-14, jnp.float16)
    exact = 48 * 300.0**2 / 2**14
    plan = nm.make_plan(jnp.asarray([[0], [1], [1]], jnp.int32), 2)
    rounding = bound(jnp.float16, 48, exact)
    for out in (nm.shared_expert(x, up[0], down[0]), nm.routed_experts(x, jnp.ones((3, 1)), plan, up, down)):
        assert out.dtype == jnp.float16
        np.testing.assert_allclose(np.asarray(out).astype(np.float64), exact, rtol=0, atol=rounding)


def test_computation_is_in_the_activations_dtype():
    """Weights in any dtype: float32 activations see bfloat16 weights widened, and never the reverse."""
    weights, h = random_weights(TINY_L, dtype=jnp.bfloat16), random_tokens(TINY_L, 9)
    out = block(h, weights, config=TINY_L)
    assert out.dtype == jnp.float32
    widened = block(h, weights.astype(jnp.float32), config=TINY_L)
    assert relative(out, widened) <= FLOAT32_LAYER
    for dtype in (jnp.bfloat16, jnp.float16):
        assert block(h.astype(dtype), weights, config=TINY_L).dtype == dtype
        assert block(h.astype(dtype), random_weights(TINY_L), config=TINY_L).dtype == dtype
