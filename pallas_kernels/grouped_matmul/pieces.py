"""Cutting groups of rows into pieces, each the height of one output tile: a small table, computed on the device."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

ALIGNMENT = 8  # rows: groups begin and pieces are cut at multiples of it

# Fields of a row of the table.
GROUP, ROW, ROWS, HEIGHT, FIRST, COUNT = range(6)
FIELDS = 8  # a row is one sector of memory


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pieces:
    """Consecutive rows of one group, at most the largest height of them; then the pieces of rows that no group has.

    Attributes:
      table: [P, FIELDS] int32. Of each piece: its group, its first row, how many rows, the index of its height in the
        list of heights, and which piece is the first of its group, and how many the group has (both so that the
        pieces of a group can be taken in turn with the columns of its matrix).
      counts: [2] int32, pieces of groups, and pieces of other rows. The table's later rows are not in use.
    """

    table: jax.Array
    counts: jax.Array


def cut_groups(starts: jax.Array, ends: jax.Array, m: int, heights: Sequence[int]) -> Pieces:
    """Cuts each group evenly into as few pieces as the largest of `heights` allows.

    Args:
      starts, ends: [G] int32, each group's first row, a multiple of ALIGNMENT, and the row after its last.
      m: rows in all, a multiple of ALIGNMENT.
      heights: ascending multiples of ALIGNMENT. A piece gets the smallest that holds it.
    """
    tallest = heights[-1]
    groups = starts.shape[0]
    # The last "group" is the rows after all others; the gap behind a group is written with the group's own tile.
    used = jnp.max(_round_up(ends), initial=0)
    starts, ends = jnp.append(starts, used), jnp.append(ends, jnp.int32(m))
    rows = ends - starts
    count = -(-rows // tallest)
    step = _round_up(-(-rows // jnp.maximum(count, 1)))
    step = step.at[groups].set(tallest)
    after = jnp.cumsum(count, dtype=jnp.int32)
    index = lax.iota(jnp.int32, -(-m // tallest) + groups + 1)
    group = jnp.searchsorted(after, index, side="right", method="compare_all").astype(jnp.int32)
    group = jnp.minimum(group, groups)
    first = (after - count)[group]
    row = starts[group] + (index - first) * step[group]
    here = jnp.clip(ends[group] - row, 0, step[group])
    height = jnp.searchsorted(jnp.asarray(heights, jnp.int32), here, method="compare_all").astype(jnp.int32)
    fields = jnp.stack([group, row, here, height, first, count[group]], axis=1)
    table = jnp.pad(fields, ((0, 0), (0, FIELDS - fields.shape[1])))
    return Pieces(table=table, counts=jnp.stack([after[groups - 1] if groups else jnp.int32(0), count[groups]]))


def _round_up(rows: jax.Array) -> jax.Array:
    return -(-rows // ALIGNMENT) * ALIGNMENT
