"""Blocks of the groups' matrices, in the rows' dtype, whatever format the matrices are kept in."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.formats import Quantised
from pallas_kernels.formats.quantised import moved

# [G, N, K]
Matrices = jax.Array | Quantised


def format_of(rhs: Matrices | jax.ShapeDtypeStruct) -> str:
    """The name of the dtype or of the quantised format."""
    return rhs.format if isinstance(rhs, Quantised) else jnp.dtype(rhs.dtype).name


def element_bytes(rhs: Matrices) -> int:
    """Of an element while it is made ready: quantised ones pass through float32."""
    return 4 if isinstance(rhs, Quantised) else rhs.dtype.itemsize


def blocks(
    rhs: Matrices, group: jax.Array, axis: int, start: jax.Array, count: int, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array | None]:
    """`count` rows (axis 1) or columns (axis 2) of some groups' matrices; of no more than these is anything widened.

    For more than one group their matrices are gathered whole, packed as they are.

    Args:
      rhs: [G, N, K].
      group: [batch] int32.
      start: the first row or column.

    Returns:
      [batch, count, K] or [batch, N, count] in `dtype`, and the scale that sums over K are to be multiplied by:
      [batch, 1, count or 1] float32, or None. Columns have their scale already, because they are summed over N.
    """
    one = _quantised_block if isinstance(rhs, Quantised) else _block

    def of(group: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        return one(rhs, group, axis, start, count, dtype)  # type: ignore[arg-type]

    if group.shape[0] > 1:
        return jax.vmap(of)(group)
    return jax.tree.map(lambda array: array[None], of(group[0]))  # as slices, which are cheaper than a gather


def _block(
    rhs: jax.Array, group: jax.Array, axis: int, start: jax.Array, count: int, dtype: DTypeLike
) -> tuple[jax.Array, None]:
    corner, shape = [group, jnp.zeros_like(group), jnp.zeros_like(group)], [1, *rhs.shape[1:]]
    corner[axis], shape[axis] = jnp.asarray(start, group.dtype), count
    return lax.dynamic_slice(rhs, corner, shape)[0].astype(dtype), None


def _quantised_block(
    rhs: Quantised, group: jax.Array, axis: int, start: jax.Array, count: int, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array | None]:
    # Tied to the group, or else XLA would change all matrices before the loop over tiles begins.
    rhs, group = lax.optimization_barrier((rhs, group))
    matrix = jax.tree.map(
        lambda part: moved(part, lambda part: lax.dynamic_index_in_dim(part, group, keepdims=False)), rhs
    )
    if axis == 1:
        scale = matrix.row_scale((start, count))
        return matrix.operand(dtype, rows=(start, count)), None if scale is None else scale.swapaxes(0, 1)
    block, scale = matrix.operand(jnp.float32, columns=(start, count)), matrix.row_scale()
    return (block if scale is None else block * scale).astype(dtype), None
