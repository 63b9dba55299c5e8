"""Places by comparing: entries with those before them in a block, then sums over the blocks before."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.implementation import Facts
from pallas_kernels.sums import is_before

BLOCK = 128  # entries
MOST_ENTRIES = 1 << 19  # beyond, a sort is estimated to be as fast


class Compare:
    """For a GPU, which compares faster than it sorts: each entry with the few before it in its block."""

    name = "compare"

    def refuses(self, facts: Facts) -> str | None:
        if facts.target.platform != "gpu":
            return f"it is for GPUs, and {facts.target.kind} sorts faster"
        if facts.sizes["entries"] > MOST_ENTRIES:
            return f"S is {facts.sizes['entries']}; it accepts up to {MOST_ENTRIES} entries"
        return None

    def places(self, groups: jax.Array, n_groups: int) -> tuple[jax.Array, jax.Array]:
        entries = groups.shape[0]
        blocks = jnp.pad(groups, (0, -entries % BLOCK), constant_values=-1).reshape(-1, BLOCK)
        is_same = blocks[:, :, None] == blocks[:, None, :]
        in_block = (is_same & is_before(BLOCK)[None]).sum(2, dtype=jnp.int32)
        # Whole numbers: the order in which a GPU adds them changes nothing. Entries of the padding have no place in it.
        counts = jnp.zeros((blocks.shape[0], n_groups + 1), jnp.int32)
        block = lax.broadcasted_iota(jnp.int32, blocks.shape, 0)
        counts = counts.at[block, blocks].add(1, mode="drop", wrap_negative_indices=False)
        before = jnp.cumsum(counts, axis=0) - counts
        places = jnp.take_along_axis(before, blocks.clip(0), axis=1, mode="promise_in_bounds") + in_block
        return places.reshape(-1)[:entries], (before[-1] + counts[-1])[:n_groups]
