"""The Hopper kernel: out[rows of a piece] = activation(lhs[those rows] @ rhs[the piece's group].T).

The product is swapped: 128 columns of the output (rows of a matrix of rhs) are the wgmma's M, the rows of a piece its
N, which may be any of a short list of heights. So a group of any size is cut into pieces with little left over, and
the matrices, read in their stored layout, are the operand that all pieces of a group share.

One block per core stays for the whole call and takes tiles in turn: of each wave of as many tiles as there are cores,
one, and every time another core's, because some tiles are narrow. (With the same place in each wave some cores get all
of those: 6 % slower at Super's 21 bands and 8192 tokens.) Two warpgroups compute, each every other tile, and a third
one loads, into one ring of slots for both:

    loads       | tile 0: slots 0 1 2 ..  | tile 1: slots ..        | tile 2 ...
    computes 0  |   wgmma wgmma ..        | activation, store 0     | wgmma (tile 2)
    computes 1  |                         |   wgmma wgmma ..        | activation, store 1

so that the tensor cores work through the other's epilogue. A slot is 64 (or 128) of K: [128, 64] of the matrix and
[height, 64] of the rows. Each computing warpgroup has its own "full" barriers, because no phase of a barrier may pass
unobserved; the "empty" ones are shared.

Tiles of one group follow each other with the pieces fastest, so that a matrix is read from memory once. Rows that
belong to no group are written as zeros: those up to the next multiple of eight by the tile before them, once its own
stores are done (masking the accumulator instead would spill registers), the others in tiles of their own, by the second
warpgroup before its first tile is there.

What bounds it, by leaving parts out on an H200: with 352 rows a group, moving operands from the cache to the cores
(1270 us without the products, 1480 with them); with 24, memory: 313 us, of which storing 15 MB costs 17 and loading the
rows 6, where streaming the matrices alone takes 287.

What was tried and lost: clusters of two blocks that share the rows by multicast (8 % slower at 49152 rows); tiles of
64 columns (1 % slower at 3072 rows), and of 256, half for each warpgroup, which load the rows half as often but leave
place for three slots only (10 to 35 % slower from 12288 rows on); a fifth slot, for which only half of a tile is stored
at a time (no gain at 49152 rows); reading the table a tile ahead (no gain at 768 to 12288 rows). Telling the cache that
matrices are read once, which Pallas cannot, gained 3 % at 768 and 3072 rows of Nano, nothing with Super's matrices, and
lost 2 % at 12288 rows.

Mutations that the tests catch: dropping `wait_smem_to_gmem` before an output buffer is reused, or before a gap is
cleared (races in the interpreter); freeing a slot a step early (a race); leaving out the last piece.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.pieces import ALIGNMENT, FIELDS, Pieces
from pallas_kernels.grouped_matmul.tile import COLUMNS, TileConfig

LOADS = 2  # the warpgroup that loads; 0 and 1 compute
BAND = 64  # columns that are stored at once: a wgmma's own M, and one swizzled row of 128 bytes
# Python's integers become 64 bits wide where JAX's are, and `lax` mixes no widths.
ZERO, TWO = np.int32(0), np.int32(2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a tile is: scalars, but for its shape."""

    group: Any
    column: Any
    row: Any
    rows: Any
    height: Any
    is_last_band: Any


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
      pieces: of the M rows, cut for `tile.heights`.
      contract: the axis of rhs that is summed over.
      cores: streaming multiprocessors.

    Returns:
      [M, columns] bfloat16.
    """
    (m, depth), columns = lhs.shape, rhs.shape[3 - contract]
    steps, stages = np.int32(depth // tile.depth), np.int32(tile.stages)
    tallest = tile.heights[-1]
    bands = np.int32(pl.cdiv(columns, COLUMNS))  # of columns: a tile is a piece's part of one
    # The last band may be 64 columns short. With contract=1 those are no whole part of a slot: they are then loaded (as
    # zeros), multiplied, and not stored.
    is_short = columns % COLUMNS > 0
    has_half_band = is_short and contract == 2

    def body(  # type: ignore[no-untyped-def]
        lhs_ref, rhs_ref, table_ref, counts_ref, out_ref, matrix, rows, result, zeros, full, empty
    ) -> None:
        core, warpgroup = lax.axis_index("core"), lax.axis_index("warpgroup")

        def tile_of(turn: Any) -> Any:
            """The number of this core's tile in a wave."""
            return turn * cores + lax.rem(core + turn, np.int32(cores))

        def taken(tiles: Any) -> Any:
            """How many of so many tiles this core takes."""
            waves = lax.div(tiles, np.int32(cores))
            return waves + (tile_of(waves) < tiles).astype(jnp.int32)

        mine = taken(counts_ref[0] * bands)

        def locate(number: Any) -> Place:
            """The place of a tile: all pieces of a group have one, then all of them in the group's next band."""
            some = lax.div(number, bands)  # a piece of the same group
            group, first, count, start, rows, step, height, last = (table_ref[some, field] for field in FIELDS)
            within = number - first * bands
            band = lax.div(within, count)
            piece = within - band * count
            return Place(
                group=group,
                column=pl.multiple_of(band * COLUMNS, COLUMNS),
                row=pl.multiple_of(start + piece * step, ALIGNMENT),
                rows=lax.min(step, rows - piece * step),
                height=jnp.where(piece == count - 1, last, height),
                is_last_band=band == bands - 1,
            )

        def by_shape(place: Place, run: Any) -> None:
            """Calls `run(width, height)` for this tile's shape; both are known when the kernel is compiled."""
            for width in (COLUMNS, BAND) if has_half_band else (COLUMNS,):
                has_width = place.is_last_band == (width == BAND) if has_half_band else True
                for index, height in enumerate(tile.heights):
                    pl.when((place.height == index) & has_width)(functools.partial(run, width, height))

        def operand(slot: Any, width: int) -> Any:
            """[width, depth] of the matrix, or its transpose with contract=1."""
            return matrix.at[(slot, pl.ds(0, width)) if contract == 2 else (slot, slice(None), pl.ds(0, width))]

        @pl.when(warpgroup == LOADS)
        def _load() -> None:
            plgpu.set_max_registers(24, action="decrease")

            def one_tile(turn: Any, _: None) -> None:
                place = locate(tile_of(turn))
                group, column, row = place.group, place.column, place.row

                def load(width: int, height: int) -> None:
                    def one_step(step: Any, _: None) -> None:
                        count = turn * steps + step
                        slot = lax.rem(count, stages)

                        @pl.when(count >= stages)
                        def _wait() -> None:
                            plgpu.barrier_wait(empty.at[slot])

                        depths = pl.ds(step * tile.depth, tile.depth)
                        some = pl.ds(column, width)
                        of_matrix = rhs_ref.at[(group, some, depths) if contract == 2 else (group, depths, some)]
                        of_rows = lhs_ref.at[pl.ds(row, height), depths]
                        arrived = full.at[lax.rem(turn, TWO) * stages + slot]
                        plgpu.copy_gmem_to_smem(of_matrix, operand(slot, width), arrived)
                        plgpu.copy_gmem_to_smem(of_rows, rows.at[slot, pl.ds(0, height)], arrived)

                    lax.fori_loop(ZERO, steps, one_step, None)

                by_shape(place, load)

            def drain(count: Any, _: None) -> None:
                plgpu.barrier_wait(empty.at[lax.rem(count, stages)])

            lax.fori_loop(ZERO, mine, one_tile, None)
            lax.fori_loop(lax.max(mine * steps - stages, ZERO), mine * steps, drain, None)

        @pl.when(warpgroup != LOADS)
        def _compute() -> None:
            plgpu.set_max_registers(240, action="increase")
            buffer, zero_row = result.at[warpgroup], zeros.at[warpgroup]
            zero_row[...] = jnp.zeros(zero_row.shape, zeros.dtype)
            plgpu.commit_smem()

            def store(values: Any, column: Any, row: Any, count: Any, height: int) -> None:
                """Stores [BAND, height] transposed, in eights of rows as far as `count` rows need them."""
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                buffer.at[pl.ds(0, height)].T[...] = values
                plgpu.commit_smem()
                columns_ = pl.ds(pl.multiple_of(column, BAND), BAND)

                @pl.when(count > height - ALIGNMENT)
                def _whole() -> None:
                    plgpu.copy_smem_to_gmem(buffer.at[pl.ds(0, height)], out_ref.at[pl.ds(row, height), columns_])

                if height > ALIGNMENT:
                    # One condition around the others: with both in each, registers spill.
                    @pl.when(count <= height - ALIGNMENT)
                    def _eights() -> None:
                        for start in range(0, height - ALIGNMENT, ALIGNMENT):

                            @pl.when(start < count)
                            def _eight(start: int = start) -> None:
                                eight = pl.ds(row + start, ALIGNMENT)
                                plgpu.copy_smem_to_gmem(buffer.at[pl.ds(start, ALIGNMENT)], out_ref.at[eight, columns_])

            def clear_gap(column: Any, row: Any, count: Any, width: int) -> None:
                """Overwrites the rows between a group's last and the next multiple of eight."""
                odd = lax.rem(count, np.int32(ALIGNMENT))

                @pl.when(odd != 0)
                def _clear() -> None:
                    plgpu.wait_smem_to_gmem(0)  # until the tile itself is written
                    for above in range(1, ALIGNMENT):

                        @pl.when(odd + above <= ALIGNMENT)
                        def _one(above: int = above) -> None:
                            gap = out_ref.at[pl.ds(row + count + (above - 1), 1), pl.ds(column, width)]
                            plgpu.copy_smem_to_gmem(zero_row.at[:, pl.ds(0, width)], gap)

            def in_range(column: Any, run: Any) -> None:
                if is_short and not has_half_band:
                    pl.when(column < columns)(run)
                else:
                    run()

            def one_tile(pair: Any, _: None) -> None:
                turn = pair * 2 + warpgroup
                place = locate(tile_of(turn))
                column, row, count = place.column, place.row, place.rows

                def compute(width: int, height: int) -> None:
                    @functools.partial(pl.run_scoped, acc=plgpu.ACC((width, height), jnp.float32))
                    def _accumulate(acc: Any) -> None:
                        def slot(step: Any) -> Any:
                            return lax.rem(turn * steps + step, stages)

                        def one_step(step: Any, _: None) -> None:
                            plgpu.barrier_wait(full.at[warpgroup * stages + slot(step)])
                            of_matrix = operand(slot(step), width)
                            of_matrix = of_matrix if contract == 2 else of_matrix.T
                            plgpu.wgmma(acc, of_matrix, rows.at[slot(step), pl.ds(0, height)].T)
                            plgpu.wgmma_wait(1)  # the step before this one has read its slot

                            @pl.when(step > 0)
                            def _free() -> None:
                                plgpu.barrier_arrive(empty.at[slot(step - 1)])

                        lax.fori_loop(ZERO, steps, one_step, None)
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(empty.at[slot(steps - 1)])
                        values = acc[...]
                        for start in range(0, width, BAND):
                            part = values[start : start + BAND]
                            if activation == "relu2":
                                part = jnp.maximum(part, 0.0)
                                part = part * part
                            part = part.astype(out_ref.dtype)
                            in_range(
                                column + start,
                                functools.partial(store, part, column + start, row, count, height),
                            )
                        step_of_gap = BAND if is_short and not has_half_band else width
                        for start in range(0, width, step_of_gap):
                            in_range(
                                column + start,
                                functools.partial(clear_gap, column + start, row, count, step_of_gap),
                            )

                by_shape(place, compute)

            def one_tile_of_zeros(turn: Any, _: None) -> None:
                place = locate(counts_ref[0] * bands + tile_of(turn))

                @functools.partial(pl.run_scoped, acc=plgpu.ACC((BAND, tallest), jnp.float32))
                def _zeros(acc: Any) -> None:
                    for start in range(0, COLUMNS, BAND):
                        column = place.column + start

                        @pl.when(column < columns)
                        def _store(column: Any = column) -> None:
                            store(acc[...].astype(out_ref.dtype), column, place.row, place.rows, tallest)

            @pl.when(warpgroup == 1)  # which has to wait for its first tile
            def _clear_the_rest() -> None:
                lax.fori_loop(ZERO, taken(counts_ref[1] * bands), one_tile_of_zeros, None)

            lax.fori_loop(ZERO, lax.div(mine - warpgroup + 1, TWO), one_tile, None)
            plgpu.wait_smem_to_gmem(0)

    swizzled: Any = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
    slot_of_matrix = (COLUMNS, tile.depth) if contract == 2 else (tile.depth, COLUMNS)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, columns), lhs.dtype),
        scratch_types=dict(
            matrix=plgpu.SMEM((tile.stages, *slot_of_matrix), rhs.dtype, transforms=swizzled),
            rows=plgpu.SMEM((tile.stages, tallest, tile.depth), lhs.dtype, transforms=swizzled),
            result=plgpu.SMEM((2, tallest, BAND), lhs.dtype, transforms=swizzled),
            zeros=plgpu.SMEM((2, 1, COLUMNS), lhs.dtype),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=2 * tile.stages),
            empty=plgpu.Barrier(num_arrivals=1, num_barriers=tile.stages),
        ),
        grid=(cores,),
        grid_names=("core",),
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
