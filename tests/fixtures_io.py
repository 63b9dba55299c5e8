"""The small checkpoints of tests/fixtures (their README says what they are), and a writer of others."""

import functools
import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np

from checkpoints.safetensors_file import SafetensorsFile

FIXTURES = Path(__file__).parent / "fixtures"
UNQUANTISED = ("bf16_direct", "bf16_latent", "fused3d_direct", "puzzle_bf16")
QUANTISED = (
    *("fp8_modelopt_direct", "fp8_ct_channel_latent", "fp8_block_direct", "nvfp4_modelopt_direct"),
    *("nvfp4_modelopt_latent", "nvfp4_ct_direct", "w4a16_modelopt_direct", "mixed_modelopt_latent"),
)

_NAMES = {
    np.dtype(dtype): name
    for name, dtype in {
        **{
            "BOOL": "?",
            "U8": "u1",
            "I8": "i1",
            "I16": "i2",
            "I32": "i4",
            "I64": "i8",
            "U16": "u2",
            "U32": "u4",
            "U64": "u8",
        },
        **{"F16": "f2", "F32": "f4", "F64": "f8", "BF16": ml_dtypes.bfloat16},
        **{"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu},
    }.items()
}


@functools.cache
def manifest() -> dict:
    """tests/fixtures/manifest.json."""
    return json.loads((FIXTURES / "manifest.json").read_text())


def layers_of(name: str) -> dict[int | str, dict]:
    """The MoE layers of fixture `name` as `load_layer` names them (3, "mtp.layers.1"), with their rows of the manifest.

    A row's "key" is the layer's prefix in `expected(name)`: "layers.3" or "mtp.layers.1".
    """
    rows = manifest()["fixtures"][name]["layers"]
    return {int(row["key"][7:]) if row["key"].startswith("layers.") else row["key"]: row for row in rows}


@functools.cache
def expected(name: str) -> dict[str, np.ndarray]:
    """Everything in reference/expected.safetensors of fixture `name`."""
    with SafetensorsFile(FIXTURES / name / "reference" / "expected.safetensors") as file:
        return {key: file.read(key) for key in file.tensors}


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint folder, by their names in the files."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with SafetensorsFile(path) as file:
            tensors |= {key: file.read(key) for key in file.tensors}
    return tensors


def write_safetensors(
    path: str | os.PathLike[str], tensors: dict[str, np.ndarray], metadata: dict | None = None
) -> None:
    """Writes a safetensors file; views are stored with the contents that they show."""
    header: dict = {} if metadata is None else {"__metadata__": metadata}
    blobs, end = [], 0
    for name, array in tensors.items():
        blobs.append(np.asarray(array).tobytes())  # In C order, whatever the strides are.
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [end, end + len(blobs[-1])],
        }
        end += len(blobs[-1])
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    Path(path).write_bytes(len(raw).to_bytes(8, "little") + raw + b"".join(blobs))


def write_checkpoint(folder: Path, shards: dict[str, dict[str, np.ndarray]], config: dict) -> Path:
    """Writes shards (tensors by file name), their index and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, tensors in shards.items():
        write_safetensors(folder / file, tensors)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def moe_config(layers: tuple[str, ...] = ("mamba", "moe"), **changes) -> dict:
    """A config.json of tiny layers; `changes` replaces keys."""
    return {
        "model_type": "nemotron_h",
        "layers_block_type": list(layers),
        "hidden_size": 16,
        "moe_intermediate_size": 12,
        "moe_shared_expert_intermediate_size": 20,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 2.5,
        **changes,
    }


def layer_tensors(prefix: str, config: dict, *, seed: int = 0, dtype=ml_dtypes.bfloat16) -> dict[str, np.ndarray]:
    """Random tensors of one MoE layer under their published names."""
    rng = np.random.default_rng(seed)
    hidden, inner, shared = (
        config[key] for key in ("hidden_size", "moe_intermediate_size", "moe_shared_expert_intermediate_size")
    )
    experts, latent = config["n_routed_experts"], config.get("moe_latent_size")
    shapes = {"norm.weight": (hidden,), "mixer.gate.weight": (experts, hidden)}
    if latent:
        shapes |= {"mixer.fc1_latent_proj.weight": (latent, hidden), "mixer.fc2_latent_proj.weight": (hidden, latent)}
    blocks = {f"experts.{expert}": (inner, latent or hidden) for expert in range(experts)}
    for block, (rows, columns) in (blocks | {"shared_experts": (shared, hidden)}).items():
        shapes[f"mixer.{block}.up_proj.weight"] = (rows, columns)
        shapes[f"mixer.{block}.down_proj.weight"] = (columns, rows)
    tensors = {prefix + name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    bias = rng.standard_normal(experts).astype(np.float32)
    return tensors | {prefix + "mixer.gate.e_score_correction_bias": bias}


def quantised_matrix(module: str, scheme: str, shape: tuple[int, int], seed: int = 0) -> dict[str, np.ndarray]:
    """A matrix [N, K] of random codes and scales as `scheme` names its tensors: "fp8_tensor", "fp8_channel",
    "fp8_block", "nvfp4" as Model Optimizer writes them, or "nvfp4_ct", as compressed-tensors does.
    """
    rng, (n, k), one = np.random.default_rng(seed), shape, np.ones((), np.float32)

    def scales(*shape: int, dtype=np.float32) -> np.ndarray:
        return rng.uniform(0.5, 2, shape).astype(dtype)

    if scheme.startswith("nvfp4"):
        codes = rng.integers(0, 256, (n, k // 2), np.uint8)
        inner = scales(n, k // 16, dtype=ml_dtypes.float8_e4m3fn)
        if scheme == "nvfp4":
            named = {"weight": codes, "weight_scale": inner, "weight_scale_2": scales(), "input_scale": scales()}
        else:
            outer = {"weight_global_scale": scales(1), "input_global_scale": scales(1)}
            named = {"weight_packed": codes, "weight_scale": inner, **outer}
    else:
        codes = rng.integers(0, 0x7F, shape, np.uint8) | (rng.integers(0, 2, shape, np.uint8) << 7)
        scale = {"tensor": (), "channel": (n,), "block": (-(-n // 128), -(-k // 128))}[scheme.removeprefix("fp8_")]
        values = codes.view(ml_dtypes.float8_e4m3fn)
        named = {"weight": values, "weight_scale": scales(*scale) * one, "input_scale": scales()}
    return {f"{module}.{name}": np.asarray(array) for name, array in named.items()}


def with_quantised(tensors: dict[str, np.ndarray], scheme: str, modules: str = "experts") -> dict[str, np.ndarray]:
    """The tensors, those matrices quantised whose names contain `modules`; each has numbers of its own."""
    changed = dict(tensors)
    for seed, name in enumerate(name for name in tensors if modules in name and name.endswith("proj.weight")):
        changed |= quantised_matrix(name.removesuffix(".weight"), scheme, changed.pop(name).shape, seed)
    return changed


def shuffled(tensors: dict[str, np.ndarray], shards: int, *, seed: int = 0) -> dict[str, dict[str, np.ndarray]]:
    """The tensors in random order, dealt to `shards` files."""
    names = np.random.default_rng(seed).permutation(list(tensors))
    return {
        f"model-{shard + 1:05}-of-{shards:05}.safetensors": {str(name): tensors[name] for name in names[shard::shards]}
        for shard in range(shards)
    }


def stacked_by_hand(tensors: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """What the fields of MoEWeights must hold, by a route that has nothing in common with the loader's."""
    mixer = prefix + "mixer."
    names = {
        "norm": prefix + "norm.weight",
        "gate": mixer + "gate.weight",
        "gate_bias": mixer + "gate.e_score_correction_bias",
        **{f"{name}_latent_proj": f"{mixer}{name}_latent_proj.weight" for name in ("fc1", "fc2")},
        **{f"shared_experts_{name}": f"{mixer}shared_experts.{name}.weight" for name in ("up_proj", "down_proj")},
    }
    fields = {field: tensors[name] for field, name in names.items() if name in tensors}
    for name in ("up_proj", "down_proj"):
        parts, expert = [], 0
        while (key := f"{mixer}experts.{expert}.{name}.weight") in tensors:
            parts.append(tensors[key])
            expert += 1
        fields[f"experts_{name}"] = np.stack(parts) if parts else tensors[f"{mixer}experts.{name}"]
    return fields


def assert_same_bits(array, wanted: np.ndarray) -> None:
    """Equal in dtype, shape and every bit."""
    array = np.asarray(array)
    assert (array.dtype, array.shape) == (wanted.dtype, wanted.shape)
    assert array.tobytes() == wanted.tobytes()


def written(folder: Path, tensors: dict[str, np.ndarray], config: dict | None = None) -> Path:
    """A checkpoint in `folder`/checkpoint with these tensors dealt to two shards."""
    return write_checkpoint(folder / "checkpoint", shuffled(tensors, 2), config or moe_config())


def assert_holds(weights, wanted: dict[str, np.ndarray]) -> None:
    """The weights have exactly these fields, bit for bit."""
    assert weights.items().keys() == wanted.keys()
    for field, array in wanted.items():
        assert_same_bits(weights.items()[field], array)
