"""The benchmark of the layer: device time of its parts beside what the chip can do and what other libraries offer.

For each model, number of tokens and kind of routing there is a cell, and in it each part (the up product, the down
product, the plan, the routed experts, the whole block) by each implementation. In a pass, the ceilings, our kernels,
the rivals and the ceilings again are timed in turn, without a pause: after a rest in the cool pass, and in the hot pass
after seconds of dense products, because a chip that is hot runs slower. Results are checked in the same run.
"""

import dataclasses
import datetime
import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from nemotron_moe import bench_check as check
from nemotron_moe.bench_cell import Cell, Entry
from nemotron_moe.bench_data import ROUTINGS, random_layer
from nemotron_moe.bench_measure import Ceilings, Machine, measure
from nemotron_moe.bench_programs import Programs, Shape, add_checks, add_parts
from nemotron_moe.bench_rivals import PARTS as RIVALS
from nemotron_moe.bench_rivals import load, rival
from nemotron_moe.bench_work import PARTS, Product
from nemotron_moe.config import MoEConfig
from nemotron_moe.weights import MoEWeights
from pallas_kernels.bench.conditions import conditions
from pallas_kernels.bench.device import WALL, Group, Timing, prepare, timer
from pallas_kernels.bench.rivals import NotPresentError

AUTO, XLA = "auto", "xla"
IMPLEMENTATIONS = (AUTO, *RIVALS, XLA)
PASSES = ("cool", "hot")
# Where these run if nobody asks for them: they are slow, and one number tells enough.
USUAL_TOKENS = {XLA: (8192,), "huggingface": (8192,)}
TOKENS = (8192, 512, 2048, 128)  # what matters most comes first
REHEAT = 1 / 3  # of the seconds of heating, before each further part of a cell
OK, NOT_PRESENT, FAILED, WRONG = "ok", "not present", "failed", "wrong"
KERNELS = 12  # of a row, the longest

# Every row has these; "status" and "reason" too where it is not fine.
KEYS = (
    *("date", "commit", "device", "driver", "jax", "model", "tokens", "part", "format", "routing", "pass"),
    *("implementation", "us", "tflops", "tbps", "ceiling", "share", "rel_error", "poisoned", "timer", "kernels"),
)
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured.

    Attributes:
      models: the layers, by name.
      tokens: numbers of tokens.
      parts, routings, passes: some of `PARTS`, `ROUTINGS` and `PASSES`.
      implementations: some of `IMPLEMENTATIONS`; "auto" is what the layer picks. None means all, where they are usual.
      rounds: of a hot pass, each of which calls every routing once.
      draws: routings of a cell.
      lock: a file by which several runs on one GPU compile together and then measure one after the other.
      pause, heat: seconds of rest before a cool pass, and of dense products before the first hot one of a cell; a
        third of them before the others, which find the chip warm.
      read_bytes: size of the buffer whose reading is timed; much larger than any cache.
      commit: of the source; None asks git.
      say: told how far it is.

    Raises:
      ValueError: on a value that is none of these.
    """

    models: Mapping[str, MoEConfig]
    tokens: Sequence[int] = TOKENS
    parts: Sequence[str] = PARTS
    routings: Sequence[str] = ("uniform",)
    passes: Sequence[str] = PASSES
    implementations: Sequence[str] | None = None
    rounds: int = 2
    lock: str | None = None
    draws: int = 8
    pause: float = 2.0
    heat: float = 2.0
    read_bytes: int = 3 << 30
    commit: str | None = None
    say: Callable[[str], Any] = print

    def __post_init__(self) -> None:
        for name, known in (
            ("parts", PARTS),
            ("routings", ROUTINGS),
            ("passes", PASSES),
            ("implementations", IMPLEMENTATIONS),
        ):
            if unknown := sorted(set(getattr(self, name) or ()) - set(known)):
                raise ValueError(f"{name} has {unknown}; wanted some of {list(known)}.")
        for name, values in (("tokens", self.tokens), ("rounds", [self.rounds]), ("draws", [self.draws])):
            if wrong := [value for value in values if value < 1]:
                raise ValueError(f"{name} is {wrong[0]}; wanted 1 or more.")

    def usual(self, implementation: str, tokens: int) -> bool:
        """Whether the implementation is to be measured at this number of tokens."""
        if self.implementations is not None:
            return implementation in self.implementations
        return tokens in USUAL_TOKENS.get(implementation, (tokens,))


def passed(rows: Sequence[Row]) -> bool:
    """Nothing failed, and everything that ran was right."""
    return all(row.get("status", OK) in (OK, NOT_PRESENT) for row in rows)


def run(options: Options) -> Iterator[Row]:
    """Measures; a row for each model, number of tokens, routing, part, pass and implementation.

    A part that fails is a row that says so, and the others are measured.
    """
    with open(options.lock or os.devnull, "a") as file:
        yield from _run(options, _Turn(file if options.lock else None))


def _run(options: Options, turn: "_Turn") -> Iterator[Row]:
    start = time.perf_counter()
    # The first cells are the most important ones, of every model.
    cells: list[tuple[Row, MoEConfig]] = [
        ({"model": model, "tokens": tokens, "routing": routing}, config)
        for tokens in options.tokens
        for model, config in options.models.items()
        for routing in options.routings
    ]
    programs = Programs(os.cpu_count() or 1)
    try:
        for where, config in cells:
            _add(programs, options, where, config)
        for line in programs.wait():
            options.say(line)
        options.say(f"compiled in {time.perf_counter() - start:.0f} s")
        machine = Machine(read_bytes=options.read_bytes, heat=options.heat, pause=options.pause, say=options.say)
        load([name for name in RIVALS if _anywhere(options, name)])
        turn.take(options.tokens)
        common, weights = _common(options), _Weights()
        for where, config in cells:
            options.say(f"{datetime.datetime.now():%H:%M:%S}, {_words(where)}")
            of_model = functools.partial(weights.of, where["model"], config)
            for row in _cell_or_failure(options, machine, programs, of_model, config, where):
                yield {name: (common | row).get(name) for name in KEYS} | row
    finally:
        programs.close()


class _Turn:
    """To measure, which begins when no run with the same file compiles or measures; closing the file ends it."""

    def __init__(self, file: IO[str] | None) -> None:
        self._file = file
        self._lock("LOCK_SH")

    def take(self, tokens: Sequence[int]) -> None:
        """Waits. Runs with more important numbers of tokens ask more often, so that they mostly come first."""
        rank = min(TOKENS.index(count) if count in TOKENS else len(TOKENS) for count in tokens)
        while not self._lock("LOCK_EX"):
            time.sleep(0.002 + 0.3 * rank)

    def _lock(self, kind: str) -> bool:
        if self._file is None:
            return True
        import fcntl  # There is none on Windows.

        try:
            fcntl.flock(self._file, getattr(fcntl, kind) | (fcntl.LOCK_NB if kind == "LOCK_EX" else 0))
        except BlockingIOError:
            return False
        return True


class _Weights:
    """Of the last model that was asked for: more may not fit."""

    def __init__(self) -> None:
        self._model: str | None = None
        self._weights: MoEWeights | None = None

    def of(self, model: str, config: MoEConfig) -> MoEWeights:
        if self._weights is None or self._model != model:
            self._weights = None  # The memory is needed.
            self._model, self._weights = model, random_layer(config)
        return self._weights


def _add(programs: Programs, options: Options, where: Row, config: MoEConfig) -> None:
    """Begins to compile what a cell runs."""
    model, tokens = where["model"], where["tokens"]
    try:
        for shape in _shapes(options, config, tokens):
            add_parts(programs, model, shape, options.parts)
        add_checks(programs, model, Shape(config, tokens, None), options.parts)
    except Exception as error:  # The cell's rows will say what fails.
        options.say(f"{_words(where)}: {_reason(error)['reason']}")


def _anywhere(options: Options, name: str) -> bool:
    """Whether a rival is to be measured in some cell."""
    return bool(set(RIVALS[name]) & set(options.parts)) and any(options.usual(name, n) for n in options.tokens)


def _common(options: Options) -> Row:
    here = conditions()
    kept = {name: here[name] for name in ("date", "device", "driver", "jax")}
    return kept | {"commit": options.commit or here["commit"]}


def _shapes(options: Options, config: MoEConfig, tokens: int) -> list[Shape]:
    """Ours: what the layer picks, and XLA's, each once."""
    asked = [name for name in (AUTO, XLA) if options.usual(name, tokens)]
    shapes = [Shape(config, tokens, None if name == AUTO else name) for name in asked]
    return list({shape.name: shape for shape in reversed(shapes)}.values())[::-1]


def _cell_or_failure(options: Options, *arguments: Any) -> Iterator[Row]:
    found = set()
    try:
        for row in _cell(options, *arguments):
            found.add((row["part"], row["pass"]))
            yield row
    except Exception as error:  # Such as too little memory for the data.
        for part, which in itertools.product(options.parts, options.passes):
            if (part, which) not in found:
                row = {"part": part, "format": "bf16", "pass": which, "implementation": AUTO}
                yield arguments[-1] | row | _reason(error)


def _cell(
    options: Options,
    machine: Machine,
    programs: Programs,
    weights: Callable[[], MoEWeights],
    config: MoEConfig,
    where: Row,
) -> Iterator[Row]:
    start = time.perf_counter()
    tokens = where["tokens"]
    cell = Cell(config=config, **where, draws=options.draws, weights=weights(), programs=programs)
    shapes, ceilings = _shapes(options, config, tokens), Ceilings(machine, cell)
    found: dict[str, dict[str, Candidate | Row]] = {}
    for part in options.parts:
        found[part] = {shape.name: _candidate(cell.ours, part, shape) for shape in shapes}
        for name, parts in RIVALS.items():
            if part in parts and options.usual(name, tokens):
                found[part][name] = _candidate(rival, name, part, cell)
    for which in options.passes:
        for part in options.parts:
            share = REHEAT if which == "hot" and part != options.parts[0] else 1.0
            rows = [where | row for row in _part(options, ceilings, part, which, share, found[part])]
            yield from rows
            options.say(_line(where, which, part, rows))
    options.say(f"{_words(where)}: {time.perf_counter() - start:.0f} s")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An implementation that runs, and how right it is."""

    group: Group
    rel_error: float
    poisoned: bool


def _candidate(make: Callable[..., Entry], *arguments: Any) -> Candidate | Row:
    """The implementation, checked and warmed up, or what its row says instead."""
    try:
        entry = make(*arguments)
        error, unwritten = entry.check()
        return Candidate(_group(entry), error, unwritten)
    except Exception as error:  # Whatever a kernel or a rival does, the others are measured.
        return _reason(error)


def _group(entry: Entry) -> Group:
    # XLA's loops take as many turns as the routing has tiles, and the host waits for each of them: few calls.
    slow = entry.implementation == XLA and timer() != WALL
    return prepare(entry.calls[:2] if slow else entry.calls)


def _part(
    options: Options, ceilings: Ceilings, part: str, which: str, share: float, found: Mapping[str, Candidate | Row]
) -> Iterator[Row]:
    """The rows of one pass."""
    groups = {name: one.group for name, one in found.items() if isinstance(one, Candidate)}
    rounds = options.rounds if which == "hot" else 1
    try:
        work = ceilings.work(part)
        measured = measure(ceilings, which, work, groups, rounds=rounds, last=[XLA], share=share)
        ceiling = measured.floor_us(work)
        if measured.trouble:
            options.say(f"{which} {part}: timed one by one, not in turn: {measured.trouble}")
    except Exception as error:
        found = {name: _reason(error) if name in groups else one for name, one in found.items()}
    for name, one in found.items():
        row: Row = {"part": part, "format": "bf16", "pass": which, "implementation": name}
        if isinstance(one, Candidate):
            row |= _result(one, measured.timings[name], work, ceiling)
        else:
            row |= one
        yield row


def _result(one: Candidate, timing: Timing | Exception, work: Sequence[Product], ceiling: float | None) -> Row:
    row: Row = {"rel_error": float(f"{one.rel_error:.3g}"), "poisoned": one.poisoned}
    if not math.isfinite(one.rel_error):
        row["rel_error"] = None  # JSON has no NaN.
    if one.poisoned:
        row |= {"status": WRONG, "reason": "some of the output is NaN, as the memory was before"}
    elif not one.rel_error <= check.LIMIT:
        row |= {"status": WRONG, "reason": f"rel_error is {one.rel_error:.1e}; wanted at most {check.LIMIT:.0e}"}
    if isinstance(timing, Exception):
        return row | _reason(timing)
    us = timing.median
    longest = sorted(sorted(range(len(timing.kernels)), key=lambda i: -timing.kernels[i][1])[:KERNELS])
    row |= {
        "us": round(us, 2),
        "timer": timing.timer,
        "kernels": [[timing.kernels[i][0][:80], round(timing.kernels[i][1], 2)] for i in longest],
    }
    if work and ceiling is not None:
        row |= {
            "tflops": round(sum(product.flops for product in work) / us / 1e6, 1),
            "tbps": round(sum(product.bytes for product in work) / us / 1e6, 3),
            "ceiling": round(ceiling, 2),
            "share": round(ceiling / us, 3),
        }
    return row


def _words(where: Row) -> str:
    return " ".join(map(str, where.values()))


def _line(where: Row, which: str, part: str, rows: Sequence[Row]) -> str:
    """What a pass found, in a line."""
    found = []
    for row in rows:
        text = row["implementation"]
        text += f" {row['us']:.1f} us" if "us" in row else ""
        text += f" = floor / {row['share']}" if "share" in row else ""
        text += f" {row['status'].upper()}" if "status" in row else ""
        found.append(text)
    return f"{_words(where)} {which} {part}: {', '.join(found)}"


def _reason(error: Exception) -> Row:
    text = " ".join(str(error).split())[:300]
    if isinstance(error, NotPresentError):
        return {"status": NOT_PRESENT, "reason": text}
    return {"status": FAILED, "reason": f"{type(error).__name__}: {text}"}
