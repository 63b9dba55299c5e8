"""The demonstration: one layer of a tiny checkpoint in the published layout, run and compared with recorded numbers."""

import dataclasses
import hashlib
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import nemotron_moe as nm
from nemotron_moe.check import relative_error

FOLDER = Path(__file__).parent / "data" / "demo"
CHECKPOINT, RECORDED, SUMS = "checkpoint", "recorded.safetensors", "SHA256SUMS"
LAYER = 0
# What `RECORDED` holds of Hugging Face's block; the README of `FOLDER` says what each is.
RECORDED_KEYS = (
    *("x.f32", "f32.router_logits", "f32.topk_ids", "f32.topk_weights", "f32.block_out"),
    *("x.bf16", "f32_of_bf16.topk_ids", "f32_of_bf16.block_out"),
)
# Allowed against Hugging Face, absolute for `_ABSOLUTE`.
ALLOWED = {
    "float32": {"router_logits": 3e-5, "topk_weights": 1e-5, "block_out": 1e-5},
    "bfloat16": {"block_out": 1e-2},
}
_ABSOLUTE = ("router_logits", "topk_weights")
_KEYS = {"float32": ("x.f32", "f32."), "bfloat16": ("x.bf16", "f32_of_bf16.")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """How far a stage's output is from one source of truth, and how far it may be.

    `error` is the largest difference if `absolute`, else the norm of the difference over the norm of the truth.
    """

    stage: str
    against: str
    absolute: bool = False
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed  # False for NaN.


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoRun:
    """The jitted block in one dtype of the activations.

    Attributes:
      tokens: how many it was given.
      same_experts: how many of them went to the experts that Hugging Face chose.
      unexplained: how many went to others although the logits' error is too small to explain it.
      load: (token, slot) pairs by expert.
    """

    dtype: str
    compile_seconds: float
    run_seconds: float
    tokens: int
    same_experts: int
    unexplained: int
    comparisons: tuple[Comparison, ...]
    load: tuple[int, ...]

    @property
    def passed(self) -> bool:
        same = self.same_experts == self.tokens or self.dtype != "float32"
        return same and not self.unexplained and all(comparison.passed for comparison in self.comparisons)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoReport:
    """What the demonstration found.

    Attributes:
      checkpoint: the folder.
      device: what it ran on.
      changed: files that are not what was packaged.
      failure: why it could not be carried through, or None.
      config, weights: of the layer; None if it could not be loaded.
      runs: in float32 and in bfloat16.
    """

    checkpoint: Path
    device: str
    changed: tuple[str, ...]
    failure: str | None = None
    config: nm.MoEConfig | None = None
    weights: nm.MoEWeights | None = None
    runs: tuple[DemoRun, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.changed and self.failure is None and all(run.passed for run in self.runs)


def run_demo(folder: Path = FOLDER) -> DemoReport:
    """Loads the layer, runs it in float32 and bfloat16, and compares with Hugging Face's outputs and the oracle.

    Changed files are reported, and what can still be run is run.
    """
    found: dict[str, Any] = {}
    try:
        found["weights"], found["config"] = nm.load_layer(folder / CHECKPOINT, LAYER)
        recorded = _read_recorded(folder / RECORDED)
        with np.errstate(invalid="ignore"):  # A changed number may be no number.
            found["runs"] = tuple(_run(dtype, found["weights"], found["config"], recorded) for dtype in ALLOWED)
    except ValueError as error:
        found["failure"] = str(error)
    return DemoReport(
        checkpoint=folder / CHECKPOINT, device=device_name(), changed=tuple(changed_files(folder)), **found
    )


def device_name() -> str:
    """The device that jax uses by default: "cpu", or as in "gpu (NVIDIA H200)"."""
    device = jax.devices()[0]
    return device.platform if device.device_kind == device.platform else f"{device.platform} ({device.device_kind})"


def against_oracle(report: nm.CheckReport) -> Iterator[Comparison]:
    """The errors of a `self_check` as comparisons."""
    for stage, error in report.errors.items():
        yield Comparison(stage=stage, against="float64 oracle", error=error, allowed=report.tolerance)


def sums(folder: Path) -> str:
    """The text of SHA256SUMS, as `sha256sum` writes it, for the data files as they are."""
    return "".join(f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in _files(folder))


def changed_files(folder: Path) -> Iterator[str]:
    """The data files whose line in SHA256SUMS is not what it should be; comparing whole lines checks the list too."""
    text, wanted = (folder / SUMS).read_bytes().decode(errors="replace"), sums(folder)
    if text != wanted:
        lines = text.split("\n")
        yield from [line[66:] for line in wanted.splitlines() if line not in lines] or [SUMS]


def _files(folder: Path) -> list[str]:
    found = (path for path in folder.rglob("*") if path.suffix in (".json", ".safetensors"))
    return sorted(path.relative_to(folder).as_posix() for path in found)


def _read_recorded(path: Path) -> dict[str, np.ndarray]:
    from checkpoints.safetensors_file import SafetensorsFile

    with SafetensorsFile(path) as file:
        if file.tensors.keys() != set(RECORDED_KEYS):
            raise ValueError(f"{path} holds {', '.join(file.tensors)}; wanted {', '.join(RECORDED_KEYS)}.")
        return {key: file.read(key) for key in RECORDED_KEYS}


def _run(dtype: str, weights: nm.MoEWeights, config: nm.MoEConfig, recorded: dict[str, np.ndarray]) -> DemoRun:
    key, prefix = _KEYS[dtype]
    h = jax.numpy.asarray(recorded[key])
    wanted = {name.removeprefix(prefix): value for name, value in recorded.items() if name.startswith(prefix)}
    block = jax.jit(nm.moe_block, static_argnames=("config", "return_aux"))
    start = time.perf_counter()
    compiled = block.lower(h, weights, config=config, return_aux=True).compile()
    compile_seconds = time.perf_counter() - start
    out, aux = jax.block_until_ready(compiled(h, weights))

    order = np.argsort(aux.routing.ids, axis=1)
    ids, topk_weights = (np.take_along_axis(np.asarray(x), order, 1) for x in (aux.routing.ids, aux.routing.weights))
    same = (ids == wanted["topk_ids"]).all(1)
    errors = {"block_out": relative_error(np.asarray(out)[same], wanted["block_out"][same].astype(np.float64))}
    if dtype == "float32":
        errors["router_logits"] = _largest(aux.routing.logits, wanted["router_logits"])
        errors["topk_weights"] = _largest(topk_weights[same], wanted["topk_weights"][same])
    oracle = nm.self_check(weights, config, h=h, dtype=dtype)
    return DemoRun(
        dtype=dtype,
        compile_seconds=compile_seconds,
        run_seconds=statistics.median(_seconds(compiled, h, weights) for _ in range(5)),
        tokens=len(same),
        same_experts=int(same.sum()),
        unexplained=oracle.unexplained,
        comparisons=(
            *(
                Comparison(
                    stage=stage,
                    against="Hugging Face",
                    absolute=stage in _ABSOLUTE,
                    error=errors[stage],
                    allowed=allowed,
                )
                for stage, allowed in ALLOWED[dtype].items()
            ),
            *against_oracle(oracle),
        ),
        load=tuple(int(count) for count in aux.load),
    )


def _seconds(compiled: Any, *arguments: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(compiled(*arguments))
    return time.perf_counter() - start


def _largest(seen: Any, wanted: np.ndarray) -> float:
    return float(np.abs(np.asarray(seen, np.float64) - wanted).max(initial=0.0))
