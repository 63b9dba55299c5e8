"""Timing of functions that are compared with each other, and the conditions that a recorded number needs."""

import datetime
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax


def alternate(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, by name, in `rounds` rounds that take the calls in turn; compiled and warmed up before.

    Taking turns lets whatever else the machine does fall on all of them alike.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready(call())
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - start)
    return seconds


def summary(seconds: list[float]) -> dict[str, float]:
    """Median and least, in milliseconds."""
    return {"median_ms": round(statistics.median(seconds) * 1e3, 3), "least_ms": round(min(seconds) * 1e3, 3)}


def conditions() -> dict[str, Any]:
    """Device, processor, versions, date, load and commit (None outside git)."""
    return {
        "device": jax.devices()[0].device_kind,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
