"""What every implementation of `scatter_rows` must do. A test module subclasses the contract and names one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.scatter_rows import scatter_rows


def draw(t, d, dtype=jnp.bfloat16):
    """Rows with a NaN, an infinity and a negative zero among them."""
    x = np.random.default_rng(t * d).standard_normal((t, d)).astype(np.float32)
    x[0, :3] = np.nan, np.inf, -0.0
    return jnp.asarray(x).astype(dtype)


def name_rows(t, k, n_rows, seed=0):
    """[T, K] different rows of n_rows in random order; as many as do not fit are out of range, on both sides."""
    rng = np.random.default_rng(seed)
    numbers = rng.permutation(np.concatenate([np.arange(n_rows), np.arange(max(t * k - n_rows, 0)) * 7 + n_rows]))
    rows = numbers[: t * k].astype(np.int32).reshape(t, k)
    return np.where((rows >= n_rows) & (rng.random((t, k)) < 0.5), -1 - rows, rows)


def bits(array):
    """The array's bits as integers, so that NaN and -0 count."""
    return np.asarray(array).view(f"u{array.dtype.itemsize}")


def assert_scattered(got, x, rows, n_rows):
    assert (got.shape, got.dtype) == ((n_rows, x.shape[1]), x.dtype)
    token, slot = np.nonzero((rows >= 0) & (rows < n_rows))
    assert np.array_equal(bits(got)[rows[token, slot]], bits(x)[token])


class ScatterRowsContract:
    implementation: str

    def scatter(self, x, rows, n_rows):
        run = functools.partial(scatter_rows, n_rows=n_rows, implementation=self.implementation)
        return jax.jit(run)(x, jnp.asarray(rows))

    def check(self, t, d, k, n_rows, dtype=jnp.bfloat16):
        x, rows = draw(t, d, dtype), name_rows(t, k, n_rows)
        assert_scattered(self.scatter(x, rows, n_rows), x, rows, n_rows)

    @pytest.mark.quick
    @pytest.mark.parametrize("t, k", [(1, 1), (1, 6), (2, 3), (3, 5), (7, 6), (13, 2)])
    def test_every_named_row_gets_its_token(self, t, k):
        self.check(t, 256, k, t * k)

    @pytest.mark.parametrize("t, d, k", [(5, 2688, 6), (3, 1024, 22), (2, 128, 64), (3, 128, 33)])
    def test_nemotrons_widths(self, t, d, k):
        self.check(t, d, k, t * k + 9)

    @pytest.mark.quick
    def test_numbers_out_of_range_name_nothing(self):
        self.check(9, 128, 4, 11)
        x, n_rows = draw(3, 128), 5
        low, high = jnp.iinfo(jnp.int32).min, jnp.iinfo(jnp.int32).max
        rows = np.array([[-1, 5], [low, 2], [high, -5]], np.int32)
        assert_scattered(self.scatter(x, rows, n_rows), x, rows, n_rows)
        rows = np.full((3, 2), -1, np.int32)
        assert self.scatter(x, rows, n_rows).shape == (5, 128)

    def test_a_token_that_names_nothing_leaves_the_others_alone(self):
        x, rows = draw(4, 128), name_rows(4, 3, 12)
        rows[1] = -1
        assert_scattered(self.scatter(x, rows, 12), x, rows, 12)

    @pytest.mark.quick
    @pytest.mark.parametrize("t, d, k, n_rows", [(0, 128, 3, 4), (3, 0, 2, 6), (3, 128, 0, 4), (3, 128, 2, 0)])
    def test_sizes_of_zero_R57(self, t, d, k, n_rows):
        x, rows = jnp.ones((t, d), jnp.bfloat16), jnp.zeros((t, k), jnp.int32)
        assert self.scatter(x, rows, n_rows).shape == (n_rows, d)

    def test_works_under_vmap(self):
        x, n_rows = jnp.stack([draw(3, 128), 2 * draw(3, 128)]), 9
        rows = np.stack([name_rows(3, 2, n_rows, seed) for seed in range(2)])
        run = functools.partial(scatter_rows, n_rows=n_rows, implementation=self.implementation)
        got = jax.jit(jax.vmap(run))(x, jnp.asarray(rows))
        for i in range(2):
            assert_scattered(got[i], x[i], rows[i], n_rows)
