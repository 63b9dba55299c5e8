"""The Mixture-of-Experts layer, read from top to bottom: the path of a token."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from nemotron_moe.config import MoEConfig
from nemotron_moe.dense import linear, rms_norm, shared_expert
from nemotron_moe.dispatch import Plan, make_plan
from nemotron_moe.experts import routed_experts
from nemotron_moe.routing import Routing, choice_margin, route
from nemotron_moe.validate import check_activations, check_token_mask, check_weights
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
        and why); a name ("xla") means that one, or an error.
      token_mask: [...] bool. A token that is False gives 0, whatever it holds, and counts nowhere.
      routing: experts to use instead of the router's choice, over h's leading dimensions.
      return_aux: return (output, `Aux`) instead of the output alone.

    Returns:
      An array like h: same shape and dtype.

    Raises:
      ValueError: at trace time, naming the argument, what was seen and what was wanted.
    """
    check_activations("h", h, config.hidden_size)
    check_weights(weights, config)
    h = _without_masked(h, token_mask)
    with jax.named_scope("norm"):
        x = rms_norm(h, weights.norm, config.layer_norm_epsilon)
    branches, routing, plan = _branches(x, weights, config, parallel, implementation, token_mask, routing)
    out = _add([h, *branches])
    return (out, _aux(weights, config, routing, plan)) if return_aux else out


def moe_mixer(
    x: jax.Array,
    weights: MoEWeights,
    config: MoEConfig,
    *,
    parallel: None = None,
    implementation: str | None = None,
    token_mask: jax.Array | None = None,
    routing: Routing | None = None,
    return_aux: bool = False,
) -> Any:
    """What lies between norm and residual: routed experts plus shared expert of the normed activations x [..., H].

    Arguments, result and errors are those of `moe_block`; `weights.norm` is not used.
    """
    check_activations("x", x, config.hidden_size)
    check_weights(weights, config)
    x = _without_masked(x, token_mask)
    branches, routing, plan = _branches(x, weights, config, parallel, implementation, token_mask, routing)
    out = _add(branches)
    return (out, _aux(weights, config, routing, plan)) if return_aux else out


def _branches(
    x: jax.Array,
    weights: MoEWeights,
    config: MoEConfig,
    parallel: None,
    implementation: str | None,
    token_mask: jax.Array | None,
    routing: Routing | None,
) -> tuple[list[jax.Array], Routing, Plan]:
    if parallel is not None:
        raise ValueError(f"parallel is {parallel!r}; this version runs on one device and wants None.")
    with jax.named_scope("router"):
        routing = route(x, weights.gate, weights.gate_bias, config, token_mask=token_mask, routing=routing)
    z = x
    if config.moe_latent_size:
        with jax.named_scope("fc1_latent_proj"):
            z = linear(x, weights.fc1_latent_proj)
    with jax.named_scope("plan"):
        plan = make_plan(_flat(routing.ids), config.n_routed_experts)
    routed = routed_experts(
        _flat(z),
        _flat(routing.weights),
        plan,
        weights.experts_up_proj,
        weights.experts_down_proj,
        implementation=implementation,
    ).reshape(z.shape)
    if config.moe_latent_size:
        with jax.named_scope("fc2_latent_proj"):
            routed = linear(routed, weights.fc2_latent_proj)
    branches = [routed]
    if config.moe_shared_expert_intermediate_size:
        with jax.named_scope("shared_expert"):
            branches.append(shared_expert(x, weights.shared_experts_up_proj, weights.shared_experts_down_proj))
    return branches, routing, plan


def _aux(weights: MoEWeights, config: MoEConfig, routing: Routing, plan: Plan) -> Aux:
    margin = choice_margin(routing.logits, weights.gate_bias, config)
    return Aux(routing=routing, load=plan.group_sizes, margin=margin)


def _without_masked(x: jax.Array, token_mask: jax.Array | None) -> jax.Array:
    # Selected away, not multiplied: a padding row may hold NaN. A row of zeros gives zeros in every branch.
    if token_mask is None:
        return x
    check_token_mask(token_mask, x.shape[:-1])
    return jnp.where(token_mask[..., None], x, jnp.zeros((), x.dtype))


def _add(terms: list[jax.Array]) -> jax.Array:
    wide = (term.astype(jnp.float32) for term in terms)
    return functools.reduce(jnp.add, wide).astype(terms[0].dtype)


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])
