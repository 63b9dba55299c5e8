"""The layer's dense pieces: RMS norm, linear projections, the shared expert."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from nemotron_moe.validate import check_activations, check_shape


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
    x: jax.Array, weight: jax.Array, *, activation: str | None = None, out_dtype: DTypeLike | None = None
) -> jax.Array:
    """x [..., in] times weight [out, in] transposed -> [..., out] in `out_dtype` (None: x's).

    The weight is cast to x's dtype; the sum is float32 (float32 operands multiply at the highest precision), and so is
    the activation: None or "relu2", max(v, 0)^2.

    Raises:
      ValueError: on shapes or dtypes that do not fit, or an unknown activation.
    """
    if jnp.ndim(weight) != 2:
        raise ValueError(f"weight has shape {jnp.shape(weight)}; wanted [out, in].")
    check_activations("x", x, weight.shape[-1])
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    out = jnp.einsum(
        "...i,oi->...o", x, weight.astype(x.dtype), precision=precision, preferred_element_type=jnp.float32
    )
    if activation == "relu2":
        out = jnp.square(jax.nn.relu(out))
    elif activation is not None:
        raise ValueError(f'activation is {activation!r}; wanted None or "relu2".')
    return out.astype(out_dtype or x.dtype)


def squares_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The dtype that keeps relu^2 of values of `dtype`: float32 for float16, where 256^2 is infinite."""
    return jnp.dtype(jnp.float32 if dtype == jnp.float16 else dtype)


def shared_expert(x: jax.Array, up_proj: jax.Array, down_proj: jax.Array) -> jax.Array:
    """relu(x @ up^T)^2 @ down^T: x [..., H], up_proj [S, H], down_proj [H, S] -> [..., H] in x's dtype.

    In float16 the squares are kept in float32, and so is the second product.

    Raises:
      ValueError: on shapes or dtypes that do not fit.
    """
    check_shape("down_proj", down_proj, (x.shape[-1], up_proj.shape[0]))
    inner = linear(x, up_proj, activation="relu2", out_dtype=squares_dtype(x.dtype))
    return linear(inner, down_proj, out_dtype=x.dtype)
