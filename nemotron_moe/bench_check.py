"""Whether what is timed is right: sampled results against float32 products, in memory that was full of NaN before."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from nemotron_moe.config import MoEConfig
from nemotron_moe.weights import MoEWeights

LIMIT = 1e-2  # of a relative error in bfloat16
BLOCK = 64  # columns whose error is taken together, so that a wrong band cannot hide
WINDOW = 512  # rows of an expert that are compared: its first and its last ones
_dot = functools.partial(jnp.dot, precision=lax.Precision.HIGHEST)


def dirty(sizes: Sequence[int]) -> None:
    """Fills memory of these sizes in bytes, or more, with NaN and frees it, so that the next call gets it."""
    counts = [1 << (size // 2 - 1).bit_length() for size in sizes if size >= 2]  # few different ones: each is compiled
    jax.block_until_ready([jnp.full(count, jnp.nan, jnp.bfloat16) for count in counts])


def sizes_of(compiled: Any) -> list[int]:
    """Bytes of the output and of the temporaries of a compiled program."""
    found = compiled.memory_analysis()
    return [found.output_size_in_bytes, found.temp_size_in_bytes] if found else []


def windows(sizes: np.ndarray, starts: np.ndarray, rows: int, seed: int = 0) -> np.ndarray:
    """[12, 4] int32: (expert, first row of a window, first row to compare, row after the last) of six experts.

    They are the first, the last, the largest and the smallest that have rows, and two more.
    """
    hit = np.flatnonzero(sizes)
    by_size = hit[np.argsort(sizes[hit], kind="stable")]
    chosen = [hit[0], hit[-1], by_size[0], by_size[-1], *np.random.default_rng(seed).choice(hit, 2)]
    found = []
    for expert in chosen:
        start, end = int(starts[expert]), int(starts[expert] + sizes[expert])
        for first in (start, max(start, end - WINDOW)):
            found.append((expert, min(first, max(rows - WINDOW, 0)), first, min(first + WINDOW, end)))
    return np.asarray(found, np.int32)


def product_error(
    out: jax.Array, lhs: jax.Array, rhs: jax.Array, windows: jax.Array, *, activation: str | None
) -> tuple[jax.Array, jax.Array]:
    """The largest relative error of a band of columns in any window, and whether any output is NaN.

    Args:
      out, lhs, rhs: [M, N], [M, K] and [E, N, K].
      windows: as made by `windows`.
    """
    height = min(WINDOW, lhs.shape[0])

    def one(window: jax.Array) -> jax.Array:
        expert, start, first, end = window
        row = start + lax.iota(jnp.int32, height)
        inside = ((row >= first) & (row < end))[:, None]
        take = functools.partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=height)
        # Selected, not multiplied: rows of no expert may hold NaN.
        rows, seen = (jnp.where(inside, take(array), 0).astype(jnp.float32) for array in (lhs, out))
        wanted = _dot(rows, lax.dynamic_index_in_dim(rhs, expert, keepdims=False).astype(jnp.float32).T)
        if activation == "relu2":
            wanted = jnp.square(jax.nn.relu(wanted))
        least = jnp.finfo(jnp.float32).tiny  # 0 where both are 0
        return jnp.sqrt(_by_band(jnp.square(seen - wanted)) / jnp.maximum(_by_band(jnp.square(wanted)), least)).max()

    return lax.map(one, windows).max(), jnp.isnan(out).any()


def routed_error(
    out: jax.Array, tokens: jax.Array, x: jax.Array, weights: jax.Array, ids: jax.Array, up: jax.Array, down: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The largest relative error of a token, and whether any output is NaN.

    Args:
      out, x: [T, D].
      tokens: [n] int32, which are compared.
      weights, ids: [T, K].
      up, down: [E, I, D] and [E, D, I].
    """
    wanted = _routed(x[tokens].astype(jnp.float32), weights[tokens], ids[tokens], up, down)
    return _token_error(out[tokens], wanted), jnp.isnan(out).any()


def block_error(
    out: jax.Array, tokens: jax.Array, h: jax.Array, ids: jax.Array, weights: MoEWeights, *, config: MoEConfig
) -> tuple[jax.Array, jax.Array]:
    """As `routed_error`, of the whole block; `ids` [T, K] are the experts that it chose."""
    h, ids = h[tokens].astype(jnp.float32), ids[tokens]
    wide = {name: leaf if leaf.ndim == 3 else leaf.astype(jnp.float32) for name, leaf in weights.items().items()}
    x = h * lax.rsqrt(jnp.square(h).mean(1, keepdims=True) + config.layer_norm_epsilon) * wide["norm"][None]
    scores = jnp.take_along_axis(jax.nn.sigmoid(_dot(x, wide["gate"].T)), ids, axis=1)
    if config.norm_topk_prob:
        scores = scores / scores.sum(1, keepdims=True)
    z = _dot(x, wide["fc1_latent_proj"].T) if config.moe_latent_size else x
    scores = scores * config.routed_scaling_factor
    routed = _routed(z, scores, ids, wide["experts_up_proj"], wide["experts_down_proj"])
    wanted = h + (_dot(routed, wide["fc2_latent_proj"].T) if config.moe_latent_size else routed)
    if config.moe_shared_expert_intermediate_size:
        inner = jnp.square(jax.nn.relu(_dot(x, wide["shared_experts_up_proj"].T)))
        wanted += _dot(inner, wide["shared_experts_down_proj"].T)
    return _token_error(out[tokens], wanted), jnp.isnan(out).any()


def plan_error(row_of_slot: np.ndarray, ids: np.ndarray, starts: np.ndarray) -> float:
    """The share of slots [T, K] that did not get the row which the sort by expert gives them."""
    order = np.argsort(ids, axis=None, kind="stable")
    sorted_ids = ids.ravel()[order]
    place = np.arange(order.size) - np.searchsorted(sorted_ids, sorted_ids)
    wanted = np.empty(order.size, np.int64)
    wanted[order] = starts[sorted_ids] + place
    return float(np.mean(wanted != row_of_slot.ravel()))


def _routed(x: jax.Array, weights: jax.Array, ids: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    def one(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        row, expert = pair
        take = functools.partial(lax.dynamic_index_in_dim, index=expert, keepdims=False)
        inner = jnp.square(jax.nn.relu(_dot(take(up).astype(jnp.float32), row)))
        return _dot(take(down).astype(jnp.float32), inner)

    tokens, slots = ids.shape
    out = lax.map(one, (jnp.repeat(x, slots, axis=0), ids.reshape(-1))).reshape(tokens, slots, -1)
    return (out * weights[:, :, None]).sum(1)


def _token_error(seen: jax.Array, wanted: jax.Array) -> jax.Array:
    difference = seen.astype(jnp.float32) - wanted
    return (jnp.linalg.norm(difference, axis=1) / jnp.linalg.norm(wanted, axis=1)).max()


def _by_band(squares: jax.Array) -> jax.Array:
    columns = squares.shape[1]
    padded = jnp.pad(squares.sum(0), (0, math.ceil(columns / BLOCK) * BLOCK - columns))
    return padded.reshape(-1, BLOCK).sum(1)
