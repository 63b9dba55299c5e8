"""The public function: checks its arguments and chooses an implementation."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import check_array, is_integer
from pallas_kernels.implementation import Choice, Facts, select, target
from pallas_kernels.top_k.mosaic import Mosaic
from pallas_kernels.top_k.reference import Reference
from pallas_kernels.top_k.xla import Xla

IMPLEMENTATIONS = (Mosaic(), Xla(), Reference())  # in order of preference


def top_k(scores: jax.Array, k: int, *, implementation: str | None = None) -> jax.Array:
    """The ids of each token's k largest scores, the largest first, and of equal scores the lowest id first.

    Every bit pattern has its place, in the total order of IEEE 754, as in `jax.lax.top_k`: negative NaNs below
    -inf, -0 below 0, positive NaNs above inf. So the ids of a token are always k different ones. No gradient flows.

    Args:
      scores: [T, E] float32.
      k: from 0 to E, an integer that is no traced one.
      implementation: a name in `IMPLEMENTATIONS`, or None for the first one that serves these arguments.

    Returns:
      [T, k] int32.

    Raises:
      ValueError: naming the argument, what was seen and what was wanted.
    """
    _check(scores, k)
    k = int(k)
    chosen = choose(scores, k, implementation=implementation).implementation
    if 0 in (scores.shape[0], k):
        return jnp.zeros((scores.shape[0], k), jnp.int32)
    with jax.named_scope("top_k"):
        return chosen.ids(jax.lax.stop_gradient(scores), k)


def choose(scores: jax.Array | jax.ShapeDtypeStruct, k: int, *, implementation: str | None = None) -> Choice[Any]:
    """Which implementation `top_k` uses for an array (or a ShapeDtypeStruct) like this, and why.

    Raises:
      ValueError: if `implementation` names none, or one that refuses these arguments.
    """
    tokens, experts = scores.shape
    facts = Facts(
        target=target(),
        dtypes={"scores": scores.dtype},
        sizes={"tokens": tokens, "experts": experts, "k": k},
    )
    return select("top_k", IMPLEMENTATIONS, facts, implementation)


def _check(scores: jax.Array, k: int) -> None:
    check_array("scores", scores, "[T, E]")
    if scores.dtype != jnp.float32:
        raise ValueError(f"scores is {scores.dtype}; wanted float32.")
    if not is_integer(k) or not 0 <= k <= scores.shape[1]:
        raise ValueError(f"k is {k!r}; wanted an integer from 0 to {scores.shape[1]}, the experts.")
