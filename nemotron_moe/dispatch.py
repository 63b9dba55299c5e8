"""Moving tokens to their experts and back: one plan, a gather, and a weighted sum in a fixed order.

Neither direction adds by scatter, forward or backward, so results have the same bits on every run.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from nemotron_moe.kernels import (
    Pieces,
    count_up_to,
    cut_for_kernels,
    group_places,
    row_alignment,
    scatter_rows,
    sums_before,
)
from nemotron_moe.validate import check_float32, check_ids, check_shape

# The combine is unrolled up to this many experts per token, so that XLA makes one kernel of it.
_UNROLL = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The (token, slot) pairs sorted by expert, in M rows: T * K and what the alignment adds.

    Attributes:
      group_sizes: [E] int32, rows of each expert.
      slot_of_row: [M] int32, the row's place in the flattened [T, K], or T * K for a row that no slot has.
      row_of_slot: [T, K] int32, the inverse. Slots without an expert have rows after the last group.
      pieces: how this machine's kernels cut the rows; None where there are none for this alignment.
      alignment: each expert's rows begin at the first multiple of it that the experts before leave free.
    """

    group_sizes: jax.Array
    slot_of_row: jax.Array
    row_of_slot: jax.Array
    pieces: Pieces | None = None
    alignment: int = dataclasses.field(default=1, metadata={"static": True})

    def token_of_row(self) -> jax.Array:
        """[M] int32, T for a row that no slot has."""
        return self.slot_of_row // max(self.row_of_slot.shape[1], 1)

    def expert_of_row(self) -> jax.Array:
        """[M] int32; of a row that no expert has, any."""
        sizes = _round_up(self.group_sizes, self.alignment)
        row = jnp.arange(self.slot_of_row.shape[0], dtype=jnp.int32)
        return count_up_to(sums_before(sizes) + sizes, row).clip(0, max(self.group_sizes.shape[0] - 1, 0))

    def is_routed(self) -> jax.Array:
        """[T, K] bool: the slot has an expert."""
        return self.row_of_slot < _round_up(self.group_sizes, self.alignment).sum(dtype=jnp.int32)


def make_plan(ids: jax.Array, n_experts: int, *, alignment: int | None = None) -> Plan:
    """Sorts the slots of `ids` [T, K] by expert, tokens in order within one; ids outside [0, n_experts) go last.

    Args:
      ids: [T, K] integers.
      n_experts: E.
      alignment: of each expert's first row; None means what this machine's kernels want.

    Raises:
      ValueError: if `ids` is not a matrix of integers, or `alignment` not a positive integer.
    """
    if jnp.ndim(ids) != 2:
        raise ValueError(f"ids has shape {jnp.shape(ids)}; wanted [tokens, experts per token].")
    check_ids("ids", ids, ids.shape)
    alignment = row_alignment() if alignment is None else alignment
    if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"alignment is {alignment!r}; wanted a positive integer, such as 1 or 8.")
    expert = known_ids(ids, n_experts).reshape(-1)
    place, sizes = group_places(expert, n_experts)
    starts = sums_before(_round_up(jnp.append(sizes, jnp.int32(0)), alignment))
    row_of_slot = starts[expert] + place
    # A group is short of the next multiple by `alignment` - 1 at most.
    rows = _round_up(expert.size + (alignment - 1) * min(n_experts, expert.size), alignment)
    slot_of_row = jnp.full(rows, expert.size, jnp.int32)
    slot_of_row = slot_of_row.at[row_of_slot].set(
        jnp.arange(expert.size, dtype=jnp.int32), unique_indices=True, mode="promise_in_bounds"
    )
    return Plan(
        group_sizes=sizes,
        slot_of_row=slot_of_row,
        row_of_slot=row_of_slot.reshape(ids.shape),
        pieces=cut_for_kernels(sizes, rows) if alignment == row_alignment() else None,
        alignment=alignment,
    )


def _round_up[Size: (int, jax.Array)](size: Size, multiple: int) -> Size:
    return -(-size // multiple) * multiple


def known_ids(ids: jax.Array, n_experts: int) -> jax.Array:
    """ids of any integer dtype as int32, those outside [0, n_experts) as n_experts."""
    if ids.dtype.itemsize > 4:
        ids = ids.clip(max(-1, jnp.iinfo(ids.dtype).min), n_experts)  # its own: jnp would wrap NumPy's to 32 bits
    ids = jnp.asarray(ids).astype(jnp.int32)
    return jnp.where((ids >= 0) & (ids < n_experts), ids, n_experts)


def gather_rows(x: jax.Array, plan: Plan, *, implementation: str | None = None) -> jax.Array:
    """Each token's row once for each of its slots, in the plan's order: [T, D] -> [M, D].

    Rows that no slot has hold anything.

    Raises:
      ValueError: if x does not have the plan's tokens.
    """
    check_shape("x", x, (plan.row_of_slot.shape[0], *jnp.shape(x)[1:2]))
    return _gather_rows(jnp.asarray(x), plan, implementation)


def combine(y: jax.Array, weights: jax.Array, plan: Plan) -> jax.Array:
    """Each token's weighted sum of its experts' rows: y [M, D], weights [T, K] float32 -> [T, D] in y's dtype.

    The sum is float32, in slot order, rounded once. Slots without an expert are left out, whatever they hold.

    Raises:
      ValueError: if y does not have the plan's rows, or weights not its slots.
    """
    check_shape("y", y, (plan.slot_of_row.shape[0], *jnp.shape(y)[1:2]))
    check_float32("weights", weights, plan.row_of_slot.shape)
    return _combine(jnp.asarray(y), jnp.asarray(weights), plan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _gather_rows(x: jax.Array, plan: Plan, implementation: str | None) -> jax.Array:
    return scatter_rows(x, plan.row_of_slot, plan.slot_of_row.shape[0], implementation=implementation)


@jax.custom_vjp
def _combine(y: jax.Array, weights: jax.Array, plan: Plan) -> jax.Array:
    return _sum_slots(y, weights, plan).astype(y.dtype)


def _sum_slots(y: jax.Array, weights: jax.Array | None, plan: Plan) -> jax.Array:
    tokens, slots = plan.row_of_slot.shape
    # Slots in front, so that XLA takes all of them in one kernel, which it does not along the last axis.
    routed = plan.is_routed()
    if weights is not None:
        weights = jnp.where(routed, weights, 0.0)  # of plain arguments XLA would make a kernel for each slot's slice
    turned = jax.tree.map(jnp.transpose, (plan.row_of_slot, routed, weights))

    def one(slot: int | jax.Array) -> jax.Array:
        row, routed, weight = jax.tree.map(
            lambda array: lax.dynamic_index_in_dim(array, slot, axis=0, keepdims=False), turned
        )
        rows = y.at[row].get(mode="promise_in_bounds").astype(jnp.float32)
        if weight is not None:
            rows = weight[:, None] * rows
        return jnp.where(routed[:, None], rows, 0.0)

    if not tokens:
        return y.astype(jnp.float32)
    unroll = max(1, min(slots - 1, _UNROLL))
    return lax.fori_loop(1, slots, lambda slot, total: total + one(slot), one(0), unroll=unroll)


def _gather_rows_forward(x: jax.Array, plan: Plan, implementation: str | None) -> tuple[jax.Array, Plan]:
    return _gather_rows(x, plan, implementation), plan


def _gather_rows_backward(implementation: str | None, plan: Plan, d_rows: jax.Array) -> tuple[jax.Array, None]:
    return _sum_slots(d_rows, None, plan).astype(d_rows.dtype), None


def _combine_forward(y: jax.Array, weights: jax.Array, plan: Plan) -> tuple[jax.Array, tuple]:
    return _combine(y, weights, plan), (y, weights, plan)


def _combine_backward(residuals: tuple, d_out: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    y, weights, plan = residuals
    routed = plan.is_routed()
    d_out = d_out.astype(jnp.float32)
    # Rows that no slot has are out of range.
    weight_of_row = jnp.where(routed, weights, 0.0).reshape(-1).at[plan.slot_of_row].get(mode="fill", fill_value=0.0)
    d_y = weight_of_row[:, None] * d_out.at[plan.token_of_row()].get(mode="fill", fill_value=0.0)
    rows = y.at[plan.row_of_slot].get(mode="promise_in_bounds").astype(jnp.float32)
    d_weights = jnp.where(routed, (d_out[:, None, :] * rows).sum(-1), 0.0)
    return d_y.astype(y.dtype), d_weights, None


_gather_rows.defvjp(_gather_rows_forward, _gather_rows_backward)
_combine.defvjp(_combine_forward, _combine_backward)
