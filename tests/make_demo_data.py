"""Makes nemotron_moe/data/demo from the fixture bf16_latent: `python tests/make_demo_data.py [FOLDER]`."""

import json
import sys
from pathlib import Path

from fixtures_io import FIXTURES, expected, tensors_of, write_checkpoint, write_safetensors

from nemotron_moe import demo

SOURCE = "bf16_latent"
KEPT = ("backbone.layers.0.", "backbone.layers.2.", "mtp.layers.1.")
SHARD_BYTES = 130_000


def make(folder: Path) -> None:
    """Writes the MoE layers of the fixture, what is recorded of the first one, and the sums."""
    tensors = {name: array for name, array in tensors_of(FIXTURES / SOURCE).items() if name.startswith(KEPT)}
    shards: list[dict] = [{}]
    for name in sorted(tensors):
        if sum(array.nbytes for array in shards[-1].values()) + tensors[name].nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensors[name]
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    checkpoint = folder / demo.CHECKPOINT
    write_checkpoint(checkpoint, dict(zip(names, shards, strict=True)), {})
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps(json.loads(index.read_text()), indent=2) + "\n")
    (checkpoint / "config.json").write_bytes((FIXTURES / SOURCE / "config.json").read_bytes())
    prefix = f"layers.{demo.LAYER}."
    recorded = {key: expected(SOURCE)[prefix + key] for key in demo.RECORDED_KEYS}
    write_safetensors(folder / demo.RECORDED, recorded)
    (folder / demo.SUMS).write_text(demo.sums(folder))


if __name__ == "__main__":
    make(Path(*sys.argv[1:2]) if len(sys.argv) > 1 else demo.FOLDER)
