"""Loads MoE layers of a published checkpoint."""

import dataclasses
import operator
import os
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from checkpoints.directory import Checkpoint
from checkpoints.errors import CheckpointError, listed, shown
from checkpoints.formats import UNQUANTISED, format_of
from checkpoints.names import Place, check_names, expected_places, prefix_of, prefixes_of_layers
from checkpoints.progress import Progress, reporting
from checkpoints.safetensors_file import SafetensorsFile, TensorInfo
from checkpoints.slices import Bounds, Read, Source, bounds, plan_reads, read_slices
from nemotron_moe.config import MoEConfig
from nemotron_moe.sharding import ShardingRules
from nemotron_moe.weights import MoEWeights, abstract_weights, stored_dtype

_COMPUTE_DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A layer that has been found complete and right, and what is to be read of it by this process."""

    config: MoEConfig
    abstract: MoEWeights
    wanted: dict[str, list[Bounds]]
    reads: list[Read]


def load_layer(
    path: str | os.PathLike[str],
    layer: int | str,
    *,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    rules: ShardingRules | None = None,
    progress: Progress | None = None,
) -> tuple[MoEWeights, MoEConfig]:
    """Loads one MoE layer; only its own files need be present, and only its own bytes are read.

    Args:
      path: folder with `config.json` and safetensors files, or a repository's folder in the Hugging Face hub's cache.
      layer: a number, or the name of a multi-token-prediction block such as "mtp.layers.1" (see `list_moe_layers`).
      dtype: bfloat16, float16 or float32 for all weights; but `gate_bias` is always float32, and `gate` is never
        narrowed. None keeps what is stored (a `gate_bias` stored in 16 bits is widened, which is exact).
      mesh, rules: where the weights go, as in `abstract_weights`. Each process reads the rows and experts that its
        devices hold, once. Without a mesh they go to jax's default device.
      progress: called with (bytes done, bytes in total) as the load goes on. None shows a bar for 1 GiB and more.

    Raises:
      CheckpointError: (a ValueError) if files are missing, damaged or contradict each other, or the layer is quantised.
      ValueError: if config.json does not have that MoE layer, or an argument is wrong.
    """
    return load_layers(path, [layer], dtype=dtype, mesh=mesh, rules=rules, progress=progress)[layer]


def load_layers(
    path: str | os.PathLike[str],
    layers: Iterable[int | str] | None = None,
    *,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    rules: ShardingRules | None = None,
    progress: Progress | None = None,
) -> dict[int | str, tuple[MoEWeights, MoEConfig]]:
    """Loads several MoE layers, one after the other; None means all. Arguments and errors are those of `load_layer`.

    All layers are checked before the first is read, and each file is opened once.
    """
    if isinstance(layers, (int, str)):
        raise ValueError(f"layers is {layers!r}; wanted a list, as in [{layers!r}].")
    if dtype is not None and jnp.dtype(dtype).name not in _COMPUTE_DTYPES:
        raise ValueError(f"dtype is {jnp.dtype(dtype).name}; wanted one of {', '.join(_COMPUTE_DTYPES)}, or None.")
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ValueError(f"mesh is {type(mesh).__name__}; wanted a jax.sharding.Mesh, whose devices exist.")
    if progress is not None and not callable(progress):
        raise ValueError(f"progress is {progress!r}; wanted a function of (bytes done, bytes in total), or None.")
    with Checkpoint(path) as checkpoint:
        prefixes = prefixes_of_layers(checkpoint.weight_map)
        plans = {}
        for layer in prefixes if layers is None else map(_checked, layers):
            plans[layer] = _plan(checkpoint, layer, prefix_of(layer, prefixes), dtype, mesh, rules)
        with reporting(progress, sum(read.nbytes for plan in plans.values() for read in plan.reads)) as step:
            return {layer: (_weights(plan, step), plan.config) for layer, plan in plans.items()}


def list_moe_layers(path: str | os.PathLike[str]) -> list[int | str]:
    """The MoE layers of a checkpoint as `load_layer` names them: numbers in order, then names like "mtp.layers.1".

    Raises:
      CheckpointError: as `load_layer`; no shard need be present if there is an index.
    """
    with Checkpoint(path) as checkpoint:
        return list(prefixes_of_layers(checkpoint.weight_map))


def layer_files(path: str | os.PathLike[str], layer: int | str) -> list[str]:
    """The names of the files that must be present to load `layer`, from the index alone.

    Raises:
      CheckpointError: as `load_layer`; no shard need be present if there is an index.
    """
    with Checkpoint(path) as checkpoint:
        prefix = prefix_of(_checked(layer), prefixes_of_layers(checkpoint.weight_map))
        return sorted({file for name, file in checkpoint.weight_map.items() if name.startswith(prefix)})


def _checked(layer: int | str) -> int | str:
    if isinstance(layer, str):
        return layer
    try:
        return operator.index("" if isinstance(layer, bool) else layer)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"layer is {layer!r}; wanted a number, or a name such as 'mtp.layers.1'.") from None


def _plan(
    checkpoint: Checkpoint,
    layer: int | str,
    prefix: str,
    dtype: DTypeLike | None,
    mesh: Mesh | None,
    rules: ShardingRules | None,
) -> _Plan:
    if not (checkpoint.folder / "config.json").is_file():
        raise CheckpointError(f"{shown(checkpoint.folder)} has no config.json, which says how large the layer is.")
    config = MoEConfig.from_hf(checkpoint.folder, layer=layer)
    found = _find_tensors(checkpoint, prefix)
    tensors = {name: info for name, (_, info) in found.items()}
    shapes = {field: leaf.shape for field, leaf in abstract_weights(config).items().items()}
    places = expected_places(prefix, shapes, tensors)
    _refuse_quantised(places, tensors)
    check_names(places, tensors, f"Layer {layer} of {shown(checkpoint.folder)}")
    stored = _stored_dtypes(places, tensors)
    formats = {field: stored_dtype(field, stored[field], dtype) for field in stored if field != "gate_bias"}
    abstract = abstract_weights(config, formats=formats, mesh=mesh, rules=rules)
    wanted = {field: _wanted(leaf) for field, leaf in abstract.items().items()}
    sources = [source for name, place in places.items() for source in _sources(*found[name], name, place)]
    return _Plan(config, abstract, wanted, plan_reads(sources, wanted))


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


def _wanted(leaf: jax.ShapeDtypeStruct) -> list[Bounds]:
    """The distinct parts of an array that this process's devices hold."""
    if leaf.sharding is None:
        return [tuple((0, size) for size in leaf.shape)]
    indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
    return list(dict.fromkeys(bounds(index, leaf.shape) for index in indices if index is not None))


def _sources(file: SafetensorsFile, info: TensorInfo, name: str, place: Place) -> list[Source]:
    if place.expert is None and len(info.shape) == 3:
        return [Source(file, name, info.at(expert), place.field, expert) for expert in range(info.shape[0])]
    return [Source(file, name, info, place.field, place.expert)]


def _weights(plan: _Plan, step: Callable[[int], None]) -> MoEWeights:
    abstract = plan.abstract.items()
    arrays = read_slices(plan.reads, plan.wanted, {field: leaf.dtype for field, leaf in abstract.items()}, step)

    def leaf(field: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        if like.sharding is None:
            return jax.device_put(arrays.pop((field, plan.wanted[field][0])))
        return jax.make_array_from_callback(
            like.shape, like.sharding, lambda index: arrays[field, bounds(index or (), like.shape)], dtype=like.dtype
        )

    return MoEWeights(**{field: leaf(field, like) for field, like in abstract.items()})
