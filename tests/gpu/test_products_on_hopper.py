"""The grouped products on a Hopper GPU: every tile that can be chosen, and more than 2^31 elements.

Collected with --gpu only: no other machine can run it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import bound
from gpu.common import dirty, draw

from nemotron_moe import presets
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.pieces import HEIGHT, LAST, cut_groups
from pallas_kernels.grouped_matmul.reference import group_bounds
from pallas_kernels.grouped_matmul.tile import default_heights, default_tile_config

TOKENS = (1, 8, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 65536)
SHORT, WHOLE = 1856, 2688  # columns: the last band of 128 is half as wide, or not
CONFIGS = dict.fromkeys(config for layers in presets.MODELS.values() for config in layers.values())


def tiles():
    """Every tile of the models' products and of their gradients, with a depth that it is chosen for."""
    found = {}
    for config in CONFIGS:
        for tokens in TOKENS:
            pairs, groups = tokens * config.num_experts_per_tok, config.n_routed_experts
            rows = -(-(pairs + 7 * min(groups, pairs)) // 8) * 8
            # N is what the gradient sums over.
            for depth in (config.expert_width, config.moe_intermediate_size):
                tile = default_tile_config(default_heights(rows=rows, groups=groups), depth=depth)
                found.setdefault(tile, depth)
    return found


@functools.partial(jax.jit, static_argnames=("direction", "tile"))
def product(rows, matrices, sizes, direction, tile=None):
    """Rows [M, depth] times matrices [G, columns, depth] or, for dlhs, [G, depth, columns]."""
    run = functools.partial(grouped_matmul, group_alignment=8, implementation="mosaic", tile=tile)
    if direction == "forward":
        return run(rows, matrices, sizes)
    lhs = jnp.zeros((rows.shape[0], matrices.shape[2]), rows.dtype)
    return jax.vjp(lambda lhs: run(lhs, matrices, sizes), lhs)[1](rows)[0]


def operands(direction, m, columns, depth, groups):
    """Rows of order 1, and matrices whose products are."""
    shape = (columns, depth) if direction == "forward" else (depth, columns)
    return draw(0, (m, depth)), draw(1, (groups, *shape)) * jnp.bfloat16(depth**-0.5)


def assert_product(got, rows, matrices, sizes, direction):
    """The error relative to the product, in each 64 columns (what is stored at once) of each group."""
    got, end = np.asarray(got), 0
    assert np.isfinite(got).all()  # nothing is left of what the memory held
    limit = bound(jnp.bfloat16, rows.shape[1], 1.0)
    for group, size in enumerate(sizes):
        start, end = end, end + size
        matrix = np.asarray(matrices[group], np.float32)
        want = np.asarray(rows[start:end], np.float32) @ (matrix.T if direction == "forward" else matrix)
        error, norm = (
            np.linalg.norm(x.reshape(size, got.shape[1] // 64, 64).astype(np.float64), axis=(0, 2))
            for x in (got[start:end].astype(np.float32) - want, want)
        )
        assert (error <= limit * norm).all(), (group, (error / norm).max(), (error / norm).argmax(), limit)
        gap = slice(end, end + -end % 8)
        assert not got[gap].any()
        end = gap.stop
    assert not got[end:].any()


@pytest.mark.parametrize("columns", [SHORT, WHOLE], ids=["short", "whole"])
@pytest.mark.parametrize("direction", ["forward", "dlhs"])
@pytest.mark.parametrize("tile", tiles(), ids=lambda tile: tile.label)
def test_every_tile_that_can_be_chosen(tile, direction, columns):
    # A group for each height, with gaps of every width between them; none, one row, and more than one piece.
    sizes = [0, 1, 2 * tile.heights[-1] + 3, *(height - i % 8 for i, height in enumerate(tile.heights)), 0]
    m = sum(-(-size // 8) * 8 for size in sizes) + 2 * tile.heights[-1] + 8
    counts = jnp.array(sizes, jnp.int32)
    pieces = cut_groups(*group_bounds(counts, 8, m), m, tile.heights)
    used = np.asarray(pieces.table[: int(pieces.counts[0])])
    assert {*used[:, HEIGHT], *used[:, LAST]} == set(range(len(tile.heights)))
    rows, matrices = operands(direction, m, columns, tiles()[tile], len(sizes))
    dirty()
    assert_product(product(rows, matrices, counts, direction, tile), rows, matrices, sizes, direction)


@pytest.mark.parametrize("direction", ["forward", "dlhs"])
@pytest.mark.parametrize("m, columns, depth, groups", [(520 * 16, 2048, 2048, 520), (1_200_000, 2048, 64, 8)], ids=str)
def test_more_than_2_31_elements_R55(m, columns, depth, groups, direction):
    """Of the matrices, or of the result: the first rows and the last ones of some groups."""
    rows, matrices = operands(direction, m, columns, depth, groups)
    size = m // groups // 8 * 8
    dirty()
    out = product(rows, matrices, np.full(groups, size, np.int32), direction)
    assert bool(jnp.isfinite(out).all()) and not out[groups * size :].any()
    for group in (0, groups // 2, groups - 1):
        for start in (group * size, (group + 1) * size - 8):
            part = slice(start, start + 8)
            assert_product(out[part], rows[part], matrices[group][None], [8], direction)
