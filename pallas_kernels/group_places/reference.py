"""What `group_places` means, in plain jnp. Small arrays only."""

import jax
import jax.numpy as jnp

from pallas_kernels.implementation import Facts


class Reference:
    """Compares every entry with every group."""

    name = "reference"

    def refuses(self, facts: Facts) -> str | None:
        return None

    def places(self, groups: jax.Array, n_groups: int) -> tuple[jax.Array, jax.Array]:
        is_in = jax.nn.one_hot(groups, n_groups + 1, dtype=jnp.int32)  # [S, n_groups + 1]
        return (is_in * (is_in.cumsum(0) - 1)).sum(1), is_in.sum(0)[:n_groups]
