"""What a checkpoint's configs say of number formats, to be held against the tensors, which decide.

config.json and hf_quant_config.json are silent, incomplete or damaged in published checkpoints, and every tool writes
them in its own way. So nothing here fails: what is not understood is not declared.
"""

import dataclasses
import fnmatch
import functools
import json
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

# Tells whether a name is meant, and the format that is then.
_Pattern = tuple[Callable[[str], Any], str]

_KEYS_OF_EXCEPTIONS = ("exclude_modules", "ignore", "modules_to_not_convert", "ignored_layers")
_KEYS_OF_SUBCONFIGS = ("text_config", "llm_config", "language_config")

# Patterns of more repetitions could take a regular expression years.
_MOST_REPETITIONS = 3


@dataclasses.dataclass(frozen=True)
class _Table:
    """What one file says.

    Attributes:
      exact: format by the name of a module, or of one that contains it, both without the model's prefix.
      patterns: what is said of names that are alike; the first that fits counts.
      everything: the format of all modules else, or None.
    """

    exact: dict[str, str]
    patterns: list[_Pattern]
    everything: str | None

    def of(self, module: str, *, router: bool) -> str | None:
        name = _short(module)
        while name:
            if name in self.exact:
                return self.exact[name]
            name = name.rpartition(".")[0]
        for matches, format in self.patterns:
            if matches(module) or matches(_short(module)):
                return format
        return None if router else self.everything


@dataclasses.dataclass(frozen=True)
class Declared:
    """What the configs of a checkpoint say, the more particular file first."""

    tables: tuple[_Table, ...]

    def of(self, module: str, *, router: bool = False) -> str | None:
        """ "FP8", "NVFP4", "unquantised", the name of another format, or None if nothing is said of the module.

        Args:
          module: its name as in the files, such as "backbone.layers.1.mixer.experts.0.up_proj".
          router: whether it is the router, which what is said of all modules does not mean.
        """
        said = (table.of(module, router=router) for table in self.tables)
        return next((format for format in said if format is not None), None)


def read_declared(folder: Path) -> Declared:
    """What hf_quant_config.json and config.json in `folder` say; warns if one is there and cannot be read."""
    beside = _read(folder / "hf_quant_config.json")
    beside = _object(beside.get("quantization")) or beside
    config = _read(folder / "config.json")
    inside = [config, *(_object(config.get(key)) for key in _KEYS_OF_SUBCONFIGS)]
    tables = [
        beside,
        *(_object(one.get(key)) for one in inside for key in ("quantization_config", "compression_config")),
    ]
    return Declared(tuple(_table(table) for table in tables if table))


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return _object(json.loads(path.read_bytes().decode("utf-8", errors="replace")))
    except (OSError, ValueError, RecursionError) as error:
        warnings.warn(
            f"{path} cannot be read ({type(error).__name__}), so the number formats that it declares are not compared "
            "with the tensors.",
            UserWarning,
            skip_file_prefixes=(str(Path(__file__).parent),),
        )
        return {}


def _table(config: dict[str, Any]) -> _Table:
    exact: dict[str, str] = {}
    targets: list[_Pattern] = []
    exceptions: list[_Pattern] = []
    everything = _format(config.get("quant_algo")) or _format(config.get("quant_method"))
    for group in _object(config.get("config_groups")).values():
        format = _format_of_group(_object(group))
        for target in _strings(_object(group).get("targets")) if format else ():
            if target.isidentifier() and not target.islower():  # The name of a class, as in "Linear".
                everything = everything or format
            else:
                _add(target, str(format), exact, targets)
    for key in _KEYS_OF_EXCEPTIONS:
        for name in _strings(config.get(key)):
            _add(name, "unquantised", exact, exceptions)
    for name, entry in _object(config.get("quantized_layers")).items():
        if format := _format(_object(entry).get("quant_algo")):
            _add(name, format, exact, targets)
    return _Table(exact, exceptions + targets, everything)


def _add(name: str, format: str, exact: dict[str, str], patterns: list[_Pattern]) -> None:
    # A damaged name goes on behind a NUL character.
    name = name.partition("\0")[0].rstrip(".")
    if name.startswith("re:"):
        if matches := _regular(name.removeprefix("re:")):
            patterns.append((matches, format))
    elif "*" in name or "?" in name or "[" in name:
        patterns.append((functools.partial(_glob, name), format))
    elif name:
        exact[_short(name)] = format


def _glob(pattern: str, name: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern)


def _regular(pattern: str) -> Callable[[str], Any] | None:
    repeated = len(re.findall(r"[*+{]", pattern)) > _MOST_REPETITIONS or re.search(r"\)[*+?{]", pattern)
    try:
        return None if repeated else re.compile(pattern).match
    except (re.error, OverflowError, RecursionError):
        return None


def _short(name: str) -> str:
    """A module's name from "layers." or "mtp.layers." on: the prefix before changes as checkpoints are converted."""
    # Tens of thousands of names come here.
    start = name.find("layers.")
    if start < 0 or (start > 0 and name[start - 1] != "."):
        return name
    return name[start - 4 :] if start >= 4 and name.startswith("mtp.", start - 4) else name[start:]


def _format(algorithm: Any) -> str | None:
    """The format that a tool's word for it means; None where it says nothing, or refers to a list."""
    word = algorithm.upper() if isinstance(algorithm, str) else ""
    if word in ("", "MIXED_PRECISION", "MODELOPT", "COMPRESSED-TENSORS", "NONE"):
        return None
    return "NVFP4" if "NVFP4" in word else "FP8" if word.startswith("FP8") else word


def _format_of_group(group: dict[str, Any]) -> str | None:
    weights = _object(group.get("weights"))
    kind, bits = weights.get("type"), weights.get("num_bits")
    if not isinstance(kind, str) or not isinstance(bits, int):
        return None
    return {("float", 8): "FP8", ("float", 4): "NVFP4"}.get((kind, bits), f"{bits}-bit {kind}")


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _strings(values: Any) -> Iterable[str]:
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []
