"""Small layers for tests, and the jitted calls on them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import nemotron_moe as nm

# Sizes of the public fault reports: direct and latent.
TINY_D = nm.MoEConfig(
    hidden_size=64,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=48,
    moe_shared_expert_intermediate_size=96,
    routed_scaling_factor=2.5,
)
TINY_L = nm.MoEConfig(
    hidden_size=64,
    moe_latent_size=32,
    n_routed_experts=16,
    num_experts_per_tok=6,
    moe_intermediate_size=80,
    moe_shared_expert_intermediate_size=112,
    routed_scaling_factor=5.0,
)
BOTH = {"direct": TINY_D, "latent": TINY_L}

block = jax.jit(nm.moe_block, static_argnames=("config", "implementation", "return_aux"))
mixer = jax.jit(nm.moe_mixer, static_argnames=("config", "implementation", "return_aux"))


@functools.cache
def random_weights(config: nm.MoEConfig, seed: int = 0, dtype=jnp.float32) -> nm.MoEWeights:
    """Random weights with a gate bias that changes choices and a norm that is not one."""
    rng = np.random.default_rng(seed)
    weights = nm.init_weights(jax.random.key(seed), config, dtype=dtype)
    return dataclasses.replace(
        weights,
        norm=jnp.asarray(rng.uniform(0.5, 1.5, config.hidden_size), dtype),
        gate_bias=jnp.asarray(0.3 * rng.standard_normal(config.n_routed_experts), jnp.float32),
    )


def random_tokens(config: nm.MoEConfig, *leading: int, seed: int = 1, dtype=jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((*leading, config.hidden_size)), dtype)


def set_of(ids) -> np.ndarray:
    """Chosen experts as comparable sets: sorted along the last axis."""
    return np.sort(np.asarray(ids), axis=-1)
