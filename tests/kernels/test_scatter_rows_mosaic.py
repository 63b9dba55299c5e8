"""The Hopper kernel of `scatter_rows`: the contract, its rings, and that it compiles at the models' sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.hopper import OnHopper
from kernels.scatter_rows_contract import ScatterRowsContract, assert_scattered, draw, name_rows

from pallas_kernels.aot import compile_for_h200
from pallas_kernels.implementation import H200, compiling_for
from pallas_kernels.scatter_rows import scatter_rows
from pallas_kernels.scatter_rows.mosaic import SHARED_MEMORY, Ring, default_ring
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
        out = np.asarray(self.scatter(x, rows, 8), np.float32)
        if jax.default_backend() == "cpu":  # the interpreter's memory is NaN
            assert np.isnan(out[[0, 2, 4, 5, 7]]).all()


@pytest.mark.quick
@pytest.mark.parametrize("width, named", SIZES)
@pytest.mark.parametrize("tokens", [1, 2, 263, 264, 265, 8192, 1 << 20])
def test_the_default_ring_fits_and_every_cta_has_a_block(tokens, width, named):
    ring = default_ring(tokens, width, named, H200.cores)
    assert ring.slots >= 2 and ring.tokens in (1, 2, 4)
    assert ring.tokens * named % 4 == 0  # a load at another address than whole 16 bytes faults, on a GPU only
    assert 1 <= ring.ctas <= -(-tokens // ring.tokens)
    per_core = -(-ring.ctas // H200.cores)
    assert per_core * (ring.shared_memory(width, named) + 1024) <= SHARED_MEMORY


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
@pytest.mark.parametrize("t, d, k", [(8192, 2688, 6), (8191, 1024, 22), (64, 2688, 6), (300, 32768, 64), (1, 128, 1)])
def test_compiles_for_h200_to_the_kernel_alone_and_spills_nothing(t, d, k, monkeypatch, tmp_path):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    compiled = compile_for_h200(functools.partial(scatter_rows, n_rows=t * k), *arguments(t, d, k))
    text = compiled.as_text()
    assert text.count("custom-call(") == 1 and "mosaic_gpu" in text
    if t % default_ring(t, d, k, H200.cores).tokens == 0:  # else the last block's row numbers are filled up
        assert "fusion(" not in text and "copy(" not in text  # no other kernel runs
        assert compiled.memory_analysis().temp_size_in_bytes == 0
    [report], [code] = tmp_path.glob("*.ptxas"), tmp_path.glob("*.ptx")
    assert "0 bytes spill stores, 0 bytes spill loads" in report.read_text()
    # A plain bulk copy would want its source at a multiple of 16 bytes, and would read past the end.
    assert "cp.async.bulk.tensor.1d.shared" in code.read_text()
    assert "cp.async.bulk.shared" not in code.read_text()


@pytest.mark.aot
def test_an_output_of_more_than_2_31_elements_compiles():
    t, d, k = 131072, 1024, 22
    text = compile_for_h200(functools.partial(scatter_rows, n_rows=t * k), *arguments(t, d, k)).as_text()
    assert "mosaic_gpu" in text
