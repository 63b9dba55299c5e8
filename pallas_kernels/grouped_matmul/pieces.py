"""Cutting groups of rows into pieces, each the height of one output tile: a small table, computed on the device."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.sums import count_up_to, sums_before

ALIGNMENT = 8  # rows: groups begin and pieces are cut at multiples of it

# Of a row of the table, which is one sector of memory.
FIELDS = GROUP, FIRST, COUNT, START, ROWS, STEP, HEIGHT, LAST = range(8)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pieces:
    """Consecutive rows of one group, at most the largest height of them; then the pieces of rows that no group has.

    Attributes:
      table: [P, 8] int32. The same of each piece of a group, so that one look tells all of whichever of them is next,
        and they can be taken in turn with the columns of the matrix: the group, its first piece, how many it has, its
        first row, its rows, the rows of a piece (but the last, which has what is left), the index of their height in
        the list of heights, and that of the last one's.
      counts: [2] int32, pieces of groups, and pieces of other rows. The table's later rows are not in use.
      m, groups, heights: what they were cut for: rows in all, groups, and the heights of the tiles.
    """

    table: jax.Array
    counts: jax.Array
    m: int = dataclasses.field(metadata={"static": True})
    groups: int = dataclasses.field(metadata={"static": True})
    heights: tuple[int, ...] = dataclasses.field(metadata={"static": True})


def cut_groups(starts: jax.Array, ends: jax.Array, m: int, heights: tuple[int, ...]) -> Pieces:
    """Cuts each group evenly into as few pieces as the largest of `heights` allows.

    Args:
      starts, ends: [G] int32, each group's first row, a multiple of ALIGNMENT, and the row after its last.
      m: rows in all, a multiple of ALIGNMENT.
      heights: ascending multiples of ALIGNMENT. A piece gets the smallest that holds it.
    """
    tallest, groups = heights[-1], starts.shape[0]
    used = jnp.max(_round_up(ends), initial=0)
    group, start, rows, count, step = _tallest_pieces_first(starts, ends - starts, tallest)
    # The last "group" is the rows after all others; the gap behind a group is written with the group's own tile.
    group, start, step = jnp.append(group, groups), jnp.append(start, used), jnp.append(step, tallest)
    rows = jnp.append(rows, m - used)
    count = jnp.append(count, -(-(m - used) // tallest))
    before = sums_before(count)
    index = lax.iota(jnp.int32, -(-m // tallest) + groups + 1)
    which = jnp.minimum(count_up_to(before + count, index), groups)

    def smallest(rows: jax.Array) -> jax.Array:
        return jnp.searchsorted(jnp.asarray(heights, jnp.int32), rows, method="compare_all").astype(jnp.int32)

    fields = [group, before, count, start, rows, step, smallest(step), smallest(rows - (count - 1) * step)]
    counts = jnp.stack([before[groups], count[groups]])
    return Pieces(table=jnp.stack(fields, axis=1)[which], counts=counts, m=m, groups=groups, heights=heights)


def _tallest_pieces_first(starts: jax.Array, rows: jax.Array, tallest: int) -> tuple[jax.Array, ...]:
    """Group, start, rows, pieces and rows of a piece, in an order in which cores that take turns keep pace."""
    count = -(-rows // tallest)
    step = _round_up(-(-rows // jnp.maximum(count, 1)))
    order = jnp.argsort(-step, stable=True).astype(jnp.int32)
    return order, starts[order], rows[order], count[order], step[order]


def _round_up(rows: jax.Array) -> jax.Array:
    return -(-rows // ALIGNMENT) * ALIGNMENT
