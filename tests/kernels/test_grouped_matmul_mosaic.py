"""The Hopper kernel: the contract, and what is its own."""

import jax.numpy as jnp
from kernels.grouped_matmul_contract import GroupedMatmulContract
from kernels.hopper import OnHopper


class TestMosaic(OnHopper, GroupedMatmulContract):
    implementation = "mosaic"
    dtypes = (jnp.bfloat16,)
    alignments = (8,)
    row_multiple = 8
    small = middle = (128, 64)
    widths = ((192, 128), (320, 64))
