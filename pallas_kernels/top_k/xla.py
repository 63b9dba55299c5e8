"""The k largest in plain XLA, for every platform: on a GPU a full sort."""

import jax
from jax import lax

from pallas_kernels.implementation import Facts


class Xla:
    """XLA's own operation."""

    name = "xla"

    def refuses(self, facts: Facts) -> str | None:
        return None

    def ids(self, scores: jax.Array, k: int) -> jax.Array:
        return lax.top_k(scores, k)[1]
