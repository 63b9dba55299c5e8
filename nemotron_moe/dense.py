"""The layer's dense pieces: RMS norm, linear projections, the shared expert."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from nemotron_moe.activations import quantised_rows
from nemotron_moe.kernels import target
from nemotron_moe.validate import check_activations, check_shape
from pallas_kernels.formats import Quantised


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    """x [..., H] / sqrt(mean(x^2) + epsilon) * weight [H]; float32 inside, rounded once to x's dtype.

    Raises:
      ValueError: on shapes or dtypes that do not fit.
    """
    check_activations("x", x, x.shape[-1] if jnp.ndim(x) else 0)
    check_shape("weight", weight, x.shape[-1:])
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + epsilon)
    return (wide * lax.expand_dims(weight.astype(jnp.float32), range(x.ndim - 1))).astype(x.dtype)


def linear(
    x: jax.Array,
    weight: jax.Array | Quantised,
    *,
    activation: str | None = None,
    out_dtype: DTypeLike | None = None,
    quantize_activations: str | None = None,
) -> jax.Array:
    """x [..., in] times weight [out, in] transposed -> [..., out] in `out_dtype` (None: x's).

    The weight is brought to x's dtype, as a whole where it is quantised; the sum is float32 (float32 operands multiply
    at the highest precision), and so are a quantised weight's scale, where it is constant along `in`, and the
    activation: None or "relu2", max(v, 0)^2. `quantize_activations` is that of `moe_block`.

    Raises:
      ValueError: on shapes or dtypes that do not fit, or an unknown activation.
    """
    shape = weight.shape if isinstance(weight, Quantised) else jnp.shape(weight)
    if len(shape) != 2:
        raise ValueError(f"weight has shape {shape}; wanted [out, in].")
    check_activations("x", x, weight.shape[-1])
    scale = None
    if isinstance(weight, Quantised):
        weight.check("weight")
        x = quantised_rows(x.reshape(-1, x.shape[-1]), weight, quantize_activations).reshape(x.shape)
        scale, weight = weight.row_scale(), weight.operand(x.dtype)
    out_dtype = out_dtype or x.dtype
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    # A GPU rounds its float32 sum as it stores it, which saves a pass over memory; a CPU's sum would be narrow itself.
    is_plain = scale is None and activation is None and out_dtype == x.dtype
    stored = x.dtype if is_plain and target().platform == "gpu" else jnp.float32
    out = jnp.einsum("...i,oi->...o", x, weight.astype(x.dtype), precision=precision, preferred_element_type=stored)
    if scale is not None:
        out = out * lax.expand_dims(scale[:, 0], range(out.ndim - 1))
    if activation == "relu2":
        out = jnp.square(jax.nn.relu(out))
    elif activation is not None:
        raise ValueError(f'activation is {activation!r}; wanted None or "relu2".')
    return out.astype(out_dtype)


def squares_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The dtype that keeps relu^2 of values of `dtype`: float32 for float16, where 256^2 is infinite."""
    return jnp.dtype(jnp.float32 if dtype == jnp.float16 else dtype)


def shared_expert(
    x: jax.Array,
    up_proj: jax.Array | Quantised,
    down_proj: jax.Array | Quantised,
    *,
    quantize_activations: str | None = None,
) -> jax.Array:
    """relu(x @ up^T)^2 @ down^T: x [..., H], up_proj [S, H], down_proj [H, S] -> [..., H] in x's dtype.

    The projections may be quantised. In float16 the squares are kept in float32, and so is the second product.

    Raises:
      ValueError: on shapes or dtypes that do not fit.
    """
    check_shape("down_proj", down_proj, (x.shape[-1], up_proj.shape[0]))
    multiply = functools.partial(linear, quantize_activations=quantize_activations)
    inner = multiply(x, up_proj, activation="relu2", out_dtype=squares_dtype(x.dtype))
    return multiply(inner, down_proj, out_dtype=x.dtype)
