"""Numbers to codes, and what that costs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.formats import fp8, nvfp4
from pallas_kernels.formats.fp8 import Fp8Array
from pallas_kernels.formats.nvfp4 import Nvfp4Array
from pallas_kernels.formats.quantised import Quantised

# The class and the static fields of each format.
FORMATS: dict[str, tuple[type[Quantised], dict[str, Any]]] = {
    **{f"fp8_{granularity}": (Fp8Array, {"granularity": granularity}) for granularity in fp8.SHARED},
    "nvfp4": (Nvfp4Array, {}),
}

_SMALLEST = float(np.finfo(np.float32).tiny)  # a float32 scale below it would lose bits
_E4M3_STEP = 2.0**-9  # the smallest positive e4m3 number


def abstract(shape: tuple[int, ...], format: str) -> Quantised:
    """An array of this shape [*lead, N, K] with a jax.ShapeDtypeStruct for each part.

    Args:
      format: one of `FORMATS`.

    Raises:
      ValueError: on an unknown format, or a shape that it does not take.
    """
    if format not in FORMATS:
        raise ValueError(f"format is {format!r}; wanted one of {', '.join(FORMATS)}.")
    kind, static = FORMATS[format]
    return kind.abstract(shape, **static)


def quantize(
    x: jax.Array,
    format: str | None = None,
    *,
    outer_scale: jax.Array | None = None,
    scales_of: Quantised | None = None,
) -> Any:
    """x [*lead, N, K] as codes and scales; each matrix of the leading axes has its own.

    Numbers go to the nearest code, and halfway to the even one; those beyond the largest code go to it, infinity too.
    NaN makes the scales that it meets NaN. Without given scales a matrix's, row's or block's largest magnitude becomes
    the largest code (in NVFP4 the global scale is largest / (6 * 448), and a block's scale is its largest magnitude / 6
    / global scale, rounded to e4m3, at least 2^-9), as NVIDIA's Model Optimizer does it; but a block whose largest
    number would be cut off by a quarter, which only the very smallest scale does, gets the next one. Quantising what
    was dequantised then gives the same bits.

    Args:
      x: bfloat16, float16 or float32.
      format: one of `FORMATS`.
      outer_scale: float32 [*lead], or [*lead, N] for "fp8_channel": the scale that is constant along K, where it is not
        to be taken from x. "fp8_block" has none.
      scales_of: an array of x's shape whose format and scales are used instead. `quantize(q.dequantize(),
        scales_of=q)` is q, bit for bit, -0 included, where no product of code and scale leaves float32's normal range.

    Returns:
      An `Fp8Array` or `Nvfp4Array`.

    Raises:
      ValueError: if not exactly one of `format` and `scales_of` is given, or on a dtype or shape that does not fit.
    """
    if (format is None) == (scales_of is None):
        raise ValueError("quantize wants either a format or scales_of, an array whose scales it shall use.")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x is {x.dtype}; wanted bfloat16, float16 or float32.")
    if scales_of is not None:
        scales_of.check("scales_of")
        if scales_of.shape != x.shape:
            raise ValueError(f"x has shape {x.shape}, but scales_of {scales_of.shape}.")
        return _with_codes(scales_of, x.astype(jnp.float32))
    blank = abstract(x.shape, str(format))
    wide = x.astype(jnp.float32)
    if outer_scale is not None:
        wanted = None if blank.outer is None else getattr(blank, blank.outer).shape
        if outer_scale.shape != wanted or outer_scale.dtype != jnp.float32:
            raise ValueError(
                f"outer_scale is {outer_scale.dtype}{list(outer_scale.shape)}; {format} of shape {x.shape} wants "
                + ("none." if wanted is None else f"float32{list(wanted)}.")
            )
    if isinstance(blank, Nvfp4Array):
        if outer_scale is None:
            outer_scale = _largest(wide, (None, None), nvfp4.LARGEST * fp8.LARGEST)
        return _with_codes(_nvfp4_scales(blank, wide, outer_scale), wide)
    assert isinstance(blank, Fp8Array)
    if outer_scale is None:
        outer_scale = _largest(wide, fp8.SHARED[blank.granularity], fp8.LARGEST)
    return _with_codes(dataclasses.replace(blank, scale=outer_scale), wide)


def _with_codes(array: Any, x: jax.Array) -> Any:
    """`array` with the codes of x under its scales."""
    scaled = x
    # In two steps, as the scales' product may not be a normal number where each of them is.
    if (outer := array.row_scale()) is not None:
        scaled = scaled / outer
    if array.inner is not None:
        scaled = scaled / array.spread(array.inner).astype(jnp.float32)
    if isinstance(array, Nvfp4Array):
        return dataclasses.replace(array, packed=nvfp4.pack(nvfp4.e2m1_codes(scaled)))
    # A cast alone would make NaN of what is too large.
    values = jnp.clip(scaled, -fp8.LARGEST, fp8.LARGEST).astype(jnp.float8_e4m3fn)
    return dataclasses.replace(array, values=values)


def _nvfp4_scales(blank: Nvfp4Array, x: jax.Array, global_scale: jax.Array) -> Nvfp4Array:
    largest = jnp.max(jnp.abs(x).reshape(*x.shape[:-1], -1, nvfp4.BLOCK), axis=-1)
    outer = global_scale[..., None, None]
    rounded = jnp.clip(_divide(largest, nvfp4.LARGEST) / outer, _E4M3_STEP, fp8.LARGEST)
    rounded = rounded.astype(jnp.float8_e4m3fn).astype(jnp.float32)
    rounded = jnp.where(largest >= 8 * rounded * outer, rounded + _E4M3_STEP, rounded)
    return dataclasses.replace(blank, scale=rounded.astype(jnp.float8_e4m3fn), global_scale=global_scale)


def _largest(x: jax.Array, block: tuple[int | None, int | None], code: float) -> jax.Array:
    """The scale that makes the largest magnitude of each block `code`; where all are zero, 1."""
    size = jnp.abs(x)
    for axis in (-1, -2):
        if (length := block[axis]) is None:
            size = jnp.max(size, axis=axis, keepdims=True)
        elif length > 1:
            missing = [(0, 0)] * x.ndim
            missing[axis] = (0, -size.shape[axis] % length)
            axis %= x.ndim
            size = jnp.pad(size, missing)
            size = jnp.max(size.reshape(*size.shape[:axis], -1, length, *size.shape[axis + 1 :]), axis=axis + 1)
    absent = tuple(axis for axis in (-2, -1) if block[axis] is None)
    size = jnp.minimum(jnp.squeeze(size, absent), jnp.finfo(jnp.float32).max)
    return jnp.where(size == 0, 1.0, jnp.maximum(_divide(size, code), _SMALLEST))


def _divide(x: jax.Array, number: float) -> jax.Array:
    """x / number rounded once; XLA by itself multiplies by the reciprocal, and dequantised numbers get other scales."""
    numerator, denominator = lax.optimization_barrier((x, jnp.full(x.shape, number, x.dtype)))
    return numerator / denominator
