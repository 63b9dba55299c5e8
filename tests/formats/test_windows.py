"""Operands, row scales and windows: what a product takes of a quantised array, piece by piece."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formats.golden import FORMATS, assert_numbers, bits, example

SHAPE = (2, 144, 160)
WINDOWS = [  # of rows and of columns
    (None, (5, 17)),
    ((3, 5), None),
    ((0, 144), (1, 1)),
    ((127, 2), (126, 9)),
    ((128, 16), (128, 32)),
    ((100, 44), (15, 2)),
]


def array(format):
    return example(format, (2, 37, 160) if format == "fp8_channel" else SHAPE)


@functools.partial(jax.jit, static_argnums=(1, 2))
def product(q, rows, columns):
    operand, scale = q.operand(jnp.float32, rows, columns), q.row_scale(rows)
    return operand if scale is None else operand * scale


def cut(numbers, rows, columns):
    rows, columns = (slice(None) if one is None else slice(one[0], sum(one)) for one in (rows, columns))
    return numbers[..., rows, columns]


@pytest.mark.parametrize("format", FORMATS)
def test_operand_times_row_scale_is_the_array(format):
    q, wanted = array(format)
    operand, scale = q.operand(jnp.float32), q.row_scale()
    assert (scale is None) == (format == "fp8_block")
    if scale is not None:
        assert scale.shape == (2, q.shape[1] if format == "fp8_channel" else 1, 1)
        assert (np.unique(operand).size > 30) and scale.dtype == jnp.float32
    assert_numbers(operand if scale is None else operand * scale, wanted)


@pytest.mark.parametrize("format", ["fp8_tensor", "fp8_channel", "nvfp4"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_narrow_operands_are_exact(format, dtype):
    """The scale that is constant along K is not in them: four or six significant bits are."""
    q, _ = array(format)
    assert bits(q.operand(dtype).astype(jnp.float32)) == bits(q.operand(jnp.float32))


@pytest.mark.parametrize("format", FORMATS)
def test_windows_are_slices_of_the_whole(format):
    q, wanted = array(format)
    for rows, columns in WINDOWS:
        if rows and sum(rows) > q.shape[1]:
            rows = (rows[0] % 20, 7)
        assert_numbers(product(q, rows, columns), cut(wanted, rows, columns))


@pytest.mark.quick
@pytest.mark.parametrize("format", FORMATS)
def test_windows_may_begin_at_traced_numbers(format):
    q, wanted = array(format)

    @jax.jit
    def window(q, row, column):
        operand, scale = q.operand(jnp.float32, (row, 9), (column, 11)), q.row_scale((row, 9))
        return operand if scale is None else operand * scale

    for row, column in [(0, 0), (1, 3), (28, 149), (17, 127), (q.shape[1] - 9, 120)]:
        assert_numbers(window(q, jnp.int32(row), jnp.int32(column)), cut(wanted, (row, 9), (column, 11)))


def test_spread_names_the_element_of_each_number():
    q, _ = example("nvfp4", (2, 3, 96))
    assert_numbers(q.spread("scale", None, (14, 4)), np.repeat(np.asarray(q.scale, np.float64), 16, -1)[..., 14:18])
    assert q.spread("global_scale").shape == (2, 1, 1)
