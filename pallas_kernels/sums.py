"""Sums over what comes before, by comparing: one kernel of XLA, where it makes several of a cumulative sum."""

import jax
import jax.numpy as jnp
from jax import lax


def is_before(count: int) -> jax.Array:
    """[count, count] bool: the column's number is below the row's."""
    row, column = (lax.broadcasted_iota(jnp.int32, (count, count), axis) for axis in (0, 1))
    return column < row


def sums_before(values: jax.Array) -> jax.Array:
    """Of values [n, ...] int32, the sum of those before each one along the first axis; n * n comparisons."""
    before = lax.expand_dims(is_before(values.shape[0]), range(2, values.ndim + 1))
    return jnp.where(before, values[None], 0).sum(1, dtype=jnp.int32)


def count_up_to(ascending: jax.Array, values: jax.Array) -> jax.Array:
    """How many of `ascending` [n] are at most each of `values` [m]: [m] int32, n * m comparisons."""
    return (ascending[None, :] <= values[:, None]).sum(1, dtype=jnp.int32)
