"""Scattering rows in plain XLA, for every platform and dtype."""

import jax
import jax.numpy as jnp

from pallas_kernels.implementation import Facts


class Xla:
    """One scatter that sets rows; it adds nothing, so its bits do not depend on an order."""

    name = "xla"

    def refuses(self, facts: Facts) -> str | None:
        return None

    def scatter(self, x: jax.Array, rows: jax.Array, n_rows: int) -> jax.Array:
        out = jnp.zeros((n_rows, x.shape[1]), x.dtype)
        return out.at[rows].set(x[:, None], mode="drop", unique_indices=True, wrap_negative_indices=False)
