"""The router: which experts a token goes to, and with what weight."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from nemotron_moe.config import MoEConfig
from nemotron_moe.dispatch import known_ids
from nemotron_moe.kernels import steps_around, top_k
from nemotron_moe.validate import check_activations, check_float32, check_routing, check_shape, check_token_mask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """Where tokens go.

    Attributes:
      ids: [..., K] integers, the chosen experts. An id outside [0, E) contributes nothing.
      weights: [..., K] float32, scaling factor included. None asks for the router's own weights of these ids.
      logits: [..., E] float32, or None when a caller gives the routing.
    """

    ids: jax.Array
    weights: Any = None
    logits: Any = None


def router_logits(x: jax.Array, gate: jax.Array) -> jax.Array:
    """x [..., H] times gate [E, H] transposed, in float32 [..., E].

    Products of two bfloat16 (or float16) values are exact in float32; any other pair multiplies as float32 at the
    highest precision. Rounding the logits to bfloat16 would change the choice of 2 to 7 tokens in 100.
    """
    precision = lax.Precision.DEFAULT
    if x.dtype != gate.dtype or x.dtype == jnp.float32:
        x, gate, precision = x.astype(jnp.float32), gate.astype(jnp.float32), lax.Precision.HIGHEST
    return jnp.einsum("...h,eh->...e", x, gate, precision=precision, preferred_element_type=jnp.float32)


def route(
    x: jax.Array,
    gate: jax.Array,
    gate_bias: jax.Array,
    config: MoEConfig,
    *,
    token_mask: jax.Array | None = None,
    routing: Routing | None = None,
    implementation: str | None = None,
) -> Routing:
    """Sigmoid scores, of which the top K after adding the bias are chosen; the bias never enters the weights.

    Equal scores go to the lowest id. Everything is float32.

    Args:
      x: [..., H], the normed activations.
      gate: [E, H].
      gate_bias: [E] float32.
      config: the layer.
      token_mask: [...] bool; a token that is False gets ids -1 and weights 0.
      routing: a choice to replay: its ids are taken as they are, and its weights unless they are None.
      implementation: as in `moe_block`.

    Raises:
      ValueError: on shapes or dtypes that do not fit.
    """
    check_activations("x", x, config.hidden_size)
    check_shape("gate", gate, (config.n_routed_experts, config.hidden_size))
    check_float32("gate_bias", gate_bias, (config.n_routed_experts,))
    check_token_mask(token_mask, x.shape[:-1])
    check_routing(routing, (*x.shape[:-1], config.num_experts_per_tok))
    logits = router_logits(x, gate)
    scores = jax.nn.sigmoid(logits)
    if routing is None:
        choice = choice_scores(scores, gate_bias, config)
        tokens = choice.reshape(-1, choice.shape[-1])
        ids = top_k(tokens, config.num_experts_per_tok, implementation=steps_around(implementation))
        ids = ids.reshape(*choice.shape[:-1], config.num_experts_per_tok)
    else:
        ids = routing.ids
    weights = _weights(scores, ids, config) if routing is None or routing.weights is None else routing.weights
    if token_mask is not None:
        ids = jnp.where(token_mask[..., None], known_ids(ids, config.n_routed_experts), -1)
        weights = jnp.where(token_mask[..., None], weights, 0.0)
    return Routing(ids=ids, weights=weights, logits=logits)


def choice_scores(scores: jax.Array, gate_bias: jax.Array, config: MoEConfig) -> jax.Array:
    """scores + bias [..., E] float32, with -inf in the groups that may not be chosen from.

    A group's score is the sum of its two best; the best `topk_group` groups stay.
    """
    choice = scores + lax.expand_dims(gate_bias, range(scores.ndim - 1))
    if config.n_group == 1:
        return choice
    grouped, group_scores = _by_group(choice, config)
    kept = lax.top_k(group_scores, config.topk_group)[1]
    is_kept = jax.nn.one_hot(kept, config.n_group, dtype=jnp.bool_).any(-2)
    return jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(choice.shape)


def choice_margin(logits: jax.Array, gate_bias: jax.Array, config: MoEConfig) -> jax.Array:
    """How far each token's choice is from another one, [...] float32; infinite where every expert is chosen.

    It is the gap between the last chosen and the first rejected choice score; with groups, the gap between the last
    kept and the first dropped group if that is smaller.
    """
    scores = jax.nn.sigmoid(logits)
    margin = _gap(choice_scores(scores, gate_bias, config), config.num_experts_per_tok)
    if config.n_group == 1:
        return margin
    choice = scores + lax.expand_dims(gate_bias, range(scores.ndim - 1))
    return jnp.minimum(margin, _gap(_by_group(choice, config)[1], config.topk_group))


def _weights(scores: jax.Array, ids: jax.Array, config: MoEConfig) -> jax.Array:
    chosen = _at(scores, known_ids(ids, scores.shape[-1]))
    if config.norm_topk_prob:
        chosen = _normalise(chosen)
    return chosen * config.routed_scaling_factor


@jax.custom_jvp
def _at(scores: jax.Array, ids: jax.Array) -> jax.Array:
    """scores [..., E] of ids [..., K]; 0 for the id E."""
    return jnp.take_along_axis(scores, ids, axis=-1, mode="fill", fill_value=0.0)


@_at.defjvp
def _at_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    # By comparing with every id: the transpose of a gather would be a scatter, which adds in no fixed order.
    (scores, ids), (d_scores, _) = primals, tangents
    is_chosen = jax.nn.one_hot(ids, scores.shape[-1], dtype=jnp.bool_)
    return _at(scores, ids), jnp.where(is_chosen, d_scores[..., None, :], 0.0).sum(-1)


@jax.custom_jvp
def _normalise(scores: jax.Array) -> jax.Array:
    return scores / _total(scores)


def _total(scores: jax.Array) -> jax.Array:
    # One addition after the other: XLA orders a reduction as suits the program around it, and the bits would vary.
    return functools.reduce(jnp.add, jnp.moveaxis(scores, -1, 0))[..., None] + 1e-20


@_normalise.defjvp
def _normalise_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    # The derivative of a quotient as jax writes it squares the denominator, and (1e-20)^2 is 0 in float32: NaN where
    # all scores underflow.
    (scores,), (d_scores,) = primals, tangents
    total = _total(scores)
    weights = scores / total
    return weights, (d_scores - weights * d_scores.sum(-1, keepdims=True)) / total


def _by_group(choice: jax.Array, config: MoEConfig) -> tuple[jax.Array, jax.Array]:
    grouped = choice.reshape(*choice.shape[:-1], config.n_group, -1)
    return grouped, lax.top_k(grouped, 2)[0].sum(-1)


def _gap(scores: jax.Array, kept: int) -> jax.Array:
    if kept == scores.shape[-1]:
        return jnp.full(scores.shape[:-1], jnp.inf)
    best = lax.top_k(scores, kept + 1)[0]
    return best[..., -2] - best[..., -1]
