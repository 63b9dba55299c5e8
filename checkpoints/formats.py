"""Tells from the tensors of a module in which number format its weight is stored.

The tensors decide, not the config: published configs are silent or incomplete about quantisation.
"""

import math
from collections.abc import Mapping

from checkpoints.safetensors_file import TensorInfo

UNQUANTISED = ("BF16", "F16", "F32")


def format_of(tensors: Mapping[str, TensorInfo], name: str) -> str | None:
    """The number format of the weight `name`, or None if it is stored unquantised.

    Args:
      tensors: all tensors of the layer.
      name: of the weight: "...up_proj.weight", or "...up_proj" without that ending.

    Raises:
      KeyError: if there is no such weight.
    """
    module = name.removesuffix(".weight")
    if f"{module}.weight_packed" in tensors:
        packed = f"{module}.weight_global_scale" in tensors or _dtype(tensors, f"{module}.weight_scale") == "F8_E4M3"
        return "NVFP4 (compressed-tensors)" if packed else "an unknown packed format (compressed-tensors)"
    weight, scale = tensors[name], f"{module}.weight_scale"
    if weight.dtype in UNQUANTISED:
        return None
    if weight.dtype == "U8" and (f"{module}.weight_scale_2" in tensors or _dtype(tensors, scale) == "F8_E4M3"):
        return "NVFP4 (ModelOpt)" if f"{module}.input_scale" in tensors else "NVFP4 (ModelOpt, weights only)"
    if weight.dtype == "F8_E4M3":
        if f"{module}.weight_scale_inv" in tensors:
            return "FP8 per block"
        if scale not in tensors:
            return "FP8 without a scale"
        return _fp8(weight, tensors[scale])
    return f"of dtype {weight.dtype}"


def _fp8(weight: TensorInfo, scale: TensorInfo) -> str:
    if scale.dtype in ("U8", "F8_E8M0"):
        return "MXFP8"
    if math.prod(scale.shape) == 1:
        return "FP8 per tensor"
    return "FP8 per channel" if scale.shape in (weight.shape[:1], (*weight.shape[:1], 1)) else "FP8 per block"


def _dtype(tensors: Mapping[str, TensorInfo], name: str) -> str | None:
    return tensors[name].dtype if name in tensors else None
