"""How exact each way of computing a layer is: each stage by itself, beside the float64 oracle."""

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
from nemotron_moe.dense import linear, rms_norm, shared_expert, squares_dtype
from nemotron_moe.dispatch import combine, gather_rows, make_plan
from nemotron_moe.experts import expert_product
from nemotron_moe.explanation import explain
from nemotron_moe.kernels import implementations, steps_around
from nemotron_moe.layer import moe_block
from nemotron_moe.routing import Routing, route
from nemotron_moe.validate import check_dtype
from nemotron_moe.weights import DTYPES, MoEWeights
from pallas_kernels.formats import to_float64

_TOKENS = 16


def accuracy(
    weights: MoEWeights, config: MoEConfig, *, h: Any = None, dtypes: Sequence[str] = DTYPES
) -> dict[str, dict[str, float]]:
    """Relative errors by way of computing and stage: norm of the difference over norm of the oracle's numbers.

    The ways are the activations' dtypes, each by every implementation that serves the layer here, without and with
    every `quantize_activations` that the weights serve: "bfloat16 xla", "bfloat16 xla fp8". All go to the experts that
    the oracle chooses. The oracle takes the same weights, dequantised in float64, and does not quantise activations, so
    what that costs is in the error.

    Args:
      h: [T, H], the block's input; None draws 16 random tokens. Rounded to bfloat16, so that all ways get the same.
      dtypes: of the activations.

    Returns:
      {way: {stage: error}}; the stages are norm, router_logits, topk_weights, fc1_latent_proj, experts_up,
      experts_down, combine, fc2_latent_proj, shared_expert, those of them that the layer has, and block. A stage's
      error is its own: it is given the oracle's numbers in the dtype that the layer has them in, and the oracle goes on
      from the same. The block's is that of all of them, one after the other.
    """
    for dtype in dtypes:
        check_dtype("dtypes", dtype)
    if h is None:
        h = np.random.default_rng(0).standard_normal((_TOKENS, config.hidden_size))
    h = jnp.asarray(h).astype(jnp.bfloat16)
    whole = reference.moe_block(h, weights, config)
    modes = [None, *filter(functools.partial(_serves, weights), MODES)]
    errors: dict[str, dict[str, float]] = {}
    for dtype in dtypes:
        given, wanted = _oracle(whole, weights, config, dtype)
        given["h"] = h.astype(dtype)
        for implementation in _serving(weights, config, len(h), dtype):
            for mode in modes:
                seen = _stages(weights, config, given, implementation, mode)
                way = " ".join(filter(None, (dtype, implementation, mode)))
                errors[way] = {stage: relative_error(seen[stage], numbers) for stage, numbers in wanted.items()}
    return errors


def _serves(weights: MoEWeights, mode: str) -> bool:
    try:
        check_mode(mode, weights)
    except ValueError:
        return False
    return True


def _serving(weights: MoEWeights, config: MoEConfig, tokens: int, dtype: str) -> list[str]:
    """The implementations that serve here: all that are not passed over but "reference", which is for small arrays."""
    steps = explain(config, tokens=tokens, dtype=dtype, weights=weights).steps
    passed_over = {name for step in steps if step.name.startswith("experts_") for name in step.reasons}
    return [name for name in implementations() if name not in passed_over | {"reference"}]


def _oracle(
    whole: dict[str, np.ndarray], weights: MoEWeights, config: MoEConfig, dtype: str
) -> tuple[dict[str, jax.Array], dict[str, np.ndarray]]:
    """What stages are given, by the stage that gives it, and what they make of it; `whole` is the float64 block."""
    ids, up, down = whole["topk_ids"], weights.experts_up_proj, weights.experts_down_proj
    given, wanted = {"ids": jnp.asarray(ids, jnp.int32)}, {"norm": whole["mixer_in"]}

    def give(stage: str, dtype: Any = dtype) -> np.ndarray:
        given[stage] = jnp.asarray(wanted[stage]).astype(dtype)
        return to_float64(given[stage])

    z = x = give("norm")
    # The reference with experts of width 0: it would widen all of them once more.
    narrow = {"experts_up_proj": np.zeros((up.shape[0], 0, up.shape[2]))}
    narrow["experts_down_proj"] = narrow["experts_up_proj"].swapaxes(1, 2)
    mixer = reference.moe_mixer(x, dataclasses.replace(weights, **narrow), config, ids=ids)
    wanted |= {"router_logits": mixer["router_logits"], "topk_weights": mixer["topk_weights"]}
    if config.moe_latent_size:
        wanted["fc1_latent_proj"] = x @ to_float64(weights.fc1_latent_proj).T
        z = give("fc1_latent_proj")
    wanted["experts_up"] = np.maximum(_by_expert(np.repeat(z[:, None], ids.shape[1], 1), up, ids), 0.0) ** 2
    wanted["experts_down"] = _by_expert(give("experts_up", squares_dtype(dtype)), down, ids)
    wanted["combine"] = (give("topk_weights", jnp.float32)[..., None] * give("experts_down")).sum(1)
    if config.moe_latent_size:
        wanted["fc2_latent_proj"] = give("combine") @ to_float64(weights.fc2_latent_proj).T
    if config.moe_shared_expert_intermediate_size:
        wanted["shared_expert"] = mixer["shared_out"]
    return given, wanted | {"block": whole["block_out"]}


def _by_expert(x: np.ndarray, matrices: Any, ids: np.ndarray) -> np.ndarray:
    """x [T, K, in] times each slot's matrix of [E, out, in], transposed."""
    out = np.zeros((*ids.shape, matrices.shape[1]))
    for expert in np.unique(ids):
        out[ids == expert] = x[ids == expert] @ to_float64(matrices[int(expert)]).T
    return out


@functools.partial(jax.jit, static_argnums=(1, 3, 4))
def _stages(
    weights: MoEWeights, config: MoEConfig, given: dict[str, jax.Array], implementation: str, mode: str | None
) -> dict[str, jax.Array]:
    """What the layer's stages make of `given`, each by itself."""
    h, x = given["h"], given["norm"]
    routing, plan = Routing(ids=given["ids"]), make_plan(given["ids"], config.n_routed_experts)
    multiply = functools.partial(linear, quantize_activations=mode)
    grouped = functools.partial(expert_product, plan=plan, implementation=implementation, quantize_activations=mode)

    def rows(stage: str) -> jax.Array:
        slots = given[stage].reshape(-1, given[stage].shape[-1])
        return slots.at[plan.slot_of_row].get(mode="fill", fill_value=0)

    def product(rows: jax.Array, matrices: Any, **result: Any) -> jax.Array:
        return grouped(rows, matrices, **result)[plan.row_of_slot]

    z = gather_rows(given.get("fc1_latent_proj", x), plan, implementation=steps_around(implementation))
    router = route(x, weights.gate, weights.gate_bias, config, routing=routing)
    squares = squares_dtype(h.dtype)
    seen = {
        "norm": rms_norm(h, weights.norm, config.layer_norm_epsilon),
        "router_logits": router.logits,
        "topk_weights": router.weights,
        "experts_up": product(z, weights.experts_up_proj, activation="relu2", out_dtype=squares),
        "experts_down": product(rows("experts_up"), weights.experts_down_proj, out_dtype=h.dtype),
        "combine": combine(rows("experts_down"), given["topk_weights"], plan),
        "block": moe_block(
            h, weights, config, implementation=implementation, quantize_activations=mode, routing=routing
        ),
    }
    if config.moe_latent_size:
        seen["fc1_latent_proj"] = multiply(x, weights.fc1_latent_proj)
        seen["fc2_latent_proj"] = multiply(given["combine"], weights.fc2_latent_proj)
    if config.moe_shared_expert_intermediate_size:
        up, down = weights.shared_experts_up_proj, weights.shared_experts_down_proj
        seen["shared_expert"] = shared_expert(x, up, down, implementation=implementation, quantize_activations=mode)
    return seen
