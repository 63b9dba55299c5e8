"""Division that a GPU rounds as a CPU does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats.division import divide, nearest_quotient
from pallas_kernels.implementation import H200, compiling_for

SMALLEST = np.finfo(np.float32).tiny


def is_normal(x):
    return np.isfinite(x) & (np.abs(x) >= SMALLEST)


def pairs(kind, count=200_000):
    """Numbers of any bits; by the largest e4m3 code; or with quotients on either side of a power of two."""
    rng = np.random.default_rng(0)
    x, by = rng.integers(0, 2**32, (2, count), dtype=np.uint32).view(np.float32)
    if kind == "448":
        by = np.full_like(x, 448)
    if kind == "near one":
        x = x[is_normal(x)]
        by = (x.view(np.int32) + rng.integers(-2, 3, x.shape, dtype=np.int32)).view(np.float32)
    return x, by


@pytest.mark.quick
@pytest.mark.parametrize("off", [-2, -1, 0, 1, 2])
@pytest.mark.parametrize("kind", ["any", "448", "near one"])
def test_a_quotient_that_is_off_is_mended_to_the_bit(kind, off):
    x, by = pairs(kind)
    with np.errstate(all="ignore"):
        want = x / by
    guess = (want.view(np.int32) + np.int32(off)).view(np.float32)
    some = is_normal(x) & is_normal(by) & is_normal(want) & is_normal(guess)
    assert some.sum() > len(x) // 2
    got = np.asarray(jax.jit(nearest_quotient)(guess, x, by))
    np.testing.assert_array_equal(got[some], want[some])


@pytest.mark.quick
def test_what_is_not_normal_stays():
    x = np.array([0.0, -0.0, np.nan, np.inf, 1.0, 1e-40, 3e38, 1e-30], np.float32)
    by = np.array([2.0, 2.0, 2.0, 2.0, np.inf, 0.5, 1e-5, 1e30], np.float32)
    with np.errstate(all="ignore"):
        want = x / by
    np.testing.assert_array_equal(nearest_quotient(want, x, by).view(np.int32), want.view(np.int32))


@pytest.mark.quick
def test_division_is_the_same_for_a_gpu_and_by_0_is_by_1():
    x, by = pairs("any", 1000)
    by[:10], x[:5] = 0, 3
    with np.errstate(all="ignore"):
        want = x / np.where(by == 0, np.float32(1), by)
    some = is_normal(x) & is_normal(want) & (is_normal(by) | (by == 0))
    assert some[:5].all()
    with compiling_for(H200):
        for_gpu = divide(jnp.asarray(x), jnp.asarray(by))
    for got in (for_gpu, divide(jnp.asarray(x), jnp.asarray(by))):
        np.testing.assert_array_equal(np.asarray(got)[some], want[some])
