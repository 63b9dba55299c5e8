"""The README's table of speeds, made from recorded results: `python -m nemotron_moe.bench_table` writes it."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README, RESULTS = ROOT / "README.md", ROOT / "results" / "h200.jsonl"
BEGIN = "<!-- Made by `python -m nemotron_moe.bench_table` from results/h200.jsonl. -->"
END = "<!-- End of what is made. -->"
MODELS = ("nano", "super")
_RIVAL = "torch_grouped_mm"
# What makes two rows the same cell; the later one counts.
_CELL = ("model", "tokens", "part", "format", "routing", "pass", "implementation")


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Markdown of the routed experts' latest times: hot pass, uniform routing, right results."""
    cells = {tuple(row[name] for name in _CELL): row for row in rows}
    found = {
        key[:2] + key[-1:]: row
        for key, row in cells.items()
        if key[2:6] == ("routed", "bf16", "uniform", "hot") and "status" not in row and row["timer"] == "cupti"
    }
    ours = {key[:2]: row for key, row in found.items() if key[2] == "mosaic" and key[0] in MODELS}
    if not ours:
        return "No GPU has been measured yet."
    lines = ["| tokens |" + "".join(f" {model}: us | of the floor | torch |" for model in MODELS)]
    lines.append("|--:|" + "--:|--:|--:|" * len(MODELS))
    for tokens in sorted({tokens for _, tokens in ours}):
        values = [_values(ours.get((model, tokens)), found.get((model, tokens, _RIVAL))) for model in MODELS]
        lines.append(f"| {tokens} |" + "".join(f" {value} |" for model in values for value in model))
    return "\n".join([*lines, "", _conditions(list(ours.values()))])


def section(text: str) -> str:
    """What stands between the marks of a README's `text`.

    Raises:
      ValueError: if the marks are not there.
    """
    return _split(text)[1].strip()


def replaced(text: str, new: str) -> str:
    """A README's `text` with `new` between the marks."""
    before, _, after = _split(text)
    return f"{before}{BEGIN}\n{new}\n{END}{after}"


def recorded(path: Path = RESULTS) -> list[dict[str, Any]]:
    """The rows of a file of results; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _values(row: Mapping[str, Any] | None, rival: Mapping[str, Any] | None) -> tuple[str, str, str]:
    if row is None:
        return "-", "-", "-"
    times = f"{rival['us'] / row['us']:.2f}x" if rival else "-"
    return f"{row['us']:.0f}", f"{row['us'] / row['ceiling']:.2f}x", times


def _conditions(rows: list[Mapping[str, Any]]) -> str:
    last = max(rows, key=lambda row: row["date"])
    commits = ", ".join(sorted({str(row["commit"]) for row in rows}))
    return (
        "Routed experts in bfloat16, from tokens and routing to the summed output: device time, how many times the "
        "floor of their two products that is, and how many times as long torch's `grouped_mm` takes; uniform routing, "
        "hot chip. "
        f"{last['device']}, driver {last['driver']}, jax {last['jax']}, {last['date']}, commit {commits}."
    )


def _split(text: str) -> tuple[str, str, str]:
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"The text has no section between {BEGIN!r} and {END!r}, or several; wanted one.")
    before, rest = text.split(BEGIN)
    return before, *rest.split(END)  # type: ignore[return-value]


def main() -> None:
    README.write_text(replaced(README.read_text(), table(recorded())))


if __name__ == "__main__":
    main()
