"""Loads MoE layers of a published checkpoint."""

import dataclasses
import operator
import os
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from checkpoints.directory import Checkpoint
from checkpoints.find import FoundLayer, find_layer
from checkpoints.names import prefix_of
from checkpoints.progress import Progress, reporting
from checkpoints.slices import Bounds, Read, bounds, plan_reads, read_slices
from nemotron_moe.config import MoEConfig
from nemotron_moe.sharding import ShardingRules
from nemotron_moe.weights import MoEWeights, abstract_weights, stored_dtype

_COMPUTE_DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What this process reads of a layer, and what becomes of it."""

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
            plans[layer] = _plan(find_layer(checkpoint, layer), dtype, mesh, rules)
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
    formats = {field: stored_dtype(field, is_, dtype) for field, is_ in found.dtypes.items() if field != "gate_bias"}
    abstract = abstract_weights(found.config, formats=formats, mesh=mesh, rules=rules)
    wanted = {field: _wanted(leaf) for field, leaf in abstract.items().items()}
    return _Plan(found.config, abstract, wanted, plan_reads(found.sources, wanted))


def _wanted(leaf: jax.ShapeDtypeStruct) -> list[Bounds]:
    """The distinct parts of an array that this process's devices hold."""
    if leaf.sharding is None:
        return [tuple((0, size) for size in leaf.shape)]
    indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
    return list(dict.fromkeys(bounds(index, leaf.shape) for index in indices if index is not None))


def _weights(plan: _Plan, step: Callable[[int], None]) -> MoEWeights:
    abstract = plan.abstract.items()
    arrays = read_slices(plan.reads, plan.wanted, {field: leaf.dtype for field, leaf in abstract.items()}, step)

    def leaf(field: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        if like.sharding is None:
            return jax.device_put(arrays.pop((field, plan.wanted[field][0])))
        return jax.make_array_from_callback(
            like.shape, like.sharding, lambda index: arrays[field, bounds(index or (), like.shape)], dtype=like.dtype
        )

    # Waits, so that the next layer's memory comes after this one's has gone to the device.
    return jax.block_until_ready(MoEWeights(**{field: leaf(field, like) for field, like in abstract.items()}))
