"""Temporary memory of the XLA implementation: it does not grow with the number of groups (R54). Compiled, never run."""

import jax
import jax.numpy as jnp
import pytest
from kernels.compiled import resources

from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.tile import BATCH_BYTES

SUPER_ROWS = 4096 * 22  # 4096 tokens, 22 experts each


def forward(lhs, rhs, sizes):
    return grouped_matmul(lhs, rhs, sizes, activation="relu2", implementation="xla")


def gradient(lhs, rhs, sizes, dout):
    return jax.vjp(lambda lhs, rhs: forward(lhs, rhs, sizes), lhs, rhs)[1](dout)


def here(fun, *args):
    return jax.jit(fun).lower(*args).compile().memory_analysis().temp_size_in_bytes


def temporary_bytes(measure, fun, m, n, k, groups, dtype):
    lhs, rhs, dout = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((m, k), (groups, n, k), (m, n)))
    args = (lhs, rhs, jax.ShapeDtypeStruct((groups,), jnp.int32), dout)
    return measure(fun, *args[: 3 if fun is forward else 4])


def rows_bytes(m, n, k, dtype):
    return m * (k + n) * jnp.dtype(dtype).itemsize


CASES = [
    pytest.param(6 * 256, 1856, 2688, jnp.bfloat16, id="nano-up-256"),
    pytest.param(6 * 2048, 1856, 2688, jnp.float32, id="nano-up-2048"),
    pytest.param(SUPER_ROWS, 2688, 1024, jnp.bfloat16, id="super-up-4096"),
    pytest.param(SUPER_ROWS, 1024, 2688, jnp.bfloat16, id="super-down-4096"),
    pytest.param(4096, 256, 256, jnp.float32, id="small"),
]
H200_CASES = [
    pytest.param(2 * SUPER_ROWS, 2688, 1024, jnp.bfloat16, id="super-up-8192"),
    pytest.param(6 * 8192, 1856, 2688, jnp.bfloat16, id="nano-up-8192", marks=pytest.mark.aot_full),
    pytest.param(2 * SUPER_ROWS, 1024, 2688, jnp.bfloat16, id="super-down-8192", marks=pytest.mark.aot_full),
]


@pytest.mark.parametrize("fun", [forward, gradient], ids=lambda f: f.__name__)
@pytest.mark.parametrize("m, n, k, dtype", CASES)
def test_temporary_memory_is_that_of_the_rows_not_of_the_groups_R54(fun, m, n, k, dtype):
    few, many = (temporary_bytes(here, fun, m, n, k, groups, dtype) for groups in (16, 64))
    assert many <= 1.2 * few
    assert max(few, many) < rows_bytes(m, n, k, dtype)


@pytest.mark.aot
@pytest.mark.parametrize("fun", [forward, gradient], ids=lambda f: f.__name__)
@pytest.mark.parametrize("m, n, k, dtype", H200_CASES)
def test_a_gpus_temporary_memory_is_that_of_a_batch_R54(fun, m, n, k, dtype, request):
    def on_h200(fun, *args):
        return resources(request, fun, *args).temporary_memory

    few, many = (temporary_bytes(on_h200, fun, m, n, k, groups, dtype) for groups in (16, 64))
    assert many <= 1.2 * few
    saved = 0 if fun is forward else m * n * jnp.dtype(dtype).itemsize  # the output, for relu2's slope
    # More would be a second copy of the matrices, or of the output; less, too few tiles at once.
    assert max(few, many) < saved + 1.1 * BATCH_BYTES
    assert min(few, many) > 0.5 * BATCH_BYTES
    assert max(few, many) < rows_bytes(m, n, k, dtype)
