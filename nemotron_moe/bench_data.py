"""Random layers, tokens and routings for benchmarks. Zeros would run faster than real data does."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nemotron_moe.config import MoEConfig
from nemotron_moe.weights import MoEWeights, abstract_weights

ROUTINGS = ("uniform", "zipf", "one")


def random_layer(config: MoEConfig, seed: int = 0) -> MoEWeights:
    """Normal weights in bfloat16 with variance 1 / in, so that outputs are of order 1; norm ones, gate bias zeros."""
    leaves = {}
    for number, (name, leaf) in enumerate(abstract_weights(config).items().items()):
        if name in ("norm", "gate_bias"):
            leaves[name] = jnp.full(leaf.shape, int(name == "norm"), leaf.dtype)
        else:
            key = jax.random.fold_in(jax.random.key(seed), number)
            leaves[name] = jax.jit(matrices, static_argnums=1)(key, leaf.shape)
    return MoEWeights(**leaves)


def matrices(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[..., n, k] bfloat16 with variance 1 / k and all of its digits: drawn in float32, one at a time, and rounded."""
    if len(shape) > 2:
        return lax.map(lambda one: matrices(one, shape[1:]), jax.random.split(key, shape[0]))
    return (jax.random.normal(key, shape, jnp.float32) * jnp.float32(shape[-1] ** -0.5)).astype(jnp.bfloat16)


def draw_rows(key: jax.Array, shape: tuple[int, int], squared: bool) -> jax.Array:
    """[m, k] bfloat16, normal; with `squared`, the squares of what is positive."""
    drawn = jax.random.normal(key, shape, jnp.float32)
    return (jnp.square(jax.nn.relu(drawn)) if squared else drawn).astype(jnp.bfloat16)


def random_ids(routing: str, config: MoEConfig, tokens: int, seed: int) -> np.ndarray:
    """[T, K] int32 experts, different ones for each token.

    "uniform": all alike likely. "zipf": drawn with probability 1 / rank without replacement, the ranks random. "one":
    every token the same.
    """
    rng = np.random.default_rng(seed)
    experts, slots = config.n_routed_experts, config.num_experts_per_tok
    if routing == "one":
        return np.tile(rng.permutation(experts)[:slots].astype(np.int32), (tokens, 1))
    # The largest of log p + Gumbel noise are a draw without replacement.
    chances = rng.gumbel(size=(tokens, experts)).astype(np.float32)
    if routing == "zipf":
        chances -= np.log(rng.permutation(experts) + 1, dtype=np.float32)
    return np.argpartition(-chances, slots - 1, axis=1)[:, :slots].astype(np.int32)


def biased(weights: MoEWeights, routing: str, config: MoEConfig) -> MoEWeights:
    """The layer with a gate bias that makes its own router choose about as `random_ids` does.

    Logits are about normal, so scores deviate by 0.21 where Gumbel noise deviates by pi / sqrt(6).
    """
    ranks = np.random.default_rng(0).permutation(config.n_routed_experts)
    bias = np.zeros(config.n_routed_experts)
    if routing == "zipf":
        bias = -0.21 / (math.pi / math.sqrt(6)) * np.log(ranks + 1)
    elif routing == "one":
        bias = np.where(ranks < config.num_experts_per_tok, 2.0, 0.0)
    return dataclasses.replace(weights, gate_bias=jnp.asarray(bias, jnp.float32))


def random_slots(config: MoEConfig, tokens: int, seed: int) -> jax.Array:
    """[T, K] float32 as the router makes them: positive, adding up to the scaling factor."""
    drawn = np.random.default_rng(seed).uniform(0.1, 1, (tokens, config.num_experts_per_tok))
    return jnp.asarray(drawn / drawn.sum(1, keepdims=True) * config.routed_scaling_factor, jnp.float32)
