"""NVFP4: two e2m1 codes a byte, an e4m3 scale for 16 of them along K, and one float32 scale for the matrix."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats.quantised import Leaf, Part, Quantised, Window

BLOCK = 16
LARGEST = 6.0  # of the e2m1 numbers, which are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Nvfp4Array(Quantised):
    """An array [*lead, N, K] of e2m1 * scale * global_scale; K is a multiple of 16.

    With global scales from 2^-116 to 2^116 every product but 0 is a normal float32, from which `quantize` finds the
    code again. Outside of that products become 0, lose bits or are infinite, and the loader refuses such scales.

    Attributes:
      packed: [*lead, N, K / 2] uint8: column 2 j in the low four bits of byte j, column 2 j + 1 in the high ones; of
        the four the highest is the sign.
      scale: [*lead, N, K / 16] float8_e4m3fn.
      global_scale: [*lead] float32.
      divides: the two float32 scales divide, as compressed-tensors stores them, instead of multiplying.
      input_scale: [*lead] float32, for activations what `global_scale` is for the matrix.
    """

    packed: Leaf
    scale: Leaf
    global_scale: Leaf
    divides: bool = dataclasses.field(default=False, metadata={"static": True})

    codes, inner, outer = "packed", "scale", "global_scale"

    @property
    def format(self) -> str:
        return "nvfp4"

    def all_parts(self) -> dict[str, Part]:
        return {
            "packed": Part((1, 2), ("uint8",)),
            "scale": Part((1, BLOCK), ("float8_e4m3fn",)),
            "global_scale": Part((None, None), ("float32",)),
            "input_scale": Part((None, None), ("float32",)),
        }

    @classmethod
    def abstract(cls, shape: tuple[int, ...], **static: Any) -> Self:
        _check_columns(f"an array of shape {tuple(shape)}", *shape[-1:])  # An odd K, unlike its bytes, has no half.
        return super().abstract(shape, **static)

    def check(self, name: str) -> None:
        super().check(name)
        _check_columns(name, self.shape[-1])

    def row_scale(self, rows: Window = None) -> jax.Array:
        scale = self.spread("global_scale", rows)
        return 1.0 / scale if self.divides else scale

    def _numbers(self, codes: jax.Array, columns: Window) -> jax.Array:
        first = 0 if columns is None else columns[0]
        odd = (first + lax.broadcasted_iota(jnp.int32, codes.shape, codes.ndim - 1)) & 1
        return e2m1(codes >> (4 * odd).astype(jnp.uint8) & 15)


def _check_columns(name: str, k: int) -> None:
    if k % BLOCK:
        raise ValueError(f"{name} has K = {k}; NVFP4 wants a multiple of {BLOCK}.")


def e2m1(codes: jax.Array) -> jax.Array:
    """uint8 codes 0..15 to the float32 numbers that they stand for, -0 included."""
    magnitude = codes & 7
    # Twice the number is an integer: 0, 1, then 2 or 3 (the lowest bit) shifted left by what the other two bits say.
    mantissa, shift = 2 | (magnitude & 1), jnp.maximum(magnitude >> 1, 1) - 1
    doubled = jnp.where(magnitude < 2, magnitude, mantissa << shift).astype(jnp.float32)
    return doubled * jnp.where(codes >= 8, -0.5, 0.5)


def e2m1_codes(values: jax.Array) -> jax.Array:
    """float32 numbers to the nearest uint8 codes 0..15; halfway to the even code; beyond 6 to 6."""
    size = jnp.abs(values)
    # Between neighbours: halfway upwards is taken where the upper code is the even one.
    above = [size > 0.25, size >= 0.75, size > 1.25, size >= 1.75, size > 2.5, size >= 3.5, size > 5.0]
    magnitude = sum(one.astype(jnp.uint8) for one in above)
    return magnitude | (jnp.signbit(values).astype(jnp.uint8) << 3)


def pack(codes: jax.Array) -> jax.Array:
    """[..., K] codes to [..., K / 2] bytes, the first of two in the low four bits."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)
