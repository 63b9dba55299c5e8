"""What MoE layers hold and cost, from their configuration alone."""

import dataclasses
import difflib
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax

from nemotron_moe.config import MoEConfig
from nemotron_moe.hf_config import MoELayers, moe_layers_from_hf, shorten
from nemotron_moe.presets import MODELS
from nemotron_moe.weights import abstract_weights

_PARTS = {
    "norm": "norm",
    "gate": "router",
    "gate_bias": "router",
    "fc1_latent_proj": "latent",
    "fc2_latent_proj": "latent",
    "experts_up_proj": "routed",
    "experts_down_proj": "routed",
    "shared_experts_up_proj": "shared",
    "shared_experts_down_proj": "shared",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """What a group of weights holds and costs.

    Attributes:
      parameters: number of weights, the gate bias not counted (it is no parameter in the published totals).
      active_parameters: those that one token meets.
      flops_per_token: of the matrix products, two for each multiply-add.
      bf16, fp8, nvfp4: bytes in a release of that precision, scales and gate bias counted, activation scales not.
    """

    parameters: int = 0
    active_parameters: int = 0
    flops_per_token: int = 0
    bf16: int = 0
    fp8: int = 0
    nvfp4: int = 0

    def __add__(self, other: Self) -> Self:
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return type(self)(**dict(zip(_SIZE_FIELDS, map(sum, zip(mine, theirs, strict=True)), strict=True)))


_SIZE_FIELDS = tuple(field.name for field in dataclasses.fields(Size))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a layer, or of several together, by part: the routed experts, the shared expert and so on."""

    routed: Size
    shared: Size
    latent: Size
    router: Size
    norm: Size
    total: Size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """One MoE layer: its number, or its name in multi-token prediction, or None; its configuration; its sizes."""

    layer: int | str | None
    config: MoEConfig
    sizes: Sizes


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Description:
    """What `describe` found; prints as tables within 80 columns, and `dataclasses.asdict` makes a JSON-able dict of it.

    Attributes:
      layers: every MoE layer in order.
      model: the MoE layers of the model together, without multi-token prediction (MTP).
      mtp: the MoE layers of MTP together, or None.
    """

    layers: tuple[Layer, ...]
    model: Sizes
    mtp: Sizes | None

    def __repr__(self) -> str:
        from rich.console import Console

        console = Console(width=100, color_system=None, force_jupyter=False, legacy_windows=False)
        with console.capture() as capture:
            console.print(self.__rich__())
        return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())

    def __rich__(self) -> Any:
        from rich.console import Group

        alike: dict[tuple[MoEConfig, bool], list[Layer]] = {}
        for layer in self.layers:
            alike.setdefault((layer.config, _is_mtp(layer.layer)), []).append(layer)
        tables = [
            _table("each layer", "hidden", "latent", "inner", "shared", "experts"),
            _table("each layer", *_COLUMNS),
            _table("together", *_COLUMNS, "MFLOP\n/token"),
        ]
        for (config, _), layers in alike.items():
            widths = (config.hidden_size, config.moe_latent_size, config.moe_intermediate_size)
            shape = [str(width or "-") for width in (*widths, config.moe_shared_expert_intermediate_size)]
            experts = f"{config.num_experts_per_tok} of {config.n_routed_experts}"
            names = _names([layer.layer for layer in layers if layer.layer is not None])
            tables[0].add_row(names, *shape, experts)
            tables[1].add_row(names, *_cells(layers[0].sizes.total))
        for field in dataclasses.fields(Sizes):
            size = getattr(self.model, field.name)
            if size.parameters:
                tables[2].add_row(field.name, *_cells(size), f"{size.flops_per_token / 1e6:,.0f}")
        lines = [line for table in tables if table.row_count for line in ("", table)]
        if self.mtp and tables[2].row_count:
            lines.append(f"without {shorten(str(layer.layer) for layer in self.layers if _is_mtp(layer.layer))}")
        return Group(*lines[1:])


def describe(config: MoEConfig | Mapping[Any, Any] | str | os.PathLike[str]) -> Description:
    """Parameters, bytes and FLOPs of a layer or a model, before anything is loaded.

    Bytes are those of the releases. FP8: the routed and shared experts, with one float32 scale a matrix. NVFP4: the
    routed experts (half a byte a weight, an e4m3 scale for 16 along a row, a float32 scale a matrix), and the shared
    expert in a direct MoE; it is FP8 in a LatentMoE. All else, and multi-token prediction wholly, is bfloat16, and the
    gate bias float32. A release may differ in single matrices (Super NVFP4 does).

    Args:
      config: a `MoEConfig`; layers by number, as `moe_layers_from_hf` gives them; a preset's name ("nano", "lightning",
        "super", "ultra", "puzzle"), in any case; a parsed `config.json`, its path, or its folder's path.

    Raises:
      ValueError: if `config` is none of these, or is not understood.
    """
    found = [
        Layer(layer=layer, config=one, sizes=_layer_sizes(one, quantised=not _is_mtp(layer)))
        for layer, one in _resolve(config).items()
    ]
    own = [layer.sizes for layer in found if not _is_mtp(layer.layer)]
    mtp = [layer.sizes for layer in found if _is_mtp(layer.layer)]
    return Description(layers=tuple(found), model=_together(own), mtp=_together(mtp) if mtp else None)


def _resolve(config: Any) -> Mapping[Any, MoEConfig]:
    if isinstance(config, MoEConfig):
        return {None: config}
    if isinstance(config, MoELayers):
        return config
    if isinstance(config, str) and (layers := preset(config)):
        return layers
    try:
        return moe_layers_from_hf(config)
    except ValueError as error:
        if isinstance(config, str) and not os.path.exists(config):
            raise ValueError(not_found(config)) from error
        raise


def preset(name: str) -> MoELayers | None:
    """The released model of that name; in another case only if no file or folder has the name."""
    return MODELS.get(name if os.path.exists(name) else name.lower())


def not_found(name: str) -> str:
    """What to say of a name that is no path and no preset."""
    near = difflib.get_close_matches(name.lower(), MODELS, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"{name!r} is no file, folder or preset; the presets are {', '.join(MODELS)}.{hint}"


def _is_mtp(layer: int | str | None) -> bool:
    return isinstance(layer, str)


def _layer_sizes(config: MoEConfig, *, quantised: bool) -> Sizes:
    parts = dict.fromkeys(("routed", "shared", "latent", "router", "norm"), Size())
    for name, leaf in abstract_weights(config).items().items():
        parts[_PARTS[name]] += _size(name, leaf, config, quantised)
    return Sizes(**parts, total=sum(parts.values(), start=Size()))


def _size(name: str, leaf: jax.ShapeDtypeStruct, config: MoEConfig, quantised: bool) -> Size:
    part, count, stored = _PARTS[name], leaf.size, leaf.size * leaf.dtype.itemsize
    if name == "gate_bias":
        return Size(bf16=stored, fp8=stored, nvfp4=stored)
    active = count // config.n_routed_experts * config.num_experts_per_tok if part == "routed" else count
    fp8 = nvfp4 = stored
    if quantised and part in ("routed", "shared"):
        rows, columns = math.prod(leaf.shape[:-1]), leaf.shape[-1]
        scales = 4 * math.prod(leaf.shape[:-2])
        fp8 = count + scales
        nvfp4 = rows * (-(-columns // 2) + -(-columns // 16)) + scales
        if part == "shared" and config.moe_latent_size:
            nvfp4 = fp8
    flops = 0 if part == "norm" else 2 * active
    return Size(parameters=count, active_parameters=active, flops_per_token=flops, bf16=stored, fp8=fp8, nvfp4=nvfp4)


def _together(layers: list[Sizes]) -> Sizes:
    names = [field.name for field in dataclasses.fields(Sizes)]
    return Sizes(**{name: sum((getattr(sizes, name) for sizes in layers), start=Size()) for name in names})


def _names(layers: Sequence[int | str]) -> str:
    # The count, since the ends of a long list do not tell what is between them; more would not fit in 80 columns.
    return shorten(layers) if len(layers) <= 6 else f"{len(layers)} layers: {layers[0]}, ..., {layers[-1]}"


def _table(*headings: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    return table


_COLUMNS = ("parameters", "active", "BF16", "FP8", "NVFP4")


def _cells(size: Size) -> list[str]:
    from rich.filesize import decimal

    nbytes = (decimal(count, precision=1) for count in (size.bf16, size.fp8, size.nvfp4))
    return [f"{size.parameters:,}", f"{size.active_parameters:,}", *nbytes]
