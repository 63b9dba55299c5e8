"""What a batch's routing looks like."""

import dataclasses

import jax
import jax.numpy as jnp

from nemotron_moe.dispatch import known_ids
from nemotron_moe.routing import Routing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingStats:
    """How a batch spreads over the experts.

    Attributes:
      load: [E] int32, (token, slot) pairs of each expert.
      weight_mass: [E] float32, sum of the routing weights of each expert.
      entropy: scalar float32, of the load's distribution in bits; log2(E) when it is even, 0 when one expert gets all.
    """

    load: jax.Array
    weight_mass: jax.Array
    entropy: jax.Array


def routing_stats(routing: Routing, n_experts: int) -> RoutingStats:
    """Load, weight and entropy over all tokens of `routing` (from `aux.routing`); works inside jit.

    Args:
      routing: ids and weights over any leading dimensions; ids outside [0, n_experts) do not count.
      n_experts: E.
    """
    if routing.weights is None:
        raise ValueError("routing.weights is None; wanted a routing that the layer returned (aux.routing).")
    chosen = jax.nn.one_hot(known_ids(routing.ids.reshape(-1), n_experts), n_experts, dtype=jnp.bool_)
    load = chosen.sum(0, dtype=jnp.int32)
    weight_mass = jnp.where(chosen, routing.weights.reshape(-1, 1), 0.0).sum(0)
    share = load.astype(jnp.float32) / jnp.maximum(load.sum(), 1).astype(jnp.float32)
    entropy = -jnp.where(load > 0, share * jnp.log2(jnp.where(load > 0, share, 1.0)), 0.0).sum()
    return RoutingStats(load=load, weight_mass=weight_mass, entropy=entropy)
