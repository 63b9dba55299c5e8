"""`quantisation_error`: small cases by hand, and what the formats cost Gaussian numbers."""

import jax.numpy as jnp
import numpy as np
import pytest
from formats.golden import fp8, nvfp4, quantize

from pallas_kernels.formats import quantisation_error


@pytest.mark.quick
def test_by_hand():
    seen, wanted = np.array([[3.0, 0.0], [-4.0, 1.0]]), np.array([[3.0, 4.0], [-4.0, 0.0]])
    error = quantisation_error(seen, wanted)
    assert error.relative == pytest.approx(np.sqrt(17 / 41))  # (0, -4, 0, 1) over (3, 4, -4, 0)
    assert error.cosine == pytest.approx(25 / np.sqrt(26 * 41))
    assert error.largest == 4
    assert error.bias == pytest.approx(-3 / 11)
    assert error.shrinkage == pytest.approx(-4 / 11)


def test_several_matrices_are_one_sum():
    wanted = np.array([[[1.0, -2.0]], [[2.0, 4.0]]])
    error = quantisation_error(jnp.asarray(wanted * 0.5, jnp.float32), wanted)
    assert error.relative == pytest.approx(0.5) and error.cosine == pytest.approx(1)
    assert (error.largest, error.shrinkage) == (2, -0.5)
    assert error.bias == pytest.approx(-2.5 / 9)


def test_zeros_and_what_is_not_finite():
    zero, one = np.zeros((1, 2)), np.ones((1, 2))
    same = quantisation_error(zero, zero)
    assert (same.relative, same.cosine, same.largest, same.bias, same.shrinkage) == (0, 1, 0, 0, 0)
    lost = quantisation_error(zero, one)
    assert (lost.relative, lost.cosine, lost.largest, lost.bias, lost.shrinkage) == (1, 0, 1, -1, -1)
    assert quantisation_error(one, zero).relative == np.inf
    nan = quantisation_error(np.array([[[1.0, np.nan]], [[1.0, 1.0]]]), np.ones((2, 1, 2)))
    assert np.isnan([nan.relative, nan.cosine, nan.largest, nan.bias, nan.shrinkage]).all()


def test_quantised_arrays_on_either_side():
    q = nvfp4([[0x21] * 8], [[0x38]], 1.0)  # 0.5, 1, 0.5, 1 ...
    error = quantisation_error(q, fp8([[0x38] * 16], 1.0, "tensor"))
    assert error.relative == pytest.approx(np.sqrt(1 / 8)) and error.shrinkage == -0.25


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"seen has shape \(2, 2\), but wanted \(2, 3\)"):
        quantisation_error(np.zeros((2, 2)), np.zeros((2, 3)))


def gaussian(sigma, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(0).standard_normal((4, 128, 256)) * sigma, dtype)


@pytest.mark.parametrize("sigma", [1e-20, 0.002, 1.0, 1e20])
def test_gaussian_numbers_lose_little_at_any_magnitude(sigma):
    """About 9.5 % in NVFP4; in FP8 the spacing of e4m3 costs between 2 and 3 %. Nothing leans to a side."""
    x = gaussian(sigma)
    error = quantisation_error(quantize(x, "nvfp4"), x)
    assert 0.094 < error.relative < 0.096 and error.cosine > 0.995
    assert abs(error.bias) < 1e-3 and abs(error.shrinkage) < 0.01
    for format in ("fp8_tensor", "fp8_channel", "fp8_block"):
        error = quantisation_error(quantize(x, format), x)
        assert 0.02 < error.relative < 0.03 and abs(error.bias) < 1e-3 and abs(error.shrinkage) < 1e-3


@pytest.mark.parametrize("sigma, least", [(0.02, 0.025), (0.005, 0.09), (0.002, 0.25)])
def test_a_cast_without_a_scale_loses_much_of_small_numbers(sigma, least):
    x = quantize(gaussian(sigma), "nvfp4").dequantize()
    assert quantisation_error(x.astype(jnp.float8_e4m3fn), x).relative > least
    assert quantisation_error(quantize(x, "fp8_tensor"), x).relative < 0.03
