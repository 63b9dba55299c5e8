"""Data of the tests on a Hopper GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

import nemotron_moe as nm

MODELS = {"nano": nm.presets.NANO, "super": nm.presets.SUPER}
block = jax.jit(nm.moe_block, static_argnames=("config", "implementation"))


@functools.cache
def layer(name):
    return nm.init_weights(jax.random.key(0), MODELS[name], dtype=jnp.bfloat16)


@functools.partial(jax.jit, static_argnames=("config", "implementation"))
def both_ways(h, weights, config, implementation=None):
    """moe_block, and its gradients of h, the gate and the experts' matrices, for a cotangent that is no constant."""
    trained = {name: getattr(weights, name) for name in ("gate", "experts_up_proj", "experts_down_proj")}

    def run(h, trained):
        return nm.moe_block(h, dataclasses.replace(weights, **trained), config, implementation=implementation)

    out, pull = jax.vjp(run, h, trained)
    d_h, d_trained = pull(jnp.cos(jnp.arange(out.size).reshape(out.shape)).astype(out.dtype))
    return {"out": out, "h": d_h} | d_trained


@functools.partial(jax.jit, static_argnums=(0, 1))
def draw(seed, shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def bits(array):
    return jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")


@jax.jit
def same_bits(one, other):
    """Whether two trees of arrays are equal bit for bit; on the device, as gradients are large."""
    return jnp.array(jax.tree.leaves(jax.tree.map(lambda a, b: (bits(a) == bits(b)).all(), one, other))).all()


def dirty():
    """Fills free memory with NaN, so that what is read before it is written shows."""
    jax.block_until_ready([jnp.full((1 << 29,), jnp.nan, jnp.bfloat16) for _ in range(4)])
