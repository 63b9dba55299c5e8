"""The Hopper kernels lowered for an H200 on any machine, with JAX's 64-bit types too."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import nemotron_moe as nm
from nemotron_moe.weights import abstract_weights
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.implementation import H200, compiling_for
from pallas_kernels.scatter_rows import scatter_rows
from pallas_kernels.top_k import top_k

LAYER = nm.MoEConfig(
    hidden_size=256,
    n_routed_experts=128,
    num_experts_per_tok=4,
    moe_intermediate_size=192,
    moe_shared_expert_intermediate_size=64,
    moe_latent_size=128,
)
product = functools.partial(grouped_matmul, group_alignment=8, implementation="mosaic")


def spec(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def gradient(lhs, rhs, sizes):
    return jax.grad(lambda lhs: product(lhs, rhs, sizes, activation="relu2").astype(jnp.float32).sum())(lhs)


def block_gradient(h, weights):
    return jax.grad(lambda h: nm.moe_block(h, weights, LAYER).astype(jnp.float32).sum())(h)


OPERANDS = (spec(64, 128), spec(4, 192, 128))
LAYER_ARGUMENTS = (spec(8, 256), abstract_weights(LAYER))
CASES = {
    "product": (product, *OPERANDS, spec(4, dtype=jnp.int32)),
    "gradient": (gradient, *OPERANDS, spec(4, dtype=jnp.int32)),
    "scatter_rows": (functools.partial(scatter_rows, n_rows=30), spec(8, 128), spec(8, 3, dtype=jnp.int32)),
    "top_k": (functools.partial(top_k, k=22), spec(8, 512, dtype=jnp.float32)),
    "layer": (functools.partial(nm.moe_block, config=LAYER), *LAYER_ARGUMENTS),
    "gradient of the layer": (block_gradient, *LAYER_ARGUMENTS),
}


def kernels(fun, *args):
    """The Mosaic kernels of the lowered program, as text."""
    with compiling_for(H200):
        # Through a new function, so that no earlier trace is remembered.
        text = jax.jit(lambda *args: fun(*args)).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return [line for line in text.splitlines() if re.search(r"custom_call @mosaic_gpu", line)]


@pytest.mark.quick
@pytest.mark.parametrize("fun, args", [(fun, args) for fun, *args in CASES.values()], ids=CASES)
def test_lowers_for_cuda_with_64_bit_types_too(fun, args):
    narrow = kernels(fun, *args)
    with jax.enable_x64(True):
        wide = kernels(fun, *args)
    assert len(wide) == len(narrow) > 0
