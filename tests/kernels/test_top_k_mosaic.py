"""The Hopper kernel of `top_k`: the contract, its blocks, and that it compiles at the models' sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.compiled import resources
from kernels.hopper import OnHopper
from kernels.top_k_contract import TopKContract, oracle, random, some_of

from pallas_kernels.implementation import H200, compiling_for
from pallas_kernels.top_k import top_k
from pallas_kernels.top_k.mosaic import LANES
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
@pytest.mark.parametrize(
    "tokens, experts, k",
    [
        (4, 1024, 64),  # the most lists, and so registers
        *(
            pytest.param(tokens, experts, k, marks=pytest.mark.aot_full)
            for tokens in (4, 8192)
            for experts, k in SIZES
            if (tokens, experts) != (4, 1024)
        ),
    ],
)
def test_compiles_for_h200_to_the_kernel_and_a_slice_of_its_ids(tokens, experts, k, request):
    scores = jax.ShapeDtypeStruct((tokens, experts), jnp.float32)
    seen = resources(request, functools.partial(top_k, k=k), scores)
    assert seen.text.count("custom-call(") == 1 and "mosaic_gpu" in seen.text
    is_padded = k % LANES > 0
    others = [line for line in seen.text.splitlines() if " fusion(" in line or " copy(" in line]
    assert len(others) == is_padded and all("/top_k/slice" in line for line in others)
    assert seen.temporary_memory <= is_padded * tokens * 4 * LANES * -(-k // LANES)
    assert list(seen.kernels) == [f"top_k_{k}of{experts}"]
