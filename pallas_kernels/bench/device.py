"""Device time: the sum of the durations of a call's kernels on an NVIDIA GPU, as CUPTI records them.

It records every kernel of the process, whichever library launches it, so rivals are measured alike. Where there is no
NVIDIA GPU the wall clock stands in, so that benchmarks run anywhere; `Timing.timer` says which it was.
"""

import dataclasses
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

Call = Callable[[], Any]
CUPTI, WALL = "cupti", "wall"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """What several calls of one function took.

    Attributes:
      us: microseconds of each call.
      kernels: (name, median microseconds) of each kernel of one call, in the order of their launches.
      timer: "cupti" or "wall".
    """

    us: tuple[float, ...]
    kernels: tuple[tuple[str, float], ...]
    timer: str

    @property
    def median(self) -> float:
        return statistics.median(self.us)


@dataclasses.dataclass(frozen=True)
class Group:
    """Calls of one function that are timed one after the other, and the names of the kernels that each launches.

    Without names they are timed by the wall clock.
    """

    calls: Sequence[Call]
    kernels: tuple[str, ...]


class LaunchError(RuntimeError):
    """The recorded kernels are not those that the calls launch."""


def device_time(calls: Sequence[Call], *, before: Call | None = None) -> Timing:
    """Times `calls`, one after the other, after running them to warm up; `before` runs immediately before them.

    Raises:
      LaunchError: if the calls do not launch the same kernels each.
    """
    return device_times([prepare(calls)], before=before)[0]


def prepare(calls: Sequence[Call]) -> Group:
    """Compiles and warms up the calls, and finds out which kernels each launches.

    Raises:
      LaunchError: if the number of kernels is not the same for each.
    """
    for _ in range(2):  # XLA records a program as a graph when it runs for the second time.
        _run_all(calls)
    if timer() == WALL:
        return Group(calls, ())
    names = [name for name, _ in _recorded(lambda: _run_all(calls))]
    if not names or len(names) % len(calls):
        raise LaunchError(f"{len(calls)} calls launched {len(names)} kernels; wanted a multiple, each call the same.")
    return Group(calls, tuple(names[: len(names) // len(calls)]))


def device_times(groups: Sequence[Group], *, before: Call | None = None) -> list[Timing]:
    """Times the groups' calls in turn, with nothing between the groups but waiting for the device.

    Args:
      groups: from `prepare`. One group may stand in several places. Those for the wall clock come after all others.
      before: runs immediately before the first call, such as work that heats the chip. It is not timed.

    Raises:
      LaunchError: if the kernels recorded are not those of the groups.
    """
    recorded = [group for group in groups if group.kernels]
    if recorded:
        records = _recorded(lambda: _run_groups(recorded, before))
    elif before is not None:
        synchronize(before())
    timings = []
    launches = [len(group.calls) * len(group.kernels) for group in groups]
    end = len(records) - sum(launches) if recorded else 0  # What `before` launched is in front.
    for group, count in zip(groups, launches, strict=True):
        start, end = end, end + count
        timings.append(_timing(group, records[max(start, 0) : max(end, 0)]) if count else _wall_time(group))
    return timings


def synchronize(result: Any = None) -> None:
    """Waits for jax's `result`, and for all that torch has launched."""
    jax.block_until_ready(result)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def timer() -> str:
    """How calls are timed here: "cupti" or "wall"."""
    return CUPTI if jax.default_backend() == "gpu" and "NVIDIA" in jax.devices()[0].device_kind else WALL


def driver() -> str | None:
    """Version of the NVIDIA driver, or None where there is none."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def _run_all(calls: Sequence[Call]) -> None:
    result = None
    for call in calls:
        result = call()
    synchronize(result)


def _run_groups(groups: Sequence[Group], before: Call | None) -> None:
    if before is not None:
        synchronize(before())
    for group in groups:
        _run_all(group.calls)


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
    step = len(group.kernels)
    calls = [records[start : start + step] for start in range(0, step * len(group.calls), step)]
    # Calls follow each other, but kernels of one call that do not depend on each other may end in any order.
    order = sorted(range(step), key=group.kernels.__getitem__)
    by_name = [sorted(call, key=lambda record: record[0]) for call in calls]
    wanted = [group.kernels[place] for place in order]
    for call in by_name:
        if (seen := [name for name, _ in call]) != wanted:
            differing = sorted(set(seen) ^ set(wanted)) or seen
            raise LaunchError(f"A call is recorded with {len(seen)} kernels, wanted {step}; see {differing[:4]}.")
    medians = [statistics.median(us for _, us in column) for column in zip(*by_name, strict=True)]
    at_place = dict(zip(order, medians, strict=True))
    kernels = tuple((name, at_place[place]) for place, name in enumerate(group.kernels))
    return Timing(us=tuple(sum(us for _, us in call) for call in calls), kernels=kernels, timer=CUPTI)


def _wall_time(group: Group) -> Timing:
    us = []
    for call in group.calls:
        start = time.perf_counter()
        synchronize(call())
        us.append((time.perf_counter() - start) * 1e6)
    return Timing(us=tuple(us), kernels=(), timer=WALL)
