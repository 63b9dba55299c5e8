"""FP8: e4m3 codes, and a scale for the whole matrix, each row, or each block of 128 x 128."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.formats.quantised import Leaf, Part, Quantised, Window

BLOCK = 128
LARGEST = 448.0  # of the e4m3fn numbers
# How many rows and columns share a scale; None means all.
SHARED: dict[str, tuple[int | None, int | None]] = {
    "tensor": (None, None),
    "channel": (1, None),
    "block": (BLOCK, BLOCK),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Fp8Array(Quantised):
    """An array [*lead, N, K] of values * scale.

    With scales from 2^-117 to 2^119 every product but 0 is a normal float32, from which `quantize` finds the code
    again. Outside of that products become 0, lose bits or are infinite. The loader takes scales from 2^-116 to 2^116.

    Attributes:
      values: [*lead, N, K] float8_e4m3fn.
      scale: float32, or bfloat16 where a file has it so: [*lead], [*lead, N] or, the last blocks partial,
        [*lead, ceil(N / 128), ceil(K / 128)], by `granularity`.
      granularity: "tensor", "channel" or "block".
      input_scale: as `scale`, one for each matrix: activations are code * input_scale.
    """

    values: Leaf
    scale: Leaf
    granularity: str = dataclasses.field(metadata={"static": True})

    codes = "values"

    def __post_init__(self) -> None:
        if self.granularity not in SHARED:
            raise ValueError(f"granularity is {self.granularity!r}; wanted one of {', '.join(SHARED)}.")
        super().__post_init__()

    @property
    def format(self) -> str:
        return f"fp8_{self.granularity}"

    @property
    def inner(self) -> str | None:  # type: ignore[override]
        return "scale" if self.granularity == "block" else None

    @property
    def outer(self) -> str | None:  # type: ignore[override]
        return None if self.granularity == "block" else "scale"

    def all_parts(self) -> dict[str, Part]:
        return {
            "values": Part((1, 1), ("float8_e4m3fn",)),
            "scale": Part(SHARED[self.granularity], ("float32", "bfloat16")),
            "input_scale": Part((None, None), ("float32", "bfloat16")),
        }

    def _numbers(self, codes: jax.Array, columns: Window) -> jax.Array:
        return codes.astype(jnp.float32)
