"""What `top_k` means, in plain jnp: a sort of (score, id). Small arrays only."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.implementation import Facts


class Reference:
    """Sorts every token's scores as integers in the same order, descending, and keeps equal ones in place."""

    name = "reference"

    def refuses(self, facts: Facts) -> str | None:
        return None

    def ids(self, scores: jax.Array, k: int) -> jax.Array:
        return jnp.argsort(ordered(scores), axis=1, stable=True, descending=True)[:, :k].astype(jnp.int32)


def ordered(scores: jax.Array) -> jax.Array:
    """int32 in the same order as the float32 in IEEE 754's total order: the bits, reversed for negative ones."""
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)
