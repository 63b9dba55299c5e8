"""Scattering rows in plain XLA, for every platform and dtype."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.implementation import Facts


class Xla:
    """A gather by the inverse, which a scatter of row numbers gives; that one is small, and sets where it is told."""

    name = "xla"

    def refuses(self, facts: Facts) -> str | None:
        return None

    def scatter(self, x: jax.Array, rows: jax.Array, n_rows: int) -> jax.Array:
        token = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
        source = jnp.zeros(n_rows, jnp.int32)
        source = source.at[rows].set(token, mode="drop", unique_indices=True, wrap_negative_indices=False)
        return x.at[source].get(mode="promise_in_bounds")
