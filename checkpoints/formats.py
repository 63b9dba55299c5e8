"""Tells from the tensors of a module in which number format its weight is stored, and which tensors make it up.

The tensors decide, not the config: published configs are silent or incomplete about quantisation.

Scales in a kernel's order (swizzled) are refused where padding gave them another shape. Where the shape stays, as that
of [128, 4] or [2688, 64], no test of the tensors would be sound: a block's largest code is nearly always 6, whichever
scale stands beside it, and any order of the scales makes a matrix. Such a file loads, as wrong numbers. Comparing it
with an unquantised checkpoint of the same layer shows it: `nemotron-moe check --report --sibling`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from checkpoints.errors import CheckpointError, listed, shown
from checkpoints.safetensors_file import TensorInfo
from pallas_kernels.formats import Fp8Array, Nvfp4Array, Quantised

UNQUANTISED = ("BF16", "F16", "F32")

_READ = (
    f"{', '.join(UNQUANTISED)}, FP8 (e4m3 with a scale per tensor, channel or block of 128 x 128) and NVFP4, as Model "
    "Optimizer and compressed-tensors write them"
)
_FAMILIES: dict[type[Quantised], str] = {Fp8Array: "FP8", Nvfp4Array: "NVFP4"}
_PLAIN_ROWS = "rows as they are, neither padded nor swizzled"


@dataclasses.dataclass(frozen=True)
class Piece:
    """One tensor of the file, and what it is in a stored matrix.

    Attributes:
      shape: what it is read as.
      shapes, dtypes: what it may be in the file, where any of the shapes means the same elements in the same order.
      scale: whether its numbers are scales, which must be finite and positive.
      hint: what else to say of a tensor with another shape.
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
      name: the format's, such as "NVFP4" or "FP8 per block"; the dtype's where it is not quantised.
      kind: the class and the static fields of the quantised array, or None.
      pieces: by part of the quantised array ("" if it is none), the tensor's name and what it must be. Those of scales
        that are needed are there whether the file has them or not.
      maker: the tool whose names and conventions the tensors have, where tools differ in them.
    """

    name: str
    kind: tuple[type[Quantised], dict[str, Any]] | None
    pieces: dict[str, tuple[str, Piece]]
    maker: str | None = None

    @property
    def family(self) -> str:
        """ "FP8", "NVFP4" or "unquantised", as configs declare it."""
        return _FAMILIES[self.kind[0]] if self.kind else "unquantised"

    def published(self, *, weights_only: bool = False) -> str:
        """The name for people, such as "NVFP4 (ModelOpt, weights only)"."""
        notes = [*([self.maker] if self.maker else []), *(["weights only"] if weights_only else [])]
        return f"{self.name} ({', '.join(notes)})" if notes else self.name


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
        raise _unread(weight, f"of dtype {dtype}{more}" + _lacks_scales(tensors, weight, shape, "weight_scale_2"))
    if packed in tensors and len(shape) == 2:
        if tensors[packed].dtype == "U8" and _is_nvfp4(tensors, module, "weight_global_scale"):
            names = ("weight_packed", "weight_global_scale", "input_global_scale")
            return _nvfp4(tensors, module, shape, "compressed-tensors", names)
        lacks = _lacks_scales(tensors, packed, shape, "weight_global_scale")
        raise _unread(packed, f"of dtype {tensors[packed].dtype}" + (lacks or ", in an unknown packing (not NVFP4)"))
    return None


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


def _lacks_scales(tensors: Mapping[str, TensorInfo], codes: str, shape: tuple[int, ...], global_scale: str) -> str:
    """What to say of a tensor that could be NVFP4's codes: which of their scales are missing. "" if it could not."""
    if len(shape) != 2 or shape[1] % 16:
        return ""
    (n, k), module, info = shape, codes.rpartition(".")[0], tensors[codes]
    scale = tensors.get(f"{module}.weight_scale")
    if (info.dtype, info.shape) != ("U8", (n, k // 2)) or (scale is not None and scale.shape != (n, k // 16)):
        return ""
    wanted = {"weight_scale": f"F8_E4M3 {[n, k // 16]}", global_scale: "F32 []"}
    missing = [f"{module}.{name} ({what})" for name, what in wanted.items() if f"{module}.{name}" not in tensors]
    return f" without the scales of NVFP4, missing: {listed(missing)}"


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
    return Stored("NVFP4", (Nvfp4Array, {"divides": maker == "compressed-tensors"}), pieces, maker)


def _scalar(*dtypes: str) -> Piece:
    return Piece((), ((), (1,)), dtypes)


def _unread(name: str, what: str) -> CheckpointError:
    return CheckpointError(f"{shown(name)} is {what}; load_layer reads {_READ}.")
