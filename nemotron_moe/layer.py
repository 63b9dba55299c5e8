"""The Mixture-of-Experts layer, read from top to bottom: the path of a token."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from nemotron_moe.activations import check_mode
from nemotron_moe.config import MoEConfig
from nemotron_moe.dense import linear, rms_norm, shared_expert
from nemotron_moe.dispatch import make_plan
from nemotron_moe.experts import routed_experts
from nemotron_moe.routing import Routing, choice_margin, route
from nemotron_moe.validate import (
    check_activations,
    check_routing,
    check_token_mask,
    check_unsharded,
    check_weights,
)
from nemotron_moe.weights import MoEWeights


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Aux:
    """What the layer did.

    Attributes:
      routing: ids, weights and logits over the input's leading dimensions.
      load: [E] int32, how many (token, slot) pairs went to each expert.
      margin: [...] float32, how far each token's choice is from another (see `choice_margin`).
    """

    routing: Routing
    load: jax.Array
    margin: jax.Array


def moe_block(
    h: jax.Array,
    weights: MoEWeights,
    config: MoEConfig,
    *,
    parallel: None = None,
    implementation: str | None = None,
    quantize_activations: str | None = None,
    token_mask: jax.Array | None = None,
    routing: Routing | None = None,
    return_aux: bool = False,
) -> Any:
    """norm + mixer + residual: h + moe_mixer(rms_norm(h)), the sum rounded once.

    Args:
      h: [..., H] bfloat16, float16 or float32; any leading dimensions, zero tokens too. Computation is in h's dtype
        with float32 sums, and the router in float32.
      weights: the layer's weights.
      config: the layer; static under `jax.jit`.
      parallel: None, the only value so far: the layer runs on one device.
      implementation: of the grouped products. None picks one for this platform, dtype and sizes (`explain` says which
        and why); a name ("xla", "mosaic") means that one, or an error. The steps around them follow, where they can.
      quantize_activations: None computes with the activations as they are. "fp8" and "nvfp4" quantise what goes into
        products with weights of that format, with a scale for each token; "fp8_static" and "nvfp4_static" with the
        checkpoint's `input_scale`. Simulated: their values are rounded, the products are the same.
      token_mask: [...] bool. A token that is False gives 0, whatever it holds, and counts nowhere.
      routing: experts to use instead of the router's choice, over h's leading dimensions.
      return_aux: return (output, `Aux`) instead of the output alone.

    Returns:
      An array like h: same shape and dtype.

    Raises:
      ValueError: at trace time, naming the argument, what was seen and what was wanted.
    """
    check_activations("h", h, config.hidden_size)
    return _layer(
        h,
        weights,
        config,
        parallel,
        implementation,
        quantize_activations,
        token_mask,
        routing,
        return_aux,
        is_block=True,
    )


def moe_mixer(
    x: jax.Array,
    weights: MoEWeights,
    config: MoEConfig,
    *,
    parallel: None = None,
    implementation: str | None = None,
    quantize_activations: str | None = None,
    token_mask: jax.Array | None = None,
    routing: Routing | None = None,
    return_aux: bool = False,
) -> Any:
    """What lies between norm and residual: routed experts plus shared expert of the normed activations x [..., H].

    Arguments, result and errors are those of `moe_block`; `weights.norm` is not used.
    """
    check_activations("x", x, config.hidden_size)
    return _layer(
        x,
        weights,
        config,
        parallel,
        implementation,
        quantize_activations,
        token_mask,
        routing,
        return_aux,
        is_block=False,
    )


def _layer(
    h: jax.Array,
    weights: MoEWeights,
    config: MoEConfig,
    parallel: None,
    implementation: str | None,
    quantize_activations: str | None,
    token_mask: jax.Array | None,
    routing: Routing | None,
    return_aux: bool,
    *,
    is_block: bool,
) -> Any:
    leading = h.shape[:-1]
    check_weights(weights, config)
    check_mode(quantize_activations, weights)
    check_unsharded("the activations' array", h)
    check_unsharded("weights", weights)
    check_token_mask(token_mask, leading)
    check_routing(routing, (*leading, config.num_experts_per_tok))
    if parallel is not None:
        raise ValueError(f"parallel is {parallel!r}; this version runs on one device and wants None.")

    # From here on there are only tokens [T, ...], so that a token's bits do not depend on the leading dimensions.
    tokens = math.prod(leading)
    h, token_mask, routing = jax.tree.map(
        lambda array: jnp.asarray(array).reshape(tokens, *array.shape[len(leading) :]), (h, token_mask, routing)
    )
    if token_mask is not None:
        # Selected away, not multiplied: a padding row may hold NaN. A row of zeros gives zeros in every branch.
        h = jnp.where(token_mask[:, None], h, jnp.zeros((), h.dtype))
    multiply = functools.partial(linear, quantize_activations=quantize_activations)
    x = h
    if is_block:
        with jax.named_scope("norm"):
            x = rms_norm(h, weights.norm, config.layer_norm_epsilon)
    with jax.named_scope("router"):
        routing = route(
            x,
            weights.gate,
            weights.gate_bias,
            config,
            token_mask=token_mask,
            routing=routing,
            implementation=implementation,
        )
    z = x
    if config.moe_latent_size:
        with jax.named_scope("fc1_latent_proj"):
            z = multiply(x, weights.fc1_latent_proj)
    with jax.named_scope("plan"):
        plan = make_plan(routing.ids, config.n_routed_experts)
    up, down = weights.experts_up_proj, weights.experts_down_proj
    routed = routed_experts(
        z, routing.weights, plan, up, down, implementation=implementation, quantize_activations=quantize_activations
    )
    if config.moe_latent_size:
        with jax.named_scope("fc2_latent_proj"):
            routed = multiply(routed, weights.fc2_latent_proj)
    terms = [h, routed] if is_block else [routed]
    if config.moe_shared_expert_intermediate_size:
        with jax.named_scope("shared_expert"):
            up, down = weights.shared_experts_up_proj, weights.shared_experts_down_proj
            terms.append(
                shared_expert(x, up, down, implementation=implementation, quantize_activations=quantize_activations)
            )
    out = functools.reduce(jnp.add, (term.astype(jnp.float32) for term in terms)).astype(h.dtype)
    out = out.reshape(*leading, config.hidden_size)
    if not return_aux:
        return out
    margin = choice_margin(routing.logits, weights.gate_bias, config)
    routing, margin = jax.tree.map(lambda array: array.reshape(*leading, *array.shape[1:]), (routing, margin))
    return out, Aux(routing=routing, load=plan.group_sizes, margin=margin)
