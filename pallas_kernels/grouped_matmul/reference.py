"""What `grouped_matmul` means, in plain jnp: every group's product with every row, then a choice. Small arrays only."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

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
        rhs: jax.Array,
        group_sizes: jax.Array,
        *,
        activation: str | None,
        out_dtype: DTypeLike,
        tile: Tile | None,
    ) -> jax.Array:
        every = _einsum("mk,gnk->mgn", lhs, rhs.astype(lhs.dtype))
        acc = jnp.sum(jnp.where(membership(lhs, group_sizes)[:, :, None], every, 0.0), axis=1)
        return activate(acc, activation).astype(out_dtype)

    def dlhs(
        self,
        dout: jax.Array,
        out: jax.Array | None,
        rhs: jax.Array,
        group_sizes: jax.Array,
        *,
        out_dtype: DTypeLike,
        tile: Tile | None,
    ) -> jax.Array:
        every = _einsum("mn,gnk->mgk", cotangent(dout, out, out_dtype), rhs.astype(out_dtype))
        return jnp.sum(jnp.where(membership(dout, group_sizes)[:, :, None], every, 0.0), axis=1).astype(out_dtype)

    def drhs(
        self,
        dout: jax.Array,
        out: jax.Array | None,
        lhs: jax.Array,
        group_sizes: jax.Array,
        *,
        out_dtype: DTypeLike,
        tile: Tile | None,
    ) -> jax.Array:
        member = membership(lhs, group_sizes).T[:, :, None]
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


def membership(rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """[M, G] bool: row i lies in group g."""
    ends = jnp.cumsum(group_sizes)
    row = lax.iota(jnp.int32, rows.shape[0])[:, None]
    return (row >= (ends - group_sizes)[None]) & (row < ends[None])


def _einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
