"""Times implementations in turn with what the chip can do at the same moment."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax

from nemotron_moe.bench_cell import Cell
from nemotron_moe.bench_work import Product, floor_us, products
from pallas_kernels.bench import ceilings
from pallas_kernels.bench.device import Call, Group, Timing, device_times, prepare, time_alone, timer
from pallas_kernels.bench.rivals import NotPresentError, find_torch

_CALLS = 4  # of each ceiling, before the implementations and again after them
_Shape = tuple[int, int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """One pass over one part of one cell.

    Attributes:
      timings: by implementation; an exception where it could not be timed.
      dense_us: microseconds of the dense product of each shape (m, n, k), by the fastest library.
      read_tbps: terabytes a second of reading memory, by the fastest reduction. NaN, here and in `dense_us`, is what
        could not be timed.
      trouble: why the implementations were not timed in turn but each alone, or None.
    """

    timings: Mapping[str, Timing | Exception]
    dense_us: Mapping[_Shape, float]
    read_tbps: float
    trouble: Exception | None

    def floor_us(self, work: Sequence[Product]) -> float | None:
        """Of the work that was measured; None where there is none, or a ceiling is missing."""
        known = all(map(math.isfinite, (self.read_tbps, *(self.dense_us[one.shape] for one in work))))
        return floor_us(work, self.dense_us, self.read_tbps) if work and known else None


class Machine:
    """The device: what heats it, and the memory whose reading is timed."""

    def __init__(self, *, read_bytes: int, heat: float, pause: float, say: Callable[[str], Any]) -> None:
        self.torch, self.say = _torch(), say
        self._seconds = {"hot": heat, "cool": pause}
        self._heat = ceilings.heater(8192 if jax.default_backend() == "gpu" else 64)
        buffer = ceilings.read_buffer(read_bytes)
        self.read_bytes = buffer.nbytes
        self.reads = _prepared(ceilings.read_calls(buffer, self.torch), say)

    def before(self, which: str, *, share: float = 1) -> Call:
        """What runs immediately before a pass, "cool" or "hot", or a share of it."""
        run = {"hot": self._heat, "cool": time.sleep}[which]
        return lambda: run(share * self._seconds[which])


class Ceilings:
    """The dense products of the shapes of one cell, each made when it is first asked for."""

    def __init__(self, machine: Machine, cell: Cell) -> None:
        self.machine, self._cell = machine, cell
        self._dense: dict[_Shape, list[Group]] = {}

    def work(self, part: str) -> tuple[Product, ...]:
        """What the part must do in this cell."""
        return products(part, self._cell.config, self._cell.tokens, self._cell.hit(part))

    def groups(self, work: Sequence[Product]) -> list[tuple[Any, Group]]:
        """What is to be timed for these products: ("read" or a shape, calls)."""
        for product in work:
            if product.shape not in self._dense:
                self._dense[product.shape] = self._prepared_dense(product)
        found: list[tuple[Any, Group]] = [("read", group) for group in self.machine.reads] if work else []
        shapes = dict.fromkeys(product.shape for product in work)
        return found + [(shape, group) for shape in shapes for group in self._dense[shape]]

    def _prepared_dense(self, product: Product) -> list[Group]:
        try:
            calls = ceilings.dense_calls(*self._cell.dense(product), self.machine.torch)
        except Exception as error:  # Without it there is no floor, but there are times.
            self.machine.say(f"No dense product of {product.shape}: {type(error).__name__}: {str(error)[:200]}")
            return []
        return _prepared(calls, self.machine.say)


def measure(
    of_cell: Ceilings,
    which: str,
    work: Sequence[Product],
    groups: Mapping[str, Group],
    *,
    rounds: int,
    last: Sequence[str] = (),
    share: float = 1,
) -> Measured:
    """Times ceilings, implementations, and ceilings again, in turn and without a pause.

    Args:
      of_cell: the ceilings of the cell.
      which: the pass, "cool" or "hot".
      work: what the implementations must do, whose ceilings are timed with them.
      groups: the implementations' calls, by name.
      rounds: how often the implementations take their turn.
      last: those which come once, after the second ceilings: slow ones, on which the chip would cool.
      share: of the machine's seconds that are spent before the pass.
    """
    machine, ceiling_groups = of_cell.machine, of_cell.groups(work)
    fast = [(name, group) for name, group in groups.items() if name not in last]
    slow = [(name, group) for name, group in groups.items() if name in last]
    sequence = [*ceiling_groups, *fast * rounds, *ceiling_groups, *slow]
    # Together, so that nothing lies between them; one by one if that fails, to tell which of them it was.
    together = _try(lambda: device_times([group for _, group in sequence], before=machine.before(which, share=share)))
    trouble = together if isinstance(together, Exception) else None
    if isinstance(together, Exception):
        alone = {group: _alone(machine, which, group) for _, group in sequence}
        results: Sequence[Timing | Exception] = [alone[group] for _, group in sequence]
    else:
        results = together
    timings: dict[str, Timing | Exception] = {}
    for name in groups:
        found = [result for (key, _), result in zip(sequence, results, strict=True) if key == name]
        errors = [result for result in found if isinstance(result, Exception)]
        timings[name] = errors[0] if errors else _merged(found)
    best: dict[Any, float] = {}  # Of the libraries.
    for key, group in ceiling_groups:
        found = [result for (_, other), result in zip(sequence, results, strict=True) if other is group]
        if all(isinstance(result, Timing) and result.timer == timer() for result in found):
            best[key] = min(best.get(key, math.inf), _merged(found).median)
    read_us = best.pop("read", math.nan)
    dense_us = {product.shape: best.get(product.shape, math.nan) for product in work}
    read_tbps = machine.read_bytes / read_us / 1e6
    return Measured(timings=timings, dense_us=dense_us, read_tbps=read_tbps, trouble=trouble)


def _alone(machine: Machine, which: str, group: Group) -> Timing | Exception:
    return _try(lambda: time_alone(group, before=machine.before(which, share=0.1)))


def _try[Result](run: Callable[[], Result]) -> Result | Exception:
    try:
        return run()
    except Exception as error:  # Whatever a kernel does, the other cells are measured.
        return error


def _merged(timings: Sequence[Any]) -> Timing:
    return dataclasses.replace(timings[0], us=tuple(us for timing in timings for us in timing.us))


def _prepared(calls: Mapping[str, Call], say: Callable[[str], Any]) -> list[Group]:
    """Those that run."""
    groups = []
    for name, call in calls.items():
        try:
            groups.append(prepare([call] * _CALLS))
        except Exception as error:
            say(f"{name} is no ceiling: {type(error).__name__}: {str(error)[:200]}")
    return groups


def _torch() -> ModuleType | None:
    try:
        return find_torch()
    except NotPresentError:
        return None
