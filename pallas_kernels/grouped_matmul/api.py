"""The public function: checks its arguments, chooses an implementation, and ties the three products to one gradient."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes
from jax.typing import DTypeLike

from pallas_kernels.arguments import check_array, is_integer
from pallas_kernels.formats import Quantised
from pallas_kernels.grouped_matmul.matrices import Matrices, format_of
from pallas_kernels.grouped_matmul.mosaic import Mosaic, cut_rows
from pallas_kernels.grouped_matmul.pieces import ALIGNMENT, Pieces
from pallas_kernels.grouped_matmul.reference import Reference
from pallas_kernels.grouped_matmul.tile import Tile, TileConfig
from pallas_kernels.grouped_matmul.xla import Xla
from pallas_kernels.implementation import Choice, Facts, no_hopper_kernels, select, target
from pallas_kernels.varying import vary_like

IMPLEMENTATIONS = (Mosaic(), Xla(), Reference())  # in order of preference
ACTIVATIONS = (None, "relu2")
DTYPES = ("bfloat16", "float16", "float32")


def grouped_matmul(
    lhs: jax.Array,
    rhs: Matrices,
    group_sizes: jax.Array,
    *,
    activation: str | None = None,
    out_dtype: DTypeLike | None = None,
    group_alignment: int = 1,
    implementation: str | None = None,
    tile: Tile | TileConfig | None = None,
    pieces: Pieces | None = None,
) -> jax.Array:
    """Multiplies consecutive groups of rows, each by the transpose of its own matrix.

    Row i of group g becomes `activation(lhs[i] @ rhs[g].T)`: products of operands in lhs's dtype (float32 ones at full
    precision), a float32 sum, the activation in float32, then one rounding. Rows between the groups and after the last
    one are zero, and whatever they hold (NaN too) reaches no other row and no gradient. What the sizes reach beyond M
    is cut off. The bits of a row do not depend on where in its group it stands.

    Quantised matrices are widened block by block too. What of their scales is constant along K multiplies the sums, so
    that products are exact where nothing varies along K, and with NVFP4 (see `Quantised.operand`).

    Differentiable in `lhs` and, unless it is quantised, `rhs`, in reverse mode. The cotangent is rounded once to lhs's
    dtype. The derivative of relu2 is taken from the saved output, 2 * sqrt(out), so it is exact up to the rounding of
    out; give relu2 an `out_dtype` of float32 where lhs is float16, which holds squares of 2^-12 to 255 only.

    Args:
      lhs: [M, K], bfloat16, float16 or float32. M = 0 works.
      rhs: [G, N, K], any of those dtypes, or an Fp8Array or Nvfp4Array; brought to lhs's dtype block by block, never as
        a whole.
      group_sizes: [G] integers, rows of each group; zeros are fine, and negative sizes count as zero.
      activation: None, or "relu2": relu(x)^2.
      out_dtype: one of those dtypes; None means lhs's.
      group_alignment: each group begins at the first multiple of it that the groups before leave free; 1 means that
        they follow each other without gaps.
      implementation: a name in `IMPLEMENTATIONS`, or None for the first one that serves these arguments.
      tile: block sizes, a Tile for "xla" or a TileConfig for "mosaic"; None chooses them from the shapes.
      pieces: what `cut_for_kernels` made of these sizes and M, for calls that share it; None makes it where it is used.

    Returns:
      [M, N] in `out_dtype`.

    Raises:
      ValueError: naming the argument, what was seen and what was wanted.
    """
    _check(lhs, rhs, group_sizes, activation, out_dtype, group_alignment)
    out_dtype, group_alignment = np.dtype(lhs.dtype if out_dtype is None else out_dtype), int(group_alignment)
    if pieces is not None:
        _check_pieces(pieces, lhs.shape[0], rhs.shape[0], group_alignment)
    chosen = choose(
        lhs, rhs, out_dtype=out_dtype, group_alignment=group_alignment, implementation=implementation
    ).implementation
    if tile is not None and not (chosen.tile and isinstance(tile, chosen.tile)):
        takes = f"a {chosen.tile.__name__}" if chosen.tile else "none"
        raise ValueError(f"tile is {tile!r}; implementation {chosen.name!r} takes {takes}, or None to let it choose.")
    # Clipped as what they are: jnp would wrap NumPy's 64 bits to 32. What they add up to is cut off by `group_bounds`.
    sizes = jnp.asarray(group_sizes.clip(0, min(lhs.shape[0], jnp.iinfo(group_sizes.dtype).max))).astype(jnp.int32)
    # Under shard_map all vary alike, so that it is JAX that sums the gradient of a replicated operand over the devices.
    arguments = (lhs, rhs, sizes, pieces)
    lhs, rhs, sizes, pieces = vary_like(arguments, arguments)
    call = _Call(chosen, group_alignment, activation, out_dtype, tile)
    return _product(call, lhs, rhs, sizes, pieces)


def choose(
    lhs: jax.Array | jax.ShapeDtypeStruct,
    rhs: Matrices | jax.ShapeDtypeStruct,
    *,
    out_dtype: DTypeLike | None = None,
    group_alignment: int = 1,
    implementation: str | None = None,
) -> Choice[Any]:
    """Which implementation `grouped_matmul` uses for arrays (or ShapeDtypeStructs) like these, and why.

    Raises:
      ValueError: if `implementation` names none, or one that refuses these arguments.
    """
    (groups, columns, depth), rows = rhs.shape, lhs.shape[0]
    facts = Facts(
        target=target(),
        dtypes={
            "lhs": format_of(lhs),
            "rhs": format_of(rhs),
            "out": np.dtype(lhs.dtype if out_dtype is None else out_dtype).name,
        },
        sizes={"rows": rows, "groups": groups, "columns": columns, "depth": depth, "alignment": group_alignment},
    )
    return select("grouped_matmul", IMPLEMENTATIONS, facts, implementation)


def preferred_alignment() -> int:
    """The `group_alignment` that lets this target's kernels serve; 1 where it has none."""
    return ALIGNMENT if _has_kernels() else 1


def cut_for_kernels(group_sizes: jax.Array, m: int) -> Pieces | None:
    """How this target's kernels cut M = `m` rows in groups of these sizes, at multiples of `preferred_alignment()`.

    Args:
      group_sizes: [G] int32, none negative.

    Returns:
      None where there are no kernels, or nothing to cut.
    """
    return cut_rows(group_sizes, m) if _has_kernels() and m and group_sizes.shape[0] else None


def _has_kernels() -> bool:
    return no_hopper_kernels(target()) is None


@dataclasses.dataclass(frozen=True)
class _Call:
    """The static part of a call."""

    implementation: Any
    alignment: int
    activation: str | None
    out_dtype: np.dtype
    tile: Tile | TileConfig | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(call: _Call, lhs: jax.Array, rhs: Matrices, sizes: jax.Array, pieces: Pieces | None) -> jax.Array:
    with jax.named_scope("grouped_matmul"):
        return call.implementation.forward(
            lhs,
            rhs,
            sizes,
            alignment=call.alignment,
            activation=call.activation,
            out_dtype=call.out_dtype,
            tile=call.tile,
            pieces=pieces,
        )


def _forward(
    call: _Call, lhs: jax.Array, rhs: Matrices, sizes: jax.Array, pieces: Pieces | None
) -> tuple[jax.Array, tuple[Any, ...]]:
    out = _product(call, lhs, rhs, sizes, pieces)
    return out, (lhs, rhs, sizes, pieces, None if call.activation is None else out)


def _backward(call: _Call, residuals: tuple[Any, ...], dout: jax.Array) -> tuple[Any, ...]:
    lhs, rhs, sizes, pieces, out = residuals
    with jax.named_scope("grouped_matmul_dlhs"):
        dlhs = call.implementation.dlhs(
            dout, out, rhs, sizes, alignment=call.alignment, out_dtype=lhs.dtype, tile=call.tile, pieces=pieces
        )
    if isinstance(rhs, Quantised):
        drhs = None  # codes have no gradient
    else:
        with jax.named_scope("grouped_matmul_drhs"):
            drhs = call.implementation.drhs(
                dout, out, lhs, sizes, alignment=call.alignment, out_dtype=rhs.dtype, tile=call.tile, pieces=pieces
            )
    no_gradient = jax.tree.map(lambda array: np.zeros(array.shape, dtypes.float0), (sizes, pieces))
    return dlhs, drhs, *no_gradient


_product.defvjp(_forward, _backward)


def _check(
    lhs: jax.Array,
    rhs: Matrices,
    group_sizes: jax.Array,
    activation: str | None,
    out_dtype: DTypeLike | None,
    group_alignment: int,
) -> None:
    floating = {"lhs": lhs}
    if isinstance(rhs, Quantised):
        rhs.check("rhs")
    else:
        floating["rhs"] = rhs
    for name, array, axes in (("lhs", lhs, "[M, K]"), ("rhs", rhs, "[G, N, K]"), ("group_sizes", group_sizes, "[G]")):
        check_array(name, array, axes)
    for name, dtype in {**{name: array.dtype for name, array in floating.items()}, "out_dtype": out_dtype}.items():
        if dtype is not None and (seen := _name(dtype)) not in DTYPES:
            raise ValueError(f"{name} is {seen}; wanted one of {list(DTYPES)}.")
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(f"group_sizes is {group_sizes.dtype}; wanted integers, such as int32.")
    if lhs.shape[1] != rhs.shape[2]:
        raise ValueError(
            f"lhs has K = {lhs.shape[1]} but rhs has K = {rhs.shape[2]}, from shapes {lhs.shape} and {rhs.shape}; "
            "rhs is [G, N, K], as in the checkpoint: out by in."
        )
    if group_sizes.shape[0] != rhs.shape[0]:
        raise ValueError(f"group_sizes has {group_sizes.shape[0]} sizes but rhs has {rhs.shape[0]} groups.")
    if not is_integer(group_alignment) or group_alignment < 1:
        raise ValueError(f"group_alignment is {group_alignment!r}; wanted a positive integer, such as 1 or 8.")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; wanted one of {list(ACTIVATIONS)}.")


def _name(dtype: Any) -> str:
    try:
        return np.dtype(dtype).name
    except TypeError:  # it is no dtype at all
        return repr(dtype)


def _check_pieces(pieces: Any, m: int, groups: int, alignment: int) -> None:
    if not isinstance(pieces, Pieces):
        raise ValueError(f"pieces is a {type(pieces).__name__}; wanted a Pieces, as `cut_for_kernels` makes, or None.")
    for name, cut_for, seen in (
        ("M", pieces.m, m),
        ("G", pieces.groups, groups),
        ("group_alignment", ALIGNMENT, alignment),
    ):
        if cut_for != seen:
            raise ValueError(
                f"pieces were cut for {name} = {cut_for}, but this call has {name} = {seen}; "
                "give those that `cut_for_kernels` makes of this call's group_sizes and M, or None."
            )
