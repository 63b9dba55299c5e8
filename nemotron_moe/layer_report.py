"""What `nemotron-moe check --report` writes: how each weight of a layer is stored, and how exact the layer is."""

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

import nemotron_moe as nm
from nemotron_moe.cli_output import jsonable
from pallas_kernels.formats import Quantised


def write_report(
    file: str | os.PathLike[str],
    path: str,
    layer: int | str,
    weights: nm.MoEWeights,
    config: nm.MoEConfig,
    *,
    sibling: str | None = None,
) -> None:
    """Writes `layer_report` as JSON, all of it or nothing.

    Raises:
      ValueError: as `layer_report`.
      OSError: if the file cannot be written.
    """
    file = Path(file)
    report = layer_report(path, layer, weights, config, sibling=sibling)
    text = json.dumps(jsonable(report), indent=2, allow_nan=False)
    unfinished = file.with_name(f"{file.name}.unfinished")
    try:
        unfinished.write_text(text + "\n")
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


def check_arguments(file: str | os.PathLike[str], layer: int | str, sibling: str | None) -> None:
    """What `write_report` would find out late, before anything large is read.

    Raises:
      ValueError: if `file` cannot be one, or the sibling is quantised itself.
    """
    file = Path(file)
    if file.is_dir():
        raise ValueError(f"--report is {file}, a folder; wanted the name of a file in it.")
    if not file.absolute().parent.is_dir():
        raise ValueError(f"--report wants to write {file}, but there is no folder {file.absolute().parent}.")
    formats = {} if sibling is None else nm.layer_formats(sibling, layer)
    if quantised := [name for name, stored in formats.items() if stored.format is not None]:
        raise ValueError(f"{sibling} is quantised itself ({', '.join(quantised)}); wanted the BF16 release.")


def layer_report(
    path: str, layer: int | str, weights: nm.MoEWeights, config: nm.MoEConfig, *, sibling: str | None = None
) -> dict[str, Any]:
    """A JSON-able dict of one layer.

    Args:
      path, layer: what was loaded.
      weights, config: what `load_layer` gave.
      sibling: a checkpoint of the same model without quantisation, to compare the weights with.

    Returns:
      {checkpoint, layer, sibling, config, tensors, accuracy}. `tensors` has for each field its published format, ours,
      whether it was dequantised as it was loaded, shape, bytes, parts, the range of each scale, the scales' tensors in
      the files (of the first expert), the experts without an input scale, what the configs declare, whether that
      agrees, `error` (see `QuantisationError`), null without a sibling, and `experts`. Of routed experts, `error` is
      that of the worst, whose number is beside it, and `experts` has by expert the relative errors and the ranges of
      the scales. `accuracy` is `nemotron_moe.accuracy`'s.

    Raises:
      ValueError: if the sibling is another model's.
    """
    originals = {} if sibling is None else _originals(sibling, layer, config)
    formats = nm.layer_formats(path, layer)
    return {
        "checkpoint": os.fspath(path),
        "layer": layer,
        "sibling": sibling,
        "config": dataclasses.asdict(config),
        "tensors": {name: _tensor(leaf, formats[name], originals.get(name)) for name, leaf in weights.items().items()},
        "accuracy": nm.accuracy(weights, config),
    }


def check_sizes(sibling: str, layer: int | str, its_config: nm.MoEConfig, config: nm.MoEConfig) -> None:
    """Raises ValueError, with the settings that differ, unless the sibling's layer is of the same sizes."""
    seen, wanted = dataclasses.asdict(its_config), dataclasses.asdict(config)
    if differ := [f"{name} {seen[name]}, not {wanted[name]}" for name in seen if seen[name] != wanted[name]]:
        raise ValueError(
            f"{sibling} has another layer {layer} than the checkpoint: {', '.join(differ)}; wanted the same model."
        )


def _originals(sibling: str, layer: int | str, config: nm.MoEConfig) -> dict[str, Any]:
    weights, its_config = nm.load_layer(sibling, layer)
    check_sizes(sibling, layer, its_config, config)
    return weights.items()


def _tensor(leaf: Any, stored: nm.FieldFormat, original: Any) -> dict[str, Any]:
    is_quantised = isinstance(leaf, Quantised)
    parts = {name: getattr(leaf, name) for name in leaf.parts()} if is_quantised else {"values": leaf}
    scales = {name: _ranges(part, leaf) for name, part in parts.items() if name.endswith("scale")}
    errors = None if original is None else _errors(leaf, original)
    return {
        "published": stored.published,
        "format": leaf.format if is_quantised else str(leaf.dtype),
        "dequantised": stored.format is not None and not is_quantised,
        "shape": list(leaf.shape),
        "bytes": leaf.nbytes,
        "parts": {name: f"{part.dtype}{list(part.shape)}" for name, part in parts.items()},
        "scales": {name: {"least": min(one["least"]), "largest": max(one["largest"])} for name, one in scales.items()},
        "files": {name: f"{dtype}{list(shape)}" for name, (dtype, shape) in stored.scales.items()},
        "uncalibrated": list(leaf.uncalibrated) if is_quantised else [],
        "declared": stored.declared,
        "agrees": stored.agrees,
        "error": None if errors is None else _worst(errors),
        "experts": {"relative": errors and [one.relative for one in errors], "scales": scales}
        if leaf.ndim == 3
        else None,
    }


def _ranges(scale: jax.Array, leaf: Quantised) -> dict[str, list[float]]:
    """The range of a scale in each of the leaf's matrices."""
    numbers = np.asarray(scale).astype(np.float32).reshape(math.prod(leaf.shape[:-2]), -1)
    return {"least": numbers.min(1).tolist(), "largest": numbers.max(1).tolist()}


def _errors(leaf: Any, original: Any) -> list[nm.QuantisationError]:
    """Of each of the leaf's matrices; a vector is a matrix of one row."""
    if leaf.ndim < 3:
        leaf, original = (leaf, original) if leaf.ndim == 2 else (leaf[None], original[None])
        return [nm.quantisation_error(leaf, original)]
    return [nm.quantisation_error(leaf[expert], original[expert]) for expert in range(leaf.shape[0])]


def _worst(errors: list[nm.QuantisationError]) -> dict[str, Any]:
    number = int(np.argmax([one.relative for one in errors]))  # NaN is the largest
    return {"expert": number if len(errors) > 1 else None, **dataclasses.asdict(errors[number])}
