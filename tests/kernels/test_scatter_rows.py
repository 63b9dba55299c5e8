"""`scatter_rows`: the contract of every implementation, the choice, and the refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.scatter_rows_contract import ScatterRowsContract

from pallas_kernels.implementation import H200, compiling_for
from pallas_kernels.scatter_rows import choose, scatter_rows


class AnyWidth(ScatterRowsContract):
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.int8, jnp.float8_e4m3fn], ids=lambda d: d.__name__)
    def test_any_dtype_and_width(self, dtype):
        self.check(5, 33, 3, 15, dtype)


class TestReference(AnyWidth):
    implementation = "reference"


class TestXla(AnyWidth):
    implementation = "xla"


def chosen(t=8, d=256, k=3, n_rows=24, dtype=jnp.bfloat16):
    x, rows = jax.ShapeDtypeStruct((t, d), dtype), jax.ShapeDtypeStruct((t, k), jnp.int32)
    return choose(x, rows, n_rows)


@pytest.mark.quick
@pytest.mark.parametrize(
    "arguments, reason",
    [
        (dict(dtype=jnp.float32), "x is float32; it accepts bfloat16"),
        (dict(d=200), "D is 200; it accepts multiples of 128 up to 32768"),
        (dict(d=32896), "D is 32896; it accepts multiples of 128 up to 32768"),
        (dict(k=65), "K is 65; it accepts up to 64"),
        (dict(d=32768, k=1), "a block of 4 tokens of 32768 fills more than half of the shared memory"),
        (dict(t=2**26, k=32), "there are 2147483648 row numbers; it accepts fewer than 2^31"),
    ],
)
def test_what_the_kernel_refuses_runs_in_xla(arguments, reason):
    with compiling_for(H200):
        choice = chosen(**arguments)
        assert chosen().implementation.name == "mosaic"
    assert choice.implementation.name == "xla"
    assert choice.passed_over == (("mosaic", reason),)


@pytest.mark.quick
@pytest.mark.parametrize(
    "x, rows, n_rows, message",
    [
        ((3,), (3, 2), 6, r"x has shape \(3,\); wanted \[T, D\]"),
        ((3, 4), (2, 3), 6, r"rows has shape \(2, 3\); wanted \[T, K\] with x's T = 3"),
        ((3, 4), (3,), 6, r"rows has shape \(3,\)"),
        ((3, 4), (3, 2), -1, "n_rows is -1; wanted an integer from 0 to 2147483647"),
        ((3, 4), (3, 2), 2**31, "n_rows is 2147483648"),
        ((3, 4), (3, 2), True, "n_rows is True"),
        ((3, 4), (3, 2), 6.0, r"n_rows is 6\.0"),
    ],
)
def test_wrong_arguments_are_named(x, rows, n_rows, message):
    with pytest.raises(ValueError, match=message):
        scatter_rows(jnp.ones(x), jnp.zeros(rows, jnp.int32), n_rows)


def test_other_row_numbers_are_refused():
    with pytest.raises(ValueError, match="rows is uint8; wanted int32"):
        scatter_rows(jnp.ones((3, 4)), jnp.zeros((3, 2), jnp.uint8), 6)


@pytest.mark.quick
def test_lists_are_refused_and_numpys_integers_are_taken():
    x, rows = np.ones((3, 4)), np.zeros((3, 2), np.int32)
    with pytest.raises(ValueError, match=r"x is a list; wanted an array \[T, D\]"):
        scatter_rows(x.tolist(), rows, 6)
    with pytest.raises(ValueError, match=r"rows is a list; wanted an array \[T, K\]"):
        scatter_rows(x, rows.tolist(), 6)
    assert scatter_rows(np.ones((3, 4), np.float32), rows, np.int64(6)).shape == (6, 4)
