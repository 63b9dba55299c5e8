"""The layer in float64 NumPy, dense and slow, to be checked against the formulas by reading it."""

from typing import Any

import numpy as np

from nemotron_moe.config import MoEConfig
from nemotron_moe.weights import MoEWeights


def moe_block(
    h: Any, weights: MoEWeights, config: MoEConfig, *, token_mask: Any = None, ids: Any = None
) -> dict[str, np.ndarray]:
    """All intermediate results of one layer, on T tokens.

    Args:
      h: [T, H], of any real dtype.
      weights: the layer's weights, of any real dtype.
      config: the layer.
      token_mask: [T] bool; tokens that are False give 0 and are not routed.
      ids: [T, K], experts to use instead of the router's choice; outside [0, E) they contribute nothing.

    Returns:
      float64 arrays by the name of the stage: mixer_in [T, H], router_logits [T, E], topk_ids [T, K] (integers, best
      first), topk_weights [T, K], routed_out [T, H], shared_out [T, H], mixer_out [T, H], block_out [T, H], load [E].
    """
    w = {name: np.asarray(leaf, np.float64) for name, leaf in weights.items().items()}
    h = np.asarray(h, np.float64)
    tokens, experts, top_k = h.shape[0], config.n_routed_experts, config.num_experts_per_tok
    if token_mask is not None:
        h = np.where(np.asarray(token_mask)[:, None], h, 0.0)

    n = h / np.sqrt(np.mean(h**2, axis=1, keepdims=True) + config.layer_norm_epsilon) * w["norm"]

    logits = n @ w["gate"].T
    scores = np.exp(-np.logaddexp(0.0, -logits))
    if ids is None:
        choice = scores + w["gate_bias"]
        if config.n_group > 1:
            grouped = choice.reshape(tokens, config.n_group, -1)
            group_score = np.sort(grouped, axis=2)[:, :, -2:].sum(2)
            dropped = np.argsort(-group_score, axis=1, kind="stable")[:, config.topk_group :]
            np.put_along_axis(grouped, dropped[:, :, None], -np.inf, axis=1)
        ids = np.argsort(-choice, axis=1, kind="stable")[:, :top_k]
    ids = np.asarray(ids).astype(np.int64)
    if token_mask is not None:
        ids = np.where(np.asarray(token_mask)[:, None], ids, -1)
    valid = (ids >= 0) & (ids < experts)
    chosen = np.where(valid, np.take_along_axis(scores, np.where(valid, ids, 0), axis=1), 0.0)
    if config.norm_topk_prob:
        chosen = chosen / (chosen.sum(1, keepdims=True) + 1e-20)
    topk_weights = chosen * config.routed_scaling_factor

    z = n @ w["fc1_latent_proj"].T if config.moe_latent_size else n
    routed, load = np.zeros_like(z), np.zeros(experts)
    for expert in range(experts):
        token, slot = np.nonzero(ids == expert)
        load[expert] = len(token)
        y = np.maximum(z[token] @ w["experts_up_proj"][expert].T, 0.0) ** 2 @ w["experts_down_proj"][expert].T
        routed[token] += topk_weights[token, slot][:, None] * y
    if config.moe_latent_size:
        routed = routed @ w["fc2_latent_proj"].T

    shared = np.zeros_like(h)
    if config.moe_shared_expert_intermediate_size:
        shared = np.maximum(n @ w["shared_experts_up_proj"].T, 0.0) ** 2 @ w["shared_experts_down_proj"].T

    return {
        "mixer_in": n,
        "router_logits": logits,
        "topk_ids": ids,
        "topk_weights": topk_weights,
        "routed_out": routed,
        "shared_out": shared,
        "mixer_out": routed + shared,
        "block_out": h + routed + shared,
        "load": load,
    }
