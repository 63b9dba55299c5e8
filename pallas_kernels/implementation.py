"""Which implementation of an operation runs, and why: one table per operation, one function that reads it."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from jax.typing import DTypeLike

_log = logging.getLogger("pallas_kernels")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What a choice may depend on; all of it is known while tracing.

    Attributes:
      target: what the program will run on.
      dtypes: by argument name, a dtype, or the name of one or of a quantised format.
      sizes: size by dimension name.
    """

    target: "Target"
    dtypes: Mapping[str, DTypeLike]
    sizes: Mapping[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """What a program will run on.

    Attributes:
      kind: the device's name, such as "NVIDIA H200".
      platform: "cpu", "gpu" or "tpu".
      compute_capability: of an NVIDIA GPU, such as "9.0"; None elsewhere.
      cores: streaming multiprocessors of a GPU; None elsewhere.
    """

    kind: str
    platform: str
    compute_capability: str | None = None
    cores: int | None = None


H200 = Target(kind="NVIDIA H200", platform="gpu", compute_capability="9.0", cores=132)


def target() -> Target:
    """What is being traced for: the context mesh's device where `compiling_for` or a mesh names one, else the default.

    The context mesh is part of jax's own cache keys, so a function that was traced for one target is traced again for
    another.
    """
    stated = jax.sharding.get_abstract_mesh().abstract_device
    device = default_device()
    if stated is None or stated.device_kind == device.device_kind:
        return Target(
            kind=device.device_kind,
            platform=device.platform,
            compute_capability=getattr(device, "compute_capability", None),
            cores=getattr(device, "core_count", None),
        )
    if stated.device_kind == H200.kind:
        return dataclasses.replace(H200, cores=stated.num_cores)
    return Target(kind=stated.device_kind, platform=stated.platform, cores=stated.num_cores)


@contextlib.contextmanager
def compiling_for(target: Target) -> Iterator[None]:
    """Inside, choices are made as for `target`, whatever this machine has."""
    device = AbstractDevice(device_kind=target.kind, platform=target.platform, num_cores=target.cores)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        yield


def no_hopper_kernels(target: Target) -> str | None:
    """Why the kernels for Hopper GPUs do not run on `target`, and what they accept, in a sentence; None if they do."""
    if target.compute_capability != H200.compute_capability:
        return f"it runs on NVIDIA GPUs of compute capability {H200.compute_capability}, not on {target.kind}"
    if target.cores is None:
        return f"it runs on GPUs that say how many cores they have, not on this {target.kind}"
    return None


def hopper_cores() -> int:
    """Streaming multiprocessors of the target.

    Raises:
      ValueError: if Hopper kernels do not run there, as where what was traced for an H200 is differentiated elsewhere.
    """
    here = target()
    if (reason := no_hopper_kernels(here)) is not None or here.cores is None:
        raise ValueError(f"A kernel for Hopper GPUs cannot run: {reason}.")
    return here.cores


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
