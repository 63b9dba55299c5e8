"""Places by a stable sort."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.implementation import Facts


class Sort:
    """For every platform, and for any number of entries."""

    name = "sort"

    def refuses(self, facts: Facts) -> str | None:
        return None

    def places(self, groups: jax.Array, n_groups: int) -> tuple[jax.Array, jax.Array]:
        entry = lax.iota(jnp.int32, groups.shape[0])
        ordered, order = lax.sort_key_val(groups, entry, is_stable=True)
        # By a loop, which is short: unrolled it takes a CPU a minute to compile.
        starts = jnp.searchsorted(ordered, lax.iota(jnp.int32, n_groups + 1), method="scan").astype(jnp.int32)
        within = entry - starts[ordered]
        places = jnp.zeros_like(entry).at[order].set(within, unique_indices=True, mode="promise_in_bounds")
        return places, jnp.diff(starts)
