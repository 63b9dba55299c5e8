"""What the command line prints: tables for people, or one JSON object for programs, from the same values."""

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

import nemotron_moe as nm
from nemotron_moe.check import CheckReport
from nemotron_moe.demo import LAYER, Comparison, DemoReport, against_oracle, device_name
from nemotron_moe.description import Description
from nemotron_moe.hf_config import MoELayers
from nemotron_moe.weights import format_name

_BARS, _BAR_WIDTH = 32, 40


@dataclasses.dataclass(frozen=True)
class Output:
    """`data` is the JSON object; `parts` are what rich prints instead, one below the other."""

    data: dict[str, Any]
    parts: Sequence[Any]


def show(output: Output, *, as_json: bool) -> None:
    """Writes to stdout."""
    if as_json:
        print(json.dumps(jsonable(output.data), indent=2, allow_nan=False))
        return
    # Names come from files: nothing in them is markup. Nothing here is wider than 80 columns but paths and messages.
    console = Console(markup=False, highlight=False, emoji=False)
    console.width = max(console.width, 80)
    # Captured, since rich pads the rows of tables, and since on a broken pipe it would exit with a status of its own.
    with console.capture() as capture:
        for part in output.parts:
            console.print(part, soft_wrap=isinstance(part, (str, Text)))
    print("\n".join(line.rstrip() for line in capture.get().rstrip().split("\n")))


def files(names: Sequence[str]) -> Output:
    """The shards of a layer."""
    return Output({"files": names}, names)


def models(presets: Mapping[str, MoELayers]) -> Output:
    """The released models; details are a command away."""
    table = _table("model", "MoE layers", "hidden", "latent", "experts", "parameters", "BF16")
    data = {}
    for name, layers in presets.items():
        total, numbers = nm.describe(layers).model.total, [layer for layer in layers if isinstance(layer, int)]
        data[name] = {"moe_layers": list(layers), **dataclasses.asdict(total)}
        one = layers[numbers[0]]
        top_k = sorted({layers[layer].num_experts_per_tok for layer in numbers})
        experts = f"{'-'.join(str(k) for k in dict.fromkeys((top_k[0], top_k[-1])))} of {one.n_routed_experts}"
        latent = str(one.moe_latent_size or "-")
        table.add_row(
            name, str(len(numbers)), str(one.hidden_size), latent, experts, f"{total.parameters:,}", decimal(total.bf16)
        )
    return Output({"models": data}, [table, "", "Details: nemotron-moe info MODEL"])


def description(found: Description) -> Output:
    """What a model's MoE layers hold and cost."""
    return Output(dataclasses.asdict(found), [found])


def layer(name: int | str, config: nm.MoEConfig) -> Output:
    """One layer, from its configuration."""
    found = nm.describe(MoELayers({name: config}))
    weights = nm.abstract_weights(config).items()
    table = _table("weight", "shape", "parameters")
    for field, leaf in weights.items():
        table.add_row(field, str(list(leaf.shape)), f"{leaf.size:,}")
    data = {
        **dataclasses.asdict(found.layers[0]),
        "weights": [{"name": field, "shape": leaf.shape, "parameters": leaf.size} for field, leaf in weights.items()],
    }
    return Output(data, [f"MoE layer {name}", *_config(config), _heading("Weights"), table, "", found])


def demo_report(report: DemoReport) -> Output:
    """The demonstration, stage by stage."""
    data = {
        "passed": report.passed,
        "checkpoint": report.checkpoint,
        "layer": LAYER,
        "device": report.device,
        "changed_files": report.changed,
        "failure": report.failure,
        "config": report.config and dataclasses.asdict(report.config),
        "weights": _weights_data(report.weights),
        "runs": [
            {
                **dataclasses.asdict(run),
                "passed": run.passed,
                "comparisons": [dataclasses.asdict(row) | {"passed": row.passed} for row in run.comparisons],
            }
            for run in report.runs
        ],
    }
    parts: list[Any] = _title(LAYER, report.checkpoint, report.device)
    if report.config and report.weights:
        parts += [_heading("Configuration"), *_config(report.config), *_weights(report.weights)]
    if report.runs:
        times = _table("moe_block under jit", "tokens", "compile", "run")
        for run in report.runs:
            times.add_row(run.dtype, str(run.tokens), f"{run.compile_seconds:.2f} s", f"{run.run_seconds * 1e3:.2f} ms")
        errors = _errors([(run.dtype, row) for run in report.runs for row in run.comparisons])
        parts += [_heading("Time"), times, _heading("Correctness"), errors]
        parts += [
            f"{run.dtype}: {run.same_experts} of {run.tokens} tokens go to the experts that Hugging Face chose."
            for run in report.runs
        ]
        parts += _load(report.runs[0].load)
    parts += [""]
    parts += [f"{name} is not as it was packaged (SHA-256)." for name in report.changed]
    parts += [f"The layer could not be run: {report.failure}"] if report.failure else []
    return Output(data, [*parts, _verdict(report.passed)])


def check_report(
    path: str,
    name: int | str,
    dtype: str,
    config: nm.MoEConfig,
    weights: nm.MoEWeights,
    stored: Mapping[str, nm.FieldFormat],
    report: CheckReport,
) -> Output:
    """A layer against the oracle; `stored` is how its file has it."""
    gate = stored["gate"]
    dequantised = f"The router is {gate.published} in the file; it was dequantised to float32." if gate.format else None
    data = {
        "passed": report.passed,
        "checkpoint": path,
        "layer": name,
        "dtype": dtype,
        "device": device_name(),
        "config": dataclasses.asdict(config),
        "weights": _weights_data(weights),
        "stored": {field: one.published for field, one in stored.items()},
        **dataclasses.asdict(report),
    }
    parts = [
        *_title(name, path, device_name()),
        *(_heading("Configuration"), *_config(config), *_weights(weights)),
        *filter(None, [dequantised]),
        *(_heading("Correctness"), _errors([(dtype, row) for row in against_oracle(report)])),
        *_same_experts(report, sum(report.load) // config.num_experts_per_tok),
        *(*_load(report.load), "", _verdict(report.passed)),
    ]
    return Output(data, parts)


def bench_report(rows: Sequence[Mapping[str, Any]], passed: bool) -> Output:
    """What the benchmark found: a table for each routing and pass, and why rows are missing.

    "share" is the floor's of the time.
    """
    first = rows[0] if rows else {}
    parts: list[Any] = [f"device: {first.get('device')}, driver {first.get('driver')}, jax {first.get('jax')}"]
    for routing, which in dict.fromkeys((row["routing"], row["pass"]) for row in rows):
        table = _table("model", "tokens", "part", "by", "us", "TFLOP/s", "TB/s", "share", "error")
        for row in rows:
            if (row["routing"], row["pass"]) == (routing, which) and row["us"] is not None:
                shares = [_number(row[name], digits) for name, digits in _BENCH_DIGITS.items()]
                error = "-" if row["rel_error"] is None else f"{row['rel_error']:.0e}"
                table.add_row(row["model"], str(row["tokens"]), row["part"], row["implementation"], *shares, error)
        parts += [_heading(f"Routing {routing}, {which} pass"), table]
    reasons = dict.fromkeys(
        f"{row['implementation']} {row['part']}: {row['status']}: {row['reason']}" for row in rows if "status" in row
    )
    return Output({"passed": passed, "rows": rows}, [*parts, "", *reasons, "", _verdict(passed)])


_BENCH_DIGITS = {"us": 1, "tflops": 0, "tbps": 2, "share": 2}


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _title(name: int | str, path: str | os.PathLike[str], device: str) -> list[Any]:
    return [f"MoE layer {name} of the checkpoint", os.fspath(path), f"device: {device}"]


def _same_experts(report: CheckReport, tokens: int) -> list[str]:
    same = round(report.same_experts * tokens)
    lines, ties = [f"{same} of {tokens} tokens go to the oracle's experts."], tokens - same - report.unexplained
    if ties:
        what = "1 is a near tie" if ties == 1 else f"{ties} are near ties"
        lines.append(f"{'' if report.unexplained else 'The other '}{what} that rounding explains.")
    if report.unexplained:
        goes = "goes" if report.unexplained == 1 else "go"
        lines.append(f"{report.unexplained} {goes} elsewhere without a rounding that explains it: FAIL")
    return lines


def _config(config: nm.MoEConfig) -> list[Any]:
    table = _table("", "")
    for name, value in dataclasses.asdict(config).items():
        table.add_row(name, "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value))
    table.show_header = False
    return [table]


def _weights(weights: nm.MoEWeights) -> list[Any]:
    table = _table("weight", "shape", "dtype", "bytes")
    for row in _weights_data(weights):
        table.add_row(row["name"], str(list(row["shape"])), row["dtype"], f"{row['bytes']:,}")
    table.add_row("total", "", "", f"{weights.nbytes:,}")
    return [_heading("Weights"), table]


def _weights_data(weights: nm.MoEWeights | None) -> list[dict[str, Any]]:
    return [
        {"name": name, "shape": leaf.shape, "dtype": format_name(leaf), "bytes": leaf.nbytes}
        for name, leaf in (weights.items() if weights else {}).items()
    ]


def _load(load: Sequence[int]) -> list[Any]:
    """A bar per expert, or per equal run of experts where there are many."""
    step = -(-len(load) // _BARS)
    table = _table("expert", "tokens", "")
    table.columns[2].justify = "left"
    groups = [range(start, min(start + step, len(load))) for start in range(0, len(load), step)]
    counts = [sum(load[expert] for expert in group) for group in groups]
    for group, count in zip(groups, counts, strict=True):
        label = str(group[0]) if step == 1 else f"{group[0]}-{group[-1]}"
        table.add_row(label, str(count), "#" * math.ceil(_BAR_WIDTH * count / max(*counts, 1)))
    return [_heading("Load of the experts"), table]


def _errors(rows: Sequence[tuple[str, Comparison]]) -> Table:
    table = _table("output", "dtype", "compared with", "error", "allowed", "", "")
    for dtype, row in rows:
        kind, verdict = "absolute" if row.absolute else "relative", "ok" if row.passed else "TOO LARGE"
        table.add_row(row.stage, dtype, row.against, f"{row.error:.1e}", f"{row.allowed:.0e}", kind, verdict)
    return table


def _verdict(passed: bool) -> Text:
    return Text("PASS", "bold green") if passed else Text("FAIL", "bold red")


def _heading(text: str) -> Text:
    return Text(f"\n{text}", "bold")


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    return table


def jsonable(value: Any) -> Any:
    """The value with texts as keys, and None for numbers that JSON has not."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
