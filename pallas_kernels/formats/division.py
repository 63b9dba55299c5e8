"""Division that is rounded correctly everywhere: codes and scales must not depend on the machine."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.implementation import target

MANTISSA = 23  # bits of a float32's that are stored
HIDDEN, BIAS = 1 << MANTISSA, 127  # its first bit, which is not; and what is added to exponents


def divide(x: jax.Array, by: jax.Array | float) -> jax.Array:
    """x / by in float32, rounded once, to the nearest; x where `by` is 0."""
    by = jnp.where(by == 0, 1.0, by)
    # XLA multiplies by the reciprocal of what it sees to be broadcast: on a CPU that alone would be inexact.
    by = jnp.where(jnp.isnan(x), x, by)
    quotient = x / by
    return nearest_quotient(quotient, x, by) if target().platform == "gpu" else quotient


def nearest_quotient(quotient: jax.Array, x: jax.Array, by: jax.Array) -> jax.Array:
    """x / by rounded to the nearest, from a quotient that is off by up to two units in its last place, as on a GPU.

    In whole numbers: with x = mx 2^i and by = mb 2^j the result's mantissa is the m next to mx 2^s / mb, where s makes
    that 24 bits. The remainder mx 2^s - m mb is small, so 32 bits hold it though its terms overflow them. No quotient
    of two float32 numbers lies halfway between two others. What is not normal (0, NaN, infinity, magnitudes below
    2^-126) stays as it is.
    """
    (_, seen, guess), (_, of_x, mx), (_, of_by, mb) = parts = [_parts(array) for array in (quotient, x, by)]
    is_less = (mx < mb).astype(jnp.int32)
    exponent = of_x - of_by + BIAS - is_less
    # It may have been guessed on the other side of a power of two.
    guess = jnp.where(seen > exponent, 2 * guess, jnp.where(seen < exponent, guess >> 1, guess))
    twice = 2 * (lax.shift_left(mx, MANTISSA + is_less) - guess * mb)
    for odd in (1, 3, 5, 7):
        guess += (twice > odd * mb).astype(jnp.int32) - (twice < -odd * mb).astype(jnp.int32)
    bits = (exponent << MANTISSA) + (guess - HIDDEN)  # a carry into the exponent is right
    exact = jnp.copysign(lax.bitcast_convert_type(bits, jnp.float32), quotient)
    is_normal = functools.reduce(jnp.logical_and, (kind for kind, _, _ in parts), (exponent > 0) & (exponent < 255))
    return jnp.where(is_normal, exact, quotient)


def _parts(array: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Whether they are normal, the biased exponent, and the mantissa as an integer of 24 bits."""
    bits = lax.bitcast_convert_type(array, jnp.int32)
    exponent = lax.shift_right_logical(bits, MANTISSA) & 255
    return (exponent > 0) & (exponent < 255), exponent, bits & (HIDDEN - 1) | HIDDEN
