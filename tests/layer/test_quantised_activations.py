"""Activations that are quantised before products: each mode's numbers, which product uses them, and the gradient."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from bounds import FLOAT32_LAYER, bound, relative
from layers import BOTH, TINY_D, TINY_L, random_tokens, random_weights

import nemotron_moe as nm
from nemotron_moe.activations import MODES, quantised_rows
from pallas_kernels.formats import Nvfp4Array, quantize

FORMAT = {"fp8": "fp8_tensor", "fp8_static": "fp8_tensor", "nvfp4": "nvfp4", "nvfp4_static": "nvfp4"}
STATIC = [mode for mode, (_, is_static) in MODES.items() if is_static]
EXPERTS = 4
# Largest relative error of a number: half of what lies between two codes, over the lower of them.
ROUNDING = {"fp8": 2**-4, "nvfp4": 2**-2}
mixer = jax.jit(nm.moe_mixer, static_argnames=("config", "quantize_activations"))


def rounded_rows(x, mode, scale):
    """What the mode makes of rows x [M, K] float32, in float64; scale [M] is the one above the blocks'."""
    x, kind = x.astype(np.float64), mode.removesuffix("_static")
    codes = {"fp8": ml_dtypes.float8_e4m3fn, "nvfp4": ml_dtypes.float4_e2m1fn}[kind]
    largest = {"fp8": 448, "nvfp4": 6}[kind]
    scale = scale.astype(np.float64)[:, None]
    if kind == "nvfp4":
        blocks = np.abs(x).reshape(len(x), -1, 16).max(2) / 6 / scale
        inner = np.clip(blocks, 2.0**-9, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        scale = scale * inner.repeat(16, axis=1)
    return np.clip(x / scale, -largest, largest).astype(np.float32).astype(codes).astype(np.float64) * scale


def rows_and_matrices(mode, divides, leading=(EXPERTS,)):
    """Rows, matrices whose input scales are distinct powers of two, an expert for each row, and the row's scale."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((12, 64)).astype(np.float32)
    matrix = quantize(jnp.asarray(rng.standard_normal((*leading, 32, 64)), jnp.float32), FORMAT[mode])
    expert = np.arange(12) % EXPERTS if leading else np.zeros(12, int)
    # One of them clips, and with another most numbers are lost.
    scales = np.float32(2) ** np.array([-9, -7, -5, 1])[: EXPERTS if leading else 1]
    stored = 1 / scales if divides else scales
    matrix = dataclasses.replace(matrix, input_scale=jnp.asarray(stored if leading else stored[0]))
    if divides:
        matrix = dataclasses.replace(matrix, divides=True, global_scale=1 / matrix.global_scale)
    scale = scales[expert]
    if mode not in STATIC:
        scale = np.abs(x).max(1) / np.float32(448 if mode == "fp8" else 448 * 6)
    return x, matrix, expert, scale


@pytest.mark.parametrize("leading", [(EXPERTS,), ()], ids=["experts", "one matrix"])
@pytest.mark.parametrize("mode, divides", [*((mode, False) for mode in MODES), ("nvfp4_static", True)])
def test_a_mode_s_rows_are_the_oracle_s_C13_C14(mode, divides, leading):
    """`divides`: as compressed-tensors writes it, the scale is the reciprocal."""
    x, matrix, expert, scale = rows_and_matrices(mode, divides, leading)
    seen = quantised_rows(jnp.asarray(x), matrix, mode, jnp.asarray(expert, jnp.int32) if leading else None)
    wanted = rounded_rows(x, mode, scale)
    assert np.all(np.abs(seen - wanted) <= bound(jnp.float32, 1, np.abs(wanted), roundings=3))
    assert relative(seen, x) > 2**-7  # something is rounded


@pytest.mark.parametrize("mode", ["fp8_static", "nvfp4_static"])
def test_what_is_too_large_becomes_the_largest_code_C13(mode):
    x, matrix, *_ = rows_and_matrices(mode, False, ())
    matrix = dataclasses.replace(matrix, input_scale=jnp.float32(1))
    largest = 448 * (6 if isinstance(matrix, Nvfp4Array) else 1)
    seen = quantised_rows(jnp.asarray(x + np.float32(1e6)), matrix, mode)
    assert (seen == largest).all()


def test_small_rows_vanish_without_the_second_level_C14():
    """Rows of 1e-4 keep their relative error with a scale of their own above the blocks', and are lost without."""
    x, matrix, *_ = rows_and_matrices("nvfp4", False, ())
    errors = {}
    for size in (1.0, 1e-4):
        rows, single = jnp.asarray(x * np.float32(size)), dataclasses.replace(matrix, input_scale=jnp.float32(1))
        errors[size] = [
            relative(quantised_rows(rows, m, mode), rows) for m, mode in ((matrix, "nvfp4"), (single, "nvfp4_static"))
        ]
    assert max(errors[1.0]) < ROUNDING["nvfp4"] and errors[1e-4][0] < ROUNDING["nvfp4"]
    assert errors[1e-4][1] == 1  # nothing is left


@functools.cache
def quantised(name, format):
    """A layer all of whose products are with quantised weights, with input scales that clip nothing."""
    weights = random_weights(BOTH[name])
    changed = {}
    for field, leaf in weights.items().items():
        if leaf.ndim > 1 and field != "gate":
            packed = quantize(leaf, format)
            changed[field] = dataclasses.replace(packed, input_scale=jnp.full(leaf.shape[:-2], 2.0**-5))
    return dataclasses.replace(weights, **changed)


FIELDS = [field for field, leaf in nm.abstract_weights(TINY_L).items().items() if leaf.ndim > 1 and field != "gate"]


@pytest.mark.parametrize("mode", STATIC)
def test_every_product_takes_its_own_static_scale(mode):
    """Under a huge scale all rows become 0: as if the matrix, of experts one alone, were 0."""
    weights, h = quantised("latent", FORMAT[mode]), random_tokens(TINY_L, 37)
    run = functools.partial(mixer, h, config=TINY_L, quantize_activations=mode)
    usual = run(weights=weights)
    assert len(FIELDS) == 6
    for field in FIELDS:
        packed = getattr(weights, field)
        one = (3,) if packed.ndim == 3 else ()
        changed = [
            dataclasses.replace(packed, input_scale=packed.input_scale.at[one].set(2.0**60)),
            dataclasses.replace(packed, **{packed.outer: getattr(packed, packed.outer).at[one].set(0.0)}),
        ]
        without, zero = (run(weights=dataclasses.replace(weights, **{field: leaf})) for leaf in changed)
        np.testing.assert_array_equal(without, zero, err_msg=field)
        assert (without != usual).any(), field


@pytest.mark.parametrize("mode", ["fp8", "nvfp4"])
@pytest.mark.parametrize("name", BOTH)
def test_a_layer_s_error_is_that_of_its_products(name, mode):
    config, weights, h = BOTH[name], quantised(name, FORMAT[mode]), random_tokens(BOTH[name], 37)
    routing = nm.route(h, weights.gate, weights.gate_bias, config)
    plain = mixer(h, weights, config=config, routing=routing)
    seen = mixer(h, weights, config=config, routing=routing, quantize_activations=mode)
    products = 4 if config.moe_latent_size else 2  # that follow each other
    assert 0 < relative(seen, plain) < products * ROUNDING[mode]
    # A token's row does not depend on the others.
    alone = jax.tree.map(lambda x: x[5:6], routing)
    alone = mixer(h[5:6], weights, config=config, routing=alone, quantize_activations=mode)
    assert relative(alone[0], seen[5]) < FLOAT32_LAYER


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_goes_straight_through(mode):
    x, matrix, expert, _ = rows_and_matrices(mode, False)
    expert = jnp.asarray(expert, jnp.int32)
    for factor in (1e-4, 1.0, 1e5):
        cotangent = jnp.asarray(x[::-1] * np.float32(factor))
        _, pull = jax.vjp(lambda x: quantised_rows(x, matrix, mode, expert), jnp.asarray(x))
        np.testing.assert_array_equal(pull(cotangent)[0], cotangent)


@pytest.mark.parametrize("mode", ["fp8", "nvfp4"])
def test_a_layer_s_gradient_scales_with_the_loss(mode):
    """By a power of two, bit for bit; and it is near the one without rounding."""
    weights, h = quantised("latent", FORMAT[mode]), random_tokens(TINY_L, 9)

    @functools.partial(jax.jit, static_argnames="mode")
    def gradient(h, factor, mode):
        run = functools.partial(nm.moe_mixer, weights=weights, config=TINY_L, quantize_activations=mode)
        return jax.grad(lambda h: factor * jnp.sum(run(h)))(h)

    usual = gradient(h, 1.0, mode)
    for factor in (2.0**-14, 2.0**17):
        np.testing.assert_array_equal(gradient(h, factor, mode), factor * usual)
    assert relative(usual, gradient(h, 1.0, None)) < 4 * ROUNDING[mode]


def test_modes_that_do_not_fit_are_refused():
    run = functools.partial(nm.moe_block, random_tokens(TINY_D, 2), config=TINY_D)
    weights = quantised("direct", "nvfp4")
    with pytest.raises(ValueError, match="quantize_activations is 'int8'; wanted None or one of fp8, fp8_static"):
        run(weights=weights, quantize_activations="int8")
    with pytest.raises(ValueError, match="is 'fp8', which is for weights of type Fp8Array; the layer has none"):
        run(weights=weights, quantize_activations="fp8")
    with pytest.raises(ValueError, match="the layer has none"):
        run(weights=random_weights(TINY_D), quantize_activations="nvfp4")
    up = dataclasses.replace(weights.experts_up_proj, uncalibrated=(2, 5), input_scale=None)
    down = dataclasses.replace(weights.experts_down_proj, input_scale=None)
    some = dataclasses.replace(weights, experts_up_proj=up, experts_down_proj=down)
    unreached = r"experts_up_proj of experts 2, 5 \(no token reached them in calibration\)"
    with pytest.raises(ValueError, match=rf"for {unreached}, experts_down_proj\. Use 'nvfp4',"):
        run(weights=some, quantize_activations="nvfp4_static")
    with pytest.raises(ValueError, match=r"weights\.experts_up_proj\.scale is float8_e4m3fn"):
        run(weights=dataclasses.replace(weights, experts_up_proj=dataclasses.replace(up, scale=up.scale[:, :, :1])))
