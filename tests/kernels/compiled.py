"""What ptxas says of kernels that are compiled for an H200 on a machine that has none."""

import dataclasses
import hashlib
import os
import re
import tempfile
from pathlib import Path
from unittest import mock

import jax

from pallas_kernels.aot import compile_for_h200
from pallas_kernels.implementation import H200, compiling_for

# A multiprocessor has 65536 registers; a block of three warpgroups may have 168 for each thread on entry.
REGISTERS = {1: 255, 3: 168}
SHARED_MEMORY = 232448  # bytes that a block may ask for


@dataclasses.dataclass(frozen=True)
class Resources:
    """Of one kernel: registers of a thread on entry, bytes that were spilled, bytes of shared memory of a block."""

    kernel: str
    registers: int
    spilled: int
    shared_memory: int


def resources(cache, fun, *args):
    """The Mosaic kernels that `fun` compiles to, each once, by name; remembered in pytest's cache until one changes."""
    key = f"aot/{_hash(fun, *args)}"
    known = cache.get(key, None)
    if known is None:
        known = [dataclasses.asdict(one) for one in _compile(fun, *args)]
        cache.set(key, known)
    return {one["kernel"]: Resources(**one) for one in known}


def _hash(fun, *args):
    """Of what is compiled: the lowered program with its kernels, and the versions that compile it."""
    with compiling_for(H200):
        text = jax.jit(fun).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return hashlib.sha256(f"{jax.__version__} {text}".encode()).hexdigest()


def _compile(fun, *args):
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, MOSAIC_GPU_DUMP_TO=folder):
        # Through a new function, so that no earlier compile is remembered.
        compile_for_h200(lambda *args: fun(*args), *args)
        return [_read(report) for report in sorted(Path(folder).glob("*.ptxas"))]


def _read(report):
    text, planned = report.read_text(), report.with_suffix(".resources.txt").read_text()
    return Resources(
        kernel=re.sub(r"_\d+$", "", report.stem),
        registers=max(map(int, re.findall(r"Used (\d+) registers", text))),
        spilled=sum(map(int, re.findall(r"(\d+) bytes spill stores, \d+ bytes spill loads\n", text))),
        shared_memory=int(re.search(r"smem_scratch_bytes=(\d+)", planned)[1]),
    )
