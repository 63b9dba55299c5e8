"""The public function: checks its arguments and chooses an implementation."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import check_array, is_integer
from pallas_kernels.implementation import Choice, Facts, select, target
from pallas_kernels.scatter_rows.mosaic import Mosaic
from pallas_kernels.scatter_rows.reference import Reference
from pallas_kernels.scatter_rows.xla import Xla

IMPLEMENTATIONS = (Mosaic(), Xla(), Reference())  # in order of preference
MOST_ROWS = jnp.iinfo(jnp.int32).max


def scatter_rows(x: jax.Array, rows: jax.Array, n_rows: int, *, implementation: str | None = None) -> jax.Array:
    """Writes each token's row to the K rows that it names: out[rows[t, j]] = x[t], bit for bit.

    A row may be named once at most. Numbers below 0 and from `n_rows` on name nothing. Rows that nothing names hold
    anything, NaN included. Not differentiable.

    Args:
      x: [T, D] of any dtype.
      rows: [T, K] int32.
      n_rows: rows of the result, an integer that is no traced one.
      implementation: a name in `IMPLEMENTATIONS`, or None for the first one that serves these arguments.

    Returns:
      [n_rows, D] in x's dtype.

    Raises:
      ValueError: naming the argument, what was seen and what was wanted.
    """
    _check(x, rows, n_rows)
    x, rows, n_rows = jnp.asarray(x), jnp.asarray(rows), int(n_rows)
    chosen = choose(x, rows, n_rows, implementation=implementation).implementation
    if 0 in (*x.shape, *rows.shape, n_rows):
        return jnp.zeros((n_rows, x.shape[1]), x.dtype)
    with jax.named_scope("scatter_rows"):
        return chosen.scatter(x, rows, n_rows)


def choose(
    x: jax.Array | jax.ShapeDtypeStruct,
    rows: jax.Array | jax.ShapeDtypeStruct,
    n_rows: int,
    *,
    implementation: str | None = None,
) -> Choice[Any]:
    """Which implementation `scatter_rows` uses for arrays (or ShapeDtypeStructs) like these, and why.

    Raises:
      ValueError: if `implementation` names none, or one that refuses these arguments.
    """
    (tokens, width), named = x.shape, rows.shape[1]
    facts = Facts(
        target=target(),
        dtypes={"x": x.dtype},
        sizes={"tokens": tokens, "named": named, "width": width, "rows": n_rows},
    )
    return select("scatter_rows", IMPLEMENTATIONS, facts, implementation)


def _check(x: jax.Array, rows: jax.Array, n_rows: int) -> None:
    check_array("x", x, "[T, D]")
    check_array("rows", rows, "[T, K]")
    if rows.shape[0] != x.shape[0]:
        raise ValueError(f"rows has shape {rows.shape}; wanted [T, K] with x's T = {x.shape[0]}.")
    if rows.dtype != jnp.int32:
        raise ValueError(f"rows is {rows.dtype}; wanted int32.")
    if not is_integer(n_rows) or not 0 <= n_rows <= MOST_ROWS:
        raise ValueError(f"n_rows is {n_rows!r}; wanted an integer from 0 to {MOST_ROWS}.")
