"""Numbers to codes, and what that costs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.formats import fp8, nvfp4
from pallas_kernels.formats.division import divide
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
    NaN makes the scales that it meets NaN; under given scales it stays NaN in FP8, and is 0 in NVFP4, which has no code
    for it. Without given scales a matrix's, row's or block's largest magnitude becomes the largest code (in NVFP4 the
    global scale is largest / (6 * 448), and a block's scale is its largest magnitude / 6 / global scale, rounded to
    e4m3, at least 2^-9), as NVIDIA's Model Optimizer does it; but where scales are so small that e4m3 is coarse, two
    more blocks get the scale 2^-8: those whose largest number the scale 2^-9 would cut off by a quarter, and those
    whose largest number would be code 4 under the scale 3 * 2^-9. Quantising what was dequantised then gives the same
    bits, from magnitudes of 1e-30 on.

    Args:
      x: bfloat16, float16 or float32.
      format: one of `FORMATS`.
      outer_scale: float32 [*lead], or [*lead, N] for "fp8_channel": the scale that is constant along K, where it is not
        to be taken from x. "fp8_block" has none.
      scales_of: an array of x's shape whose format and scales are used instead. `quantize(q.dequantize(),
        scales_of=q)` is q, bit for bit, -0 included, where every product of codes and scales, but 0, is a normal
        float32: with global scales from 2^-116 to 2^116, and FP8 scales from 2^-117 to 2^119. Others lose codes.

    Returns:
      An `Fp8Array` or `Nvfp4Array`.

    Raises:
      ValueError: if not exactly one of `format` and `scales_of` is given, or `outer_scale` beside the latter, or on a
        dtype or shape that does not fit.
    """
    if (format is None) == (scales_of is None):
        raise ValueError("quantize wants either a format or scales_of, an array whose scales it shall use.")
    if scales_of is not None and outer_scale is not None:
        raise ValueError("quantize was given outer_scale beside scales_of, which has one; leave out one of them.")
    if str(dtype := getattr(x, "dtype", type(x).__name__)) not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"x is {dtype}; wanted an array of bfloat16, float16 or float32.")
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
    inner = None if array.inner is None else array.spread(array.inner).astype(jnp.float32)
    outer = array.row_scale()
    scaled = divide(x, outer if inner is None else inner if outer is None else inner * outer)
    if isinstance(array, Nvfp4Array):
        return dataclasses.replace(array, packed=nvfp4.pack(nvfp4.e2m1_codes(scaled)))
    # A cast alone would make NaN of what is too large.
    values = jnp.clip(scaled, -fp8.LARGEST, fp8.LARGEST).astype(jnp.float8_e4m3fn)
    return dataclasses.replace(array, values=values)


def _nvfp4_scales(blank: Nvfp4Array, x: jax.Array, global_scale: jax.Array) -> Nvfp4Array:
    blocks = jnp.abs(x).reshape(*x.shape[:-1], x.shape[-1] // nvfp4.BLOCK, nvfp4.BLOCK)
    largest, outer = jnp.max(blocks, axis=-1), global_scale[..., None, None]
    # The barrier keeps XLA from making one division of the two.
    scale = divide(lax.optimization_barrier(divide(largest, nvfp4.LARGEST)), outer)
    # Without a barrier XLA would, for a GPU, go on with the scale that is not yet rounded.
    scale = lax.optimization_barrier(jnp.clip(scale, _E4M3_STEP, fp8.LARGEST).astype(jnp.float8_e4m3fn))
    # Where e4m3 is coarse, the largest number may become code 4 instead of 6, and would then ask for another scale.
    wide = scale.astype(jnp.float32)
    code = divide(largest, wide * outer)
    two = ((wide == _E4M3_STEP) & (code >= 8)) | ((wide == 3 * _E4M3_STEP) & (code <= 5))
    scale = jnp.where(two, jnp.float8_e4m3fn(2 * _E4M3_STEP), scale)
    return dataclasses.replace(blank, scale=scale, global_scale=global_scale)


def _largest(x: jax.Array, block: tuple[int | None, int | None], code: float) -> jax.Array:
    """The scale that makes the largest magnitude of each block `code`; where all are zero, 1."""
    size = jnp.abs(x)
    for axis in (-1, -2):
        if (length := block[axis]) is None:
            size = jnp.max(size, axis=axis, keepdims=True, initial=0.0)
        elif length > 1:
            count, at = -(-size.shape[axis] // length), axis % x.ndim
            missing = [(0, 0)] * x.ndim
            missing[axis] = (0, count * length - size.shape[axis])
            size = jnp.pad(size, missing)
            size = jnp.max(size.reshape(*size.shape[:at], count, length, *size.shape[at + 1 :]), axis=at + 1)
    absent = tuple(axis for axis in (-2, -1) if block[axis] is None)
    size = jnp.minimum(jnp.squeeze(size, absent), jnp.finfo(jnp.float32).max)
    return jnp.where(size == 0, 1.0, jnp.maximum(divide(size, code), _SMALLEST))
