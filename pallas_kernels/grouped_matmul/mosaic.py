"""Grouped matrix multiplication on Hopper GPUs: what it takes, its tiles, and its gradient."""

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.typing import DTypeLike

from pallas_kernels.grouped_matmul.pieces import ALIGNMENT, Pieces, cut_groups
from pallas_kernels.grouped_matmul.reference import cotangent, group_bounds
from pallas_kernels.grouped_matmul.tile import TileConfig, default_heights, default_tile_config
from pallas_kernels.grouped_matmul.xla import Xla
from pallas_kernels.implementation import Facts, hopper_cores, no_hopper_kernels
from pallas_kernels.varying import vary_like


class Mosaic:
    """The implementation for Hopper GPUs, bfloat16 through and through.

    The gradient of rhs is XLA's, until there is a kernel for it.
    """

    name = "mosaic"
    tile = TileConfig

    def refuses(self, facts: Facts) -> str | None:
        if (reason := no_hopper_kernels(facts.target)) is not None:
            return reason
        for name in ("lhs", "rhs", "out"):
            if facts.dtypes[name] != "bfloat16":
                return f"{name} is {facts.dtypes[name]}; it takes bfloat16"
        for name, multiple in (("columns", 64), ("depth", 64), ("rows", ALIGNMENT)):
            if facts.sizes[name] % multiple:
                return f"{name} is {facts.sizes[name]}; it takes multiples of {multiple}"
        if (alignment := facts.sizes["alignment"]) != ALIGNMENT:
            return f"alignment is {alignment}; it takes {ALIGNMENT}, up to which it clears the rows behind a group"
        return None

    def forward(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        *,
        alignment: int,
        activation: str | None,
        out_dtype: DTypeLike,
        tile: TileConfig | None,
        pieces: Pieces | None,
    ) -> jax.Array:
        return _products(
            lhs, rhs, group_sizes, alignment=alignment, activation=activation, tile=tile, pieces=pieces, contract=2
        )

    def dlhs(
        self,
        dout: jax.Array,
        out: jax.Array | None,
        rhs: jax.Array,
        group_sizes: jax.Array,
        *,
        alignment: int,
        out_dtype: DTypeLike,
        tile: TileConfig | None,
        pieces: Pieces | None,
    ) -> jax.Array:
        dacc = cotangent(dout, out, out_dtype)
        return _products(
            dacc, rhs, group_sizes, alignment=alignment, activation=None, tile=tile, pieces=pieces, contract=1
        )

    def drhs(
        self,
        dout: jax.Array,
        out: jax.Array | None,
        lhs: jax.Array,
        group_sizes: jax.Array,
        *,
        alignment: int,
        out_dtype: DTypeLike,
        tile: TileConfig | None,
        pieces: Pieces | None,
    ) -> jax.Array:
        return Xla().drhs(dout, out, lhs, group_sizes, alignment=alignment, out_dtype=out_dtype, tile=None, pieces=None)


def _products(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    alignment: int,
    activation: str | None,
    tile: TileConfig | None,
    pieces: Pieces | None,
    contract: int,
) -> jax.Array:
    m, groups, columns = lhs.shape[0], rhs.shape[0], rhs.shape[3 - contract]
    if 0 in (*lhs.shape, *rhs.shape):
        return jnp.zeros((m, columns), lhs.dtype)
    # Imported where a kernel runs: elsewhere nobody waits for Pallas to load.
    from pallas_kernels.grouped_matmul.mosaic_kernel import products

    if tile is None:
        heights = default_heights(rows=m, groups=groups) if pieces is None else pieces.heights
        tile = default_tile_config(heights, depth=lhs.shape[1])
    if lhs.shape[1] % tile.depth:
        summed = "K" if contract == 2 else "N"
        raise ValueError(
            f"TileConfig.depth is {tile.depth}, which does not divide the sum of {summed} = {lhs.shape[1]}; wanted 64."
        )
    if pieces is None:
        pieces = cut_groups(*group_bounds(group_sizes, alignment, m), m, tile.heights)
    elif pieces.heights != tile.heights:
        raise ValueError(
            f"pieces were cut for heights {pieces.heights}, but tile has {tile.heights}; give one of them."
        )
    cores = hopper_cores()

    @sequential_vmap  # Pallas has no rule for a batch of kernels with barriers.
    def run(lhs: jax.Array, rhs: jax.Array, pieces: Pieces) -> jax.Array:
        return products(lhs, rhs, pieces, tile, contract=contract, activation=activation, cores=cores)

    return vary_like(run(lhs, rhs, pieces), (lhs, rhs, pieces))


def cut_rows(group_sizes: jax.Array, m: int) -> Pieces:
    """The pieces of M = `m` rows in groups of these sizes at multiples of ALIGNMENT, cut for the usual tiles."""
    heights = default_heights(rows=m, groups=group_sizes.shape[0])
    return cut_groups(*group_bounds(group_sizes, ALIGNMENT, m), m, heights)
