"""Measures loading: `python -m checkpoints.bench` prints one JSON line for each layer, cold and warm."""

import argparse
import dataclasses
import functools
import gc
import json
import math
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from checkpoints.directory import INDEX
from checkpoints.load import load_layer
from checkpoints.names import TABLE
from checkpoints.safetensors_file import DTYPES
from nemotron_moe.config import MoEConfig
from nemotron_moe.presets import NANO, SUPER
from nemotron_moe.weights import abstract_weights
from pallas_kernels.bench.conditions import conditions

SHARDS = 3
# Of the speed of plain reading, what loading reaches at least.
GOALS = {"cold": 0.5, "warm": 0.33}
# Configuration, format of the experts, whether they are stacked, and the dtype to load.
CASES: dict[str, tuple[MoEConfig, str, bool, str | None]] = {
    "nano bf16": (NANO, "bf16", False, None),
    "nano bf16 to float32": (NANO, "bf16", False, "float32"),
    "nano bf16 stacked": (NANO, "bf16", True, None),
    "super nvfp4": (SUPER, "nvfp4", False, None),
}


def write_layer(folder: Path, config: MoEConfig, format: str, *, stacked: bool = False) -> int:
    """Writes a checkpoint of one MoE layer, its tensors dealt to the files one by one; returns the layer's bytes.

    All bytes are alike, and stand for a number above 0 in every dtype.

    Args:
      format: of the experts: "bf16", or "nvfp4" as ModelOpt writes it.
      stacked: the experts of a field are one tensor.
    """
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for field, leaf in abstract_weights(config).items().items():
        name, of_all = TABLE[field]
        if of_all is None or stacked:
            tensors[of_all or name] = ("F32" if field == "gate_bias" else "BF16", leaf.shape)
            continue
        for expert in range(config.n_routed_experts):
            tensors |= _matrix(name.replace("N", str(expert)), leaf.shape[1:], format)
    weight_map: dict[str, str] = {}
    for shard in range(SHARDS):
        file, header, end = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors", {}, 0
        for name, (dtype, shape) in list(tensors.items())[shard::SHARDS]:
            start, end = end, end + math.prod(shape) * DTYPES[dtype][0] // 8
            header[f"backbone.layers.0.{name}"] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        raw = json.dumps(header).encode()
        (folder / file).write_bytes(len(raw).to_bytes(8, "little") + raw + b"<" * end)
        weight_map |= dict.fromkeys(header, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    model = {"model_type": "nemotron_h", "layers_block_type": ["moe"]}
    (folder / "config.json").write_text(json.dumps(model | dataclasses.asdict(config)))
    return sum(math.prod(shape) * DTYPES[dtype][0] // 8 for dtype, shape in tensors.values())


def _matrix(name: str, shape: tuple[int, ...], format: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    if format == "bf16":
        return {name: ("BF16", shape)}
    module, (rows, columns) = name.removesuffix(".weight"), shape
    return {
        name: ("U8", (rows, columns // 2)),
        f"{module}.weight_scale": ("F8_E4M3", (rows, columns // 16)),
        f"{module}.weight_scale_2": ("F32", ()),
        f"{module}.input_scale": ("F32", ()),
    }


def read_in_order(folder: Path) -> float:
    """Seconds that plain reading of the files takes, one after the other."""
    buffer = memoryview(bytearray(64 << 20))
    start = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - start


def forget(folder: Path) -> None:
    """Drops the files from the page cache."""
    for path in folder.glob("*.safetensors"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)  # what is not written yet cannot be dropped
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def measure(load: Callable[[], tuple]) -> dict[str, float]:
    """Runs `load` once: seconds, GB/s of the weights, peak host memory over their size, and files opened."""
    opened = _opened()
    opened.clear()
    gc.collect()  # jax lets go of host memory that it has taken over only when Python collects.
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # Starts a new peak.
    start = time.perf_counter()
    weights, _ = load()
    jax.block_until_ready(weights)
    seconds = time.perf_counter() - start
    return {
        "loaded_bytes": weights.nbytes,
        "seconds": round(seconds, 3),
        "gb_per_s": round(weights.nbytes / seconds / 1e9, 2),
        "peak_over_layer": round((_status("VmHWM") - before) / weights.nbytes, 3),
        "opens": sum(name.endswith(".safetensors") for name in opened),
    }


@functools.cache
def _opened() -> list[str]:
    """Names of the files that this process opens from now on; a hook stays for good, so there is one."""
    opened: list[str] = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    return opened


def _status(key: str) -> int:
    return int(re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m checkpoints.bench", description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="default: all")
    parser.add_argument("--experts", type=int, metavar="E", help="that many only, for a smaller layer")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="the middle one counts (default: 3)")
    parser.add_argument("--folder", help="of the files that are written and read, on the disk in question")
    parser.add_argument("--output", metavar="FILE", help="append the results to it")
    options = parser.parse_args()
    jax.block_until_ready(jax.device_put(np.zeros(1)))
    with open(options.output or os.devnull, "a") as file:
        for case in options.cases:
            for row in run(case, options.experts, options.rounds, options.folder):
                print(line := json.dumps(row), flush=True)
                print(line, file=file, flush=True)


def run(case: str, experts: int | None, rounds: int, folder: str | None = None) -> Iterator[dict[str, Any]]:
    """Loads a layer with its files out of the page cache and in it, in turn with plain reading of the same files."""
    (config, format, stacked, dtype), here = CASES[case], conditions()
    if experts is not None:
        config = dataclasses.replace(config, n_routed_experts=experts)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        size = write_layer(where := Path(name), config, format, stacked=stacked)
        for cache, prepare in (("cold", forget), ("warm", read_in_order)):
            plain, results = [], []
            for _ in range(rounds):
                prepare(where)
                plain.append(read_in_order(where))
                prepare(where)
                results.append(measure(functools.partial(load_layer, name, 0, dtype=dtype)))
            result = sorted(results, key=lambda result: result["seconds"])[rounds // 2]
            share = round(statistics.median(plain) / result["seconds"], 2)
            speed = round(size / statistics.median(plain) / 1e9, 2)
            yield {
                **here,
                **{"case": case, "cache": cache, "bytes": size, **result},
                **{"plain_gb_per_s": speed, "share_of_plain_reading": share, "goal": GOALS[cache]},
            }


if __name__ == "__main__":
    main()
