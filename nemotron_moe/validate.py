"""Checks of arguments at trace time; each error says what was seen, what was wanted, and how to get there."""

from typing import Any

import jax
import jax.numpy as jnp

from nemotron_moe.config import MoEConfig
from nemotron_moe.weights import MoEWeights, abstract_weights

ACTIVATION_DTYPES = ("bfloat16", "float16", "float32")


def check_activations(name: str, x: Any, width: int) -> None:
    """`x` is a floating array [..., width] in a dtype that the layer computes in."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise ValueError(f"{name} is a {type(x).__name__}; wanted an array [..., {width}].")
    if jnp.dtype(x.dtype).name not in ACTIVATION_DTYPES:
        raise ValueError(
            f"{name} has dtype {jnp.dtype(x.dtype)}; the layer computes in {', '.join(ACTIVATION_DTYPES)}: "
            f"cast it, for example {name}.astype(jnp.bfloat16)."
        )
    if x.ndim < 1 or x.shape[-1] != width:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; wanted [..., {width}], hidden values along the last axis."
        )


def check_shape(name: str, x: Any, shape: tuple[int, ...]) -> None:
    """`x` is an array of exactly this shape."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise ValueError(f"{name} is a {type(x).__name__}; wanted an array of shape {shape}.")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; wanted {shape}.")


def check_weights(weights: MoEWeights, config: MoEConfig) -> None:
    """`weights` has the fields and shapes that `config` asks for, floating leaves, and its gate bias in float32."""
    if not isinstance(weights, MoEWeights):
        raise ValueError(f"weights is a {type(weights).__name__}; wanted MoEWeights (see init_weights, load_layer).")
    wanted, seen = abstract_weights(config).items(), weights.items()
    if wanted.keys() != seen.keys():
        missing, surplus = sorted(wanted.keys() - seen.keys()), sorted(seen.keys() - wanted.keys())
        raise ValueError(
            f"weights do not fit config: missing {missing}, surplus {surplus}; config has moe_latent_size="
            f"{config.moe_latent_size}, "
            f"moe_shared_expert_intermediate_size={config.moe_shared_expert_intermediate_size}."
        )
    for name, leaf in seen.items():
        check_shape(f"weights.{name}", leaf, wanted[name].shape)
        if not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype == jnp.float64:
            raise ValueError(f"weights.{name} has dtype {leaf.dtype}; wanted a floating dtype of at most 32 bits.")
    if weights.gate_bias.dtype != jnp.float32:
        raise ValueError(
            f"weights.gate_bias has dtype {weights.gate_bias.dtype}; it must be float32, because rounding it changes "
            "which experts are chosen. A cast over the whole tree rounds it: use weights.astype(dtype), which keeps it."
        )


def check_token_mask(token_mask: jax.Array | None, leading: tuple[int, ...]) -> None:
    """`token_mask` is None or a boolean array over the tokens."""
    if token_mask is None:
        return
    check_shape("token_mask", token_mask, leading)
    if token_mask.dtype != jnp.bool_:
        raise ValueError(f"token_mask has dtype {token_mask.dtype}; wanted bool, True for a token that counts.")


def check_routing(routing: Any, shape: tuple[int, ...]) -> None:
    """`routing` is None, or a `Routing` with integer ids of this shape and None or float32 weights of it."""
    if routing is None:
        return
    if not hasattr(routing, "ids") or not hasattr(routing, "weights"):
        raise ValueError(f"routing is a {type(routing).__name__}; wanted a Routing(ids=..., weights=...).")
    check_shape("routing.ids", routing.ids, shape)
    if not jnp.issubdtype(routing.ids.dtype, jnp.integer):
        raise ValueError(f"routing.ids has dtype {routing.ids.dtype}; wanted integers.")
    if routing.weights is not None:
        check_shape("routing.weights", routing.weights, shape)
        if routing.weights.dtype != jnp.float32:
            raise ValueError(f"routing.weights has dtype {routing.weights.dtype}; wanted float32.")
