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
