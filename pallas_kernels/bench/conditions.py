"""The conditions that a recorded number needs."""

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax


def conditions() -> dict[str, Any]:
    """Device, its driver, processor, versions, date, load and commit (None outside git)."""
    return {
        "device": jax.devices()[0].device_kind,
        "driver": _driver(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
    }


def _driver() -> str | None:
    """Version of the NVIDIA driver, or None where there is none."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


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
