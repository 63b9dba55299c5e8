"""Checks of arguments at trace time; each error says what was seen, what was wanted, and how to get there."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from nemotron_moe.config import MoEConfig
from nemotron_moe.weights import DTYPES, PLAIN, MoEWeights, abstract_weights
from pallas_kernels.formats import Quantised


def check_activations(name: str, x: Any, width: int) -> None:
    """`x` is a floating array [..., width] in a dtype that the layer computes in."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise ValueError(f"{name} is a {type(x).__name__}; wanted an array [..., {width}].")
    check_dtype(name, x.dtype)
    if x.ndim < 1 or x.shape[-1] != width:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; wanted [..., {width}], hidden values along the last axis."
        )


def check_dtype(name: str, dtype: DTypeLike) -> None:
    """The layer computes in `dtype`."""
    if jnp.dtype(dtype).name not in DTYPES:
        raise ValueError(
            f"{name} has dtype {jnp.dtype(dtype)}; the layer computes in {', '.join(DTYPES)}: cast it, for example "
            f"{name}.astype(jnp.bfloat16)."
        )


def check_float32(name: str, x: Any, shape: tuple[int, ...]) -> None:
    """`x` is a float32 array of exactly this shape."""
    check_shape(name, x, shape)
    if x.dtype != jnp.float32:
        raise ValueError(f"{name} has dtype {x.dtype}; wanted float32.")


def check_ids(name: str, x: Any, shape: tuple[int, ...]) -> None:
    """`x` is an array of integers of exactly this shape."""
    check_shape(name, x, shape)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} has dtype {x.dtype}; wanted integers.")


def check_shape(name: str, x: Any, shape: tuple[int, ...]) -> None:
    """`x` is an array of exactly this shape."""
    if not hasattr(x, "shape") or not (hasattr(x, "dtype") or isinstance(x, Quantised)):
        raise ValueError(f"{name} is a {type(x).__name__}; wanted an array of shape {shape}.")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; wanted {shape}.")


def check_weights(weights: MoEWeights, config: MoEConfig) -> None:
    """`weights` has the fields and shapes that `config` asks for, floating leaves, and its gate bias in float32."""
    if not isinstance(config, MoEConfig):
        raise ValueError(
            f"config is a {type(config).__name__}; wanted a MoEConfig (see MoEConfig.from_hf, load_layer)."
        )
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
        if isinstance(leaf, Quantised):
            leaf.check(f"weights.{name}")
            if name in PLAIN:
                raise ValueError(f"weights.{name} is {leaf.format}; it is kept unquantised: use its dequantize().")
            continue
        if jnp.dtype(leaf.dtype).name not in DTYPES:
            raise ValueError(f"weights.{name} has dtype {leaf.dtype}; wanted one of {', '.join(DTYPES)}.")
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
    check_ids("routing.ids", routing.ids, shape)
    if routing.weights is not None:
        check_float32("routing.weights", routing.weights, shape)


def check_unsharded(name: str, tree: Any) -> None:
    """No array of `tree` is split over an Explicit mesh axis, where jax wants every operation told how to go on."""
    for leaf in jax.tree.leaves(tree):
        spec = jax.typeof(leaf).sharding.spec
        if any(axes is not None for axes in spec):
            raise ValueError(
                f"{name} is split over Explicit mesh axes, {spec}; this version computes with arrays that are whole on "
                "every device, or split over Auto axes (jax.make_mesh(..., axis_types=(AxisType.Auto, ...)))."
            )
