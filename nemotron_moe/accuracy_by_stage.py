"""How exact each way of computing a layer is, stage by stage, beside the float64 oracle."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nemotron_moe import reference
from nemotron_moe.activations import MODES, check_mode
from nemotron_moe.check import relative_error
from nemotron_moe.config import MoEConfig
from nemotron_moe.dense import rms_norm, shared_expert
from nemotron_moe.layer import moe_block, moe_mixer
from nemotron_moe.validate import check_dtype
from nemotron_moe.weights import DTYPES, MoEWeights

_TOKENS = 16
_STAGES = ("mixer_in", "router_logits", "topk_weights", "routed_out", "shared_out", "mixer_out", "block_out")


def accuracy(
    weights: MoEWeights, config: MoEConfig, *, h: Any = None, dtypes: Sequence[str] = DTYPES
) -> dict[str, dict[str, float]]:
    """Relative errors by way of computing and stage: norm of the difference over norm of the oracle's numbers.

    The ways are the activations' dtypes, each by itself and with every `quantize_activations` that the weights serve:
    "bfloat16", "bfloat16 fp8". The oracle takes the same weights, dequantised in float64, and the way's own choice of
    experts, and does not quantise activations, so what that costs is in the error.

    Args:
      h: [T, H], the block's input; None draws 16 random tokens. Rounded to bfloat16, so that all ways get the same.
      dtypes: of the activations.

    Returns:
      {way: {stage: error}}; the stages are mixer_in, router_logits, topk_weights, routed_out and shared_out (in a layer
      with a shared expert), mixer_out and block_out, each with what the way's stages before it gave.
    """
    for dtype in dtypes:
        check_dtype("dtypes", dtype)
    if h is None:
        h = np.random.default_rng(0).standard_normal((_TOKENS, config.hidden_size))
    h = jnp.asarray(h).astype(jnp.bfloat16)
    return {
        " ".join(filter(None, (dtype, mode))): _errors(weights, config, h.astype(dtype), mode)
        for dtype in dtypes
        for mode in (None, *filter(functools.partial(_serves, weights), MODES))
    }


def _serves(weights: MoEWeights, mode: str) -> bool:
    try:
        check_mode(mode, weights)
    except ValueError:
        return False
    return True


def _errors(weights: MoEWeights, config: MoEConfig, h: jax.Array, mode: str | None) -> dict[str, float]:
    seen, ids = _stages(weights, config, h, mode)
    wanted = reference.moe_block(h, weights, config, ids=ids)
    return {name: relative_error(seen[name], wanted[name]) for name in _STAGES if name in seen}


@functools.partial(jax.jit, static_argnums=(1, 3))
def _stages(
    weights: MoEWeights, config: MoEConfig, h: jax.Array, mode: str | None
) -> tuple[dict[str, jax.Array], jax.Array]:
    block_out, aux = moe_block(h, weights, config, quantize_activations=mode, return_aux=True)
    x = rms_norm(h, weights.norm, config.layer_norm_epsilon)
    mixer = functools.partial(moe_mixer, x, routing=aux.routing)
    stages = {"mixer_in": x, "router_logits": aux.routing.logits, "topk_weights": aux.routing.weights}
    if config.moe_shared_expert_intermediate_size:
        up, down = weights.shared_experts_up_proj, weights.shared_experts_down_proj
        alone = dataclasses.replace(weights, shared_experts_up_proj=None, shared_experts_down_proj=None)
        without = dataclasses.replace(config, moe_shared_expert_intermediate_size=None)
        own = mode if mode and _serves(alone, mode) else None  # the shared expert may be all that the mode is for
        stages["routed_out"] = mixer(alone, without, quantize_activations=own)
        stages["shared_out"] = shared_expert(x, up, down, quantize_activations=mode)
    return {
        **stages,
        "mixer_out": mixer(weights, config, quantize_activations=mode),
        "block_out": block_out,
    }, aux.routing.ids
