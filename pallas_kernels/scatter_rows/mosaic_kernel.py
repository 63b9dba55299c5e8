"""The Hopper kernel: out[rows[t, j]] = x[t]. Every byte is moved by the TMA unit; no thread touches a row.

Each token is read once and written K times, so that what remains is the writing of the output: that bounds the time. A
gather by the inverse permutation would read each token K times, and would need that permutation.

Tokens are taken in blocks of 1, 2 or 4. CTA c of C takes the blocks c, c + C, c + 2 C ... into a ring of slots, each
with its tokens' rows and their row numbers:

    load     | block 0, 1, 2 | 3             | 4             |
    store    |               | K rows each   | K rows each   | ...    one box a row
    commit   |               | group 0       | group 1       |        all boxes of a block are one group
    wait     |               | -             | for group 0   |        its slot then takes block 4

Loads are thus `slots - 1` blocks ahead, and the stores of one block in flight while the next one's are issued. Several
CTAs a core hide the rest of the latency. Row numbers come through the same ring: the array is flat to the TMA unit,
and a block is as many tokens as have whole 16 bytes of them. Of a last block that is not full, the unit fills what is
not there, and nothing reads that.

It refuses rows that the TMA unit cannot move as boxes of at most 256 by 128 elements, and what was not measured.

Mutations that the tests catch: leaving one group more in flight, `wait_smem_to_gmem(2, ..)`, lets a load overwrite a
slot that is still being stored (a race, seen where a block is one store: the interpreter takes each store for a group);
so does leaving out `commit_smem` for the row numbers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.scatter_rows.mosaic import LANES, Ring, pitch


def scatter(x: jax.Array, rows: jax.Array, n_rows: int, ring: Ring) -> jax.Array:
    """`scatter_rows` for arguments that are not refused, none of them empty."""
    (tokens, width), named = x.shape, rows.shape[1]
    boxes = width // LANES
    numbers = ring.tokens * named  # of a block
    if numbers % 4:
        raise ValueError(f"{ring!r} gives a block {numbers} row numbers; wanted a multiple of 4, which are 16 bytes.")
    blocks = pl.cdiv(tokens, ring.tokens)
    # Python's integers become 64 bits wide where JAX's are, and `lax` mixes no widths.
    zero, slots = np.int32(0), np.int32(ring.slots)

    def body(x_ref: Any, rows_ref: Any, out_ref: Any, held: Any, held_rows: Any, arrived: Any) -> None:
        cta = lax.axis_index("cta")
        mine = lax.div(blocks - cta + (ring.ctas - 1), np.int32(ring.ctas))

        def load(turn: Any) -> None:
            slot, block = lax.rem(turn, slots), cta + turn * ring.ctas
            some_rows = rows_ref.at[pl.ds(block * numbers, numbers)]
            some_tokens = x_ref.at[pl.ds(block * ring.tokens, ring.tokens)]
            plgpu.copy_gmem_to_smem(some_rows, held_rows.at[slot, pl.ds(0, numbers)], arrived.at[slot])
            plgpu.copy_gmem_to_smem(some_tokens, held.at[slot], arrived.at[slot])

        def store(slot: Any, token: Any, _: None) -> None:
            # All numbers are read before the first store, so that their latencies overlap.
            for row in [held_rows[slot, token * named + j] for j in range(named)]:

                @pl.when((row >= 0) & (row < n_rows))
                def _named(row: Any = row) -> None:
                    plgpu.copy_smem_to_gmem(held.at[slot, token], out_ref.at[row], commit_group=False)

        def one_block(turn: Any, _: None) -> None:
            slot = lax.rem(turn, slots)
            plgpu.barrier_wait(arrived.at[slot])
            left = tokens - (cta + turn * ring.ctas) * ring.tokens
            lax.fori_loop(zero, lax.min(left, np.int32(ring.tokens)), functools.partial(store, slot), None)
            plgpu.commit_smem_to_gmem_group()

            @pl.when(turn + (ring.slots - 1) < mine)
            def _refill() -> None:
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the block before this one has left its slot,
                plgpu.commit_smem()  # and its row numbers were read by every thread
                load(turn + (ring.slots - 1))

        for turn in range(ring.slots - 1):
            pl.when(turn < mine)(functools.partial(load, np.int32(turn)))
        lax.fori_loop(zero, mine, one_block, None)
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((n_rows, boxes, LANES), x.dtype),
        scratch_types=dict(
            held=plgpu.SMEM((ring.slots, ring.tokens, boxes, LANES), x.dtype),
            held_rows=plgpu.SMEM((ring.slots, pitch(numbers)), jnp.int32),
            arrived=plgpu.Barrier(num_arrivals=2, num_barriers=ring.slots),
        ),
        grid=(ring.ctas,),
        grid_names=("cta",),
        kernel_name=f"scatter_rows_{ring.tokens}x{ring.slots}",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    return kernel(x.reshape(tokens, boxes, LANES), rows.reshape(-1)).reshape(n_rows, width)
