"""Proving on the spot that the layer computes what its formulas say."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from nemotron_moe import reference
from nemotron_moe.config import MoEConfig
from nemotron_moe.layer import moe_block, moe_mixer
from nemotron_moe.weights import MoEWeights
from pallas_kernels.formats import quantisation_error

# Allowed norm of the difference over norm of the oracle's result. Rounding activations to bfloat16 at each stage gives
# about 5e-3, float16 an eighth of it; float32 sums of a few thousand terms give about 1e-6.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckReport:
    """The layer against the float64 oracle.

    Attributes:
      errors: relative error by stage: router_logits, topk_weights, mixer_out, block_out.
      tolerance: what each error may be at most.
      same_experts: fraction of tokens that go to the same set of experts as in the oracle.
      unexplained: tokens with another set although the error of their logits is too small to explain it.
      load: tokens by expert.
    """

    errors: dict[str, float]
    tolerance: float
    same_experts: float
    unexplained: int
    load: tuple[int, ...]

    @property
    def passed(self) -> bool:
        # "not <=" also catches NaN.
        return not self.unexplained and all(error <= self.tolerance for error in self.errors.values())


def self_check(
    weights: MoEWeights,
    config: MoEConfig,
    *,
    h: Any = None,
    dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
) -> CheckReport:
    """Runs the jitted layer on this machine and compares logits, routing and outputs with the float64 oracle.

    The oracle multiplies by every expert in float64 on the CPU: seconds for a layer of Nano's size.

    Args:
      weights: the layer's weights.
      config: the layer.
      h: [T, H], the block's input; None draws 64 random tokens.
      dtype: of the activations.
      implementation: as in `moe_block`.

    Raises:
      ValueError: if `dtype` is not one that the layer computes in.
    """
    name = jnp.dtype(dtype).name
    if name not in TOLERANCE:
        raise ValueError(f"dtype is {name}; the layer computes in {', '.join(TOLERANCE)}.")
    if h is None:
        h = np.random.default_rng(0).standard_normal((64, config.hidden_size))
    h = jnp.asarray(h).astype(dtype)

    block_out, aux = _run(moe_block, h, weights, config, implementation)
    oracle = reference.moe_block(h, weights, config)
    replayed = reference.moe_block(h, weights, config, ids=aux.routing.ids)
    x = jnp.asarray(oracle["mixer_in"]).astype(dtype)
    mixer_out, mixer_aux = _run(moe_mixer, x, weights, config, implementation)
    mixer = reference.moe_mixer(x, weights, config, ids=mixer_aux.routing.ids)
    differs = (np.sort(aux.routing.ids, axis=1) != np.sort(oracle["topk_ids"], axis=1)).any(1)
    return CheckReport(
        errors={
            "router_logits": relative_error(aux.routing.logits, oracle["router_logits"]),
            "topk_weights": relative_error(aux.routing.weights, replayed["topk_weights"]),
            "mixer_out": relative_error(mixer_out, mixer["mixer_out"]),
            "block_out": relative_error(block_out, replayed["block_out"]),
        },
        tolerance=TOLERANCE[name],
        same_experts=1.0 - float(differs.mean()) if len(differs) else 1.0,
        unexplained=int((differs & ~_is_near_tie(aux.routing.logits, oracle, weights)).sum()),
        load=tuple(int(count) for count in aux.load),
    )


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def _run(layer: Any, x: jax.Array, weights: MoEWeights, config: MoEConfig, implementation: str | None) -> Any:
    return layer(x, weights, config, implementation=implementation, return_aux=True)


def relative_error(seen: Any, wanted: np.ndarray) -> float:
    """Norm of the difference over norm of `wanted` [..., N, K]."""
    with np.errstate(invalid="ignore"):  # infinities are an error to report, not one to warn of
        return quantisation_error(seen, wanted).relative


def _is_near_tie(logits: jax.Array, oracle: dict[str, np.ndarray], weights: MoEWeights) -> np.ndarray:
    """[T] bool: the gap between two choice scores is within what rounding can move it; never where that is not finite.

    A sigmoid's slope is at most 1/4, and a gap has two ends; adding the bias in float32 rounds each end by at most half
    an eps of its size.
    """
    logit_error = np.abs(np.asarray(logits).astype(np.float64) - oracle["router_logits"]).max(1)
    size = 1.0 + float(np.abs(np.asarray(weights.gate_bias)).max())
    error = 0.5 * logit_error + 2 * float(np.finfo(np.float32).eps) * size
    return np.isfinite(error) & (oracle["margin"] <= error)
