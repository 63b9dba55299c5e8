"""Grouped matrix multiplication in plain XLA, for every platform and dtype.

A list of tiles, each some rows of one group, is made from the group sizes. A loop takes a batch of tiles at a time,
multiplies each by blocks of its group's matrix, and selects their rows into the output: the tiles follow each other, so
those rows are a window of it. Nothing is as large as rhs or as groups times rows, and nothing is scattered. A tile
always spans the same number of rows (others' rows among them are computed and dropped), so that a row's bits do not
depend on where it stands.

A CPU takes one tile at a time. A GPU would spend its time on starting kernels, and on waiting for the host, which
decides after every step whether there is another; it takes many, for which it copies their rows and matrices.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.grouped_matmul.matrices import Matrices, blocks, element_bytes
from pallas_kernels.grouped_matmul.pieces import Pieces
from pallas_kernels.grouped_matmul.reference import activate, cotangent, group_bounds
from pallas_kernels.grouped_matmul.tile import Tile, default_tile, most_tiles
from pallas_kernels.implementation import Facts, target
from pallas_kernels.varying import vary_like


class Xla:
    """The implementation that runs everywhere."""

    name = "xla"
    tile = Tile

    def refuses(self, facts: Facts) -> str | None:
        return None

    def forward(
        self,
        lhs: jax.Array,
        rhs: Matrices,
        group_sizes: jax.Array,
        *,
        alignment: int,
        activation: str | None,
        out_dtype: DTypeLike,
        tile: Tile | None,
        pieces: Pieces | None,
    ) -> jax.Array:
        result = _zeros((lhs.shape[0], rhs.shape[1]), out_dtype, lhs)

        def read(start: jax.Array, rows: int) -> jax.Array:
            return _cuts(lhs, (start, 0), (rows, lhs.shape[1]))

        def finish(acc: jax.Array) -> jax.Array:
            return activate(acc, activation)

        return _rows_times_matrices(read, lhs.dtype, rhs, 1, group_sizes, alignment, finish, result, tile)

    def dlhs(
        self,
        dout: jax.Array,
        out: jax.Array | None,
        rhs: Matrices,
        group_sizes: jax.Array,
        *,
        alignment: int,
        out_dtype: DTypeLike,
        tile: Tile | None,
        pieces: Pieces | None,
    ) -> jax.Array:
        result = _zeros((dout.shape[0], rhs.shape[2]), out_dtype, dout)

        def read(start: jax.Array, rows: int) -> jax.Array:
            corner, shape = (start, 0), (rows, dout.shape[1])
            return cotangent(_cuts(dout, corner, shape), None if out is None else _cuts(out, corner, shape), out_dtype)

        return _rows_times_matrices(read, out_dtype, rhs, 2, group_sizes, alignment, lambda acc: acc, result, tile)

    def drhs(
        self,
        dout: jax.Array,
        out: jax.Array | None,
        lhs: jax.Array,
        group_sizes: jax.Array,
        *,
        alignment: int,
        out_dtype: DTypeLike,
        tile: Tile | None,
        pieces: Pieces | None,
    ) -> jax.Array:
        (m, n), k, groups = dout.shape, lhs.shape[1], group_sizes.shape[0]
        result = _zeros((groups, n, k), out_dtype, lhs)
        if 0 in (m, n, k, groups):
            return result
        if tile is None:
            tile = default_tile(
                platform=target().platform,
                rows=m,
                groups=groups,
                columns=n,
                column_bytes=8 * k,  # 8: the float32 sum and the product that is added to it
                row_bytes=(n + k) * lhs.dtype.itemsize,
            )
        rows, columns, batch = dataclasses.astuple(tile.within(m, n, groups))
        tiles = _tiles(group_sizes, alignment, m, rows, batch)

        def one_block(block: jax.Array, result: jax.Array) -> jax.Array:
            column = jnp.minimum(block * columns, n - columns)

            def one_step(step: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                group, start, is_first = tiles.take(step)
                corner, shape = (start, column), (rows, columns)
                saved = None if out is None else _cuts(out, corner, shape)
                a, b = cotangent(_cuts(dout, corner, shape), saved, lhs.dtype), _cuts(lhs, (start, 0), (rows, k))
                mine = tiles.own(step)[:, :, None]
                a, b = (jnp.where(mine, x, jnp.zeros((), x.dtype)) for x in (a, b))
                products = _dot(a, b, 1, 1)

                def add(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                    result, acc = carry
                    acc = jnp.where(is_first[i], 0.0, acc) + products[i]
                    # A group's later tiles overwrite what its earlier ones have stored.
                    return _put(result, acc.astype(out_dtype)[None], (group[i], column, 0)), acc

                return lax.fori_loop(0, batch, add, carry)

            return lax.fori_loop(0, tiles.steps, one_step, (result, _zeros((columns, k), jnp.float32, lhs)))[0]

        return lax.fori_loop(0, -(-n // columns), one_block, result)


def _rows_times_matrices(
    read: Callable[[jax.Array, int], jax.Array],
    dtype: DTypeLike,
    rhs: Matrices,
    out_axis: int,
    group_sizes: jax.Array,
    alignment: int,
    finish: Callable[[jax.Array], jax.Array],
    result: jax.Array,
    tile: Tile | None,
) -> jax.Array:
    """Fills `result` with each row times its group's matrix.

    Args:
      read: gives [batch, rows, depth], in `dtype`: the rows that begin at each of [batch] rows.
      rhs, out_axis: the matrices [G, N, K]; the result keeps this axis of theirs and sums over the other.
      finish: turns the float32 sums into the result, before its rounding.
      result: zeros.
    """
    (m, n), groups, depth = result.shape, rhs.shape[0], rhs.shape[3 - out_axis]
    if 0 in (m, n, depth, groups):
        return result
    if tile is None:
        itemsize = jnp.dtype(dtype).itemsize
        tile = default_tile(
            platform=target().platform,
            rows=m,
            groups=groups,
            columns=n,
            column_bytes=depth * max(itemsize, element_bytes(rhs)),
            row_bytes=depth * itemsize + 4 * n,  # 4: the float32 sums
        )
    rows, columns, batch = dataclasses.astuple(tile.within(m, n, groups))
    tiles = _tiles(group_sizes, alignment, m, rows, batch)
    # All tiles of a batch but the last may have a gap behind them, up to where the next group begins.
    window = min(batch * rows + (batch - 1) * (alignment - 1), m)

    def one_step(step: jax.Array, result: jax.Array) -> jax.Array:
        group, start, _ = tiles.take(step)
        some_rows = read(start, rows)
        top = start[0]  # where the window would hang over the last row, it is moved up, here and below
        place = _cut(tiles.place, (top,), (window,)) - step * (batch * rows)
        mine = (place >= 0)[:, None]  # or those of a later batch, which will overwrite them

        def one_block(block: jax.Array, result: jax.Array) -> jax.Array:
            column = jnp.minimum(block * columns, n - columns)
            matrices, scale = blocks(rhs, group, out_axis, column, columns, dtype)
            acc = _rows_by_columns(some_rows, matrices) if out_axis == 1 else _dot(some_rows, matrices, 2, 1)
            if scale is not None:
                acc = acc * scale
            new = finish(acc).astype(result.dtype)
            # One tile is a window already.
            new = new[0] if batch == 1 else new.reshape(-1, columns).at[place].get(mode="clip")
            old = _cut(result, (top, column), (window, columns))
            return _put(result, jnp.where(mine, new, old), (top, column))

        return lax.fori_loop(0, -(-n // columns), one_block, result)

    return lax.fori_loop(0, tiles.steps, one_step, result)


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """The list of tiles, each `rows` rows of one group or what is left of them, to be taken in batches.

    Attributes:
      steps: how many batches hold tiles that are in use.
      group, start, is_first: of each tile, its group, the first of the `rows` rows that it reads, and whether it is the
        first of its group. Those of the last batch that are not in use have the group of the last that is.
      place: of each of the M rows, where it is among the rows that the tiles read, counted through all tiles; -1 where
        it belongs to no group.
    """

    rows: int
    batch: int
    steps: jax.Array
    group: jax.Array
    start: jax.Array
    is_first: jax.Array
    place: jax.Array

    def take(self, step: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Group, start and is_first of a batch of tiles."""

        def part(field: jax.Array) -> jax.Array:
            return _cut(field, (step * self.batch,), (self.batch,))

        return part(self.group), part(self.start), part(self.is_first)

    def own(self, step: jax.Array) -> jax.Array:
        """[batch, rows] bool: which of the rows that each tile of a batch reads are its own."""
        read = _cuts(self.place, (self.take(step)[1],), (self.rows,))
        here = lax.iota(jnp.int32, self.batch * self.rows) + step * (self.batch * self.rows)
        return read == here.reshape(read.shape)


def _tiles(group_sizes: jax.Array, alignment: int, m: int, rows: int, batch: int) -> _Tiles:
    starts, ends = group_bounds(group_sizes, alignment, m)
    per_group = -(-(ends - starts) // rows)
    tile_ends = jnp.cumsum(per_group, dtype=jnp.int32)
    first_tile = tile_ends - per_group
    most = most_tiles(m, group_sizes.shape[0], rows)
    index = lax.iota(jnp.int32, -(-most // batch) * batch)
    group = _find(tile_ends, jnp.minimum(index, tile_ends[-1] - 1))
    nth = index - first_tile[group]
    start = jnp.minimum(starts[group] + nth * rows, m - rows)  # one that would hang over the last row begins earlier
    row = lax.iota(jnp.int32, m)
    its = jnp.minimum(_find(ends, row), group_sizes.shape[0] - 1)
    tile = first_tile[its] + (row - starts[its]) // rows
    place = jnp.where((row >= starts[its]) & (row < ends[its]), tile * rows + row - start[tile], -1)
    return _Tiles(rows, batch, -(-tile_ends[-1] // batch), group, start, nth == 0, place)


def _find(ends: jax.Array, values: jax.Array) -> jax.Array:
    """The first of `ends`, which ascend, that is greater, for each value."""
    return jnp.searchsorted(ends, values, side="right", method="scan_unrolled").astype(jnp.int32)


def _cuts(
    array: jax.Array, corner: tuple[jax.Array, *tuple[jax.Array | int, ...]], shape: tuple[int, ...]
) -> jax.Array:
    """[batch, *shape], the parts of `array` whose corners begin with each of [batch] first indices."""
    first, others = corner[0], corner[1:]
    if first.shape[0] == 1:  # as a slice, which is cheaper than a gather
        return _cut(array, (first[0], *others), shape)[None]
    return jax.vmap(lambda one: _cut(array, (one, *others), shape))(first)


def _cut(array: jax.Array, corner: tuple[jax.Array | int, ...], shape: tuple[int, ...]) -> jax.Array:
    return lax.dynamic_slice(array, _indices(corner), shape)


def _put(array: jax.Array, part: jax.Array, corner: tuple[jax.Array | int, ...]) -> jax.Array:
    return lax.dynamic_update_slice(array, part, _indices(corner))


def _indices(corner: tuple[jax.Array | int, ...]) -> list[jax.Array]:
    return [jnp.asarray(index, jnp.int32) for index in corner]  # of one dtype, with 64-bit types on too


def _rows_by_columns(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """[batch, rows, columns], from rows and columns that are both stored as rows."""
    if target().platform != "cpu":
        return _dot(rows, columns, 2, 2)
    # A CPU is faster with the few rows on the right; the barrier keeps XLA from turning the product round.
    return lax.optimization_barrier(_dot(columns, rows, 2, 2)).swapaxes(1, 2)


def _dot(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
    """A product for each pair along the first axes, summed over the named ones in float32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    contract = (((axis_a,), (axis_b,)), ((0,), (0,)))
    return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)


def _zeros(shape: tuple[int, ...], dtype: DTypeLike, like: jax.Array) -> jax.Array:
    """Zeros that vary over the mesh axes that `like` varies over, as a loop's carry must."""
    return vary_like(jnp.zeros(shape, dtype), like)
