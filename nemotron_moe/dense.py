"""The layer's dense pieces: RMS norm, linear projections, the shared expert."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from nemotron_moe.activations import quantised_rows
from nemotron_moe.kernels import choose_product, cut_for_kernels, grouped_matmul, row_alignment, steps_around, target
from nemotron_moe.validate import check_activations, check_shape
from pallas_kernels.formats import Quantised

# With fewer, XLA's product and the pass over memory for the activation are as fast as the kernel for groups.
FEWEST_ROWS = 2048


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
    implementation: str | None = None,
    quantize_activations: str | None = None,
) -> jax.Array:
    """x [..., in] times weight [out, in] transposed -> [..., out] in `out_dtype` (None: x's).

    The weight is brought to x's dtype, as a whole where it is quantised; the sum is float32 (float32 operands multiply
    at the highest precision), and so are a quantised weight's scale, where it is constant along `in`, and the
    activation: None or "relu2", max(v, 0)^2. `implementation` and `quantize_activations` are those of `moe_block`.

    Raises:
      ValueError: on shapes or dtypes that do not fit, or an unknown activation.
    """
    shape = weight.shape if isinstance(weight, Quantised) else jnp.shape(weight)
    if len(shape) != 2:
        raise ValueError(f"weight has shape {shape}; wanted [out, in].")
    check_activations("x", x, weight.shape[-1])
    if activation not in (None, "relu2"):
        raise ValueError(f'activation is {activation!r}; wanted None or "relu2".')
    out_dtype = out_dtype or x.dtype
    if activation and why_no_kernel(x, weight, out_dtype=out_dtype, implementation=implementation) is None:
        rows = x.reshape(-1, x.shape[-1])
        with jax.ensure_compile_time_eval():  # else four kernels would find out what is known here
            sizes = jnp.full((1,), rows.shape[0], jnp.int32)
            pieces = cut_for_kernels(sizes, rows.shape[0])
        out = grouped_matmul(
            rows, weight[None], sizes, activation=activation, group_alignment=row_alignment(), pieces=pieces
        )
        return out.reshape(*x.shape[:-1], -1)
    scale = None
    if isinstance(weight, Quantised):
        weight.check("weight")
        x = quantised_rows(x.reshape(-1, x.shape[-1]), weight, quantize_activations).reshape(x.shape)
        scale, weight = weight.row_scale(), weight.operand(x.dtype)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    # A GPU rounds its float32 sum as it stores it, which saves a pass over memory; a CPU's sum would be narrow itself.
    is_plain = scale is None and activation is None and out_dtype == x.dtype
    stored = x.dtype if is_plain and target().platform == "gpu" else jnp.float32
    out = jnp.einsum("...i,oi->...o", x, weight.astype(x.dtype), precision=precision, preferred_element_type=stored)
    if scale is not None:
        out = out * lax.expand_dims(scale[:, 0], range(out.ndim - 1))
    if activation == "relu2":
        out = jnp.square(jax.nn.relu(out))
    return out.astype(out_dtype)


def why_no_kernel(
    x: jax.Array | jax.ShapeDtypeStruct,
    weight: jax.Array | jax.ShapeDtypeStruct | Quantised,
    *,
    out_dtype: DTypeLike,
    implementation: str | None,
) -> str | None:
    """Why relu^2 of x [..., in] times weight [out, in] is XLA's, in a sentence; None if the kernel for groups runs.

    That has one group then, and saves the pass over memory that XLA needs for the activation.
    """
    if isinstance(weight, Quantised):
        return f"the weight is {type(weight).__name__}; it takes bfloat16"
    rows = math.prod(x.shape[:-1])
    lhs = jax.ShapeDtypeStruct((rows, x.shape[-1]), x.dtype)
    rhs = jax.ShapeDtypeStruct((1, *weight.shape), weight.dtype)
    implementation = steps_around(implementation)
    choice = choose_product(
        lhs, rhs, out_dtype=out_dtype, group_alignment=row_alignment(), implementation=implementation
    )
    if choice.implementation.name != "mosaic":
        return dict(choice.passed_over).get("mosaic", f"implementation is {implementation!r}")
    if rows < FEWEST_ROWS:
        return f"with {rows} rows XLA is as fast; it takes {FEWEST_ROWS} or more"
    return None


def squares_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The dtype that keeps relu^2 of values of `dtype`: float32 for float16, where 256^2 is infinite."""
    return jnp.dtype(jnp.float32 if dtype == jnp.float16 else dtype)


def shared_expert(
    x: jax.Array,
    up_proj: jax.Array | Quantised,
    down_proj: jax.Array | Quantised,
    *,
    implementation: str | None = None,
    quantize_activations: str | None = None,
) -> jax.Array:
    """relu(x @ up^T)^2 @ down^T: x [..., H], up_proj [S, H], down_proj [H, S] -> [..., H] in x's dtype.

    The projections may be quantised. `implementation` and `quantize_activations` are those of `moe_block`. In float16
    the squares are kept in float32, and so is the second product.

    Raises:
      ValueError: on shapes or dtypes that do not fit.
    """
    check_shape("down_proj", down_proj, (x.shape[-1], up_proj.shape[0]))
    multiply = functools.partial(linear, implementation=implementation, quantize_activations=quantize_activations)
    inner = multiply(x, up_proj, activation="relu2", out_dtype=squares_dtype(x.dtype))
    return multiply(inner, down_proj, out_dtype=x.dtype)
