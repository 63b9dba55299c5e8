"""What codes and scales stand for, against tables and other people's decoders."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from bounds import bound
from formats.golden import (
    E2M1,
    FINITE,
    FORMATS,
    POSITIVE,
    assert_numbers,
    bits,
    dequantize,
    e4m3,
    e4m3_numbers,
    example,
    fp8,
    nvfp4,
)

from pallas_kernels.formats import to_float64


@pytest.mark.quick
def test_literal_bytes():
    """Low four bits first; code 8 is -0."""
    q = nvfp4([[0x21, 0x43, 0x65, 0x87, 0x80, 0xA9, 0xCB, 0xFE]], [[0x38]], 1.0)
    wanted = [0.5, 1, 1.5, 2, 3, 4, 6, -0.0, 0, -0.0, -0.5, -1, -1.5, -2, -4, -6]
    assert_numbers(dequantize(q), np.array([wanted]))
    assert_numbers(to_float64(q), np.array([wanted]))


def test_the_tables_agree_with_ml_dtypes():
    assert_numbers(np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn), E2M1)
    assert_numbers(e4m3(FINITE), e4m3_numbers(FINITE))


@pytest.mark.parametrize("decode", [lambda q: q.dequantize(), jax.jit(lambda q: q.dequantize()), to_float64])
def test_every_nvfp4_byte_under_every_scale(decode):
    packed = np.tile(np.arange(256, dtype=np.uint8), (126, 1))
    numbers = E2M1[np.stack([np.arange(256) & 15, np.arange(256) >> 4], -1).ravel()]
    wanted = numbers * e4m3_numbers(POSITIVE)[:, None]
    q = nvfp4(packed, np.tile(POSITIVE[:, None], (1, 32)), 2.0**-13)
    assert_numbers(decode(q), wanted * 2.0**-13)
    assert_numbers(decode(dataclasses.replace(q, divides=True)), wanted * 2.0**13)


@pytest.mark.parametrize("decode", [lambda q: q.dequantize(), jax.jit(lambda q: q.dequantize()), to_float64])
def test_every_fp8_code(decode):
    assert FINITE.size == 254
    q = fp8(FINITE[None], 2.0**-3, "tensor")
    assert_numbers(decode(q), e4m3_numbers(FINITE)[None] / 8)
    assert np.isnan(np.asarray(decode(fp8([[0x7F, 0xFF]], 1.0, "tensor")))).all()


SHAPES = [(3, 4, 96), (2, 144, 160), (2, 116, 1856), (160, 144), (2, 2, 3, 32)]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_distinct_powers_of_two_as_scales(format, shape):
    """A factor that is lost, doubled or another element's gives a wrong power of two."""
    if format == "fp8_channel" and shape[-2] > 100:
        shape = (*shape[:-2], 37, shape[-1])  # float32 has no more powers.
    q, wanted = example(format, shape)
    assert q.shape == shape and q.ndim == len(shape) and q.size == np.prod(shape)
    assert_numbers(dequantize(q), wanted)
    assert_numbers(to_float64(q), wanted)


def test_the_parts_of_partial_blocks():
    q, _ = example("fp8_block", (2, 144, 160))
    assert q.scale.shape == (2, 2, 2)
    rows, columns = np.array([[0] * 128 + [1] * 16]).T, np.array([[0] * 128 + [1] * 32])
    spread = np.asarray(q.scale)[:, rows, columns]
    assert_numbers(dequantize(q), spread.astype(np.float64) * e4m3_numbers(np.asarray(q.values).view(np.uint8)))


@pytest.mark.parametrize("divides", [False, True])
def test_any_global_scale(divides):
    """Codes times e4m3 are exact; what is left are a division, where one is asked for, and a product."""
    rng = np.random.default_rng(5)
    q = nvfp4(rng.integers(0, 256, (7, 4, 16)), rng.choice(POSITIVE, (7, 4, 2)), rng.uniform(1, 2, 7), divides=divides)
    wanted = to_float64(q)
    error = np.abs(np.asarray(dequantize(q)) - wanted) / np.where(wanted == 0, 1.0, np.abs(wanted))
    assert error.max() <= bound(jnp.float32, 0, 1.0, roundings=1 + divides)


def test_scales_in_bfloat16():
    q, wanted = example("fp8_block", (2, 144, 160))
    q = dataclasses.replace(q, scale=q.scale.astype(jnp.bfloat16))
    assert_numbers(dequantize(q), wanted)
    assert q.row_scale() is None
    q, _ = example("fp8_channel", (2, 3, 32))
    assert dataclasses.replace(q, scale=q.scale.astype(jnp.bfloat16)).row_scale().dtype == jnp.float32


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_narrow_results_are_the_wide_ones_rounded_once(format, dtype):
    q, _ = example(format, (144, 160) if format == "fp8_block" else (6, 96))
    wide = dequantize(q)
    assert q.dequantize(dtype).dtype == dtype
    assert bits(q.dequantize(dtype)) == bits(wide.astype(dtype))
