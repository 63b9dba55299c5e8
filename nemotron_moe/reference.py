"""The layer in float64 NumPy, dense and slow, to be checked against the formulas by reading it."""

from typing import Any

import numpy as np

from nemotron_moe.config import MoEConfig
from nemotron_moe.weights import MoEWeights
from pallas_kernels.formats import to_float64


def moe_block(
    h: Any, weights: MoEWeights, config: MoEConfig, *, token_mask: Any = None, ids: Any = None
) -> dict[str, np.ndarray]:
    """norm + mixer + residual of h [T, H]: what `moe_mixer` returns, and block_out [T, H]."""
    h = _tokens(h, token_mask)
    rms = np.sqrt(np.mean(h**2, axis=1, keepdims=True) + config.layer_norm_epsilon)
    stages = moe_mixer(h / rms * _wide(weights.norm), weights, config, token_mask=token_mask, ids=ids)
    return {**stages, "block_out": h + stages["mixer_out"]}


def moe_mixer(
    x: Any, weights: MoEWeights, config: MoEConfig, *, token_mask: Any = None, ids: Any = None
) -> dict[str, np.ndarray]:
    """Every stage between norm and residual, for T tokens.

    Args:
      x: [T, H], the normed activations, of any real dtype.
      weights: the layer's weights, of any real dtype or quantised.
      config: the layer.
      token_mask: [T] bool; tokens that are False give 0 and are not routed.
      ids: [T, K], experts to use instead of the router's choice; outside [0, E) they contribute nothing.

    Returns:
      float64 arrays by name: mixer_in [T, H], router_logits [T, E], topk_ids [T, K] (integers, best first),
      topk_weights [T, K], margin [T], routed_out, shared_out and mixer_out [T, H], load [E] (integers).
    """
    n = _tokens(x, token_mask)
    experts, top_k = config.n_routed_experts, config.num_experts_per_tok

    logits = n @ _wide(weights.gate).T
    scores = np.exp(-np.logaddexp(0.0, -logits))
    choice, margin = scores + _wide(weights.gate_bias), np.full(len(n), np.inf)
    if config.n_group > 1:
        grouped = choice.reshape(len(n), config.n_group, -1)
        group_scores = np.sort(grouped, axis=2)[:, :, -2:].sum(2)
        dropped = np.argsort(-group_scores, axis=1, kind="stable")[:, config.topk_group :]
        np.put_along_axis(grouped, dropped[:, :, None], -np.inf, axis=1)
        margin = _gap(group_scores, config.topk_group)
    margin = np.minimum(margin, _gap(choice, top_k))
    if ids is None:
        ids = np.argsort(-choice, axis=1, kind="stable")[:, :top_k]
    ids = np.asarray(ids).astype(np.int64)
    if token_mask is not None:
        ids = np.where(np.asarray(token_mask)[:, None], ids, -1)

    valid = (ids >= 0) & (ids < experts)
    chosen = np.where(valid, np.take_along_axis(scores, np.where(valid, ids, 0), axis=1), 0.0)
    if config.norm_topk_prob:
        chosen = chosen / (chosen.sum(1, keepdims=True) + 1e-20)
    topk_weights = chosen * config.routed_scaling_factor

    z = n @ _wide(weights.fc1_latent_proj).T if config.moe_latent_size else n
    routed, load = np.zeros_like(z), np.zeros(experts, np.int64)
    for expert in range(experts):
        token, slot = np.nonzero(ids == expert)
        up, down = _wide(weights.experts_up_proj[expert]), _wide(weights.experts_down_proj[expert])
        np.add.at(routed, token, topk_weights[token, slot][:, None] * (np.maximum(z[token] @ up.T, 0.0) ** 2 @ down.T))
        load[expert] = len(token)
    if config.moe_latent_size:
        routed = routed @ _wide(weights.fc2_latent_proj).T

    shared = np.zeros_like(n)
    if config.moe_shared_expert_intermediate_size:
        up, down = _wide(weights.shared_experts_up_proj), _wide(weights.shared_experts_down_proj)
        shared = np.maximum(n @ up.T, 0.0) ** 2 @ down.T

    return {
        "mixer_in": n,
        "router_logits": logits,
        "topk_ids": ids,
        "topk_weights": topk_weights,
        "margin": margin,
        "routed_out": routed,
        "shared_out": shared,
        "mixer_out": routed + shared,
        "load": load,
    }


def _wide(x: Any) -> np.ndarray:
    return to_float64(x)


def _tokens(x: Any, token_mask: Any) -> np.ndarray:
    return _wide(x) if token_mask is None else np.where(np.asarray(token_mask)[:, None], _wide(x), 0.0)


def _gap(scores: np.ndarray, kept: int) -> np.ndarray:
    best = -np.sort(-scores, axis=1)
    return best[:, kept - 1] - best[:, kept] if kept < best.shape[1] else np.full(len(best), np.inf)
