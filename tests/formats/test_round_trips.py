"""Quantising what was dequantised gives the same bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures_io import FIXTURES, tensors_of
from formats.golden import FINITE, FORMATS, POSITIVE, assert_same, bits, fp8, nvfp4

from pallas_kernels.formats import quantize


def again(q, dtype=jnp.float32):
    return quantize(q.dequantize(dtype), scales_of=q)


jitted = jax.jit(again, static_argnums=1)


def global_scales():
    rng = np.random.default_rng(0)
    random = 2.0 ** rng.uniform(-116, 116, 200)
    ends = [2.0**-116, np.nextafter(np.float32(2.0**-116), np.float32(1)), 2.0**116, 2.0**116 * (1 - 2.0**-24)]
    return np.array([*ends, *2.0 ** np.arange(-116, 117, 8), *random], np.float32)


@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("run", [again, jitted], ids=["eager", "jitted"])
def test_every_nvfp4_code_under_every_scale(run, divides):
    """-0 included; every byte that holds two different codes is another test's."""
    outer = global_scales()
    packed = np.tile(np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], np.uint8), (len(outer), 1, 126))
    q = nvfp4(packed, np.tile(POSITIVE, (len(outer), 1, 1)), outer, divides=divides)
    assert_same(run(q), q)


def test_every_nvfp4_byte():
    q = nvfp4(np.arange(256)[None], np.tile(np.uint8([0x38, 0x7E, 1, 0x15]), 8)[None], 0.1)
    assert_same(jitted(q), q)


@pytest.mark.parametrize("run", [again, jitted], ids=["eager", "jitted"])
def test_every_fp8_code(run):
    scales = np.concatenate([global_scales() / 2, [2.0**-117, 2.0**119]]).astype(np.float32)
    q = fp8(np.tile(FINITE, (len(scales), 1, 1)), scales, "tensor")
    assert_same(run(q), q)
    q = fp8(np.tile(FINITE, (len(scales), 1)), scales, "channel")
    assert_same(run(q), q)


@pytest.mark.quick
def test_every_fp8_code_in_blocks():
    rng = np.random.default_rng(1)
    q = fp8(rng.choice(FINITE, (3, 144, 160)), 2.0 ** rng.uniform(-100, 100, (3, 2, 2)), "block")
    assert_same(jitted(q), q)
    assert_same(jitted(q, jnp.bfloat16), q)
    scale = jnp.asarray(q.scale, jnp.bfloat16)
    q = fp8(rng.choice(FINITE, (3, 144, 160)), scale, "block", jnp.bfloat16)
    assert_same(jitted(q), q)


def test_numbers_in_bfloat16_are_near_enough_to_find_their_codes():
    rng = np.random.default_rng(2)
    q = nvfp4(rng.integers(0, 256, (5, 4, 64)), rng.choice(POSITIVE, (5, 4, 8)), 2.0 ** rng.uniform(-20, 20, 5))
    assert_same(jitted(q, jnp.bfloat16), q)


def test_model_optimizers_bytes():
    """weight_scale_2 is exactly 2^-13: the file's bytes come back, under its scales and under those found anew."""
    tensors = tensors_of(FIXTURES / "nvfp4_modelopt_direct")
    names = [name[:-8] for name in tensors if name.endswith("weight_scale_2") and tensors[name] == 2.0**-13]
    assert len(names) == 36  # The matrices of two MoE layers.
    requantise = jax.jit(lambda q: (again(q), quantize(q.dequantize(), "nvfp4")))
    for name in names:
        scale, outer = tensors[name + "_scale"], tensors[name + "_scale_2"]
        q = nvfp4(tensors[name], scale.view(np.uint8), outer.reshape(()))
        given, own = requantise(q)
        assert_same(given, q)
        assert_same(own, q)


def matrices(seed):
    """[24, 16, 160] of all that may be hard: magnitudes, zeros, single elements, blocks that e4m3 hardly scales."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((24, 16, 160)) * 10.0 ** rng.uniform(-30, 30, (24, 1, 1))
    x[0:8] *= 10.0 ** rng.uniform(-7, 0, (8, 16, 1))  # rows whose block scales are subnormal or the smallest
    x[2] = 0
    x[3, 5], x[4, :, 16:48] = 0, 0
    x[5], x[5, 3, 7] = 0, -1.5
    x[6] = np.sign(x[6]) * 10.0 ** rng.uniform(-30, 30)
    x[7, :, 1:] = 0
    # The largest of a block at a border between two scales, or beside it: 2688 * 2^9 steps are the matrix's largest.
    for matrix in range(8, 20):
        largest = np.float32(10.0 ** rng.uniform(-25, 25))
        steps = rng.choice([0.5, 3, 5, 7.9, 8, 8.1, 9, 10, 14.9, 15, 15.1, 18, 21, 27, 40.8, 45.6], (16, 10))
        x[matrix] *= 0
        x[matrix, :, ::16] = steps * (largest / np.float32(2688) / 512)
        x[matrix, 0, 0] = largest
    x = x.astype(np.float32)
    ulps = rng.integers(-2, 3, x.shape) * (np.abs(x) > 0)
    x[8:20] = (x.view(np.int32) + ulps.astype(np.int32)).view(np.float32)[8:20]
    return x


@functools.cache
def once_and_twice(format):
    """A jitted function that quantises, and quantises what that stands for."""

    @jax.jit
    def run(x):
        once = quantize(x, format)
        return once, quantize(jax.lax.optimization_barrier(once.dequantize()), format)

    return run


@pytest.mark.parametrize("format", FORMATS)
def test_quantising_twice_is_quantising_once(format):
    for seed in range(25):
        once, twice = once_and_twice(format)(jnp.asarray(matrices(seed)))
        assert_same(twice, once)


@pytest.mark.parametrize("format", FORMATS)
def test_eager_and_jitted_give_the_same_bits(format):
    x = jnp.asarray(matrices(100))
    once, twice = once_and_twice(format)(x)
    eager = quantize(x, format)
    assert_same(eager, once)
    assert bits(eager.dequantize()) == bits(jax.jit(lambda q: q.dequantize())(once))
    assert_same(quantize(eager.dequantize(), format), twice)


@pytest.mark.parametrize("format", FORMATS)
def test_quantising_numbers_of_bfloat16_twice(format):
    x = jnp.asarray(np.random.default_rng(7).standard_normal((24, 16, 160)), jnp.bfloat16)
    once = quantize(x, format)
    assert_same(quantize(x.astype(jnp.float32), format), once)
    assert_same(quantize(once.dequantize(), format), once)
