"""The tensors' names in published checkpoints, one row per weight."""

import dataclasses
import difflib
import math
import re
from collections.abc import Collection, Iterable, Mapping

from checkpoints.errors import LISTED, CheckpointError, listed, shown
from checkpoints.formats import Piece
from checkpoints.safetensors_file import TensorInfo

# Field of MoEWeights -> name behind the layer's prefix (N is the expert), and the name in files that hold all experts
# as one tensor.
TABLE: dict[str, tuple[str, str | None]] = {
    "norm": ("norm.weight", None),
    "gate": ("mixer.gate.weight", None),
    "gate_bias": ("mixer.gate.e_score_correction_bias", None),
    "fc1_latent_proj": ("mixer.fc1_latent_proj.weight", None),
    "fc2_latent_proj": ("mixer.fc2_latent_proj.weight", None),
    "experts_up_proj": ("mixer.experts.N.up_proj.weight", "mixer.experts.up_proj"),
    "experts_down_proj": ("mixer.experts.N.down_proj.weight", "mixer.experts.down_proj"),
    "shared_experts_up_proj": ("mixer.shared_experts.up_proj.weight", None),
    "shared_experts_down_proj": ("mixer.shared_experts.down_proj.weight", None),
}

# Parts of a multi-token-prediction block that are not its MoE layer.
_MTP_OWN = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight")

# Scales of the activations around a module, for which there is no use where they are not part of its weight. Each is
# one number: with one for each column, the product would be another.
_ACTIVATION_SCALES = ("input_scale", "input_global_scale", "output_scale")
_CACHE_SCALES = ("k_scale", "v_scale")

# What belongs to a weight, and says nothing more where that is missing.
_WEIGHT_SCALES = ("weight_scale", "weight_scale_2", "weight_scale_inv", "weight_global_scale")

# A comparison of two names is slow, and a stranger's file may hold very many.
_COMPARED = 100

_LAYER = re.compile(
    r"((?:(?:backbone|model|language_model\.backbone)\.layers\.([0-9]{1,6})|(mtp\.layers\.[0-9]{1,6}))\.)(.+)",
    re.DOTALL,
)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a weight belongs: `expert` is None if it is the field's whole array. `shape` is its own, unquantised."""

    field: str
    expert: int | None
    shape: tuple[int, ...]


def prefixes_of_layers(names: Iterable[str]) -> dict[int | str, list[str]]:
    """MoE layer (3, or "mtp.layers.1") -> the prefixes under which it occurs; numbers first, in order."""
    found: dict[int | str, dict[str, None]] = {}
    for name in names:
        match = _LAYER.fullmatch(name)
        if match and match[4].startswith(("mixer.gate.", "mixer.experts.")):
            found.setdefault(match[3] or int(match[2]), {})[match[1]] = None
    ordered = sorted(found, key=lambda layer: (isinstance(layer, str), len(str(layer)), str(layer)))
    return {layer: sorted(found[layer]) for layer in ordered}


def prefix_of(layer: int | str, layers: Mapping[int | str, list[str]]) -> str:
    """The prefix of one layer's tensors, such as "backbone.layers.3.", given all layers from `prefixes_of_layers`.

    Raises:
      CheckpointError: if the layer is not there or no MoE layer, or is there under two prefixes.
    """
    prefixes = layers.get(layer, [])
    if not prefixes:
        known = listed([repr(known) for known in layers], limit=60) or "none"
        raise CheckpointError(f"The checkpoint has no MoE layer {shown(repr(layer))}; its MoE layers are {known}.")
    if len(prefixes) > 1:
        raise CheckpointError(
            f"Layer {layer} occurs {len(prefixes)} times, as {' and '.join(prefix[:-1] for prefix in prefixes)}; "
            "nothing says which one is meant."
        )
    return prefixes[0]


def expected_places(prefix: str, shapes: Mapping[str, tuple[int, ...]], names: Iterable[str]) -> dict[str, Place]:
    """The weights that a layer consists of, by the names that they have when they are not packed.

    Args:
      prefix: of the layer.
      shapes: by field, of the layer's arrays.
      names: the tensors that are there; they decide whether experts are expected one by one or stacked.

    Raises:
      CheckpointError: if the layer should have more experts than it has tensors.
    """
    names, places = set(names), {}
    for field, shape in shapes.items():
        name, stacked = TABLE[field]
        if stacked is None:
            places[prefix + name] = Place(field, None, shape)
        elif prefix + stacked in names:
            places[prefix + stacked] = Place(field, None, shape)
        elif shape[0] > len(names):  # Before a hostile config makes us write out names without end.
            raise CheckpointError(
                f"{prefix}mixer should have {shape[0]} experts, but it has only {len(names)} tensors."
            )
        else:
            for expert in range(shape[0]):
                places[prefix + name.replace("N", str(expert))] = Place(field, expert, shape[1:])
    return places


def check_names(
    wanted: Mapping[str, Piece], tensors: Mapping[str, TensorInfo], modules: Collection[str], where: str
) -> None:
    """Every wanted tensor is there in its shape and dtype, and every tensor of the layer is wanted or known.

    Args:
      wanted: by name.
      tensors: all tensors of the layer.
      modules: the names of the modules that have a weight, as in "...mixer.fc1_latent_proj".
      where: which layer of which checkpoint, for the message.

    Raises:
      CheckpointError: listing the tensors that are missing, surplus, wrongly shaped or of a wrong dtype.
    """
    absent = [name for name in wanted if name not in tensors]
    lost = {name.rpartition(".")[0] for name in absent if name.endswith((".weight", ".weight_packed"))}
    surplus = [name for name in tensors if name not in wanted and not _ignored(name, modules, lost)]
    there = [(name, tensors[name], piece) for name, piece in wanted.items() if name in tensors]
    shapes = [
        f"{name} {list(info.shape)} (wanted {' or '.join(str(list(shape)) for shape in piece.shapes)}"
        f"{f': {piece.hint}' if piece.hint else ''})"
        for name, info, piece in there
        if info.shape not in piece.shapes
    ]
    shapes += [
        f"{name} {list(info.shape)} (wanted [] or [1]: one scale)"
        for name, info in tensors.items()
        if name not in wanted and _unused(name, modules) and math.prod(info.shape) != 1
    ]
    dtypes = [
        f"{name} {info.dtype} (wanted {' or '.join(piece.dtypes)})"
        for name, info, piece in there
        if info.dtype not in piece.dtypes
    ]
    faults = {
        "missing": _with_suggestions(absent, surplus),
        "surplus": surplus,
        "wrongly shaped": shapes,
        "of a wrong dtype": dtypes,
    }
    if found := [f"{fault}: {listed(names)}" for fault, names in faults.items() if names]:
        raise CheckpointError(
            f"{where} does not have the tensors that its config.json and its number formats ask for. "
            f"{'; '.join(found)}."
        )


def _ignored(name: str, modules: Collection[str], lost: Collection[str]) -> bool:
    if name.startswith("mtp.") and name.split(".", 3)[-1] in _MTP_OWN:
        return True
    module, _, last = name.rpartition(".")
    return last in _CACHE_SCALES or _unused(name, modules) or (last in _WEIGHT_SCALES and module in lost)


def _unused(name: str, modules: Collection[str]) -> bool:
    """Whether it is a scale of the activations around one of the modules, if it is no part of a weight."""
    module, _, last = name.rpartition(".")
    return last in _ACTIVATION_SCALES and module in modules


def _with_suggestions(missing: list[str], surplus: list[str]) -> list[str]:
    """The missing names; those that are shown have the surplus name beside them that may be the same one misspelt."""
    # Same numbers, or else every other expert would be a near match.
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in surplus:
        alike.setdefault(_numbers(name), []).append(name)
    suggested = []
    for name in missing[:LISTED]:
        near = difflib.get_close_matches(name, alike.get(_numbers(name), [])[:_COMPARED], 1, 0.8)
        suggested.append(f"{name} (is it {near[0]}?)" if near else name)
    return suggested + missing[LISTED:]


def _numbers(name: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[0-9]+", name))
