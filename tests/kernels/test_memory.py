"""Temporary memory of the XLA implementation: it does not grow with the number of groups (R54). Compiled, never run."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.aot import compile_for_h200
from pallas_kernels.grouped_matmul import grouped_matmul

SUPER_ROWS = 4096 * 22  # 4096 tokens, 22 experts each


def forward(lhs, rhs, sizes):
    return grouped_matmul(lhs, rhs, sizes, activation="relu2", implementation="xla")


def gradient(lhs, rhs, sizes, dout):
    return jax.vjp(lambda lhs, rhs: forward(lhs, rhs, sizes), lhs, rhs)[1](dout)


def compile_here(fun, *args):
    return jax.jit(fun).lower(*args).compile()


def temporary_bytes(compile_, fun, m, n, k, groups, dtype):
    lhs, rhs, dout = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((m, k), (groups, n, k), (m, n)))
    args = (lhs, rhs, jax.ShapeDtypeStruct((groups,), jnp.int32), dout)
    return compile_(fun, *args[: 3 if fun is forward else 4]).memory_analysis().temp_size_in_bytes


CASES = [
    pytest.param(compile_here, 6 * 256, 1856, 2688, jnp.bfloat16, id="cpu-nano-up-256"),
    pytest.param(compile_here, 6 * 2048, 1856, 2688, jnp.float32, id="cpu-nano-up-2048"),
    pytest.param(compile_here, SUPER_ROWS, 2688, 1024, jnp.bfloat16, id="cpu-super-up-4096"),
    pytest.param(compile_here, SUPER_ROWS, 1024, 2688, jnp.bfloat16, id="cpu-super-down-4096"),
    pytest.param(compile_here, 4096, 256, 256, jnp.float32, id="cpu-small"),
    pytest.param(compile_for_h200, SUPER_ROWS, 1024, 2688, jnp.bfloat16, id="h200-super-down-4096"),
]


@pytest.mark.parametrize("fun", [forward, gradient], ids=lambda f: f.__name__)
@pytest.mark.parametrize("compile_, m, n, k, dtype", CASES)
def test_temporary_memory_is_that_of_the_rows_not_of_the_groups_R54(fun, compile_, m, n, k, dtype):
    few, many = (temporary_bytes(compile_, fun, m, n, k, groups, dtype) for groups in (16, 64))
    assert many <= 1.2 * few
    assert max(few, many) < m * (k + n) * jnp.dtype(dtype).itemsize
