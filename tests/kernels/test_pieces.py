"""The table of pieces: every row of every group in one tile, in an order in which cores keep pace."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul import TileConfig, grouped_matmul
from pallas_kernels.grouped_matmul.pieces import ALIGNMENT, cut_groups
from pallas_kernels.grouped_matmul.reference import group_bounds

HEIGHTS = ((8,), (8, 16), (16, 48), (128, 144, 160, 176, 192))


@functools.partial(jax.jit, static_argnums=(1, 2))
def cut(sizes, m, heights):
    return cut_groups(*group_bounds(sizes, ALIGNMENT, m), m, heights)


def check(sizes, m, heights):
    pieces = cut(jnp.asarray(sizes, jnp.int32), m, heights)
    of_groups, of_others = np.asarray(pieces.counts)
    table = np.asarray(pieces.table)
    assert of_groups + of_others <= len(table)
    owner, tallest_of = np.full(m, -1), {}
    for index, (group, first, count, start, of_group, step, height, last) in enumerate(table[: of_groups + of_others]):
        piece = index - first
        assert 0 <= piece < count and (table[first : first + count] == table[index]).all()
        row, rows = start + piece * step, min(step, of_group - piece * step)
        assert rows > 0 and row % ALIGNMENT == 0
        height = heights[last if piece == count - 1 else height]
        assert height >= rows and all(h >= height or h < rows for h in heights)  # the smallest that holds it
        assert (group == len(sizes)) == (index >= of_groups)
        if index < of_groups:
            tallest_of[group] = max(rows, tallest_of.get(group, 0))
        # What the tile writes: its rows, and those up to the next multiple of eight.
        end = row + -(-rows // ALIGNMENT) * ALIGNMENT
        assert end <= m and (owner[row:end] == -1).all()
        owner[row:end] = group
    assert (owner >= 0).all()  # nothing is left unwritten
    starts, ends = (np.asarray(x) for x in group_bounds(jnp.asarray(sizes, jnp.int32), ALIGNMENT, m))
    for group, (start, end) in enumerate(zip(starts, ends, strict=True)):
        assert (owner[start:end] == group).all()
    order = [-(-rows // ALIGNMENT) for rows in tallest_of.values()]
    assert order == sorted(order, reverse=True)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=4, max_size=4), st.sampled_from(HEIGHTS))
def test_every_row_is_in_one_piece(sizes, heights):
    check(sizes, 256, heights)


@pytest.mark.quick
@pytest.mark.parametrize("heights", HEIGHTS, ids=str)
@pytest.mark.parametrize("sizes", [(0, 0, 0), (1, 0, 9), (400, 1, 0), (193, 193, 14), (1000, 0, 0)], ids=str)
def test_uneven_groups_and_groups_that_are_cut_off(sizes, heights):
    check(sizes, 416, heights)


@pytest.mark.quick
@pytest.mark.parametrize(
    "change, message",
    [
        ({"m": 32}, "pieces were cut for M = 40, but this call has M = 32"),
        ({"groups": 3}, "pieces were cut for G = 2, but this call has G = 3"),
        ({"group_alignment": 1}, "pieces were cut for group_alignment = 8, but this call has group_alignment = 1"),
        ({"pieces": np.zeros((3, 8), np.int32)}, "pieces is a ndarray; wanted a Pieces, as `cut_for_kernels` makes"),
    ],
)
def test_pieces_of_another_call_are_refused(change, message):
    call = {"m": 40, "groups": 2, "group_alignment": 8, "pieces": cut(jnp.array([3, 9]), 40, (8, 16))} | change
    m, groups = call.pop("m"), call.pop("groups")
    lhs, rhs = jnp.ones((m, 64), jnp.bfloat16), jnp.ones((groups, 64, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match=message):
        grouped_matmul(lhs, rhs, jnp.ones(groups, jnp.int32), **call)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"heights": ()}, r"heights is \(\); wanted ascending multiples of 8"),
        ({"heights": (8, 12)}, r"heights is \(8, 12\)"),
        ({"heights": (16, 8)}, r"heights is \(16, 8\)"),
        ({"heights": (8, 200)}, r"heights is \(8, 200\)"),
        ({"heights": [8]}, r"heights is \[8\]"),
        ({"stages": 1}, r"stages is 1; wanted one of \[2, 3,"),
        ({"stages": True}, r"stages is True"),
        ({"depth": 96}, r"depth is 96; wanted one of \[64, 128\]"),
        ({"heights": (192,), "stages": 5}, r"needs 254464 bytes of shared memory of 228352"),
    ],
)
def test_a_tile_config_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        TileConfig(**{"heights": (8, 16), "stages": 4} | change)
