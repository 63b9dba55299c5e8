"""Quantised arrays whose numbers are known by other means than the code under test."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.formats import Fp8Array, Nvfp4Array
from pallas_kernels.formats import quantize as eager_quantize

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float64)
# Byte 0x7F is NaN: sign, four bits of the exponent less 7, three of the mantissa; no leading 1 where the exponent is 0.
E4M3 = np.array([(8 * (e > 0) + m) / 8 * 2.0 ** (max(e, 1) - 7) for e in range(16) for m in range(8)][:-1], np.float64)
POSITIVE = np.arange(1, 127, dtype=np.uint8)  # the bytes of the e4m3 numbers that may be scales
FINITE = np.array([byte for byte in range(256) if byte & 127 != 127], np.uint8)
FP8 = {"fp8_tensor": (None, None), "fp8_channel": (1, None), "fp8_block": (128, 128)}
FORMATS = [*FP8, "nvfp4"]

# One compilation is much faster than one for each operation, where a test does not ask about eager calls.
quantize = jax.jit(eager_quantize, static_argnames="format")


@functools.partial(jax.jit, static_argnums=1)
def dequantize(q, dtype=jnp.float32):
    return q.dequantize(dtype)


def e4m3(codes) -> np.ndarray:
    """Bytes as an array of float8_e4m3fn."""
    return np.asarray(codes, np.uint8).view(ml_dtypes.float8_e4m3fn)


def e4m3_numbers(codes: np.ndarray) -> np.ndarray:
    """What finite bytes stand for, in float64, -0 included."""
    return np.copysign(E4M3[codes & 127], 1.0 - (codes >> 7) * 2.0)


def nvfp4(packed, scale, global_scale, **static) -> Nvfp4Array:
    """From bytes of both kinds and numbers."""
    return Nvfp4Array(
        packed=jnp.asarray(packed, jnp.uint8),
        scale=jnp.asarray(e4m3(scale)),
        global_scale=jnp.asarray(np.asarray(global_scale, np.float32)),
        **static,
    )


def fp8(values, scale, granularity, dtype=jnp.float32) -> Fp8Array:
    return Fp8Array(values=jnp.asarray(e4m3(values)), scale=jnp.asarray(scale, dtype), granularity=granularity)


def powers(shape, first=0) -> np.ndarray:
    """Distinct powers of two, from 2^first on."""
    return 2.0 ** (first + np.arange(np.prod(shape, dtype=int))).reshape(shape)


def example(format, shape, seed=0):
    """An array of random codes under scales that are distinct powers of two, and its numbers in float64."""
    rng = np.random.default_rng(seed)
    *lead, n, k = shape
    if format == "nvfp4":
        codes, blocks = rng.integers(0, 16, shape), (*lead, n, k // 16)
        # The powers of two of e4m3 are 2^-9 to 2^8: 18 for as many blocks, then again from the start.
        exponents = (np.arange(np.prod(blocks)).reshape(blocks) % 18) - 9
        byte = np.where(exponents >= -6, (exponents + 7) << 3, 1 << np.clip(exponents + 9, 0, 2))
        outer = powers(lead, -3) ** 9.0
        numbers = E2M1[codes] * np.repeat(2.0**exponents, 16, -1) * outer[..., None, None]
        return nvfp4(codes[..., ::2] | codes[..., 1::2] << 4, byte, outer), numbers
    codes = rng.choice(FINITE, shape)
    block = FP8[format]
    of_matrix = [-(-size // one) for size, one in zip((n, k), block, strict=True) if one]
    scale = powers((*lead, *of_matrix), -40)
    spread = scale.reshape(*lead, *(of_matrix[:1] or [1]), *(of_matrix[1:] or [1]))
    for axis in (-2, -1):
        if (one := block[axis]) and one > 1:
            spread = np.repeat(spread, one, axis).take(range(shape[axis]), axis)
    return fp8(codes, scale, format[4:]), e4m3_numbers(codes) * spread


def bits(array) -> bytes:
    return np.asarray(array).tobytes()


def assert_same(seen, wanted) -> None:
    """The same format, and the same bits in every part."""
    assert type(seen) is type(wanted) and seen.format == wanted.format
    for name in wanted.parts():
        a, b = np.asarray(getattr(seen, name)), np.asarray(getattr(wanted, name))
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        different = np.flatnonzero(np.frombuffer(a.tobytes(), np.uint8) != np.frombuffer(b.tobytes(), np.uint8))
        assert different.size == 0, (name, different.size, different[:8])


def assert_numbers(seen, wanted) -> None:
    """Equal to float64 numbers that the dtype can hold, the sign of zero included."""
    seen = np.asarray(seen).astype(np.float64)
    assert seen.shape == wanted.shape
    np.testing.assert_array_equal(seen, wanted)
    np.testing.assert_array_equal(np.signbit(seen), np.signbit(wanted))
