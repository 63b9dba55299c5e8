"""Grouped matrix multiplication in plain XLA, for every platform and dtype.

A list of tiles, each some rows of one group, is made from the group sizes; a loop takes one tile at a time, multiplies it
by blocks of that group's matrix, and puts its rows (selected, never added) into the output. Nothing is as large as rhs or
as groups times rows, and nothing is scattered.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.grouped_matmul.reference import activate
from pallas_kernels.grouped_matmul.tile import Tile
from pallas_kernels.implementation import Facts


class Xla:
    """The implementation that runs everywhere."""

    name = "xla"

    def refuses(self, facts: Facts) -> str | None:
        return None

    def forward(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        *,
        activation: str | None,
        out_dtype: DTypeLike,
        tile: Tile | None,
    ) -> jax.Array:
        return _rows_times_groups(lhs, rhs, group_sizes, 1, activation, out_dtype, tile)

    def dlhs(self, dout: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, tile: Tile | None) -> jax.Array:
        return _rows_times_groups(dout, rhs, group_sizes, 2, None, dout.dtype, tile)

    def drhs(
        self, dout: jax.Array, lhs: jax.Array, group_sizes: jax.Array, *, out_dtype: DTypeLike, tile: Tile | None
    ) -> jax.Array:
        (m, n), k, groups = dout.shape, lhs.shape[1], group_sizes.shape[0]
        out = _zeros_like(lhs, (groups, n, k), out_dtype)
        if 0 in (m, n, k, groups):
            return out
        rows, columns = _tile(tile, m, n, groups)
        tiles = _tiles(group_sizes, m, rows)

        def column_block(block: jax.Array, out: jax.Array) -> jax.Array:
            column = jnp.minimum(block * columns, n - columns)

            def one_tile(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                out, acc = carry
                group, start, mine, first = tiles.take(index)
                a = lax.dynamic_slice(dout, (start, column), (rows, columns))
                b = lax.dynamic_slice(lhs, (start, jnp.int32(0)), (rows, k))
                a, b = (jnp.where(mine[:, None], x, jnp.zeros((), x.dtype)) for x in (a, b))
                acc = jnp.where(first, 0.0, acc) + _dot(a, b, 0, 0)
                return lax.dynamic_update_slice(out, acc.astype(out.dtype)[None], (group, column, jnp.int32(0))), acc

            acc = _zeros_like(lhs, (columns, k), jnp.float32)
            return lax.fori_loop(jnp.int32(0), tiles.count, one_tile, (out, acc))[0]

        return lax.fori_loop(jnp.int32(0), jnp.int32(-(-n // columns)), column_block, out)


def _rows_times_groups(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    out_axis: int,
    activation: str | None,
    out_dtype: DTypeLike,
    tile: Tile | None,
) -> jax.Array:
    """Each row times its group's matrix; `out_axis` is the axis of rhs [G, N, K] that the output keeps."""
    (m, depth), groups, n = lhs.shape, rhs.shape[0], rhs.shape[out_axis]
    out = _zeros_like(lhs, (m, n), out_dtype)
    if 0 in (m, n, depth, groups):
        return out
    rows, columns = _tile(tile, m, n, groups)
    tiles = _tiles(group_sizes, m, rows)
    block_shape = (1, columns, depth) if out_axis == 1 else (1, depth, columns)

    def one_tile(index: jax.Array, out: jax.Array) -> jax.Array:
        group, start, mine, _ = tiles.take(index)
        a = lax.dynamic_slice(lhs, (start, jnp.int32(0)), (rows, depth))

        def column_block(block: jax.Array, out: jax.Array) -> jax.Array:
            column = jnp.minimum(block * columns, n - columns)
            corner = (group, column, jnp.int32(0)) if out_axis == 1 else (group, jnp.int32(0), column)
            b = lax.dynamic_slice(rhs, corner, block_shape)[0].astype(lhs.dtype)
            new = activate(_dot(a, b, 1, 2 - out_axis), activation).astype(out.dtype)
            old = lax.dynamic_slice(out, (start, column), (rows, columns))
            return lax.dynamic_update_slice(out, jnp.where(mine[:, None], new, old), (start, column))

        return lax.fori_loop(jnp.int32(0), jnp.int32(-(-n // columns)), column_block, out)

    return lax.fori_loop(jnp.int32(0), tiles.count, one_tile, out)


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """The list of tiles: tile i holds the rows `row[i] <= r < end[i]` of group `group[i]`; `count` of them are in use."""

    count: jax.Array
    group: jax.Array
    row: jax.Array
    end: jax.Array
    rows: int
    m: int

    def take(self, index: jax.Array) -> "_OneTile":
        row, end = self.row[index], self.end[index]
        start = jnp.minimum(row, self.m - self.rows)  # a tile that would hang over the last row is moved up
        at = start + lax.iota(jnp.int32, self.rows)
        before = jnp.maximum(index - 1, 0)
        first = (index == 0) | (self.group[index] != self.group[before])
        return _OneTile(self.group[index], start, (at >= row) & (at < end), first)


class _OneTile(NamedTuple):
    group: jax.Array
    start: jax.Array
    mine: jax.Array
    first: jax.Array


def _tiles(group_sizes: jax.Array, m: int, rows: int) -> _Tiles:
    ends = jnp.cumsum(group_sizes)
    per_group = -(-group_sizes // rows)
    tile_ends = jnp.cumsum(per_group)
    index = lax.iota(jnp.int32, -(-m // rows) + min(m, group_sizes.shape[0]))
    group = jnp.searchsorted(tile_ends, index, side="right", method="compare_all").astype(jnp.int32)
    group = jnp.minimum(group, group_sizes.shape[0] - 1)
    row = (ends - group_sizes)[group] + (index - (tile_ends - per_group)[group]) * rows
    return _Tiles(tile_ends[-1], group, row, jnp.minimum(ends[group], row + rows), rows, m)


def _tile(tile: Tile | None, m: int, n: int, groups: int) -> tuple[int, int]:
    """Rows and columns of a tile, within the array."""
    if tile is None:
        tile = Tile(rows=min(128, max(16, 1 << (m // groups).bit_length())), columns=512)
    blocks = -(-n // min(tile.columns, n))
    return min(tile.rows, m), -(-n // blocks)


def _dot(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    contract = (((axis_a,), (axis_b,)), ((), ()))
    return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)


def _zeros_like(array: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Zeros that vary over the mesh axes that `array` varies over, as a loop's carry must."""
    return lax.pcast(jnp.zeros(shape, dtype), tuple(varying_axes(array)), to="varying")


def varying_axes(array: jax.Array) -> frozenset[str]:
    """The mesh axes over which `array` differs between devices, inside shard_map."""
    return frozenset(jax.typeof(array).manual_axis_type.varying)
