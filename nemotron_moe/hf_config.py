"""From a published `config.json` to one `MoEConfig` per Mixture-of-Experts layer."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from nemotron_moe.config import MoEConfig

_MODEL_TYPES = ("nemotron_h", "nemotron_h_puzzle")
_NESTED = ("llm_config", "text_config")

# Where a config lists its layers; the first that is there decides, as in transformers.
_LAYER_KEYS = ("block_configs", "layers_block_type", "hybrid_override_pattern")
_MTP_LAYER_KEYS = ("mtp_block_configs", "mtp_layers_block_type", "mtp_hybrid_override_pattern")
_MTP_DEFAULT = ("attention", "moe")
_KINDS = {
    **{"M": "mamba", "mamba": "mamba", "linear_attention": "mamba"},
    **{"*": "attention", "attention": "attention", "full_attention": "attention"},
    **{"E": "moe", "moe": "moe", "-": "mlp", "mlp": "mlp"},
}

_REQUIRED = ("hidden_size", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "routed_scaling_factor")
_SHARED = "moe_shared_expert_intermediate_size"
# `n_groups` is Mamba's and not read.
_OPTIONAL = ("n_group", "topk_group", "norm_topk_prob")
_EPSILON = ("layer_norm_epsilon", "rms_norm_eps", "norm_eps")
_FIXED = {"mlp_hidden_act": "relu2", "mlp_bias": False, "use_bias": False, "residual_in_fp32": False}


class MoELayers(Mapping[int | str, MoEConfig]):
    """The MoE layers of a model in order, read-only; a multi-token-prediction block is named as in "mtp.layers.1".

    Attributes:
      others: what the other layers are ("mamba", "attention" or "mlp"), by number or name.
    """

    def __init__(self, configs: Mapping[int | str, MoEConfig], others: Mapping[int | str, str] | None = None) -> None:
        self._configs = dict(configs)
        self.others = MappingProxyType(dict(others or {}))

    def __getitem__(self, layer: int | str) -> MoEConfig:
        return self._configs[layer]

    def __iter__(self) -> Iterator[int | str]:
        return iter(self._configs)

    def __len__(self) -> int:
        return len(self._configs)

    def __repr__(self) -> str:
        return f"MoELayers({shorten(self)})"


def shorten(layers: Iterable[int | str]) -> str:
    """The layers' names in a line, the middle left out where they are many."""
    names = [str(layer) for layer in layers]
    return ", ".join(names if len(names) <= 6 else [*names[:2], "...", *names[-2:]])


def moe_layers_from_hf(config: Mapping[str, Any] | str | os.PathLike[str]) -> MoELayers:
    """The configuration of every MoE layer of a published Nemotron-H model.

    Args:
      config: a parsed `config.json`, the file's path, or its folder's path.

    Returns:
      Layer number to `MoEConfig` in the model's order; then, if the model has multi-token prediction (MTP), its MoE
      blocks by name: "mtp.layers.N".

    Raises:
      ValueError: on a file that cannot be read, a model of another type or without MoE layers, or a key that is
        missing, of a wrong type, contradicting another, or asking for what this layer does not do. Files are named.
    """
    if isinstance(config, Mapping):
        return _layers(config)
    if not isinstance(config, (str, os.PathLike)):
        raise ValueError(f"config is a {type(config).__name__}; wanted a parsed config.json (a dict) or a path to one.")
    path = Path(config)
    try:
        path = path / "config.json" if path.is_dir() else path
        if path.exists() and not path.is_file():  # a pipe would wait for ever
            raise ValueError("not a regular file.")
        parsed = json.loads(path.read_bytes(), object_pairs_hook=without_duplicates)
        if not isinstance(parsed, dict):
            raise ValueError(f"holds a {type(parsed).__name__}; wanted a JSON object.")
        return _layers(parsed)
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)):
            reason = f"not valid JSON ({error})"
        raise ValueError(f"{path}: {reason}") from error


def pick_layer(layers: Mapping[int | str, MoEConfig], layer: int | np.integer | str | None) -> MoEConfig:
    """The configuration of one layer; `layer` may be None where all layers (MTP aside) are alike.

    Raises:
      ValueError: if `layer` is no MoE layer of the model, or is None and there is more than one kind.
    """
    known = f"the MoE layers are {shorten(layers)}."
    if layer is None:
        # MTP counts only where there is nothing else.
        kinds = {config for name, config in layers.items() if isinstance(name, int)} or set(layers.values())
        if len(kinds) != 1:
            raise ValueError(f"layer is None, but the MoE layers are of {len(kinds)} kinds; pass layer=: {known}")
        return kinds.pop()
    if isinstance(layer, bool) or not isinstance(layer, (str, int, np.integer)):
        raise ValueError(f"layer is {layer!r}; wanted a number or a name: {known}")
    layer = layer if isinstance(layer, str) else int(layer)
    if layer in layers:
        return layers[layer]
    others = getattr(layers, "others", {})
    what = f"is of kind {others[layer]!r}, not MoE" if layer in others else "does not exist"
    raise ValueError(f"layer {layer!r} {what}; {known}")


def _layers(config: Mapping[str, Any]) -> MoELayers:
    config = _text_config(config)
    blocks: dict[int | str, Mapping[str, Any]] = dict(enumerate(_blocks(config, _LAYER_KEYS)))
    if not blocks:
        raise ValueError(f"the config lacks {', '.join((' or '.join(_LAYER_KEYS), *_missing(config)))}.")
    count = _integer(config, "num_hidden_layers", len(blocks))
    if count != len(blocks):
        raise ValueError(f"num_hidden_layers is {count}, but the config lists {len(blocks)} layers.")
    if _integer(config, "num_nextn_predict_layers", 0) > 0:
        mtp = _blocks(config, _MTP_LAYER_KEYS) or [{"block_type": kind} for kind in _MTP_DEFAULT]
        blocks.update({f"mtp.layers.{index}": block for index, block in enumerate(mtp)})
    kinds = {layer: block["block_type"] for layer, block in blocks.items()}
    if "moe" not in kinds.values():
        census = ", ".join(f"{number} {kind}" for kind, number in Counter(kinds.values()).items())
        raise ValueError(f"this model has no MoE layer; its layers are {census}.")
    return MoELayers(
        {layer: _moe_config(layer, config, block) for layer, block in blocks.items() if kinds[layer] == "moe"},
        {layer: kind for layer, kind in kinds.items() if kind != "moe"},
    )


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    seen = []
    for key, part in [("", config), *((f"{key}.", config.get(key)) for key in _NESTED)]:
        if isinstance(part, Mapping):
            if part.get("model_type") in _MODEL_TYPES:
                return part
            seen.append(f"{key}model_type {part.get('model_type')!r}")
    raise ValueError(f"not a Nemotron-H config: it has {', '.join(seen)}; wanted {' or '.join(_MODEL_TYPES)}.")


def _blocks(config: Mapping[str, Any], keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """The layers as Puzzle writes them, from whichever of `keys` is there first; [] if none is."""
    key = next((key for key in keys if config.get(key) not in (None, [], "")), None)
    if key is None:
        return []
    entries = config[key]
    if not isinstance(entries, (str, list, tuple)):
        raise ValueError(f"{key} is {entries!r}; wanted a list or a pattern string.")
    blocks = []
    for index, entry in enumerate(entries):
        block = dict(entry) if isinstance(entry, Mapping) else {"block_type": entry}
        kind = block.get("block_type")
        if not isinstance(kind, str) or kind not in _KINDS:
            raise ValueError(f"{key} has {kind!r} at position {index}; wanted one of {', '.join(_KINDS)}.")
        blocks.append(block | {"block_type": _KINDS[kind]})
    return blocks


def _moe_config(layer: int | str, config: Mapping[str, Any], block: Mapping[str, Any]) -> MoEConfig:
    values = {**config, **{key: value for key, value in block.items() if not _unset(value)}}
    if missing := _missing(values):
        raise ValueError(f"the config lacks {', '.join(missing)} (for layer {layer}).")
    for key, wanted in _FIXED.items():
        value = values.get(key)
        if value is not None and (type(value), value) != (type(wanted), wanted):
            raise ValueError(f"{key} is {value!r}; this layer is made for {wanted!r} only.")
    shared = _integer(values, "n_shared_experts", 1)
    if shared not in (0, 1):
        raise ValueError(
            f"n_shared_experts is {shared}; wanted 0 or 1 (for more, implementations disagree whether {_SHARED} is the "
            "width of one or of all)."
        )
    sizes = {key: values[key] for key in _REQUIRED}
    sizes |= {key: values[key] for key in _OPTIONAL if values.get(key) is not None}
    if epsilons := [values[key] for key in _EPSILON if values.get(key) is not None]:
        sizes["layer_norm_epsilon"] = epsilons[0]
    latent = values.get("moe_latent_size")
    try:
        return MoEConfig(
            moe_latent_size=None if _unset(latent) else latent,
            moe_shared_expert_intermediate_size=values[_SHARED] if shared else None,
            **sizes,
        )
    except ValueError as error:
        raise ValueError(f"layer {layer}: {error}") from error


def _missing(values: Mapping[str, Any]) -> list[str]:
    wanted = _REQUIRED if values.get("n_shared_experts") == 0 else (*_REQUIRED, _SHARED)
    return [key for key in wanted if _unset(values.get(key))]


def _unset(value: Any) -> bool:
    # False is not "unset": it is a value of a wrong type, which MoEConfig names.
    return value is None or (type(value) is int and value == 0)


def _integer(values: Mapping[str, Any], key: str, default: int) -> int:
    value = values.get(key)
    if value is None:
        return default
    if type(value) is not int or value < 0:
        raise ValueError(f"{key} is {value!r}; wanted a whole number, 0 or more.")
    return value


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict; a ValueError if a key is given twice, since readers would disagree on which one counts.

    For `json.loads(..., object_pairs_hook=without_duplicates)`.
    """
    repeated = [key for key, times in Counter(key for key, _ in pairs).items() if times > 1]
    if repeated:
        raise ValueError(f"the JSON has {', '.join(map(repr, repeated))} more than once.")
    return dict(pairs)
