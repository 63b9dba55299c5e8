"""Slices of quantised arrays, on the borders of blocks only."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from formats.golden import FORMATS, assert_numbers, dequantize, example

FULL = slice(None)
INDICES = [
    0,
    -1,
    np.int64(1),
    slice(1, 3),
    slice(None, None, -2),
    (Ellipsis,),
    (2, Ellipsis),
    (FULL, slice(128, None)),
    (FULL, slice(None, -16)),
    (Ellipsis, slice(0, 128)),
    (Ellipsis, FULL, slice(-32, None)),
    (1, slice(0, 128), slice(128, 160)),
    (slice(0, 2), Ellipsis, slice(128, 128)),
    (slice(3, 1), slice(128, 0), slice(128, 0)),
    (FULL, slice(0, 999)),
]


def array(format):
    return example(format, (3, 144, 160))


@pytest.mark.parametrize("format", ["fp8_tensor", "fp8_block", "nvfp4"])
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_a_slice_is_the_slice_of_the_numbers(format, index):
    q, wanted = array(format)
    cut = q[index]
    cut.check("cut")
    assert cut.format == format and cut.shape == wanted[index].shape
    assert_numbers(dequantize(cut), wanted[index])


@pytest.mark.parametrize("index", [1, (FULL, slice(5, 9)), (Ellipsis, slice(3, 8)), (0, slice(30, None), slice(7, 8))])
def test_channels_may_be_cut_anywhere(index):
    q, wanted = example("fp8_channel", (2, 37, 20))
    assert_numbers(dequantize(q[index]), wanted[index])


@pytest.mark.quick
@pytest.mark.parametrize(
    "format, index, message",
    [
        ("fp8_block", (FULL, slice(0, 64)), r"axis 1 of .* has 144 elements in blocks of 128, which 0:64 would cut"),
        ("fp8_block", (FULL, slice(64, None)), r"axis 1 of .* 144 elements in blocks of 128, which 64:144 would cut"),
        ("fp8_block", (Ellipsis, slice(0, 150)), r"axis 2 of .* 160 elements in blocks of 128, which 0:150 would cut"),
        ("nvfp4", (Ellipsis, slice(8, None)), r"axis 2 of .* 160 elements in blocks of 16, which 8:160 would cut"),
        ("nvfp4", (Ellipsis, slice(0, 17)), r"axis 2 of .* 160 elements in blocks of 16, which 0:17 would cut"),
        ("nvfp4", (Ellipsis, slice(None, None, 2)), r"axis 2 of .* indexed with slice\(None, None, 2\)"),
        ("fp8_tensor", (0, 3), r"axis 1 of .* is indexed with 3; wanted a slice in steps of 1"),
        ("fp8_tensor", (0, FULL, FULL, 0), "wanted at most 3 integers and slices"),
        ("fp8_tensor", (Ellipsis, Ellipsis), "wanted at most 3 integers and slices"),
        ("fp8_tensor", None, "wanted at most 3 integers and slices"),
        ("fp8_tensor", True, "wanted at most 3 integers and slices"),
        ("fp8_tensor", np.array([0, 1]), "wanted at most 3 integers and slices"),
        ("fp8_tensor", 1.0, "wanted at most 3 integers and slices"),
    ],
)
def test_other_indices_are_refused(format, index, message):
    with pytest.raises(ValueError, match=message):
        array(format)[0][index]


@pytest.mark.parametrize("expert", [3, -4])
def test_experts_that_are_not_there(expert):
    with pytest.raises(IndexError, match=rf"index {expert} of axis 0 of .* is not from -3 to 2"):
        array("nvfp4")[0][expert]


def test_iteration_ends():
    q, wanted = example("nvfp4", (3, 4, 32))
    for one, numbers in zip(q, wanted, strict=True):
        assert_numbers(dequantize(one), numbers)


@pytest.mark.parametrize("format", FORMATS)
def test_what_belongs_to_a_matrix_follows_it(format):
    q, _ = example(format, (8, 2, 32))
    q = dataclasses.replace(q, input_scale=jnp.arange(8.0))
    assert q[5].input_scale == 5.0 and q[5:7].input_scale.tolist() == [5.0, 6.0]
    q = dataclasses.replace(q, input_scale=None, uncalibrated=(2, 5))
    seen = [q[index].uncalibrated for index in (slice(2, 6), slice(3, 5), slice(None, None, -1), 2, 3, Ellipsis)]
    assert seen == [(0, 3), (), (2, 5), (), (), (2, 5)]
    assert q[..., :32].uncalibrated == (2, 5)
    assert q[2:, :2].uncalibrated == (0, 3) and q[2:][3].uncalibrated == ()
