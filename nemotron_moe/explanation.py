"""Which implementation each step of the layer would run, and why."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from nemotron_moe.config import MoEConfig
from nemotron_moe.dense import squares_dtype, why_no_kernel
from nemotron_moe.dispatch import make_plan
from nemotron_moe.kernels import steps_around
from nemotron_moe.validate import check_dtype, check_weights
from nemotron_moe.weights import MoEWeights, abstract_weights
from pallas_kernels import group_places, grouped_matmul, scatter_rows, top_k
from pallas_kernels.implementation import Choice, target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One step of the layer.

    Attributes:
      name: the step, as in the layer's named scopes.
      operation: what it computes with. A kernel of ours bears this name, with its sizes, in a compiled program.
      shapes: of its operands.
      implementation: what runs it.
      reasons: why each implementation that was preferred to it does not, by name.
    """

    name: str
    operation: str
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
            lines.append(f"  {step.name:14}{step.operation:16}{step.implementation:10} {step.shapes}")
            lines += [f"  {'':14}not {name}: {reason}" for name, reason in step.reasons.items()]
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
    around = steps_around(implementation)
    scores = _like((tokens, config.n_routed_experts), jnp.float32)
    x = _like((tokens, config.expert_width), dtype)
    ids = _like((tokens, config.num_experts_per_tok), jnp.int32)
    plan = jax.eval_shape(lambda ids: make_plan(ids, config.n_routed_experts), ids)
    rows = plan.slot_of_row.shape[0]
    choice = top_k.choose(scores, ids.shape[1], implementation=around)
    steps = [_step("router", "top_k", choice, scores)]
    expert = _like((tokens * ids.shape[1],), jnp.int32)
    steps.append(_step("plan", "group_places", group_places.choose(expert, config.n_routed_experts), expert))
    choice = scatter_rows.choose(x, ids, rows, implementation=around)
    steps.append(_step("dispatch", "scatter_rows", choice, x, plan.row_of_slot))
    for name, matrix, in_dtype in (
        ("experts_up", weights.experts_up_proj, dtype),
        ("experts_down", weights.experts_down_proj, squares_dtype(dtype)),
    ):
        lhs = _like((rows, matrix.shape[2]), in_dtype)
        out_dtype = squares_dtype(dtype) if name == "experts_up" else dtype
        choice = grouped_matmul.choose(
            lhs, matrix, out_dtype=out_dtype, group_alignment=plan.alignment, implementation=implementation
        )
        steps.append(_step(name, "grouped_matmul", choice, lhs, matrix))
    if config.moe_shared_expert_intermediate_size:
        steps.append(_shared_expert(tokens, dtype, weights.shared_experts_up_proj, implementation))
    return Explanation(device=target().kind, steps=tuple(steps))


def _shared_expert(tokens: int, dtype: DTypeLike, matrix: Any, implementation: str | None) -> Step:
    """Of its up product; the other dense products are always XLA's."""
    x = _like((tokens, matrix.shape[1]), dtype)
    reason = why_no_kernel(x, matrix, out_dtype=squares_dtype(dtype), implementation=implementation)
    return Step(
        name="shared_expert",
        operation="grouped_matmul",
        shapes=_shapes(x, matrix),
        implementation="mosaic" if reason is None else "xla",
        reasons={} if reason is None else {"mosaic": reason},
    )


def _like(shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _step(name: str, operation: str, choice: Choice[Any], *arrays: jax.ShapeDtypeStruct) -> Step:
    return Step(
        name=name,
        operation=operation,
        shapes=_shapes(*arrays),
        implementation=choice.implementation.name,
        reasons=dict(choice.passed_over),
    )


def _shapes(*arrays: Any) -> str:
    return " x ".join(f"{grouped_matmul.format_of(array)}{list(array.shape)}" for array in arrays)
