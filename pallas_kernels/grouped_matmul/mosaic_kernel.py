"""The Hopper kernel: out[rows of a piece] = activation(lhs[those rows] @ rhs[the piece's group].T).

The product is swapped: 128 columns of the output (rows of a matrix of rhs) are the wgmma's M, the rows of a piece its N,
which may be any of a short list of heights. So a group of any size is cut into pieces with little left over, and the
matrices, read in their stored layout, are the operand that every piece shares.

One block per core stays for the whole call and takes tiles in turn: tile t of core c is the (t * cores + c)-th. Two
warpgroups compute, each every other tile, and a third one loads, into one ring of slots for both:

    loads       | tile 0: slots 0 1 2 ..  | tile 1: slots ..        | tile 2 ...
    computes 0  |   wgmma wgmma ..        | activation, store 0     | wgmma (tile 2)
    computes 1  |                         |   wgmma wgmma ..        | activation, store 1

so that the tensor cores work through the other's epilogue. A slot is 64 of K: [128, 64] of the matrix and [height, 64] of
the rows. Each computing warpgroup has its own "full" barriers, because a barrier's phase may not pass unobserved; the
"empty" ones are shared.

Tiles of one group follow each other with the pieces fastest, so that a matrix is read from memory once. Rows that belong
to no group are written as zeros: those in the last eight of a piece by its own tile, the others in tiles of their own
after all products.

Mutations that the tests catch: dropping `wait_smem_to_gmem` before an output buffer is reused (a race in the
interpreter); arriving at an "empty" barrier a step early (a race); leaving out the last piece.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.pieces import ALIGNMENT, COUNT, FIRST, GROUP, HEIGHT, ROW, ROWS, Pieces
from pallas_kernels.grouped_matmul.tile import COLUMNS, TileConfig

LOADS = 2  # the warpgroup that loads; 0 and 1 compute
BAND = 64  # columns of the output that are stored at once: the wgmma's own M, and one swizzled row of 128 bytes


def products(
    lhs: jax.Array,
    rhs: jax.Array,
    pieces: Pieces,
    tile: TileConfig,
    *,
    contract: int,
    activation: str | None,
    cores: int,
) -> jax.Array:
    """Every piece of rows times its group's matrix.

    Args:
      lhs: [M, depth] bfloat16.
      rhs: [G, columns, depth] bfloat16, or [G, depth, columns] with contract=1.
      pieces: of the M rows.
      contract: the axis of rhs that is summed over.
      cores: streaming multiprocessors.

    Returns:
      [M, columns] bfloat16.
    """
    (m, depth), columns = lhs.shape, rhs.shape[3 - contract]
    steps = depth // tile.depth
    tallest = tile.heights[-1]
    members = tile.cluster
    clusters = cores // members
    bands = pl.cdiv(columns, COLUMNS * members)
    shapes = _band_shapes(columns, members)

    def body(lhs_ref, rhs_ref, table_ref, counts_ref, out_ref, matrix, rows, result, zeros, full, empty):  # type: ignore[no-untyped-def]
        cluster, warpgroup = lax.axis_index("cluster"), lax.axis_index("warpgroup")
        member = lax.axis_index("member") if members > 1 else 0
        mine = lax.div(counts_ref[0] * bands - cluster + clusters - 1, clusters)

        def locate(number: Any) -> tuple[Any, Any]:
            """Piece and band of a tile: all pieces of a group, then its next band of columns."""
            some = lax.div(number, bands)  # a piece of the same group
            first, count = table_ref[some, FIRST], table_ref[some, COUNT]
            within = number - first * bands
            band = lax.div(within, count)
            return first + within - band * count, band

        def cases(piece: Any, band: Any, run: Any) -> None:
            """Runs `run(shape, height)` for this tile's: both are known when the kernel is compiled."""
            for shape in shapes:
                in_shape = True if len(shapes) == 1 else (band == bands - 1) == (shape is shapes[-1])
                for index, height in enumerate(tile.heights):
                    pl.when((table_ref[piece, HEIGHT] == index) & in_shape)(functools.partial(run, shape, height))

        @pl.when(warpgroup == LOADS)
        def _load() -> None:
            plgpu.set_max_registers(24, action="decrease")

            def one_tile(turn: Any, _: None) -> None:
                piece, band = locate(cluster + turn * clusters)
                group = table_ref[piece, GROUP]

                def load(shape: _Shape, height: int) -> None:
                    column, row, height = shape.corner(band, table_ref[piece, ROW], height, member)
                    mine_, all_ = {}, dict(collective_axes=("member",)) if members > 1 else {}
                    of_matrix, of_rows = (all_, mine_) if shape.splits_rows else (mine_, all_)

                    def one_step(step: Any, _: None) -> None:
                        count = turn * steps + step
                        slot = lax.rem(count, tile.stages)

                        @pl.when(count >= tile.stages)
                        def _wait() -> None:
                            plgpu.barrier_wait(empty.at[slot])

                        depths, width = pl.ds(step * tile.depth, tile.depth), shape.width
                        arrived = full.at[lax.rem(turn, 2) * tile.stages + slot]
                        if contract == 2:
                            source = rhs_ref.at[group, pl.ds(column, width), depths]
                            target = matrix.at[slot, pl.ds(0, width)]
                        else:
                            source = rhs_ref.at[group, depths, pl.ds(column, width)]
                            target = matrix.at[slot, :, pl.ds(0, width)]
                        plgpu.copy_gmem_to_smem(source, target, arrived, **of_matrix)
                        source, target = lhs_ref.at[pl.ds(row, height), depths], rows.at[slot, pl.ds(0, height)]
                        plgpu.copy_gmem_to_smem(source, target, arrived, **of_rows)

                    lax.fori_loop(0, steps, one_step, None)

                cases(piece, band, load)

            lax.fori_loop(0, mine, one_tile, None)

            def drain(count: Any, _: None) -> None:
                plgpu.barrier_wait(empty.at[lax.rem(count, tile.stages)])

            lax.fori_loop(lax.max(mine * steps - tile.stages, 0), mine * steps, drain, None)

        @pl.when(warpgroup != LOADS)
        def _compute() -> None:
            plgpu.set_max_registers(240, action="increase")
            buffer = result.at[warpgroup]

            zero_row = zeros.at[warpgroup]
            zero_row[...] = jnp.zeros(zero_row.shape, zeros.dtype)
            plgpu.commit_smem()

            def store(values: Any, row: Any, count: Any, column: Any, height: int) -> None:
                """Stores [BAND, height] transposed: rows in eights, as many as `count` rows need."""
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                buffer.at[pl.ds(0, height)].T[...] = values
                plgpu.commit_smem()
                columns_ = pl.ds(pl.multiple_of(column, BAND), BAND)

                @pl.when(count > height - ALIGNMENT)
                def _whole() -> None:
                    plgpu.copy_smem_to_gmem(buffer.at[pl.ds(0, height)], out_ref.at[pl.ds(row, height), columns_])

                if height > ALIGNMENT:

                    @pl.when(count <= height - ALIGNMENT)
                    def _eights() -> None:
                        for start in range(0, height - ALIGNMENT, ALIGNMENT):

                            @pl.when(start < count)
                            def _eight(start: int = start) -> None:
                                plgpu.copy_smem_to_gmem(
                                    buffer.at[pl.ds(start, ALIGNMENT)],
                                    out_ref.at[pl.ds(row + start, ALIGNMENT), columns_],
                                )

            def clear_gap(row: Any, count: Any, column: Any, width: int) -> None:
                """Overwrites the rows between a group's last and the next multiple of eight."""
                odd_rows = lax.rem(count, ALIGNMENT)

                @pl.when(odd_rows != 0)
                def _clear() -> None:
                    plgpu.wait_smem_to_gmem(0)  # until the tile's own stores are written
                    for above in range(1, ALIGNMENT):

                        @pl.when(odd_rows + above <= ALIGNMENT)
                        def _one(above: int = above) -> None:
                            gap = pl.ds(row + count + (above - 1), 1)
                            plgpu.copy_smem_to_gmem(zero_row.at[:, pl.ds(0, width)], out_ref.at[gap, pl.ds(column, width)])

            def one_tile(pair: Any, _: None) -> None:
                turn = pair * 2 + warpgroup
                piece, band = locate(cluster + turn * clusters)

                def compute(shape: _Shape, height: int) -> None:
                    column, row, height = shape.corner(band, table_ref[piece, ROW], height, member)
                    count, width = table_ref[piece, ROWS], shape.width
                    if shape.splits_rows:
                        count = lax.clamp(0, count - member * height, height)

                    @functools.partial(pl.run_scoped, acc=plgpu.ACC((width, height), jnp.float32))
                    def _(acc: Any) -> None:
                        def one_step(step: Any, _: None) -> None:
                            slot = lax.rem(turn * steps + step, tile.stages)
                            plgpu.barrier_wait(full.at[warpgroup * tile.stages + slot])
                            if contract == 2:
                                operand = matrix.at[slot, pl.ds(0, width)]
                            else:
                                operand = matrix.at[slot, :, pl.ds(0, width)].T
                            plgpu.wgmma(acc, operand, rows.at[slot, pl.ds(0, height)].T)
                            plgpu.wgmma_wait(1)  # the step before this one has read its slot

                            @pl.when(step > 0)
                            def _free() -> None:
                                plgpu.barrier_arrive(empty.at[lax.rem(turn * steps + step - 1, tile.stages)])

                        lax.fori_loop(0, steps, one_step, None)
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(empty.at[lax.rem(turn * steps + steps - 1, tile.stages)])
                        values = acc[...]
                        for start in range(0, width, BAND):
                            part = values[start : start + BAND]
                            if activation == "relu2":
                                part = jnp.maximum(part, 0.0)
                                part = part * part
                            store(part.astype(out_ref.dtype), row, count, column + start, height)
                        clear_gap(row, count, column, width)

                cases(piece, band, compute)

            lax.fori_loop(0, lax.div(mine - warpgroup + 1, 2), one_tile, None)

            def one_zero_tile(turn: Any, _: None) -> None:
                piece, band = locate(counts_ref[0] * bands + (turn * 2 + warpgroup) * clusters + cluster)
                column = pl.multiple_of((band * members + member) * COLUMNS, COLUMNS)
                row = pl.multiple_of(table_ref[piece, ROW], ALIGNMENT)

                @functools.partial(pl.run_scoped, acc=plgpu.ACC((BAND, tallest), jnp.float32))
                def _(acc: Any) -> None:
                    zeros = acc[...].astype(out_ref.dtype)
                    for start in range(0, COLUMNS, BAND):

                        @pl.when(column + start < columns)
                        def _(start: int = start) -> None:
                            store(zeros, row, table_ref[piece, ROWS], column + start, tallest)

            zero_tiles = lax.div(counts_ref[1] * bands - cluster + clusters - 1, clusters)
            lax.fori_loop(0, lax.div(zero_tiles - warpgroup + 1, 2), one_zero_tile, None)
            plgpu.wait_smem_to_gmem(0)

    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    slot = (COLUMNS, tile.depth) if contract == 2 else (tile.depth, COLUMNS)
    if members > 1:
        in_clusters = dict(cluster=(members,), cluster_names=("member",))
        empty = plgpu.ClusterBarrier(collective_axes=("member",), num_arrivals=1, num_barriers=tile.stages)
    else:
        in_clusters, empty = {}, plgpu.Barrier(num_arrivals=1, num_barriers=tile.stages)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, columns), lhs.dtype),
        scratch_types=dict(
            matrix=plgpu.SMEM((tile.stages, *slot), rhs.dtype, transforms=swizzled),
            rows=plgpu.SMEM((tile.stages, tallest, tile.depth), lhs.dtype, transforms=swizzled),
            result=plgpu.SMEM((2, tallest, BAND), lhs.dtype, transforms=swizzled),
            zeros=plgpu.SMEM((2, 1, COLUMNS), lhs.dtype),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=2 * tile.stages),
            empty=empty,
        ),
        grid=(clusters,),
        grid_names=("cluster",),
        **in_clusters,
        num_threads=3,
        thread_name="warpgroup",
        kernel_name=kernel_name(tile, contract=contract, activation=activation),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    return kernel(lhs, rhs, pieces.table, pieces.counts)


def kernel_name(tile: TileConfig, *, contract: int, activation: str | None) -> str:
    """The kernel's name in compiled programs and profiles."""
    operation = "grouped_matmul" if contract == 2 else "grouped_matmul_dlhs"
    return "_".join(filter(None, (operation, activation, tile.label)))


@dataclasses.dataclass(frozen=True)
class _Shape:
    """What one block computes of a tile: how many columns, and all of its rows or its member's half of them."""

    width: int
    full_span: int  # columns from one band to the next
    splits_rows: bool = False

    def corner(self, band: Any, row: Any, height: int, member: Any) -> tuple[Any, Any, int]:
        """First column, first row and height of this member's part."""
        column = band * self.full_span
        if self.splits_rows:
            height //= 2
            row = row + member * height
        else:
            column = column + member * self.width
        return pl.multiple_of(column, BAND), pl.multiple_of(row, ALIGNMENT), height


def _band_shapes(columns: int, members: int) -> tuple[_Shape, ...]:
    """The shape of every band of columns but the last, and the last one's if that differs."""
    span = COLUMNS * members
    whole = _Shape(COLUMNS, span)
    match columns % span, members:
        case 0, _:
            return (whole,)
        case 64, 1:
            last = _Shape(BAND, span)
        case 128, 2:
            last = _Shape(BAND, span)
        case 64, 2:
            last = _Shape(BAND, span, splits_rows=True)
        case rest, _:
            raise ValueError(f"{columns} columns leave {rest} for the last of the bands of {span}.")
    return (whole, last) if columns > span else (last,)
