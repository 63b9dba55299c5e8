"""Finds one MoE layer in a checkpoint's files, complete and as its config says, before any of it is read."""

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np

from checkpoints.declared import Declared
from checkpoints.directory import Checkpoint
from checkpoints.errors import CheckpointError, listed, shown
from checkpoints.formats import UNQUANTISED, Piece, Stored, resolve
from checkpoints.names import Place, check_names, expected_places, prefix_of
from checkpoints.safetensors_file import SafetensorsFile, TensorInfo
from checkpoints.slices import Source
from nemotron_moe.config import MoEConfig
from nemotron_moe.hf_config import pick_layer
from nemotron_moe.weights import abstract_weights
from pallas_kernels.formats import Quantised

# Part of a quantised array that a file may have for all, some or none of the experts.
_INPUT = "input_scale"


@dataclasses.dataclass(frozen=True)
class FieldFormat:
    """How a field of `MoEWeights` is stored in the files.

    Attributes:
      published: the format's name, such as "NVFP4 (ModelOpt)" or "BF16".
      format: the quantised array's, such as "nvfp4"; None where the field is not quantised.
      scales: dtype and shape by tensor name of the scales that are loaded; of the first expert where there are several.
      declared: what the checkpoint's configs say: "FP8", "NVFP4", "unquantised", another format's name, or None where
        they are silent.
      contradicted: the modules whose tensors are of another kind than declared.
    """

    published: str
    format: str | None
    scales: dict[str, tuple[str, tuple[int, ...]]]
    declared: str | None
    contradicted: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """Whether no module is stored in another way than the configs declare."""
        return not self.contradicted


@dataclasses.dataclass(frozen=True)
class FoundLayer:
    """A layer in the files.

    Attributes:
      config: the layer's sizes.
      stored: by field of `MoEWeights`, the dtype or the abstract quantised array; `gate` may be quantised here.
      formats: the same for people.
      sources: where the parts of the fields are, and the input scales of fields that have them for some experts only.
    """

    config: MoEConfig
    stored: dict[str, np.dtype | Quantised]
    formats: dict[str, FieldFormat]
    sources: list[Source]


@dataclasses.dataclass(frozen=True)
class _Weight:
    """A weight of the layer: where it belongs, and how it is stored."""

    name: str
    place: Place
    stored: Stored

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    def pieces(self, *, inputs: bool) -> dict[str, tuple[str, Piece]]:
        return {part: piece for part, piece in self.stored.pieces.items() if inputs or part != _INPUT}


def find_layer(checkpoint: Checkpoint, layer: int | str) -> FoundLayer:
    """Opens the files of one layer and checks everything that their headers tell.

    Raises:
      CheckpointError: if the layer is not there, its files are missing, damaged or contradict the index, its tensors
        are not those of its config, or are in a format that is not read, or its experts differ in their format.
      ValueError: if config.json does not have that MoE layer.
    """
    prefix = prefix_of(layer, checkpoint.layers)
    config = pick_layer(checkpoint.configs, layer)
    found = _find_tensors(checkpoint, prefix)
    tensors = {name: info for name, (_, info) in found.items()}
    shapes = {field: leaf.shape for field, leaf in abstract_weights(config).items().items()}
    places = expected_places(prefix, shapes, tensors)
    weights = [_Weight(name, place, _stored(tensors, name, place)) for name, place in places.items()]
    wanted = {name: piece for weight in weights for name, piece in weight.stored.pieces.values()}
    check_names(wanted, tensors, {weight.module for weight in weights}, f"Layer {layer} of {shown(checkpoint.folder)}")
    stored: dict[str, np.dtype | Quantised] = {}
    formats: dict[str, FieldFormat] = {}
    sources: list[Source] = []
    for field, shape in shapes.items():
        own = [weight for weight in weights if weight.place.field == field]
        inputs = all(_INPUT in weight.stored.pieces for weight in own)
        stored[field] = _array(own, tensors, shape, inputs=inputs)
        formats[field] = _format(own, tensors, stored[field], checkpoint.declared, inputs=inputs)
        for weight in own:
            for part, (name, piece) in weight.stored.pieces.items():
                leaf = f"{field}.{part}" if part else field
                sources += _sources(*found[name], name, piece, leaf, weight.place.expert)
    return FoundLayer(config, stored, formats, sources)


def _stored(tensors: Mapping[str, TensorInfo], weight: str, place: Place) -> Stored:
    """How a weight is stored; one that is missing is wanted in the file."""
    stored = resolve(tensors, weight, place.shape)
    if stored is None:
        packed = f"{weight}_packed"
        name = packed if f"{weight.removesuffix('.weight')}.weight_global_scale" in tensors else weight
        piece = Piece(place.shape, (place.shape,), UNQUANTISED, scale=False)
        return Stored("missing", None, {"": (name, piece)})
    return stored


def _array(
    weights: list[_Weight], tensors: Mapping[str, TensorInfo], shape: tuple[int, ...], *, inputs: bool
) -> np.dtype | Quantised:
    """What a field is stored as, which all its weights must agree on."""
    first = weights[0]
    other = _described(first, tensors, inputs=inputs)
    for weight in weights:
        if (one := _described(weight, tensors, inputs=inputs)) != other:
            name, its = (next(iter(each.stored.pieces.values()))[0] for each in (weight, first))
            raise CheckpointError(f"{name} is {one} but {its} is {other}; experts must share a number format.")
    pieces = first.pieces(inputs=inputs)
    dtypes = {part: piece.read_as(tensors[name]).numpy_dtype for part, (name, piece) in pieces.items()}
    if first.stored.kind is None:
        return dtypes[""]
    kind, static = first.stored.kind
    blank = kind.abstract(shape, **static)
    # Where the experts are, each has a scalar.
    shapes = {part: shape[:-2] if part == _INPUT else getattr(blank, part).shape for part in dtypes}
    leaves = {part: jax.ShapeDtypeStruct(shapes[part], dtype) for part, dtype in dtypes.items()}
    without = [number for number, weight in enumerate(weights) if _INPUT not in weight.stored.pieces]
    uncalibrated = tuple(without) if len(without) < len(weights) else ()
    return dataclasses.replace(blank, **leaves, uncalibrated=uncalibrated)


def _described(weight: _Weight, tensors: Mapping[str, TensorInfo], *, inputs: bool) -> str:
    """The format of a weight with the dtypes of its scales."""
    scales = {
        name.rpartition(".")[2]: piece.dtype(tensors[name])
        for name, piece in weight.pieces(inputs=inputs).values()
        if piece.scale
    }
    return " with ".join([weight.stored.published(), *(f"{name} {dtype}" for name, dtype in scales.items())])


def _format(
    weights: list[_Weight],
    tensors: Mapping[str, TensorInfo],
    stored: np.dtype | Quantised,
    declared: Declared,
    *,
    inputs: bool,
) -> FieldFormat:
    first = weights[0].stored
    calibrated = any(_INPUT in weight.stored.pieces for weight in weights)
    scales = {
        name: (tensors[name].dtype, tensors[name].shape)
        for name, piece in weights[0].pieces(inputs=inputs).values()
        if piece.scale
    }
    said = (
        {}
        if weights[0].place.field in ("norm", "gate_bias")
        else {weight.module: declared.of(weight.module, router=weight.place.field == "gate") for weight in weights}
    )
    others = {module: kind for module, kind in said.items() if kind not in (None, first.family)}
    return FieldFormat(
        published=first.published(weights_only=first.family == "NVFP4" and not calibrated),
        format=stored.format if isinstance(stored, Quantised) else None,
        scales=scales,
        declared=next(iter([*others.values(), *said.values()]), None),
        contradicted=tuple(others),
    )


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


def _sources(
    file: SafetensorsFile, info: TensorInfo, name: str, piece: Piece, leaf: str, expert: int | None
) -> list[Source]:
    info = piece.read_as(info)
    if expert is None and len(info.shape) == 3:
        return [Source(file, name, info.at(one), leaf, one) for one in range(info.shape[0])]
    return [Source(file, name, info, leaf, expert, piece.scale)]
