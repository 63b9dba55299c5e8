"""Which implementation of an operation runs, and why: one table per operation, one function that reads it."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

import jax
from jax.typing import DTypeLike

_log = logging.getLogger("pallas_kernels")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What a choice may depend on; all of it is known while tracing.

    Attributes:
      platform: "cpu", "gpu" or "tpu".
      compute_capability: of an NVIDIA GPU, such as "9.0"; None elsewhere.
      dtypes: dtype by argument name.
      sizes: size by dimension name.
    """

    platform: str
    compute_capability: str | None
    dtypes: Mapping[str, DTypeLike]
    sizes: Mapping[str, int]

    @classmethod
    def here(cls, dtypes: Mapping[str, DTypeLike], sizes: Mapping[str, int]) -> "Facts":
        """The facts of a call on this process's default device."""
        device = default_device()
        capability = getattr(device, "compute_capability", None)
        return cls(platform=device.platform, compute_capability=capability, dtypes=dtypes, sizes=sizes)


def default_device() -> jax.Device:
    """The device on which jax computes where nothing says otherwise, `jax.default_device` included."""
    device = jax.config.jax_default_device
    if isinstance(device, jax.Device):
        return device
    return jax.local_devices(backend=device)[0]


class Implementation(Protocol):
    """A row of an operation's table."""

    @property
    def name(self) -> str: ...

    def refuses(self, facts: Facts) -> str | None:
        """Why it cannot serve these facts and what it would accept, in a sentence; None if it can."""


@dataclasses.dataclass(frozen=True)
class Choice[T: Implementation]:
    """What runs, and for each implementation that was preferred to it, why that one does not: (name, reason)."""

    implementation: T
    passed_over: tuple[tuple[str, str], ...]


def select[T: Implementation](operation: str, table: Sequence[T], facts: Facts, name: str | None = None) -> Choice[T]:
    """Picks from `table` the implementation called `name`, or if that is None the first one that does not refuse.

    Raises:
      ValueError: if `name` is not in the table, or that implementation refuses.
    """
    names = [row.name for row in table]
    if name is not None and name not in names:
        raise ValueError(f"implementation is {name!r}; {operation} has {names}, or None to let it choose.")
    passed_over: list[tuple[str, str]] = []
    for row in table:
        if name not in (None, row.name):
            continue
        reason = row.refuses(facts)
        if reason is None:
            _log_once(operation, row.name, tuple(passed_over))
            return Choice(row, tuple(passed_over))
        passed_over.append((row.name, reason))
    raise ValueError(f"{operation} cannot run: " + "; ".join(f"{row!r} refuses: {why}" for row, why in passed_over))


_logged: set[tuple[object, ...]] = set()


def _log_once(operation: str, name: str, passed_over: tuple[tuple[str, str], ...]) -> None:
    if (key := (operation, name, passed_over)) not in _logged:
        _logged.add(key)
        _log.debug("%s runs %r%s", operation, name, "".join(f"; not {row!r}: {why}" for row, why in passed_over))
