"""Finds one MoE layer in a checkpoint's files, complete and as its config says, before any of it is read."""

import dataclasses

import numpy as np

from checkpoints.directory import Checkpoint
from checkpoints.errors import CheckpointError, listed, shown
from checkpoints.formats import UNQUANTISED, format_of
from checkpoints.names import Place, check_names, expected_places, prefix_of
from checkpoints.safetensors_file import SafetensorsFile, TensorInfo
from checkpoints.slices import Source
from nemotron_moe.config import MoEConfig
from nemotron_moe.hf_config import pick_layer
from nemotron_moe.weights import abstract_weights


@dataclasses.dataclass(frozen=True)
class FoundLayer:
    """A layer in the files.

    Attributes:
      config: the layer's sizes.
      dtypes: the stored dtype by field of `MoEWeights`.
      sources: where the parts of the fields are.
    """

    config: MoEConfig
    dtypes: dict[str, np.dtype]
    sources: list[Source]


def find_layer(checkpoint: Checkpoint, layer: int | str) -> FoundLayer:
    """Opens the files of one layer and checks everything that their headers tell.

    Raises:
      CheckpointError: if the layer is not there, its files are missing, damaged or contradict the index, it is
        quantised, its tensors are not those of its config, or its experts differ in dtype.
      ValueError: if config.json does not have that MoE layer.
    """
    prefix = prefix_of(layer, checkpoint.layers)
    config = pick_layer(checkpoint.configs, layer)
    found = _find_tensors(checkpoint, prefix)
    tensors = {name: info for name, (_, info) in found.items()}
    shapes = {field: leaf.shape for field, leaf in abstract_weights(config).items().items()}
    places = expected_places(prefix, shapes, tensors)
    _refuse_quantised(places, tensors)
    check_names(places, tensors, f"Layer {layer} of {shown(checkpoint.folder)}")
    sources = [source for name, place in places.items() for source in _sources(*found[name], name, place)]
    return FoundLayer(config, _stored_dtypes(places, tensors), sources)


def _find_tensors(checkpoint: Checkpoint, prefix: str) -> dict[str, tuple[SafetensorsFile, TensorInfo]]:
    """The layer's tensors as they are in the files, which the index must agree with."""
    promised = {name: file for name, file in checkpoint.weight_map.items() if name.startswith(prefix)}
    found: dict[str, tuple[SafetensorsFile, TensorInfo]] = {}
    holder: dict[str, str] = {}
    for shard, file in checkpoint.open(set(promised.values())).items():
        for name, info in file.tensors.items():
            if name.startswith(prefix):
                if name in found:
                    raise CheckpointError(f"{shown(name)} is in two files, {holder[name]} and {shown(shard)}.")
                found[name], holder[name] = (file, info), shard
    for name, shard in promised.items():
        if holder.get(name) != shard:
            instead = f"it is in {holder[name]}" if name in holder else "it is not there"
            raise CheckpointError(f"The index says that {shown(name)} is in {shown(shard)}, but {instead}.")
    if unlisted := [name for name in found if name not in promised]:
        raise CheckpointError(f"The index does not list {listed(unlisted)}, which its files hold.")
    return found


def _refuse_quantised(places: dict[str, Place], tensors: dict[str, TensorInfo]) -> None:
    for name in places:
        packed = f"{name}_packed"
        if (name in tensors or packed in tensors) and (found := format_of(tensors, name)):
            name = packed if packed in tensors else name
            raise CheckpointError(f"{name} is {found}; load_layer reads {', '.join(UNQUANTISED)}.")


def _stored_dtypes(places: dict[str, Place], tensors: dict[str, TensorInfo]) -> dict[str, np.dtype]:
    """The dtype of each field; all experts must agree."""
    first: dict[str, str] = {}
    for name, place in places.items():
        other = first.setdefault(place.field, name)
        if tensors[name].dtype != tensors[other].dtype:
            raise CheckpointError(
                f"{name} is {tensors[name].dtype} but {other} is {tensors[other].dtype}; experts must share a dtype."
            )
    return {field: tensors[name].numpy_dtype for field, name in first.items()}


def _sources(file: SafetensorsFile, info: TensorInfo, name: str, place: Place) -> list[Source]:
    if place.expert is None and len(info.shape) == 3:
        return [Source(file, name, info.at(expert), place.field, expert) for expert in range(info.shape[0])]
    return [Source(file, name, info, place.field, place.expert)]
