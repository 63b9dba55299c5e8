"""What `grouped_matmul` means, in plain jnp: every group's product with every row, then a choice. Small arrays only."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.formats import Quantised
from pallas_kernels.grouped_matmul.matrices import Matrices
from pallas_kernels.grouped_matmul.pieces import Pieces
from pallas_kernels.grouped_matmul.tile import Tile
from pallas_kernels.implementation import Facts


class Reference:
    """The dense implementation: G times the work and memory that is needed."""

    name = "reference"
    tile = None

    def refuses(self, facts: Facts) -> str | None:
        return None

    def forward(
        self,
        lhs: jax.Array,
        rhs: Matrices,
        group_sizes: jax.Array,
        *,
        alignment: int,
        activation: str | None,
        out_dtype: DTypeLike,
        tile: Tile | None,
        pieces: Pieces | None,
    ) -> jax.Array:
        every = _einsum(
            "mk,gnk->mgn", lhs, rhs.operand(lhs.dtype) if isinstance(rhs, Quantised) else rhs.astype(lhs.dtype)
        )
        if isinstance(rhs, Quantised) and (scale := rhs.row_scale()) is not None:
            every = every * scale[None, :, :, 0]
        member = membership(lhs.shape[0], group_sizes, alignment)[:, :, None]
        acc = jnp.sum(jnp.where(member, every, 0.0), axis=1)
        return activate(acc, activation).astype(out_dtype)

    def dlhs(
        self,
        dout: jax.Array,
        out: jax.Array | None,
        rhs: Matrices,
        group_sizes: jax.Array,
        *,
        alignment: int,
        out_dtype: DTypeLike,
        tile: Tile | None,
        pieces: Pieces | None,
    ) -> jax.Array:
        matrices = rhs.dequantize(out_dtype) if isinstance(rhs, Quantised) else rhs.astype(out_dtype)
        every = _einsum("mn,gnk->mgk", cotangent(dout, out, out_dtype), matrices)
        member = membership(dout.shape[0], group_sizes, alignment)[:, :, None]
        return jnp.sum(jnp.where(member, every, 0.0), axis=1).astype(out_dtype)

    def drhs(
        self,
        dout: jax.Array,
        out: jax.Array | None,
        lhs: jax.Array,
        group_sizes: jax.Array,
        *,
        alignment: int,
        out_dtype: DTypeLike,
        tile: Tile | None,
        pieces: Pieces | None,
    ) -> jax.Array:
        member = membership(lhs.shape[0], group_sizes, alignment).T[:, :, None]
        mine = [jnp.where(member, x[None], jnp.zeros((), x.dtype)) for x in (cotangent(dout, out, lhs.dtype), lhs)]
        return _einsum("gmn,gmk->gnk", *mine).astype(out_dtype)


def activate(acc: jax.Array, activation: str | None) -> jax.Array:
    """The activation of a float32 accumulator, in float32."""
    return acc if activation is None else jnp.square(jax.nn.relu(acc))


def cotangent(dout: jax.Array, out: jax.Array | None, dtype: DTypeLike) -> jax.Array:
    """The accumulator's cotangent, rounded once; through relu2, whose slope is 2 sqrt(out), if its output is given."""
    if out is not None:
        is_positive = out > 0  # so that the slope's own slope is finite where out is 0
        root = jnp.sqrt(jnp.where(is_positive, out, jnp.ones((), out.dtype)).astype(jnp.float32))
        dout = dout.astype(jnp.float32) * jnp.where(is_positive, 2 * root, 0.0)
    return dout.astype(dtype)


def group_bounds(group_sizes: jax.Array, alignment: int, m: int) -> tuple[jax.Array, jax.Array]:
    """First row of each group and the row after its last, in a layout of m rows that cuts off what it cannot hold.

    Args:
      group_sizes: [G] int32, each from 0 to m.
      alignment: each group begins at the first multiple of it that the groups before leave free.

    Returns:
      Two [G] int32 arrays, at most m.
    """
    alignment = min(alignment, max(m, 1))  # a larger one, too, leaves room for one group only
    sizes = group_sizes.astype(jnp.uint32)
    padded = (sizes + (alignment - 1)) // alignment * alignment
    # The sum may wrap, but not before it has passed m, as m plus one group still fits 32 bits; cummax remembers that.
    free = lax.cummax(jnp.minimum(jnp.cumsum(padded, dtype=jnp.uint32), m)).astype(jnp.int32)
    starts = jnp.concatenate([jnp.zeros_like(free, shape=(1,)), free])[:-1]
    return starts, starts + jnp.minimum(group_sizes, m - starts)


def membership(m: int, group_sizes: jax.Array, alignment: int) -> jax.Array:
    """[M, G] bool: row i lies in group g."""
    starts, ends = group_bounds(group_sizes, alignment, m)
    row = lax.iota(jnp.int32, m)[:, None]
    return (row >= starts[None]) & (row < ends[None])


def _einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
