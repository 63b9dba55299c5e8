"""Tells from the tensors of a module in which number format its weight is stored, and which tensors make it up.

The tensors decide, not the config: published configs are silent or incomplete about quantisation.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from checkpoints.errors import CheckpointError, shown
from checkpoints.safetensors_file import TensorInfo
from pallas_kernels.formats import Fp8Array, Nvfp4Array, Quantised

UNQUANTISED = ("BF16", "F16", "F32")

_READ = (
    f"{', '.join(UNQUANTISED)}, FP8 (e4m3 with a scale per tensor, channel or block of 128 x 128) and NVFP4, as Model "
    "Optimizer and compressed-tensors write them"
)
_PLAIN_ROWS = "rows as they are, neither padded nor swizzled"


@dataclasses.dataclass(frozen=True)
class Piece:
    """One tensor of the file, and what it is in a stored matrix.

    Attributes:
      shape: what it is read as.
      shapes, dtypes: what it may be in the file, where any of the shapes means the same elements in the same order.
      scale: whether its numbers are scales, which must be finite and positive.
      hint: what else to say of a tensor with another shape. Scales that were swizzled without padding keep their shape,
        and nothing in the file tells that they were.
    """

    shape: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    scale: bool = True
    hint: str = ""

    def dtype(self, info: TensorInfo) -> str:
        """What the tensor's elements are read as: raw bytes are the numbers of the format."""
        return self.dtypes[0] if info.dtype == "U8" else info.dtype

    def read_as(self, info: TensorInfo) -> TensorInfo:
        """`info` of the tensor in the file, with the shape and dtype of its part."""
        return TensorInfo(self.dtype(info), self.shape, info.start, info.nbytes)


@dataclasses.dataclass(frozen=True)
class Stored:
    """How one weight is stored.

    Attributes:
      published: the format's name, such as "NVFP4 (ModelOpt)"; the dtype's where it is not quantised.
      kind: the class and the static fields of the quantised array, or None.
      pieces: by part of the quantised array ("" if it is none), the tensor's name and what it must be. Those of scales
        that are needed are there whether the file has them or not.
    """

    published: str
    kind: tuple[type[Quantised], dict[str, Any]] | None
    pieces: dict[str, tuple[str, Piece]]


def resolve(tensors: Mapping[str, TensorInfo], weight: str, shape: tuple[int, ...]) -> Stored | None:
    """How a weight is stored, or None if no tensor holds it.

    Args:
      tensors: all tensors of the layer.
      weight: its name when it is not packed, as in "...up_proj.weight".
      shape: the weight's own, whatever is stored: [N, K] wherever it may be quantised.

    Raises:
      CheckpointError: on a format that is not read; it names the tensor.
    """
    module = weight.removesuffix(".weight")
    packed = f"{module}.weight_packed"
    if weight in tensors:
        dtype = tensors[weight].dtype
        if dtype in UNQUANTISED:
            return Stored(dtype, None, {"": (weight, Piece(shape, (shape,), (dtype,), scale=False))})
        if len(shape) == 2 and dtype == "F8_E4M3":
            return _fp8(tensors, module, shape)
        if len(shape) == 2 and dtype == "U8" and _is_nvfp4(tensors, module, "weight_scale_2"):
            return _nvfp4(tensors, module, shape, "ModelOpt", ("weight", "weight_scale_2", "input_scale"))
        more = ", for all experts at once" if len(shape) == 3 else ""
        if dtype == "U8" and tensors[weight].shape == (*shape[:-1], shape[-1] // 2):
            more = f" without the scales of NVFP4 ({module}.weight_scale in F8_E4M3, {module}.weight_scale_2 in F32)"
        raise _unread(weight, f"of dtype {dtype}{more}")
    if packed in tensors and len(shape) == 2:
        if tensors[packed].dtype == "U8" and _is_nvfp4(tensors, module, "weight_global_scale"):
            names = ("weight_packed", "weight_global_scale", "input_global_scale")
            return _nvfp4(tensors, module, shape, "compressed-tensors", names)
        raise _unread(packed, f"of dtype {tensors[packed].dtype}, in an unknown packing (not NVFP4)")
    return None


def family(published: str) -> str:
    """ "FP8", "NVFP4" or "unquantised" of a format's published name."""
    first = published.split()[0]
    return first if first in ("FP8", "NVFP4") else "unquantised"


def _fp8(tensors: Mapping[str, TensorInfo], module: str, shape: tuple[int, ...]) -> Stored:
    inverse = f"{module}.weight_scale_inv"  # Despite its name it multiplies.
    name = inverse if inverse in tensors else f"{module}.weight_scale"
    n, grid = shape[0], tuple(-(-size // 128) for size in shape)
    shapes = {
        "tensor": ((), ((), (1,), (1, 1), (1, 1, 1, 1))),
        "channel": ((n,), ((n,), (n, 1))),
        "block": (grid, (grid, (grid[0], 1, grid[1], 1))),
    }
    seen = tensors.get(name)
    if seen is not None and seen.dtype in ("U8", "F8_E8M0"):
        raise _unread(name, f"of dtype {seen.dtype}: MXFP8, with a scale for 32 numbers")
    fitting = [one for one, (_, accepted) in shapes.items() if seen is not None and seen.shape in accepted]
    granularity = fitting[0] if fitting else "tensor"
    read_as, accepted = shapes[granularity]
    if not fitting:  # Missing or wrongly shaped, which the caller reports.
        accepted = tuple(one for _, several in shapes.values() for one in several)
    pieces = {
        "values": (f"{module}.weight", Piece(shape, (shape,), ("F8_E4M3",), scale=False)),
        "scale": (name, Piece(read_as, accepted, ("F32", "BF16"), hint=_PLAIN_ROWS)),
    }
    if (inputs := f"{module}.input_scale") in tensors:
        pieces["input_scale"] = (inputs, _scalar("F32", "BF16"))
    return Stored(f"FP8 per {granularity}", (Fp8Array, {"granularity": granularity}), pieces)


def _is_nvfp4(tensors: Mapping[str, TensorInfo], module: str, global_scale: str) -> bool:
    """Whether two codes a byte are NVFP4's; without the global scale, scales in raw bytes would be those of MXFP4."""
    scale = tensors.get(f"{module}.weight_scale")
    return f"{module}.{global_scale}" in tensors or (scale is not None and scale.dtype == "F8_E4M3")


def _nvfp4(
    tensors: Mapping[str, TensorInfo], module: str, shape: tuple[int, ...], maker: str, names: tuple[str, str, str]
) -> Stored:
    n, k = shape
    codes, outer, inputs = (f"{module}.{name}" for name in names)
    if k % 16:
        raise CheckpointError(
            f"{shown(codes)} is NVFP4, whose rows are blocks of 16, but its weight has rows of {k} by config.json."
        )
    halves, blocks = (n, k // 2), (n, k // 16)
    pieces = {
        "packed": (codes, Piece(halves, (halves,), ("U8",), scale=False, hint="two numbers a byte")),
        "scale": (f"{module}.weight_scale", Piece(blocks, (blocks,), ("F8_E4M3", "U8"), hint=_PLAIN_ROWS)),
        "global_scale": (outer, _scalar("F32")),
    }
    if inputs in tensors:
        pieces["input_scale"] = (inputs, _scalar("F32"))
    return Stored(f"NVFP4 ({maker})", (Nvfp4Array, {"divides": maker == "compressed-tensors"}), pieces)


def _scalar(*dtypes: str) -> Piece:
    return Piece((), ((), (1,)), dtypes)


def _unread(name: str, what: str) -> CheckpointError:
    return CheckpointError(f"{shown(name)} is {what}; load_layer reads {_READ}.")
