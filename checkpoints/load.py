"""Loads MoE layers of a published checkpoint."""

import dataclasses
import operator
import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from checkpoints.directory import Checkpoint
from checkpoints.errors import CheckpointError, listed
from checkpoints.find import FieldFormat, FoundLayer, find_layer
from checkpoints.names import prefix_of
from checkpoints.progress import Progress, reporting
from checkpoints.slices import Bounds, Read, bounds, plan_reads, read_slices
from nemotron_moe.config import MoEConfig
from nemotron_moe.sharding import ShardingRules
from nemotron_moe.weights import MoEWeights, abstract_weights, dequantized, stored_format
from pallas_kernels.formats import Quantised

_COMPUTE_DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What this process reads of a layer, and what becomes of it."""

    config: MoEConfig
    abstract: MoEWeights  # what is returned
    read: dict[str, Any]  # what is read, by field: the same, or quantised where it becomes dequantised
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
        narrowed. Quantised weights are dequantised on the device, a field at a time. None keeps what is stored, and
        quantised weights packed (but widens a `gate_bias` stored in 16 bits, and dequantises a `gate` to float32).
      mesh, rules: where the weights go, as in `abstract_weights`. Each process reads the rows and experts that its
        devices hold, once. Without a mesh they go to jax's default device.
      progress: called with (bytes done, bytes in total) as the load goes on. None shows a bar for 1 GiB and more.

    Raises:
      CheckpointError: (a ValueError) if files are missing, damaged or contradict each other, a number format is not
        known, an FP8 number is NaN, or a scale is not from 2^-116 to 2^116, with which codes would be lost.
      ValueError: if config.json does not have that MoE layer, or an argument is wrong.
    """
    (loaded,) = load_layers(path, [layer], dtype=dtype, mesh=mesh, rules=rules, progress=progress).values()
    return loaded


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
    if dtype is not None and (name := _dtype_name(dtype)) not in _COMPUTE_DTYPES:
        raise ValueError(f"dtype is {name}; wanted one of {', '.join(_COMPUTE_DTYPES)}, or None.")
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ValueError(f"mesh is {type(mesh).__name__}; wanted a jax.sharding.Mesh, whose devices exist.")
    if progress is not None and not callable(progress):
        raise ValueError(f"progress is {progress!r}; wanted a function of (bytes done, bytes in total), or None.")
    layers = None if layers is None else [_checked(layer) for layer in layers]
    with Checkpoint(path, layers[0] if layers else None) as checkpoint:
        plans = {}
        for layer in checkpoint.layers if layers is None else layers:
            found = find_layer(checkpoint, layer)
            _warn(found, layer)
            plans[layer] = _plan(found, dtype, mesh, rules)
        with reporting(progress, sum(read.nbytes for plan in plans.values() for read in plan.reads)) as step:
            return {layer: (_weights(plan, step), plan.config) for layer, plan in plans.items()}


def list_moe_layers(path: str | os.PathLike[str]) -> list[int | str]:
    """The MoE layers of a checkpoint as `load_layer` names them: numbers in order, then names like "mtp.layers.1".

    Raises:
      CheckpointError: as `load_layer`; no shard need be present if there is an index.
    """
    with Checkpoint(path) as checkpoint:
        return list(checkpoint.layers)


def layer_files(path: str | os.PathLike[str], layer: int | str) -> list[str]:
    """The names of the files that must be present to load `layer`, from the index alone.

    Raises:
      CheckpointError: as `load_layer`; no shard need be present if there is an index.
    """
    layer = _checked(layer)
    with Checkpoint(path, layer) as checkpoint:
        prefix = prefix_of(layer, checkpoint.layers)
        return sorted({file for name, file in checkpoint.weight_map.items() if name.startswith(prefix)})


def layer_formats(path: str | os.PathLike[str], layer: int | str) -> dict[str, FieldFormat]:
    """How each field of a layer is stored, from the headers of its files; no weights are read.

    Raises:
      CheckpointError: as `load_layer`, but for what only the values tell.
    """
    layer = _checked(layer)
    with Checkpoint(path, layer) as checkpoint:
        return find_layer(checkpoint, layer).formats


def _warn(found: FoundLayer, layer: int | str) -> None:
    """Says so if the configs declare other number formats than the tensors have."""
    wrong = [(module, one) for one in found.formats.values() for module in one.contradicted]
    if wrong:
        names = listed([f"{module} is {one.published}, declared {one.declared}" for module, one in wrong], limit=3)
        warnings.warn(
            f"Layer {layer}: the number formats in config.json or hf_quant_config.json are not those of the tensors, "
            f"which are what is loaded: {names}.",
            UserWarning,
            skip_file_prefixes=(str(Path(__file__).parent),),
        )


def _checked(layer: int | str) -> int | str:
    if isinstance(layer, str):
        return layer
    if isinstance(layer, bool) or not hasattr(layer, "__index__"):
        raise ValueError(f"layer is {layer!r}; wanted a number, or a name such as 'mtp.layers.1'.")
    return operator.index(layer)


def _dtype_name(dtype: DTypeLike) -> str:
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        return repr(dtype)


def _plan(found: FoundLayer, dtype: DTypeLike | None, mesh: Mesh | None, rules: ShardingRules | None) -> _Plan:
    formats = {
        # The router is never quantised: dequantised it is float32.
        field: stored_format(field, jnp.float32 if field == "gate" and isinstance(stored, Quantised) else stored, dtype)
        for field, stored in found.stored.items()
        if field != "gate_bias"
    }
    abstract = abstract_weights(found.config, formats=formats, mesh=mesh, rules=rules)
    read = {field: _read_as(found.stored[field], leaf, field) for field, leaf in abstract.items().items()}
    wanted = {name: _wanted(leaf) for field, like in read.items() for name, leaf in _leaves(field, like).items()}
    for field, like in read.items():
        if isinstance(like, Quantised) and like.uncalibrated:
            # Not kept, as some experts have none; those that are there must be sound all the same.
            matrices = [part[:-2] for part in wanted[f"{field}.{like.codes}"]]
            wanted[f"{field}.input_scale"] = list(dict.fromkeys(matrices))
    return _Plan(found.config, abstract, read, wanted, plan_reads(found.sources, wanted))


def _read_as(stored: np.dtype | Quantised, leaf: Any, field: str) -> Any:
    """The abstract array to read for a field that shall become `leaf`: quantised as stored, or as `leaf` is."""
    if not isinstance(stored, Quantised) or isinstance(leaf, Quantised):
        return leaf
    if (sharding := leaf.sharding) is None:
        return stored
    try:
        return stored.placed(sharding, field)
    except ValueError:
        # It cuts blocks, which the dequantised array does not have: each device takes whole matrices first.
        whole = PartitionSpec(*sharding.spec[: stored.ndim - 2])
        return stored.placed(NamedSharding(sharding.mesh, whole), field)


def _leaves(field: str, like: Any) -> dict[str, Any]:
    """The arrays that a field consists of, by the names that sources give them."""
    if not isinstance(like, Quantised):
        return {field: like}
    return {f"{field}.{part}": getattr(like, part) for part in like.parts()}


def _wanted(leaf: jax.ShapeDtypeStruct) -> list[Bounds]:
    """The distinct parts of an array that this process's devices hold."""
    if leaf.sharding is None:
        return [tuple((0, size) for size in leaf.shape)]
    indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
    return list(dict.fromkeys(bounds(index, leaf.shape) for index in indices if index is not None))


def _weights(plan: _Plan, step: Callable[[int], None]) -> MoEWeights:
    leaves = {name: leaf for field, like in plan.read.items() for name, leaf in _leaves(field, like).items()}
    arrays = read_slices(plan.reads, plan.wanted, {name: leaf.dtype for name, leaf in leaves.items()}, step)

    def on_device(name: str) -> jax.Array:
        like = leaves[name]
        mine = {part: arrays.pop((name, part)) for part in plan.wanted[name]}
        if like.sharding is None:
            return jax.device_put(mine[plan.wanted[name][0]])
        return jax.make_array_from_callback(
            like.shape, like.sharding, lambda index: mine[bounds(index or (), like.shape)], dtype=like.dtype
        )

    def value(field: str, wanted: Any) -> Any:
        like = plan.read[field]
        if not isinstance(like, Quantised):
            return on_device(field)
        parts: dict[str, Any] = {part: on_device(f"{field}.{part}") for part in like.parts()}
        array = dataclasses.replace(like, **parts)
        return array if isinstance(wanted, Quantised) else _dequantised(array, wanted, field)

    # Waits, so that the next layer's memory comes after this one's has gone to the device.
    return jax.block_until_ready(
        MoEWeights(**{field: value(field, wanted) for field, wanted in plan.abstract.items().items()})
    )


def _dequantised(array: Quantised, wanted: jax.ShapeDtypeStruct, field: str) -> jax.Array:
    result = jax.block_until_ready(dequantized(array, wanted.dtype, wanted.sharding))
    if wanted.dtype == jnp.float16 and bool(jnp.isinf(result).any()):
        raise CheckpointError(
            f"{field} has values that overflow float16; load it in bfloat16 or float32, or as it is (dtype=None)."
        )
    return result
