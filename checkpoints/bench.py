"""Measures loading: `python -m checkpoints.bench --megabytes 500` prints one JSON line per case."""

import argparse
import functools
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from checkpoints.load import load_layer

EXPERTS, WIDTH, SHARDS = 64, 1024, 3


def write_layer(folder: Path, megabytes: int, *, stacked: bool) -> None:
    """Writes a checkpoint of one bfloat16 MoE layer of about `megabytes`, its experts scattered over the files."""
    inner = max(16, megabytes * 10**6 // (4 * EXPERTS * WIDTH) // 16 * 16)
    shapes = {"norm.weight": (WIDTH,), "mixer.gate.weight": (EXPERTS, WIDTH)}
    for name, shape in {"up_proj": (inner, WIDTH), "down_proj": (WIDTH, inner)}.items():
        shapes[f"mixer.shared_experts.{name}.weight"] = shape
        if stacked:
            shapes[f"mixer.experts.{name}"] = (EXPERTS, *shape)
        else:
            shapes |= {f"mixer.experts.{expert}.{name}.weight": shape for expert in range(EXPERTS)}
    tensors = {f"backbone.layers.0.{name}": ("BF16", shape) for name, shape in shapes.items()}
    tensors["backbone.layers.0.mixer.gate.e_score_correction_bias"] = ("F32", (EXPERTS,))
    shards: list[dict] = [{} for _ in range(SHARDS)]
    for position, name in enumerate(tensors):
        shards[position % SHARDS][name] = tensors[name]
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file, header, end = f"model-{number:05}-of-{SHARDS:05}.safetensors", {}, 0
        for name, (dtype, shape) in shard.items():
            start, end = end, end + int(np.prod(shape)) * (2 if dtype == "BF16" else 4)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
            weight_map[name] = file
        raw = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(len(raw).to_bytes(8, "little") + raw)
            for name in header:
                start, stop = header[name]["data_offsets"]
                out.write(np.full(stop - start, 60, np.uint8))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    sizes = {"hidden_size": WIDTH, "moe_intermediate_size": inner, "moe_shared_expert_intermediate_size": inner}
    rules = {
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 2.5,
        "mlp_hidden_act": "relu2",
    }
    (folder / "config.json").write_text(
        json.dumps({"model_type": "nemotron_h", "layers_block_type": ["moe"], **sizes, **rules})
    )


def measure(load: Callable[[], tuple]) -> dict[str, float]:
    """Runs `load` once: seconds, GB/s of the weights, peak host memory over their size, and files opened."""
    opened: list[str] = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
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
