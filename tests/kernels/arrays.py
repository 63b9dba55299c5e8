"""Arrays of the tests of `grouped_matmul`, and comparisons of them."""

import jax
import numpy as np


def draw(shape, dtype, seed, scale=1.0):
    """Normal numbers. All that can be is NumPy's here, because JAX compiles for every shape."""
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(dtype)


def put(array, rows, value):
    """A copy with `value` in these rows."""
    array = array.copy()
    array[rows] = value
    return array


def operands(m, n, k, groups, dtype, rhs_dtype=None):
    """Rows of order 1, and matrices that keep them so."""
    return draw((m, k), dtype, 0), draw((groups, n, k), rhs_dtype or dtype, 1, k**-0.5)


def plain(array):
    """A NumPy array: to `jit` one that was computed on a mesh, as in `compiling_for`, is of another kind."""
    return array if isinstance(array, jax.core.Tracer) else np.asarray(array)


def f64(array):
    return np.asarray(array).astype(np.float64)


def assert_within(got, want, limit):
    got = f64(got)
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    excess = np.abs(got - want) - limit
    assert (excess <= 0).all(), f"{excess.max()} over the bound at {np.unravel_index(excess.argmax(), excess.shape)}"


def assert_same(got, want):
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
