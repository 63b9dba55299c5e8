"""Grouped matrix multiplication in plain XLA, for every platform and dtype.

A list of tiles, each some rows of one group, is made from the group sizes. A loop takes one tile at a time, multiplies
it by blocks of its group's matrix, and selects its rows into the output. Nothing is as large as rhs or as groups times
rows, and nothing is scattered. A tile always spans the same number of rows (others' rows among them are computed and
dropped), so that a row's bits do not depend on where it stands.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.grouped_matmul.reference import activate, cotangent, group_bounds
from pallas_kernels.grouped_matmul.tile import Tile, default_tile
from pallas_kernels.implementation import Facts


class Xla:
    """The implementation that runs everywhere."""

    name = "xla"
    tile = Tile

    def refuses(self, facts: Facts) -> str | None:
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
        tile: Tile | None,
    ) -> jax.Array:
        result = _zeros((lhs.shape[0], rhs.shape[1]), out_dtype, lhs)

        def read(start: jax.Array, rows: int) -> jax.Array:
            return _cut(lhs, (start, 0), (rows, lhs.shape[1]))

        def finish(acc: jax.Array) -> jax.Array:
            return activate(acc, activation)

        return _rows_times_matrices(read, lhs.dtype, rhs, 1, group_sizes, alignment, finish, result, tile)

    def dlhs(
        self,
        dout: jax.Array,
        out: jax.Array | None,
        rhs: jax.Array,
        group_sizes: jax.Array,
        *,
        alignment: int,
        out_dtype: DTypeLike,
        tile: Tile | None,
    ) -> jax.Array:
        result = _zeros((dout.shape[0], rhs.shape[2]), out_dtype, dout)

        def read(start: jax.Array, rows: int) -> jax.Array:
            corner, shape = (start, 0), (rows, dout.shape[1])
            return cotangent(_cut(dout, corner, shape), None if out is None else _cut(out, corner, shape), out_dtype)

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
    ) -> jax.Array:
        (m, n), k, groups = dout.shape, lhs.shape[1], group_sizes.shape[0]
        result = _zeros((groups, n, k), out_dtype, lhs)
        if 0 in (m, n, k, groups):
            return result
        # 8 bytes: the float32 sum and the product that is added to it.
        tile = (tile or default_tile(rows=m, groups=groups, column_bytes=8 * k)).within(m, n)
        rows, columns = tile.rows, tile.columns
        tiles = _tiles(group_sizes, alignment, m, rows)

        def one_block(block: jax.Array, result: jax.Array) -> jax.Array:
            column = jnp.minimum(block * columns, n - columns)

            def one_tile(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                result, acc = carry
                group, start, mine = tiles.take(index)
                corner, shape = (start, column), (rows, columns)
                saved = None if out is None else _cut(out, corner, shape)
                a, b = cotangent(_cut(dout, corner, shape), saved, lhs.dtype), _cut(lhs, (start, 0), (rows, k))
                a, b = (jnp.where(mine[:, None], x, jnp.zeros((), x.dtype)) for x in (a, b))
                acc = jnp.where(tiles.opens_group[index], 0.0, acc) + _dot(a, b, 0, 0)
                # A group's later tiles overwrite what its earlier ones have stored.
                return _put(result, acc.astype(out_dtype)[None], (group, column, 0)), acc

            return lax.fori_loop(0, tiles.count, one_tile, (result, _zeros((columns, k), jnp.float32, lhs)))[0]

        return lax.fori_loop(0, -(-n // columns), one_block, result)


def _rows_times_matrices(
    read: Callable[[jax.Array, int], jax.Array],
    dtype: DTypeLike,
    rhs: jax.Array,
    out_axis: int,
    group_sizes: jax.Array,
    alignment: int,
    finish: Callable[[jax.Array], jax.Array],
    result: jax.Array,
    tile: Tile | None,
) -> jax.Array:
    """Fills `result` with each row times its group's matrix.

    Args:
      read: gives the rows, in `dtype`, that begin at a row.
      rhs, out_axis: the matrices [G, N, K]; the result keeps this axis of theirs and sums over the other.
      finish: turns the float32 sums into the result, before its rounding.
      result: zeros.
    """
    (m, n), groups, depth = result.shape, rhs.shape[0], rhs.shape[3 - out_axis]
    if 0 in (m, n, depth, groups):
        return result
    column_bytes = depth * max(jnp.dtype(dtype).itemsize, rhs.dtype.itemsize)
    tile = (tile or default_tile(rows=m, groups=groups, column_bytes=column_bytes)).within(m, n)
    rows, columns = tile.rows, tile.columns
    tiles = _tiles(group_sizes, alignment, m, rows)

    def one_tile(index: jax.Array, result: jax.Array) -> jax.Array:
        group, start, mine = tiles.take(index)
        some_rows = read(start, rows)

        def one_block(block: jax.Array, result: jax.Array) -> jax.Array:
            column = jnp.minimum(block * columns, n - columns)
            if out_axis == 1:
                matrix = _cut(rhs, (group, column, 0), (1, columns, depth))[0].astype(dtype)
                # A CPU is faster with the few rows on the right; the barrier keeps XLA from turning the product round.
                acc = lax.optimization_barrier(_dot(matrix, some_rows, 1, 1)).T
            else:
                matrix = _cut(rhs, (group, 0, column), (1, depth, columns))[0].astype(dtype)
                acc = _dot(some_rows, matrix, 1, 0)
            new = finish(acc).astype(result.dtype)
            old = _cut(result, (start, column), (rows, columns))
            return _put(result, jnp.where(mine[:, None], new, old), (start, column))

        return lax.fori_loop(0, -(-n // columns), one_block, result)

    return lax.fori_loop(0, tiles.count, one_tile, result)


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """The list of tiles, of which the first `count` are in use. Tile i is rows `row[i]` to `end[i]` of `group[i]`."""

    count: jax.Array
    group: jax.Array
    row: jax.Array
    end: jax.Array
    start: jax.Array
    opens_group: jax.Array
    span: jax.Array

    def take(self, index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Group of tile `index`, the first row that it reads, and which of those that it reads are its own."""
        start = self.start[index]
        at = start + self.span
        return self.group[index], start, (at >= self.row[index]) & (at < self.end[index])


def _tiles(group_sizes: jax.Array, alignment: int, m: int, rows: int) -> _Tiles:
    starts, ends = group_bounds(group_sizes, alignment, m)
    per_group = -(-(ends - starts) // rows)
    tile_ends = jnp.cumsum(per_group, dtype=jnp.int32)
    index = lax.iota(jnp.int32, -(-m // rows) + min(m, group_sizes.shape[0]))
    group = jnp.searchsorted(tile_ends, index, side="right", method="compare_all").astype(jnp.int32)
    group = jnp.minimum(group, group_sizes.shape[0] - 1)
    nth = index - (tile_ends - per_group)[group]
    row = starts[group] + nth * rows
    start = jnp.minimum(row, m - rows)  # a tile that would hang over the last row begins earlier
    return _Tiles(tile_ends[-1], group, row, ends[group], start, nth == 0, lax.iota(jnp.int32, rows))


def _cut(array: jax.Array, corner: tuple[jax.Array | int, ...], shape: tuple[int, ...]) -> jax.Array:
    return lax.dynamic_slice(array, _indices(corner), shape)


def _put(array: jax.Array, part: jax.Array, corner: tuple[jax.Array | int, ...]) -> jax.Array:
    return lax.dynamic_update_slice(array, part, _indices(corner))


def _indices(corner: tuple[jax.Array | int, ...]) -> list[jax.Array]:
    return [jnp.asarray(index, jnp.int32) for index in corner]  # of one dtype, with 64-bit types on too


def _dot(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    contract = (((axis_a,), (axis_b,)), ((), ()))
    return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)


def _zeros(shape: tuple[int, ...], dtype: DTypeLike, like: jax.Array) -> jax.Array:
    """Zeros that vary over the mesh axes that `like` varies over, as a loop's carry must."""
    return lax.pcast(jnp.zeros(shape, dtype), tuple(varying_axes(like)), to="varying")


def varying_axes(array: jax.Array) -> frozenset[str]:
    """The mesh axes over which `array` differs between devices, inside shard_map."""
    return frozenset(jax.typeof(array).manual_axis_type.varying)
