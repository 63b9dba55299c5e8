"""A checkpoint on disk: which file holds which tensor."""

import functools
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from checkpoints.declared import Declared, read_declared
from checkpoints.errors import CheckpointError, listed, parse_json, refuse_pointer, shown
from checkpoints.names import prefixes_of_layers
from checkpoints.safetensors_file import SafetensorsFile
from nemotron_moe.config import MoEConfig
from nemotron_moe.hf_config import moe_layers_from_hf

INDEX = "model.safetensors.index.json"


class Checkpoint:
    """A checkpoint's folder, opened for one call: each file is opened at most once, and closed on leaving `with`.

    Args:
      path, asked: as in `resolve`.

    Attributes:
      folder: where config.json and the shards are.
      weight_map: name of the file by name of the tensor, from the index; the files themselves need not be there.

    Raises:
      CheckpointError: on making it, if `path` is no checkpoint folder, or its index cannot be trusted.
    """

    def __init__(self, path: str | os.PathLike[str], asked: int | str | None = None):
        self.folder = resolve(path, asked)
        self._files: dict[str, SafetensorsFile] = {}
        try:
            self.weight_map = self._read_weight_map()
        except BaseException:
            self.close()
            raise

    @functools.cached_property
    def layers(self) -> dict[int | str, list[str]]:
        """The MoE layers and their prefixes, as `prefixes_of_layers`."""
        return prefixes_of_layers(self.weight_map)

    @functools.cached_property
    def configs(self) -> Mapping[int | str, MoEConfig]:
        """What config.json says of each MoE layer.

        Raises:
          ValueError: if it is missing or not understood.
        """
        if not (self.folder / "config.json").is_file():
            raise CheckpointError(f"{shown(self.folder)} has no config.json, which says how large its layers are.")
        return moe_layers_from_hf(self.folder)

    @functools.cached_property
    def declared(self) -> Declared:
        """What the configs say of number formats; where they cannot be read, nothing, with a warning."""
        return read_declared(self.folder)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, names: set[str]) -> dict[str, SafetensorsFile]:
        """The files `names`, in order of their names.

        Raises:
          CheckpointError: if any is missing (all missing ones are listed) or damaged.
        """
        if missing := [name for name in sorted(names) if not os.path.exists(self.folder / name)]:
            raise CheckpointError(
                f"{shown(self.folder)} lacks {listed(missing)}, which its index lists: the download is incomplete."
            )
        for name in sorted(names - self._files.keys()):
            self._files[name] = SafetensorsFile(self.folder / name)
        return {name: self._files[name] for name in sorted(names)}

    def _read_weight_map(self) -> dict[str, str]:
        index = self.folder / INDEX
        if index.is_file():
            raw = index.read_bytes()
            refuse_pointer(raw, shown(index))
            return _checked_weight_map(parse_json(raw, shown(index)), shown(index))
        files = sorted(file.name for file in self.folder.glob("*.safetensors"))
        if "model.safetensors" in files:
            files = ["model.safetensors"]
        if not files:
            raise CheckpointError(f"{shown(self.folder)} holds neither {INDEX} nor any .safetensors file.")
        if len(files) > 1:
            raise CheckpointError(
                f"{shown(self.folder)} holds {listed(files)} but no {INDEX}, so nothing says whether files "
                "are missing: the download is incomplete."
            )
        return dict.fromkeys(self.open(set(files))[files[0]].tensors, files[0])


def resolve(path: str | os.PathLike[str], asked: int | str | None = None) -> Path:
    """The folder that holds the checkpoint: `path`, or the snapshot in it if it is of the Hugging Face hub's cache.

    Args:
      asked: the layer that is wanted, for the error message; None if it is not known.

    Raises:
      CheckpointError: if there is no such folder; for the name of a hub repository the message says what to download.
    """
    folder = Path(path).expanduser()
    if folder.is_file():
        raise CheckpointError(f"{shown(path)} is a file; pass the checkpoint's folder, which also holds config.json.")
    if not folder.exists() and re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name := os.fspath(path), re.ASCII):
        local = name.split("/")[1]
        layer = "N" if asked is None else shlex.quote(shown(asked))
        raise CheckpointError(
            f"{name} is not a folder here. If it is a Hugging Face repository, one layer takes only some of its files: "
            f"`hf download {name} config.json {INDEX} --local-dir {local}`, then "
            f"`hf download {name} $(nemotron-moe info {local} --layer {layer} --files) --local-dir {local}` fetches "
            f"those of layer {layer}. A repository without {INDEX} has one file for all layers: "
            f"`hf download {name} config.json model.safetensors --local-dir {local}`."
        )
    if not folder.is_dir():
        raise CheckpointError(f"{shown(path)} is not a folder.")
    cached = (folder / "snapshots").is_dir() and not (folder / "config.json").exists()
    return _snapshot(folder) if cached else folder


def _snapshot(repository: Path) -> Path:
    snapshots = sorted(entry for entry in (repository / "snapshots").iterdir() if entry.is_dir())
    if len(snapshots) == 1:
        return snapshots[0]
    main = repository / "refs" / "main"
    commit = main.read_text().strip() if main.is_file() else None
    for snapshot in snapshots:
        if snapshot.name == commit:
            return snapshot
    raise CheckpointError(
        f"{shown(repository)} has {len(snapshots)} snapshots and refs/main names none of them; pass one of the folders "
        f"in {shown(repository / 'snapshots')}: {listed([entry.name for entry in snapshots])}."
    )


def _checked_weight_map(index: dict, where: str) -> dict[str, str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{where} has no weight_map object; it is no index of a safetensors checkpoint.")
    for tensor, file in weight_map.items():
        # A plain name cannot lead out of the folder, on any system.
        if not isinstance(file, str) or not re.fullmatch(r"[^/\\:\0]+\.safetensors", file):
            raise CheckpointError(
                f"{where} puts {shown(tensor)} into {shown(file)!r}; wanted the plain name of a .safetensors file."
            )
    return weight_map
