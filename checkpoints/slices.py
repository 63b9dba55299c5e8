"""Reads parts of stacked arrays from files, each byte once, straight into place."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import ml_dtypes
import numpy as np

from checkpoints.errors import CheckpointError, shown
from checkpoints.safetensors_file import SafetensorsFile, TensorInfo

# Between these, 1 / scale and the products of every code of every format with its scales are normal float32 numbers:
# NVFP4's are 2^-10 to 2688 times the scale, FP8's 2^-9 to 448 times.
LEAST_SCALE, LARGEST_SCALE = 2.0**-116, 2.0**116
# The (start, stop) of each axis.
Bounds = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Source:
    """A scalar, vector or matrix in a file that is `leaf`'s whole array, or row `expert` of its first axis.

    Attributes:
      info: where it is, and as what it is read; the file may give its shape more axes of size 1.
      leaf: name of an array, such as "gate" or "experts_up_proj.scale".
      scale: whether its numbers must be finite and positive.
    """

    file: SafetensorsFile
    name: str
    info: TensorInfo
    leaf: str
    expert: int | None
    scale: bool = False


@dataclasses.dataclass(frozen=True)
class Read:
    """One read from a file: some rows of `source` (a scalar is one), for all parts of the array that need them."""

    source: Source
    rows: tuple[int, int]
    parts: tuple[Bounds, ...]

    @property
    def row_bytes(self) -> int:
        info = self.source.info
        return info.nbytes // info.shape[0] if info.shape else info.nbytes

    @property
    def nbytes(self) -> int:
        return (self.rows[1] - self.rows[0]) * self.row_bytes


def bounds(index: Iterable[slice], shape: tuple[int, ...]) -> Bounds:
    """A tuple of slices as explicit bounds."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def plan_reads(sources: Iterable[Source], wanted: Mapping[str, Sequence[Bounds]]) -> list[Read]:
    """The reads that fill the `wanted` parts of each leaf, in the order of the files' bytes.

    Experts and rows that no part wants are not read. Columns are: a file is read in whole rows.
    """
    reads = []
    for source in sorted(sources, key=lambda source: (source.file.path, source.info.start)):
        by_rows: dict[tuple[int, int], list[Bounds]] = {}
        for part in wanted[source.leaf]:
            if source.expert is None or part[0][0] <= source.expert < part[0][1]:
                rows = (*_within(source, part), (0, 1))[0]
                by_rows.setdefault(rows, []).append(part)
        reads += [Read(source, rows, tuple(parts)) for rows, parts in by_rows.items()]
    return reads


def read_slices(
    reads: Sequence[Read],
    wanted: Mapping[str, Sequence[Bounds]],
    dtypes: Mapping[str, np.dtype],
    report: Callable[[int], None],
) -> dict[tuple[str, Bounds], np.ndarray]:
    """Carries out planned reads: the array of every wanted part, in `dtypes` of its leaf.

    Args:
      reads: from `plan_reads` with the same `wanted`.
      dtypes: a leaf that has none is read and checked, but not kept.
      report: called after each read with its number of bytes.

    Raises:
      CheckpointError: if a file became shorter meanwhile, holds a value that overflows the dtype, an FP8 number that
        is NaN, or a scale that is NaN, negative or not from `LEAST_SCALE` to `LARGEST_SCALE`.
    """
    arrays = {
        (leaf, part): _empty(tuple(stop - start for start, stop in part), dtypes[leaf])
        for leaf, parts in wanted.items()
        if leaf in dtypes
        for part in parts
    }
    scratch = np.empty(max((read.nbytes for read in reads), default=0), np.uint8)
    for read in reads:
        source, (start, stop) = read.source, read.rows
        info = source.info
        position, shape = info.start + start * read.row_bytes, (stop - start, *info.shape[1:]) if info.shape else ()
        kept = read.parts if source.leaf in dtypes else ()
        targets = [_target(arrays[source.leaf, part], source, part) for part in kept]
        if len(targets) == 1 and (targets[0].shape, targets[0].dtype) == (shape, info.numpy_dtype):
            source.file.read_into(position, values := targets[0])
        else:
            values = scratch[: read.nbytes].view(info.numpy_dtype).reshape(shape)
            source.file.read_into(position, values)
            for target, part in zip(targets, kept, strict=True):
                columns = (slice(*bound) for bound in _within(source, part)[1:])
                _convert(values[:, *columns] if shape else values, target, source.name)
        if source.scale:
            _check_scales(values, source, start)
        elif values.dtype == ml_dtypes.float8_e4m3fn:
            _check_codes(values, source, start)
        report(read.nbytes)
    return arrays


def _within(source: Source, part: Bounds) -> Bounds:
    """The part's bounds inside `source`."""
    return part if source.expert is None else part[1:]


def _target(array: np.ndarray, source: Source, part: Bounds) -> np.ndarray:
    """Where in the part's array the values of `source` go."""
    return array if source.expert is None else array[source.expert - part[0][0], ...]


def _check_scales(values: np.ndarray, source: Source, first_row: int) -> None:
    """Raises unless all are positive and no product with codes overflows or is subnormal.

    `values` are the rows of `source` from `first_row` on.
    """
    if values.dtype.itemsize == 1:
        # Of the e4m3 bytes 1 to 0x7E are; 0 is zero, 0x7F is NaN, and the upper half is negative.
        bad = values.view(np.uint8) - np.uint8(1) > 0x7D
    else:
        wide = values.astype(np.float32)
        bad = ~((wide >= LEAST_SCALE) & (wide <= LARGEST_SCALE))
    if not bad.any():
        return
    first = int(np.argmax(bad))
    raise CheckpointError(
        f"{shown(source.name)} has the scale {float(values.reshape(-1)[first])} at {_place(source, first_row, first)}, "
        f"in {shown(source.file.path)}; wanted a finite positive number"
        + (", from 2^-116 to 2^116" if values.dtype.itemsize > 1 else "")
        + ": the file is damaged, or was quantised wrongly."
    )


def _check_codes(values: np.ndarray, source: Source, first_row: int) -> None:
    """Raises if one of the e4m3 numbers is NaN; `values` are the rows of `source` from `first_row` on."""
    codes = values.view(np.uint8) << 1  # without the sign, which leaves NaN the largest
    if codes.size and codes.max() == 0xFE:
        bad = (codes == 0xFE).reshape(-1)
        raise CheckpointError(
            f"{shown(source.name)} is NaN at {_place(source, first_row, int(np.argmax(bad)))} and {int(bad.sum()) - 1} "
            f"more places, in {shown(source.file.path)}; wanted numbers: the file is damaged, or was quantised wrongly."
        )


def _place(source: Source, first_row: int, number: int) -> list[int]:
    """Where in the file's tensor the `number`-th value is of those from `first_row` on."""
    row = math.prod(source.info.shape[1:])
    place = np.unravel_index(first_row * row + number, source.file.tensors[source.name].shape)
    return [int(index) for index in place]


def _convert(values: np.ndarray, target: np.ndarray, name: str) -> None:
    with np.errstate(over="ignore"):
        np.copyto(target, values, casting="unsafe")
    narrower = np.dtype(target.dtype).itemsize <= values.dtype.itemsize and target.dtype != values.dtype
    if narrower and np.any(np.isinf(target) & ~np.isinf(values)):
        raise CheckpointError(
            f"{shown(name)} has values that overflow {target.dtype}; load it in its own {values.dtype}."
        )


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialised memory on a 64-byte boundary, which jax on the CPU takes over instead of copying."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(dtype).reshape(shape)
