"""Device time: the sum of the durations of a call's kernels on an NVIDIA GPU, as CUPTI records them.

It records every kernel of the process, whichever library launches it, so rivals are measured alike. Where there is no
NVIDIA GPU the wall clock stands in, so that benchmarks run anywhere; `Timing.timer` says which it was.
"""

import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Call = Callable[[], Any]
CUPTI, WALL = "cupti", "wall"
_MARK = "atan2"  # in the name of the kernel that stands between groups


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """What several calls of one function took.

    Attributes:
      us: microseconds of each call; of their mean alone if their kernels are not the same, so that none can be told
        from the next.
      kernels: (name, microseconds) of the kernels of one call, in the order of their launches: the median of each, or
        the mean of all of a name where the calls cannot be told apart.
      timer: "cupti" or "wall".
    """

    us: tuple[float, ...]
    kernels: tuple[tuple[str, float], ...]
    timer: str

    @property
    def median(self) -> float:
        return statistics.median(self.us)


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Calls of one function that are timed one after the other."""

    calls: Sequence[Call]


class LaunchError(RuntimeError):
    """The records do not tell which kernels are whose."""


def prepare(calls: Sequence[Call]) -> Group:
    """Compiles and warms up the calls."""
    for _ in range(2):  # XLA records a program as a graph when it runs for the second time.
        _run_all(calls)
    return Group(calls)


def device_times(groups: Sequence[Group], *, before: Call | None = None) -> list[Timing]:
    """Times the groups' calls in turn, with nothing between the groups but a tiny kernel that marks where one ends.

    Args:
      groups: from `prepare`. One group may stand in several places.
      before: runs immediately before the first call, such as work that heats the chip. It is not timed.

    Raises:
      LaunchError: if the marks are not recorded, or nothing between two of them.
    """
    if timer() == WALL:
        if before is not None:
            synchronize(before())
        return [_wall_time(group) for group in groups]
    mark = _marker()
    synchronize(mark())

    def run() -> None:
        if before is not None:
            synchronize(before())
        for group in groups:
            synchronize(mark())
            _run_all(group.calls)
        synchronize(mark())

    between: list[list[tuple[str, float]]] = [[]]
    for name, us in _recorded(run):
        if _MARK in name:
            between.append([])
        else:
            between[-1].append((name, us))
    if len(between) != len(groups) + 2:
        raise LaunchError(f"{len(between) - 1} marks are recorded; wanted {len(groups) + 1}.")
    return [_timing(group, records) for group, records in zip(groups, between[1:-1], strict=True)]


def time_alone(group: Group, *, before: Call | None = None) -> Timing:
    """Times one group whatever is recorded: all of it is the group's, and without any the time that passes counts.

    `before` runs before recording begins.
    """
    if before is not None:
        synchronize(before())
    if timer() != WALL:
        try:
            return _timing(group, _recorded(lambda: _run_all(group.calls)))
        except Exception:  # If it is not the recording that fails but a call, it fails again.
            pass
    return _wall_time(group)


def synchronize(result: Any = None) -> None:
    """Waits for jax's `result`, and for all that torch has launched."""
    jax.block_until_ready(result)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def timer() -> str:
    """How calls are timed here: "cupti" or "wall"."""
    return CUPTI if jax.default_backend() == "gpu" and "NVIDIA" in jax.devices()[0].device_kind else WALL


def _run_all(calls: Sequence[Call]) -> None:
    result = None
    for call in calls:
        result = call()
    synchronize(result)


@functools.cache
def _marker() -> Call:
    """Launches one kernel, whose name no other has."""
    angle = jnp.ones((), jnp.float32)
    return functools.partial(jax.jit(lax.atan2), angle, angle)  # XLA calls it "wrapped_atan2".


def _recorded(run: Call) -> list[tuple[str, float]]:
    """(name, microseconds) of every kernel that `run` launches."""
    from jax.experimental.mosaic.gpu import profiler

    if profiler.mosaic_gpu_lib is None:
        raise RuntimeError("This jaxlib has no CUPTI; wanted one with the CUDA plugin.")
    cupti = profiler.mosaic_gpu_lib._mosaic_gpu_ext
    cupti._cupti_init()
    try:
        run()
    finally:
        records = cupti._cupti_get_timings(True)
    return [(name, milliseconds * 1e3) for name, milliseconds in records]


def _timing(group: Group, records: Sequence[tuple[str, float]]) -> Timing:
    if not records:
        raise LaunchError(f"No kernel of {len(group.calls)} calls is recorded.")
    count = len(group.calls)
    step = -(-len(records) // count)
    calls = [records[start : start + step] for start in range(0, step * count, step)]
    # Calls follow each other, but kernels of one call that do not depend on each other may end in any order.
    by_name = [sorted(call, key=lambda record: record[0]) for call in calls]
    names = [[name for name, _ in call] for call in by_name]
    if names == names[:1] * count:
        medians = [statistics.median(us for _, us in column) for column in zip(*by_name, strict=True)]
        order = sorted(range(step), key=lambda place: calls[0][place][0])
        at_place = dict(zip(order, medians, strict=True))
        kernels = tuple((name, at_place[place]) for place, (name, _) in enumerate(calls[0]))
        return Timing(us=tuple(sum(us for _, us in call) for call in calls), kernels=kernels, timer=CUPTI)
    # Such as copies, which are a kernel at one time and none at another, or loops that turn as often as data says.
    total: dict[str, float] = {}
    for name, us in records:
        total[name] = total.get(name, 0.0) + us / count
    return Timing(us=(sum(total.values()),), kernels=tuple(total.items()), timer=CUPTI)


def _wall_time(group: Group) -> Timing:
    us = []
    for call in group.calls:
        start = time.perf_counter()
        synchronize(call())
        us.append((time.perf_counter() - start) * 1e6)
    return Timing(us=tuple(us), kernels=(), timer=WALL)
