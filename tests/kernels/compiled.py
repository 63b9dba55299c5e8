"""What a program for an H200 takes of it, as its compilers say on a machine that has none."""

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import re
import sys
import tempfile
from pathlib import Path
from unittest import mock

from jax.experimental.mosaic.gpu import utils

from pallas_kernels import aot

ROOT = Path(__file__).parents[2]
REGISTERS = 65536  # of a multiprocessor, shared by the threads of a block
MOST_REGISTERS = 255  # of a thread
SHARED_MEMORY = 232448  # bytes that a block may ask for
CORE_MEMORY = 233472  # bytes that the blocks of a multiprocessor share, each with RESERVED_MEMORY for itself
RESERVED_MEMORY = 1024
COMPILERS = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-nvvm")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One Mosaic kernel.

    Attributes:
      name: without the number that tells it from others of that name.
      threads: of a block.
      registers: of a thread on entry.
      spilled: bytes that did not fit into registers.
      shared_memory: bytes of a block.
      loads: the kinds of instructions that load by the TMA unit.
    """

    name: str
    threads: int
    registers: int
    spilled: int
    shared_memory: int
    loads: list[str]

    def assert_fits(self):
        assert self.spilled == 0, self
        # What `setmaxnreg` then takes from one warpgroup it gives to another.
        assert self.registers <= min(REGISTERS // self.threads // 8 * 8, MOST_REGISTERS), self
        assert self.shared_memory <= SHARED_MEMORY, self


@dataclasses.dataclass(frozen=True)
class Resources:
    """A compiled program: its Mosaic kernels by name, its text without theirs, and the bytes of temporary memory."""

    kernels: dict[str, Kernel]
    text: str
    temporary_memory: int


def resources(request, fun, *args):
    """Of `fun`, compiled for an H200; every Mosaic kernel in it fits.

    pytest's cache remembers it for this test and these arguments until a source or a compiler changes.
    """
    key = hashlib.sha256("\n".join([request.node.nodeid, str(args), _sources()]).encode()).hexdigest()
    known = request.config.cache.get(f"aot/{key}", None)
    if known is None:
        known = _compile(fun, *args)
        request.config.cache.set(f"aot/{key}", known)
    kernels = [Kernel(**one) for one in known["kernels"]]
    for kernel in kernels:
        kernel.assert_fits()
    return Resources({kernel.name: kernel for kernel in kernels}, known["text"], known["temporary_memory"])


@functools.cache
def _sources():
    """A hash of all that the compiled programs come from."""
    compilers = [f"{name} {importlib.metadata.version(name)}" for name in COMPILERS]
    files = [
        path for folder in ("nemotron_moe", "pallas_kernels", "tests/kernels") for path in (ROOT / folder).rglob("*.py")
    ]
    return hashlib.sha256("\n".join([*compilers, *(path.read_text() for path in sorted(files))]).encode()).hexdigest()


def _compile(fun, *args):
    """What is remembered: the fields of a `Resources`."""
    planned = {}

    def plan(text, name, folder):
        name, bytes_ = re.sub(r"(_\d+)?\.resources\.txt$", "", name), re.search(r"smem_scratch_bytes=(\d+)", text)
        planned[name] = max(int(bytes_[1]), planned.get(name, 0))

    wanted = {f"MOSAIC_GPU_DUMP_{what}": "1" for what in ("RESOURCES", "PTX", "PTXAS")}
    with (
        mock.patch.dict(os.environ, wanted),
        mock.patch.object(utils, "dump_to_file_or_stdout", plan),
        tempfile.TemporaryFile("w+") as printed,
    ):
        # It writes to files only together with every pass over the kernel, which takes minutes.
        with _standard_output(printed):
            # Through a new function, so that no earlier compile is remembered.
            compiled = aot.compile_for_h200(lambda *args: fun(*args), *args)
        printed.seek(0)
        code, reports = (
            re.findall(rf"{begin}(\w+)_mosaic_gpu_kernel(.*?)(?={begin}|\Z)", text, re.DOTALL)
            for text in [printed.read()]
            for begin in (r"\.visible \.entry ", "Compiling entry function '")
        )
    assert [name for name, _ in code] == [name for name, _ in reports]
    return {
        "kernels": [
            _kernel(name, planned[name], ptx, ptxas) for (name, ptx), (_, ptxas) in zip(code, reports, strict=True)
        ],
        "text": re.sub(r", backend_config=.*", "", compiled.as_text()),
        "temporary_memory": compiled.memory_analysis().temp_size_in_bytes,
    }


@contextlib.contextmanager
def _standard_output(file):
    """Inside, what is written to standard output, by C++ too, goes to `file`."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(file.fileno(), 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)


def _kernel(name, shared_memory, code, report):
    """The fields of a `Kernel`."""
    return {
        "name": name,
        "threads": int(re.search(r"\.maxntid (\d+), 1, 1", code)[1]),
        "registers": max(map(int, re.findall(r"Used (\d+) registers", report))),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", report))),
        "shared_memory": shared_memory,
        "loads": sorted(set(re.findall(r"(cp\.async\.bulk[\w.]*)\.shared::cluster\.global", code))),
    }
