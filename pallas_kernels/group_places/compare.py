"""Places by comparing: entries with those before them in a block, then blocks with those before them."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.implementation import Facts
from pallas_kernels.sums import is_before, sums_before

BLOCK = 512  # entries
MOST_ENTRIES = 1 << 19  # beyond, the sums over blocks take longer than a sort


class Compare:
    """For a GPU, which compares faster than it sorts: each step is one kernel of XLA, and nothing large is stored."""

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
        group = lax.iota(jnp.int32, n_groups + 1)
        counts = (blocks[:, None, :] == group[None, :, None]).sum(2, dtype=jnp.int32)
        before = sums_before(counts)
        places = jnp.take_along_axis(before, blocks.clip(0), axis=1, mode="promise_in_bounds") + in_block
        return places.reshape(-1)[:entries], (before[-1] + counts[-1])[:n_groups]
