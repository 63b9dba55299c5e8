"""The Hopper kernel: ids[t] = the k largest of scores[t] in order. A warp has a token, a lane every 32nd expert of it.

Scores become int32 keys in the same order, and an expert the pair (key, E - 1 - id): the larger pair is the one that
comes first, and no two are equal. A block has 4 tokens, so that each warp has one and shares nothing with the others:

    load     the TMA unit brings the block's scores; each lane takes its E / 32 of a token into registers
    sort     each lane sorts its pairs in lists of 4, by exchanges that all lanes make alike
    take     k rounds: the largest first key of all lists (`redux.sync`, one instruction for the warp), the largest
             second half of those that have this key (another), and the list that it was first of moves up by one
    store    round r leaves its id in lane r % 32, so that a warp writes whole lines of memory at its end

A round thus looks at one pair of each list, and moves 4; without the lists it would compare each of the E / 32 keys
three times. An empty place is (least key, -1): less than any expert, even one of -inf or NaN.

What bounds it is the issue of integer instructions, some 60 a token and round with 512 experts. Other blocks of a core
hide the load. The ids of a token fill 32 places or 64, and the last block has 4 tokens; XLA cuts off what is too much.

It refuses expert counts that do not fill its lists or need too many registers, and so few tokens that XLA is as fast.

Mutations that the tests catch: exchanging by the keys alone gives equal scores in another order; taking all that have
the largest key, not the one of that place, loses some; leaving out the wait for the scores is a race.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.top_k.mosaic import BLOCK, LANES
from pallas_kernels.top_k.reference import ordered

EXCHANGES = {2: ((0, 1),), 4: ((0, 1), (2, 3), (0, 2), (1, 3), (1, 2))}  # by depth: they sort a list of that many
LEAST = np.iinfo(np.int32).min  # less than the key of any score but one NaN, which has an id
# Of [tokens, lists, lanes]: a warp has a token, and each of its lanes a pair of every list.
LAYOUT = plgpu.Layout.TILED(plgpu.Tiling(((BLOCK, 1, LANES), (1,))), (-4,), (-2,), -1)

type Pair = tuple[jax.Array, jax.Array]
type Levels = list[Pair]


def take(scores: jax.Array, k: int) -> jax.Array:
    """`top_k` for arguments that are not refused, none of them empty."""
    tokens, experts = scores.shape
    blocks = pl.cdiv(tokens, BLOCK)
    depth = 2 if experts == 4 * LANES else 4  # a lane has two lists or more
    lists = (BLOCK, experts // (depth * LANES), LANES)  # all of their firsts, or of their seconds ..
    places = (BLOCK, pl.cdiv(k, LANES), LANES)  # of the ids

    def body(scores_ref: Any, ids_ref: Any, held: Any, arrived: Any) -> None:
        first = lax.axis_index("block") * BLOCK
        for level in range(depth):
            some_scores = scores_ref.at[pl.ds(first, BLOCK), pl.ds(level * lists[1], lists[1])]
            plgpu.copy_gmem_to_smem(some_scores, held.at[level], arrived)
        plgpu.barrier_wait(arrived)
        lane, some = indices(lists, 2), indices(lists, 1)
        levels = []
        for level in range(depth):
            place = experts - 1 - (level * lists[1] + some) * LANES - lane
            levels.append((ordered(plgpu.load(held.at[level], layout=LAYOUT)), place))
        for a, b in EXCHANGES[depth]:
            levels[a], levels[b] = descending(*levels[a], *levels[b])

        round_of = indices(places, 1) * LANES + indices(places, 2)

        def one_round(taken: Any, state: tuple[jax.Array, Levels]) -> tuple[jax.Array, Levels]:
            ids, levels = state
            key, place = levels[0]
            largest = everywhere(of_token(key), lists)
            found = of_token(jnp.where(key == largest, place, -1))
            ids = jnp.where(round_of == taken, everywhere(experts - 1 - found, places), ids)
            is_taken = place == everywhere(found, lists)
            after = [*levels[1:], (full(lists, LEAST), full(lists, -1))]
            levels = [
                (jnp.where(is_taken, next_key, key), jnp.where(is_taken, next_place, place))
                for (key, place), (next_key, next_place) in zip(levels, after, strict=True)
            ]
            return ids, levels

        ids, _ = lax.fori_loop(0, k, one_round, (full(places, 0), levels))
        ids_ref.at[pl.ds(first, BLOCK)][...] = ids

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((blocks * BLOCK, *places[1:]), jnp.int32),
        scratch_types=dict(held=plgpu.SMEM((depth, *lists), jnp.float32), arrived=plgpu.Barrier(num_arrivals=depth)),
        grid=(blocks,),
        grid_names=("block",),
        kernel_name=f"top_k_{k}of{experts}",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    ids = kernel(scores.reshape(tokens, depth * lists[1], LANES))
    return ids.reshape(blocks * BLOCK, -1)[:tokens, :k]


def indices(shape: tuple[int, int, int], axis: int) -> jax.Array:
    return plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, axis), LAYOUT)


def full(shape: tuple[int, int, int], value: int) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.int32), LAYOUT)


def of_token(values: jax.Array) -> jax.Array:
    """The largest of a level: first each lane's own, then the warp's."""
    return jnp.max(jnp.max(values, axis=1), axis=1)


def everywhere(column: jax.Array, shape: tuple[int, int, int]) -> jax.Array:
    return lax.broadcast_in_dim(column, shape, (0,))


def descending(key_a: Any, place_a: Any, key_b: Any, place_b: Any) -> tuple[Pair, Pair]:
    """The two pairs, the greater one first."""
    swap = (key_b > key_a) | ((key_b == key_a) & (place_b > place_a))
    first = jnp.where(swap, key_b, key_a), jnp.where(swap, place_b, place_a)
    return first, (jnp.where(swap, key_a, key_b), jnp.where(swap, place_a, place_b))
