"""What the chip can do, to be timed in turn with kernels: dense matrix products, and reading memory."""

import functools
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.bench.device import Call
from pallas_kernels.bench.rivals import to_torch

_ROW = 8192  # elements of a row, where a buffer is summed row by row


def dense(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """lhs [M, K] @ rhs [N, K].T, bfloat16 -> bfloat16: the layout in which checkpoints store weights."""
    return lax.dot_general(lhs, rhs, (((1,), (1,)), ((), ())), preferred_element_type=lhs.dtype)


def dense_calls(compiled: Callable, lhs: jax.Array, rhs: jax.Array, torch: ModuleType | None) -> dict[str, Call]:
    """The dense product lhs [M, K] @ rhs [N, K].T by each library that is here; `compiled` is `dense`, for them."""
    calls: dict[str, Call] = {"jnp.dot": functools.partial(compiled, lhs, rhs)}
    if torch is not None:
        calls["torch.mm"] = functools.partial(torch.mm, to_torch(torch, lhs), to_torch(torch, rhs).t())
    return calls


def read_calls(buffer: jax.Array, torch: ModuleType | None) -> dict[str, Call]:
    """Sums of the float32 `buffer` [N], N a multiple of 8192, that read each byte once: the fastest one counts."""
    calls: dict[str, Call] = {
        "jnp.sum": functools.partial(jax.jit(jnp.sum), buffer),
        "jnp.sum of rows": functools.partial(jax.jit(_sum_of_rows), buffer),
    }
    if torch is not None:
        calls["torch.sum"] = functools.partial(torch.sum, to_torch(torch, buffer))
    return calls


def read_buffer(size: int) -> jax.Array:
    """About `size` bytes of random float32, to be read."""
    shape = (max(size // (4 * _ROW), 1) * _ROW,)
    return jax.jit(jax.random.uniform, static_argnums=1)(jax.random.key(0), shape)


def heater(width: int = 8192) -> Callable[[float], Any]:
    """A function that keeps the chip busy with dense products for so many seconds."""
    product = jax.jit(dense)
    one, other = (jax.random.normal(jax.random.key(seed), (width, width), jnp.bfloat16) for seed in (0, 1))

    def heat(seconds: float) -> Any:
        end, waiting = time.perf_counter() + seconds, None
        while time.perf_counter() < end:
            for _ in range(8):
                last = product(one, other)
            jax.block_until_ready(waiting)  # The products just launched run on.
            waiting = last
        return waiting

    heat(0.1)
    return heat


def _sum_of_rows(buffer: jax.Array) -> jax.Array:
    return buffer.reshape(-1, _ROW).sum(1)
