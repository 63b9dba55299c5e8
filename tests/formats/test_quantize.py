"""Numbers to codes: rounding, saturation, and the scales that are chosen."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from formats.golden import E2M1, E4M3, FORMATS, FP8, POSITIVE, assert_same, bits, e4m3, fp8, nvfp4, quantize

from pallas_kernels.formats import quantize as eager_quantize

TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
EVEN = [0, 2, 2, 4, 4, 6, 6]  # the codes of 0, 1, 1, 2, 2, 4, 4


def nibbles(packed) -> list[int]:
    return np.stack([np.asarray(packed) & 15, np.asarray(packed) >> 4], -1).ravel().tolist()


def under(x, *, scale=0x38, global_scale=1.0):
    """The e2m1 codes of up to 16 numbers under given scales."""
    row = np.zeros((1, 16), np.float32)
    row[0, : len(x)] = x
    q = nvfp4(np.zeros((1, 8)), [[scale]], global_scale)
    return nibbles(quantize(jnp.asarray(row), scales_of=q).packed)[: len(x)]


@pytest.mark.quick
@pytest.mark.parametrize("exponent", [0, -13, 40])
def test_nvfp4_ties_go_to_the_even_code(exponent):
    x = np.array(TIES, np.float32)
    unit = np.float32(2.0**exponent)
    assert under(x * unit, global_scale=unit) == EVEN
    assert under(-x * unit, global_scale=unit) == [code | 8 for code in EVEN]
    upper, lower = (np.nextafter(x, np.float32(to)) for to in (9, 0))
    assert under(upper * unit, global_scale=unit) == [1, 2, 3, 4, 5, 6, 7]
    assert under(lower * unit, global_scale=unit) == [0, 1, 2, 3, 4, 5, 6]


def test_nvfp4_codes_are_those_of_ml_dtypes():
    x = np.random.default_rng(0).uniform(-7, 7, (64, 16)).astype(np.float32)
    q = quantize(jnp.asarray(x), scales_of=nvfp4(np.zeros((64, 8)), np.full((64, 1), 0x38), 1.0))
    assert nibbles(q.packed) == x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).ravel().tolist()


def test_fp8_ties_go_to_the_even_code():
    ties = (E4M3[:-1] + E4M3[1:]) / 2
    even = np.arange(len(ties)) + np.arange(len(ties)) % 2
    for sign in (1, -1):
        x = jnp.asarray(sign * ties[None] * 2.0**-3, jnp.float32)
        q = quantize(x, scales_of=fp8(np.zeros((1, len(ties))), 2.0**-3, "tensor"))
        assert np.asarray(q.values).view(np.uint8)[0].tolist() == (even | 128 * (sign < 0)).tolist()


@pytest.mark.quick
def test_what_is_too_large_becomes_the_largest_code():
    x = [500.0, -1000.0, 448.0, 465.0, 1e30, np.inf, -np.inf, np.finfo(np.float32).max]
    wanted = [448.0, -448.0, 448.0, 448.0, 448.0, 448.0, -448.0, 448.0]
    row = jnp.asarray([x], jnp.float32)
    for granularity, scale in (("tensor", 1.0), ("channel", [1.0]), ("block", [[1.0]])):
        q = quantize(row, scales_of=fp8(np.zeros((1, 8)), scale, granularity))
        assert np.asarray(q.values).astype(np.float64).tolist() == [wanted]
    assert under(x) == [7, 15, 7, 7, 7, 7, 15, 7]
    assert under([0.0, -0.0, -1e-30, 5.1, 6.0, 7.0]) == [0, 8, 8, 7, 7, 7]


@pytest.mark.parametrize("format", FORMATS)
def test_finite_numbers_never_become_nan(format):
    rng = np.random.default_rng(1)
    x = np.ldexp(rng.uniform(-1, 1, (4, 8, 32)), rng.integers(-140, 128, (4, 8, 32))).astype(np.float32)
    x[0], x[1, 0], x[2, :, :16] = 0, np.finfo(np.float32).max, -np.finfo(np.float32).tiny
    x[3] = np.where(np.abs(x[3]) > 1e30, np.inf, x[3])
    q = quantize(jnp.asarray(x), format)
    for name in q.parts():
        assert np.isfinite(np.asarray(getattr(q, name)).astype(np.float32)).all()
    assert np.isfinite(q.dequantize()).all()
    assert (np.asarray(q.dequantize())[0] == 0).all()
    zero = {"nvfp4": nvfp4(np.zeros((8, 16)), np.zeros((8, 2)), 0.0)}.get(format)
    zero = zero or fp8(np.zeros((8, 32)), np.zeros([-(-8 // b) for b in FP8[format] if b]), format[4:])
    for one in x:
        codes = quantize(jnp.asarray(one), scales_of=zero)
        assert np.isfinite(np.asarray(getattr(codes, codes.codes)).astype(np.float32)).all()


@pytest.mark.parametrize("format", FORMATS)
def test_nan_reaches_the_scales_that_it_meets(format):
    x = np.ones((2, 3, 32), np.float32)
    x[1, 2, 3] = np.nan
    q = np.asarray(quantize(jnp.asarray(x), format).dequantize())
    lost = np.zeros(x.shape, bool)
    lost[1, 2 if format == "fp8_channel" else slice(None)] = True
    assert np.array_equal(np.isnan(q), lost)


def test_nan_under_given_scales():
    x = jnp.full((1, 16), jnp.nan)
    assert [code & 7 for code in nibbles(quantize(x, scales_of=nvfp4([[9] * 8], [[0x38]], 1.0)).packed)] == [0] * 16
    assert np.isnan(quantize(x, scales_of=fp8(np.zeros((1, 16)), 1.0, "tensor")).dequantize()).all()


def model_optimizer(x):
    """NVFP4 codes, bytes of block scales and the global scale of one matrix by Model Optimizer's formula, in NumPy."""
    blocks = x.reshape(len(x), -1, 16)
    outer = np.abs(x).max() / np.float32(6 * 448)
    scale = np.clip(np.abs(blocks).max(-1) / np.float32(6) / outer, np.float32(2**-9), np.float32(448))
    scale = scale.astype(ml_dtypes.float8_e4m3fn)
    codes = (blocks / (scale.astype(np.float32) * outer)[..., None]).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    codes = codes.reshape(x.shape)
    return codes[:, ::2] | codes[:, 1::2] << 4, scale.view(np.uint8), outer


@pytest.mark.parametrize("spread", [0.0, 1.5], ids=["even", "uneven"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_nvfp4_is_what_model_optimizer_writes(dtype, spread):
    """Numbers of bfloat16 are often exactly halfway: a product by a reciprocal instead of a division shows."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((24, 16, 256)) * np.exp(spread * rng.standard_normal((24, 16, 1)))
    x = jnp.asarray(x, dtype)
    seen = quantize(x, "nvfp4")
    assert_same(eager_quantize(x, "nvfp4"), seen)
    for expert, matrix in enumerate(np.asarray(x).astype(np.float32)):
        packed, scale, outer = model_optimizer(matrix)
        assert scale.min() >= 4  # Below, the choice of scales is our own.
        assert bits(seen.global_scale[expert]) == bits(outer)
        assert bits(seen.scale[expert]) == bits(scale)
        assert bits(seen.packed[expert]) == bits(packed)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("format", list(FP8))
def test_fp8_scales_make_448_of_the_largest(format, dtype):
    x = jnp.asarray(np.random.default_rng(3).standard_normal((2, 144, 160)) * 10, dtype)
    q = quantize(x, format)
    assert_same(eager_quantize(x, format), q)
    wide = np.asarray(x).astype(np.float32)
    rows, columns = (size or max(x.shape) for size in FP8[format])
    for n in range(0, 144, rows):
        for k in range(0, 160, columns):
            block = wide[:, n : n + rows, k : k + columns]
            scale = np.abs(block).max((1, 2)) / np.float32(448)
            at = [one // size for one, size in ((n, FP8[format][0]), (k, FP8[format][1])) if size]
            assert bits(q.scale[:, *at]) == bits(scale)
            codes = np.clip(block / scale[:, None, None], -448, 448).astype(ml_dtypes.float8_e4m3fn)
            assert bits(np.asarray(q.values)[:, n : n + rows, k : k + columns]) == bits(codes)


def test_the_smallest_block_scales():
    """Steps of 2^-9: 6 codes of one of them, 7.9, and 8, which would be cut off by a quarter, and 15."""
    x = np.zeros((1, 96), np.float32)
    x[0, ::16] = np.array([2688 * 512, 6, 7.9, 8, 15, 15.5]) * 2.0**-9
    q = quantize(jnp.asarray(x), "nvfp4")
    assert float(q.global_scale) == 1.0
    assert np.asarray(q.scale).view(np.uint8).tolist() == [[0x7E, 1, 1, 2, 2, 3]]
    assert (np.asarray(q.dequantize())[0, ::16] * 512).tolist() == [2688 * 512, 6, 6, 8, 12, 18]
    assert POSITIVE[0] == 1 and E2M1[7] == 6  # what the bytes above mean


def test_a_given_outer_scale_is_used():
    x = jnp.asarray(np.random.default_rng(4).standard_normal((2, 3, 32)), jnp.float32)
    given = jnp.asarray([0.5, 2.0])
    q = quantize(x, "fp8_tensor", outer_scale=given)
    assert bits(q.scale) == bits(given)
    assert bits(q.values) == bits(e4m3((np.asarray(x) / np.array([[[0.5]], [[2.0]]], np.float32)).astype(
        ml_dtypes.float8_e4m3fn).view(np.uint8)))  # fmt: skip
    own = quantize(x, "nvfp4")
    assert_same(quantize(x, "nvfp4", outer_scale=own.global_scale), own)
    halved = quantize(x, "nvfp4", outer_scale=own.global_scale * 2)
    assert bits(halved.scale.astype(jnp.float32) * 2) == bits(own.scale.astype(jnp.float32))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(0, 32), (2, 0), (0, 3, 32)], ids=str)
def test_no_numbers(format, shape):
    assert quantize(jnp.zeros(shape), format).dequantize().shape == shape
