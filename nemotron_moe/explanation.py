"""Which implementation each step of the layer would run, and why."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from nemotron_moe.config import MoEConfig
from nemotron_moe.dense import squares_dtype
from nemotron_moe.validate import check_dtype, check_weights
from nemotron_moe.weights import MoEWeights, abstract_weights
from pallas_kernels.grouped_matmul import choose
from pallas_kernels.implementation import target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One step of the layer.

    Attributes:
      name: the step, as in the layer's named scopes.
      shapes: what it multiplies.
      implementation: what runs it.
      reasons: why each implementation that was preferred to it does not, by name.
    """

    name: str
    shapes: str
    implementation: str
    reasons: dict[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """The steps of one call, on the device that jax uses by default."""

    device: str
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        lines = [f"on {self.device}"]
        for step in self.steps:
            lines.append(f"  {step.name:16} {step.implementation:10} {step.shapes}")
            lines += [f"  {'':16} not {name}: {reason}" for name, reason in step.reasons.items()]
        return "\n".join(lines)


def explain(
    config: MoEConfig,
    *,
    tokens: int,
    dtype: DTypeLike = jnp.bfloat16,
    weights: MoEWeights | None = None,
    implementation: str | None = None,
) -> Explanation:
    """What `moe_block` would run for these arguments here; nothing is computed.

    Args:
      config: the layer.
      tokens: number of tokens T.
      dtype: of the activations.
      weights: the layer's weights or abstract weights, for their dtypes; None means bfloat16.
      implementation: as in `moe_block`.

    Raises:
      ValueError: if `implementation` cannot serve these arguments, or the layer does not compute in `dtype`.
    """
    check_dtype("the activations' array", dtype)
    if not isinstance(tokens, int) or tokens < 0:
        raise ValueError(f"tokens is {tokens!r}; wanted a number of tokens, 0 or more.")
    weights = weights or abstract_weights(config)
    check_weights(weights, config)
    rows = tokens * config.num_experts_per_tok
    steps = []
    for name, matrix, in_dtype in (
        ("experts_up", weights.experts_up_proj, dtype),
        ("experts_down", weights.experts_down_proj, squares_dtype(dtype)),
    ):
        lhs = jax.ShapeDtypeStruct((rows, matrix.shape[2]), in_dtype)
        choice = choose(lhs, matrix, implementation=implementation)
        steps.append(
            Step(
                name=name,
                shapes=f"{lhs.dtype}{list(lhs.shape)} x {matrix.dtype}{list(matrix.shape)}",
                implementation=choice.implementation.name,
                reasons=dict(choice.passed_over),
            )
        )
    return Explanation(device=target().kind, steps=tuple(steps))
