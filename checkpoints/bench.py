"""Measures loading: `python -m checkpoints.bench --megabytes 500` prints one JSON line per case."""

import argparse
import dataclasses
import functools
import gc
import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from checkpoints.directory import INDEX
from checkpoints.load import load_layer
from checkpoints.names import TABLE
from checkpoints.safetensors_file import DTYPES
from nemotron_moe.config import MoEConfig
from nemotron_moe.weights import abstract_weights

EXPERTS, WIDTH, SHARDS = 64, 1024, 3


def write_layer(folder: Path, megabytes: int, *, stacked: bool) -> None:
    """Writes a checkpoint of one bfloat16 MoE layer of about `megabytes`, its experts scattered over the files."""
    inner = max(16, megabytes * 10**6 // (4 * EXPERTS * WIDTH) // 16 * 16)
    config = MoEConfig(
        hidden_size=WIDTH,
        moe_intermediate_size=inner,
        moe_shared_expert_intermediate_size=inner,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=2,
    )
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for field, leaf in abstract_weights(config).items().items():
        name, of_all = TABLE[field]
        if of_all is None or stacked:
            tensors[of_all or name] = ("F32" if field == "gate_bias" else "BF16", leaf.shape)
        else:
            tensors |= {name.replace("N", str(expert)): ("BF16", leaf.shape[1:]) for expert in range(EXPERTS)}
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


def measure(load: Callable[[], tuple]) -> dict[str, float]:
    """Runs `load` once: seconds, GB/s of the weights, peak host memory over their size, and files opened."""
    opened: list[str] = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    gc.collect()  # jax lets go of host memory that it has taken over only when Python collects.
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # Starts a new peak.
    start = time.perf_counter()
    weights, _ = load()
    jax.block_until_ready(weights)
    seconds = time.perf_counter() - start
    return {
        "seconds": round(seconds, 3),
        "gb_per_s": round(weights.nbytes / seconds / 1e9, 2),
        "peak_over_layer": round((_status("VmHWM") - before) / weights.nbytes, 3),
        "opens": sum(name.endswith(".safetensors") for name in opened),
    }


def _status(key: str) -> int:
    return int(re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m checkpoints.bench", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500, help="size of the layer (default 500)")
    megabytes = parser.parse_args().megabytes
    jax.block_until_ready(jax.device_put(np.zeros(1)))
    for layout in ("one by one", "stacked"):
        with tempfile.TemporaryDirectory() as name:
            write_layer(Path(name), megabytes, stacked=layout == "stacked")
            for dtype in (None, "float32"):
                result = measure(functools.partial(load_layer, name, 0, dtype=dtype))
                print(json.dumps({"experts": layout, "dtype": dtype, "megabytes": megabytes, **result}), flush=True)


if __name__ == "__main__":
    main()
