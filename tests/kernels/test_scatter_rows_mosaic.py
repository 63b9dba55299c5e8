"""The Hopper kernel of `scatter_rows`: the contract, its rings, and that it compiles at the models' sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.compiled import CORE_MEMORY, RESERVED_MEMORY, SHARED_MEMORY, resources
from kernels.hopper import OnHopper, has_hopper
from kernels.scatter_rows_contract import ScatterRowsContract, assert_scattered, draw, name_rows

from pallas_kernels.implementation import H200, compiling_for
from pallas_kernels.scatter_rows import scatter_rows
from pallas_kernels.scatter_rows.mosaic import RESERVED, Ring, default_ring
from pallas_kernels.scatter_rows.mosaic_kernel import scatter

SIZES = [(2688, 6), (1024, 22), (2048, 22), (4096, 8), (16384, 2), (32768, 64), (128, 1), (128, 64)]


class TestMosaic(OnHopper, ScatterRowsContract):
    implementation = "mosaic"

    @pytest.mark.parametrize("tokens, slots, ctas", [(2, 4, 1), (2, 3, 2), (4, 2, 1), (2, 2, 3), (2, 4, 7)])
    @pytest.mark.parametrize("t, k", [(13, 6), (1, 2), (15, 4)])
    def test_rings_go_round(self, tokens, slots, ctas, t, k):
        """More blocks than slots, and fewer; more CTAs than blocks; a last block that is not full."""
        x, n_rows = draw(t, 128), t * k + 1  # all are in range: the interpreter does not count a group without a store
        rows = name_rows(t, k, n_rows)
        ring = Ring(tokens=tokens, slots=slots, ctas=ctas)
        got = jax.jit(functools.partial(scatter, n_rows=n_rows, ring=ring))(x, jnp.asarray(rows))
        assert_scattered(got, x, rows, n_rows)

    def test_rows_that_nothing_names_are_not_written(self):
        x, rows = draw(5, 128), np.array([[1], [-1], [6], [3], [9]], np.int32)
        out = self.scatter(x, rows, 8)
        assert_scattered(out, x, rows, 8)
        # Only the interpreter's memory is known to be NaN before.
        assert has_hopper() or np.isnan(np.asarray(out, np.float32)[[0, 2, 4, 5, 7]]).all()


@pytest.mark.quick
@pytest.mark.parametrize("width, named", SIZES)
@pytest.mark.parametrize("tokens", [1, 2, 263, 264, 265, 8192, 1 << 20])
def test_the_default_ring_is_as_large_as_fits_and_every_cta_has_a_block(tokens, width, named):
    ring = default_ring(tokens, width, named, H200.cores)
    assert ring.tokens in (1, 2, 4) and ring.tokens * named % 4 == 0  # a load of less than 16 bytes faults, on a GPU
    assert ring.tokens == 1 or ring.tokens // 2 * named % 4  # with fewer tokens it would be
    slot = 2 * ring.tokens * width + -(-4 * ring.tokens * named // 128) * 128
    assert ring.slots >= 2 and ring.slots * slot <= SHARED_MEMORY - 8 * ring.slots  # and a barrier for each slot
    assert ring.slots == 4 or (ring.slots + 1) * slot > SHARED_MEMORY - RESERVED_MEMORY
    blocks, per_core = -(-tokens // ring.tokens), -(-ring.ctas // H200.cores)
    assert 1 <= ring.ctas <= blocks
    assert per_core * (ring.slots * slot + RESERVED_MEMORY) <= CORE_MEMORY
    assert ring.ctas in (blocks, 4 * H200.cores) or (per_core + 1) * (ring.slots * slot + RESERVED) > CORE_MEMORY


def arguments(t, d, k):
    return jax.ShapeDtypeStruct((t, d), jnp.bfloat16), jax.ShapeDtypeStruct((t, k), jnp.int32)


@pytest.mark.quick
@pytest.mark.parametrize("width, named", [(2688, 6), (1024, 22), (2048, 22), (32768, 64)])
@pytest.mark.parametrize("tokens", [1, 8192])
def test_lowers_for_cuda_at_the_models_sizes(tokens, width, named):
    fun = jax.jit(functools.partial(scatter_rows, n_rows=tokens * named, implementation="mosaic"))
    with compiling_for(H200):
        text = fun.trace(*arguments(tokens, width, named)).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text and "scatter" not in text.replace("scatter_rows", "")


@pytest.mark.aot
@pytest.mark.parametrize(
    "t, d, k",
    [
        (300, 32768, 64),  # the most stores of a token, and the largest slots
        pytest.param(8192, 2688, 6, marks=pytest.mark.aot_full),
        pytest.param(8191, 1024, 22, marks=pytest.mark.aot_full),
        pytest.param(64, 2688, 6, marks=pytest.mark.aot_full),
        pytest.param(1, 128, 1, marks=pytest.mark.aot_full),
        pytest.param(131072, 1024, 22, marks=pytest.mark.aot_full),  # an output of more than 2^31 elements
    ],
)
def test_compiles_for_h200_to_the_kernel_alone(t, d, k, request):
    seen = resources(request, functools.partial(scatter_rows, n_rows=t * k), *arguments(t, d, k))
    assert seen.text.count("custom-call(") == 1 and "mosaic_gpu" in seen.text
    assert "fusion(" not in seen.text and "copy(" not in seen.text  # no other kernel runs
    assert seen.temporary_memory == 0
    [kernel] = seen.kernels.values()
    ring = default_ring(t, d, k, H200.cores)
    per_core = -(-ring.ctas // H200.cores)
    assert per_core * (kernel.shared_memory + RESERVED_MEMORY) <= CORE_MEMORY
    # A plain bulk copy would want its source at a multiple of 16 bytes, and would read past the end.
    assert [load.rpartition(".")[0] for load in kernel.loads] == ["cp.async.bulk.tensor"] * 2
