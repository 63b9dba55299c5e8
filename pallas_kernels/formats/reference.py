"""What the formats mean, in float64 NumPy, to be checked against their definitions by reading it."""

from typing import Any

import numpy as np

from pallas_kernels.formats.fp8 import BLOCK, Fp8Array
from pallas_kernels.formats.nvfp4 import Nvfp4Array

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)


def to_float64(array: Any) -> np.ndarray:
    """The numbers of an array [*lead, N, K], quantised or not; a product of code and scales is rounded only there."""
    if isinstance(array, Nvfp4Array):
        packed, scale = np.asarray(array.packed), _wide(array.scale)
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(array.shape)
        numbers = np.where(codes < 8, 1.0, -1.0) * _E2M1[codes & 7]
        blocks = numbers.reshape(*scale.shape, -1) * scale[..., None]
        outer = _wide(array.global_scale)[..., None, None]
        numbers = blocks.reshape(array.shape)
        return numbers / outer if array.divides else numbers * outer
    if isinstance(array, Fp8Array):
        values, scale = _wide(array.values), _wide(array.scale)
        if array.granularity == "tensor":
            return values * scale[..., None, None]
        if array.granularity == "channel":
            return values * scale[..., None]
        out = np.empty_like(values)
        for row in range(scale.shape[-2]):
            for column in range(scale.shape[-1]):
                block = (..., slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK))
                out[block] = values[block] * scale[..., row, column][..., None, None]
        return out
    return _wide(array)


def _wide(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)
