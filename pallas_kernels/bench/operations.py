"""Each operation by every implementation that serves it, timed in turn, beside the speed of reading memory.

The data is what one Mixture-of-Experts layer gives the operation: each token goes to `top_k` different experts, all
alike likely.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import group_places, grouped_matmul, scatter_rows, top_k
from pallas_kernels.bench.ceilings import read_buffer, read_calls
from pallas_kernels.bench.conditions import conditions
from pallas_kernels.bench.device import device_times, prepare
from pallas_kernels.implementation import Implementation

ALIGNMENT = 8  # of the first row of each expert
CALLS = 4  # each time that an implementation takes its turn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of a layer: T tokens of `width` numbers, each with `top_k` of the experts; `inner` columns of a product."""

    tokens: int
    top_k: int
    experts: int
    width: int
    inner: int

    def ids(self) -> np.ndarray:
        """[T, top_k] int32."""
        scores = np.random.default_rng(0).random((self.tokens, self.experts))
        return np.argsort(scores, axis=1)[:, : self.top_k].astype(np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What is timed: `run(*arguments, implementation=)`, which must move at least so many bytes."""

    run: Callable[..., Any]
    arguments: tuple[jax.Array, ...]
    bytes: int


def _grouped_matmul(sizes: Sizes) -> Work:
    group_sizes = np.bincount(sizes.ids().ravel(), minlength=sizes.experts).astype(np.int32)
    rows = int((-(-group_sizes // ALIGNMENT) * ALIGNMENT).sum())
    lhs, rhs = _normal(rows, sizes.width), _normal(sizes.experts, sizes.inner, sizes.width)
    moved = lhs.size + int(np.count_nonzero(group_sizes)) * rhs[0].size + rows * sizes.inner
    run = functools.partial(grouped_matmul.grouped_matmul, group_alignment=ALIGNMENT)
    return Work(run=run, arguments=(lhs, rhs, jnp.asarray(group_sizes)), bytes=2 * moved)


def _scatter_rows(sizes: Sizes) -> Work:
    x, count = _normal(sizes.tokens, sizes.width), sizes.tokens * sizes.top_k
    rows = np.random.default_rng(0).permutation(count).astype(np.int32).reshape(sizes.tokens, sizes.top_k)
    run = functools.partial(scatter_rows.scatter_rows, n_rows=count)
    return Work(run=run, arguments=(x, jnp.asarray(rows)), bytes=2 * x.size * (1 + sizes.top_k))


def _top_k(sizes: Sizes) -> Work:
    scores = _normal(sizes.tokens, sizes.experts).astype(jnp.float32)
    run = functools.partial(top_k.top_k, k=sizes.top_k)
    return Work(run=run, arguments=(scores,), bytes=4 * sizes.tokens * (sizes.experts + sizes.top_k))


def _group_places(sizes: Sizes) -> Work:
    groups = jnp.asarray(sizes.ids().ravel())
    run = functools.partial(group_places.group_places, n_groups=sizes.experts)
    return Work(run=run, arguments=(groups,), bytes=4 * (2 * groups.size + sizes.experts))


OPERATIONS: dict[str, tuple[Callable[[Sizes], Work], Sequence[Implementation]]] = {
    "grouped_matmul": (_grouped_matmul, grouped_matmul.IMPLEMENTATIONS),
    "scatter_rows": (_scatter_rows, scatter_rows.IMPLEMENTATIONS),
    "top_k": (_top_k, top_k.IMPLEMENTATIONS),
    "group_places": (_group_places, group_places.IMPLEMENTATIONS),
}


def measure(operation: str, sizes: Sizes, *, rounds: int, read_bytes: int) -> Iterator[dict[str, Any]]:
    """A row for each implementation but the reference: microseconds, and share of the speed of reading."""
    make, implementations = OPERATIONS[operation]
    work, buffer, here = make(sizes), read_buffer(read_bytes), conditions()
    calls: dict[str, Callable] = {"read": read_calls(buffer, None)["jnp.sum"]}
    for name in (row.name for row in implementations if row.name != "reference"):
        run = functools.partial(work.run, implementation=name)
        try:
            jax.eval_shape(run, *work.arguments)
        except ValueError:
            continue  # It does not serve these arguments here.
        calls[name] = functools.partial(jax.jit(run), *work.arguments)
    groups = {name: prepare([call] * CALLS) for name, call in calls.items()}
    found = device_times([*groups.values()] * rounds)
    us = {name: [us for timing in found[place :: len(groups)] for us in timing.us] for place, name in enumerate(groups)}
    read_tbps = buffer.nbytes / statistics.median(us.pop("read")) / 1e6
    for name, times in us.items():
        median = statistics.median(times)
        yield {
            **here,
            "operation": operation,
            **dataclasses.asdict(sizes),
            "implementation": name,
            "us": round(median, 2),
            "least_us": round(min(times), 2),
            "share_of_reading": round(work.bytes / median / 1e6 / read_tbps, 3),
            "timer": found[0].timer,
        }


def _normal(*shape: int) -> jax.Array:
    return jax.jit(jax.random.normal, static_argnums=(1, 2))(jax.random.key(0), shape, jnp.bfloat16)
