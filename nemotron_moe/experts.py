"""The routed experts: tokens to experts, up, relu^2, down, and back."""

import functools

import jax
from jax.typing import DTypeLike

from nemotron_moe.activations import quantised_rows
from nemotron_moe.dense import squares_dtype
from nemotron_moe.dispatch import Plan, combine, gather_rows
from nemotron_moe.kernels import grouped_matmul, steps_around
from nemotron_moe.validate import check_activations, check_shape
from pallas_kernels.formats import Quantised


def routed_experts(
    x: jax.Array,
    weights: jax.Array,
    plan: Plan,
    up_proj: jax.Array | Quantised,
    down_proj: jax.Array | Quantised,
    *,
    implementation: str | None = None,
    quantize_activations: str | None = None,
) -> jax.Array:
    """sum over k of weights[:, k] * (relu(x @ up^T)^2 @ down^T) of each token's k-th expert.

    Args:
      x: [T, D].
      weights: [T, K] float32.
      plan: `make_plan(ids, E)` of the chosen experts ids [T, K].
      up_proj: [E, I, D], quantised or not.
      down_proj: [E, D, I], likewise.
      implementation: of the grouped products; None picks one.
      quantize_activations: that of `moe_block`.

    Returns:
      [T, D] in x's dtype.

    Raises:
      ValueError: on shapes or dtypes that do not fit.
    """
    check_activations("x", x, up_proj.shape[-1])
    check_shape("up_proj", up_proj, (plan.group_sizes.shape[0], *up_proj.shape[1:]))
    check_shape("down_proj", down_proj, (up_proj.shape[0], up_proj.shape[2], up_proj.shape[1]))
    with jax.named_scope("dispatch"):
        rows = gather_rows(x, plan, implementation=steps_around(implementation))
    multiply = functools.partial(
        expert_product, plan=plan, implementation=implementation, quantize_activations=quantize_activations
    )
    with jax.named_scope("experts_up"):
        inner = multiply(rows, up_proj, activation="relu2", out_dtype=squares_dtype(x.dtype))
    with jax.named_scope("experts_down"):
        out = multiply(inner, down_proj, out_dtype=x.dtype)
    with jax.named_scope("combine"):
        return combine(out, weights, plan)


def expert_product(
    rows: jax.Array,
    matrices: jax.Array | Quantised,
    plan: Plan,
    *,
    activation: str | None = None,
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
    quantize_activations: str | None = None,
) -> jax.Array:
    """Each row times the matrix of its expert, transposed: rows [M, K] in the plan's order, [E, N, K] -> [M, N].

    Rows that no expert has give 0, whatever they hold. `activation` and `out_dtype` are those of `grouped_matmul`, the
    others those of `moe_block`.

    Raises:
      ValueError: as `grouped_matmul`.
    """
    if quantize_activations is not None:
        rows = quantised_rows(rows, matrices, quantize_activations, plan.expert_of_row())
    return grouped_matmul(
        rows,
        matrices,
        plan.group_sizes,
        group_alignment=plan.alignment,
        pieces=plan.pieces,
        activation=activation,
        out_dtype=out_dtype,
        implementation=implementation,
    )
