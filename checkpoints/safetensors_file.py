"""Reads one safetensors file.

The file is `u64 header length | JSON header | bytes of the tensors`; the header maps a tensor's name to its dtype,
shape and range of bytes (https://github.com/huggingface/safetensors, "Format"). Files come from strangers: everything
that the header claims is checked before a byte of data is read.
"""

import dataclasses
import io
import math
import os
import stat
from typing import Any, Self

import ml_dtypes
import numpy as np

from checkpoints.errors import CheckpointError, parse_json, refuse_pointer, shown

# Bits per element, and the NumPy dtype of those that fill whole bytes.
DTYPES: dict[str, tuple[int, np.dtype | None]] = {
    "BOOL": (8, np.dtype(np.bool_)),
    "U8": (8, np.dtype("u1")),
    "I8": (8, np.dtype("i1")),
    "U16": (16, np.dtype("<u2")),
    "I16": (16, np.dtype("<i2")),
    "U32": (32, np.dtype("<u4")),
    "I32": (32, np.dtype("<i4")),
    "U64": (64, np.dtype("<u8")),
    "I64": (64, np.dtype("<i8")),
    "F8_E4M3": (8, np.dtype(ml_dtypes.float8_e4m3fn)),
    "F8_E5M2": (8, np.dtype(ml_dtypes.float8_e5m2)),
    "F8_E8M0": (8, np.dtype(ml_dtypes.float8_e8m0fnu)),
    "F16": (16, np.dtype("<f2")),
    "BF16": (16, np.dtype(ml_dtypes.bfloat16)),
    "F32": (32, np.dtype("<f4")),
    "F64": (64, np.dtype("<f8")),
    "C64": (64, np.dtype("<c8")),
    "F4": (4, None),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
}

_MAX_HEADER = 100_000_000  # The format's own limit.
_MAX_RANK = 32


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file: `dtype` is the format's name ("BF16"), `start` the first byte's position in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def numpy_dtype(self) -> np.dtype:
        """The dtype of the elements.

        Raises:
          CheckpointError: if an element is less than a byte.
        """
        dtype = DTYPES[self.dtype][1]
        if dtype is None:
            raise CheckpointError(
                f"dtype {self.dtype} packs several elements into a byte; this reader has no use for it."
            )
        return dtype

    def at(self, index: int) -> "TensorInfo":
        """The tensor `self[index]` along the first axis; it is contiguous too."""
        size = self.nbytes // self.shape[0]
        return TensorInfo(self.dtype, self.shape[1:], self.start + index * size, size)


class SafetensorsFile:
    """An open safetensors file whose header has been checked; close it, or use it in a `with`.

    Attributes:
      tensors: TensorInfo by tensor name.
      bytes_read: bytes of tensors read so far.

    Raises:
      CheckpointError: on making it, if the file is missing, incomplete, damaged or no safetensors file; it is named.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        self.bytes_read = 0
        try:
            # Asked before opening, because opening a named pipe would wait for its other end.
            if not stat.S_ISREG(os.stat(self.path).st_mode):
                raise CheckpointError(f"{shown(self.path)} is not a regular file.")
            self._file = io.FileIO(self.path, "rb")
        except OSError as error:
            raise CheckpointError(f"{shown(self.path)} cannot be opened: {error.strerror}.") from error
        try:
            self.tensors = self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, name: str) -> np.ndarray:
        """The whole tensor `name`, in memory of its own."""
        info = self.tensors[name]
        array = np.empty(info.shape, info.numpy_dtype)
        self.read_into(info.start, array)
        return array

    def read_into(self, start: int, array: np.ndarray) -> None:
        """Fills `array` (C-contiguous) with the bytes of the file from position `start` on.

        Raises:
          CheckpointError: if the file ends before; it was changed after it was opened.
        """
        view = memoryview(array.reshape(-1).view(np.uint8))
        self._fill(start, view)
        self.bytes_read += len(view)

    def _fill(self, start: int, view: memoryview) -> None:
        self._file.seek(start)
        done = 0
        while done < len(view):  # One call moves at most 2 GiB.
            count = self._file.readinto(view[done:])
            if not count:
                raise CheckpointError(f"{shown(self.path)} ends at byte {start + done}; it became shorter meanwhile.")
            done += count

    def _read_header(self) -> dict[str, TensorInfo]:
        path, size = shown(self.path), os.fstat(self._file.fileno()).st_size
        beginning = bytearray(min(size, 64))
        self._fill(0, memoryview(beginning))
        refuse_pointer(bytes(beginning), path)
        length = int.from_bytes(beginning[:8], "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(
                f"{path} is truncated or no safetensors file: it has {size} bytes and claims a header of {length}. "
                "If it was downloaded, the download is incomplete."
            )
        if length > _MAX_HEADER:
            raise CheckpointError(f"{path} claims a header of {length} bytes; the format allows {_MAX_HEADER}.")
        raw = bytearray(length)
        self._fill(8, memoryview(raw))
        header = parse_json(bytes(raw), f"the header of {path}")
        header.pop("__metadata__", None)
        tensors = {name: _tensor(entry, 8 + length, f"{shown(name)} in {path}") for name, entry in header.items()}
        _check_ranges(tensors, 8 + length, size, path)
        return tensors


def _tensor(entry: Any, data_start: int, where: str) -> TensorInfo:
    """Checks one header entry by itself."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} is described by {shown(entry)}; wanted dtype, shape and data_offsets.")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where} has the unknown dtype {shown(dtype)}; known are {', '.join(DTYPES)}.")
    if not _naturals(shape) or len(shape) > _MAX_RANK:
        raise CheckpointError(
            f"{where} has the shape {shown(shape)}; wanted at most {_MAX_RANK} integers, none negative."
        )
    if not _naturals(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where} has the data_offsets {shown(offsets)}; wanted two integers, none negative.")
    begin, end = offsets
    bits = DTYPES[dtype][0] * math.prod(shape)
    if bits % 8 or end - begin != bits // 8:
        raise CheckpointError(
            f"{where} has {shown(end - begin)} bytes (data_offsets {shown(offsets)}), but {dtype} {shown(shape)} takes "
            f"{shown(bits / 8 if bits % 8 else bits // 8)}."
        )
    return TensorInfo(dtype, tuple(shape), data_start + begin, end - begin)


def _naturals(values: Any) -> bool:
    # `type`, because True is an int too.
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_ranges(tensors: dict[str, TensorInfo], data_start: int, size: int, path: str) -> None:
    """The tensors must cover the data exactly: no overlap, no gap, nothing behind the last one."""
    position, previous = data_start, "the header"
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if info.start != position:
            fault = "overlaps" if info.start < position else "leaves a gap after"
            raise CheckpointError(f"{path}: {shown(name)} (from byte {shown(info.start)}) {fault} {shown(previous)}.")
        position, previous = info.start + info.nbytes, name
    if position > size:
        raise CheckpointError(
            f"{path} is truncated: it has {size} bytes of {shown(position)}, so {shown(previous)} is cut off. "
            "If it was downloaded, the download is incomplete."
        )
    if position < size:
        raise CheckpointError(f"{path} has {size - position} bytes behind its last tensor, which the format forbids.")
