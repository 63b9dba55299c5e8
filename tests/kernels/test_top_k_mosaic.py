"""The Hopper kernel of `top_k`: the contract, its blocks, and that it compiles at the models' sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.hopper import OnHopper
from kernels.top_k_contract import TopKContract, oracle, random, some_of

from pallas_kernels.aot import compile_for_h200
from pallas_kernels.implementation import H200, compiling_for
from pallas_kernels.top_k import top_k
from pallas_kernels.top_k.mosaic_kernel import take

SIZES = [(128, 6), (512, 22), (1024, 64), (128, 64), (384, 8)]


class TestMosaic(OnHopper, TopKContract):
    implementation = "mosaic"

    @pytest.mark.parametrize("t", [1, 3, 5, 8, 13])
    def test_blocks_that_are_not_full(self, t):
        """Fewer tokens than a block too, which the choice leaves to XLA."""
        for scores in (random(t, 256), some_of([1, 2], t, 256)):
            got = jax.jit(functools.partial(take, k=9))(jnp.asarray(scores))
            assert np.array_equal(got, oracle(scores, 9))


@pytest.mark.quick
@pytest.mark.parametrize("experts, k", SIZES)
def test_lowers_for_cuda_at_the_models_sizes(experts, k):
    fun = jax.jit(functools.partial(top_k, k=k, implementation="mosaic"))
    with compiling_for(H200):
        traced = fun.trace(jax.ShapeDtypeStruct((8191, experts), jnp.float32))
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.aot
@pytest.mark.parametrize("tokens", [4, 8192])
@pytest.mark.parametrize("experts, k", SIZES)
def test_compiles_for_h200_to_the_kernel_alone_and_spills_nothing(tokens, experts, k, monkeypatch, tmp_path):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    scores = jax.ShapeDtypeStruct((tokens, experts), jnp.float32)
    compiled = compile_for_h200(functools.partial(top_k, k=k), scores)
    text = compiled.as_text()
    assert text.count("custom-call(") == 1 and "mosaic_gpu" in text
    assert "fusion(" not in text and "copy(" not in text  # no other kernel runs
    assert compiled.memory_analysis().temp_size_in_bytes == 0
    [report] = tmp_path.glob("*.ptxas")
    assert "0 bytes spill stores, 0 bytes spill loads" in report.read_text()
