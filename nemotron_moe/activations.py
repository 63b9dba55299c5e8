"""Activations that are quantised before a product, as hardware with such products wants them; simulated anywhere."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from nemotron_moe.kernels import quantize
from nemotron_moe.weights import MoEWeights
from pallas_kernels.formats import Fp8Array, Nvfp4Array, Quantised

# The kind of weights whose activations a mode quantises, and whether with the scale that the checkpoint gives, or with
# one that each token's largest magnitude sets.
MODES: dict[str, tuple[type[Quantised], bool]] = {
    "fp8": (Fp8Array, False),
    "fp8_static": (Fp8Array, True),
    "nvfp4": (Nvfp4Array, False),
    "nvfp4_static": (Nvfp4Array, True),
}


def check_mode(mode: str | None, weights: MoEWeights) -> None:
    """`mode` is None or one of `MODES` that these weights can serve.

    Raises:
      ValueError: on another name, weights none of which has the format, or, with a static one, lacking input scales.
    """
    if mode is None:
        return
    if mode not in MODES:
        raise ValueError(f"quantize_activations is {mode!r}; wanted None or one of {', '.join(MODES)}.")
    kind, is_static = MODES[mode]
    chosen = {name: leaf for name, leaf in weights.items().items() if isinstance(leaf, kind)}
    if not chosen:
        raise ValueError(
            f"quantize_activations is {mode!r}, which is for weights of type {kind.__name__}; the layer has none."
        )
    missing = [_uncalibrated(name, leaf) for name, leaf in chosen.items() if leaf.input_scale is None]
    if is_static and missing:
        raise ValueError(
            f"quantize_activations is {mode!r}, but there is no input scale for {', '.join(missing)}. "
            f"Use {mode.removesuffix('_static')!r}, which takes each token's own scale."
        )


def _uncalibrated(field: str, leaf: Quantised) -> str:
    """Of a field without input scales, which matrices the checkpoint had none for."""
    experts = leaf.uncalibrated
    if not experts:
        return field
    more = f" and {len(experts) - 5} more" if len(experts) > 5 else ""
    return f"{field} of experts {', '.join(map(str, experts[:5]))}{more} (no token reached them in calibration)"


def quantised_rows(x: jax.Array, matrix: Any, mode: str | None, expert: jax.Array | None = None) -> jax.Array:
    """x [M, K] after quantisation for a product with `matrix`, in x's dtype; x itself where `mode` is not for that.

    Simulated: the numbers that codes and scales stand for, rounded to x's dtype. The gradient is that of x itself, as
    if nothing were rounded (straight through). An FP8 row is code * scale with one scale a row. An NVFP4 row has an
    e4m3 scale for each 16 numbers and a float32 one above them: without that, rows of small numbers would vanish, as
    e4m3 ends at 2^-9.

    Args:
      matrix: [N, K] or [E, N, K], quantised or not.
      mode: None or one of `MODES`.
      expert: [M] int32, of each row, where there are E matrices.
    """
    if mode is None or not isinstance(matrix, MODES[mode][0]):
        return x
    scale = None
    if MODES[mode][1]:
        scale = matrix.input_scale.astype(jnp.float32)
        if isinstance(matrix, Nvfp4Array) and matrix.divides:
            scale = 1.0 / scale
        scale = jnp.broadcast_to(scale, x.shape[:1]) if expert is None else scale[expert]
    rows = lax.stop_gradient(x)
    if isinstance(matrix, Fp8Array):
        rows = quantize(rows, "fp8_channel", outer_scale=scale).dequantize(x.dtype)
    else:  # each row as a matrix of its own
        rows = quantize(rows[:, None], "nvfp4", outer_scale=scale).dequantize(x.dtype)[:, 0]
    return _straight_through(x, rows)


@jax.custom_vjp
def _straight_through(x: jax.Array, rows: jax.Array) -> jax.Array:
    return rows


# Codes have no gradient of their own, and a cast's would round the cotangent to e4m3.
_straight_through.defvjp(lambda x, rows: (rows, None), lambda _, d_rows: (d_rows, jnp.zeros_like(d_rows)))
