"""`grouped_matmul` against one dense `jnp.dot` of the same M, N and K, which reads one matrix where it reads G."""

import argparse
import functools
import statistics
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.timing import alternate, conditions, summary
from pallas_kernels.grouped_matmul import grouped_matmul


def add_arguments(commands: Any) -> None:
    """Adds the command; its defaults are the up projection of Nemotron-3 Nano."""
    parser = commands.add_parser("grouped_matmul", help=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--top-k", type=int, default=6, help="groups that each token is sent to")
    parser.add_argument("--groups", type=int, default=128)
    parser.add_argument("--columns", type=int, default=1856, help="N")
    parser.add_argument("--depth", type=int, default=2688, help="K")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--activation", choices=["relu2"], default=None)
    parser.add_argument("--gradient", action="store_true", help="both gradients too (and jnp.dot's)")
    parser.add_argument("--rounds", type=int, default=9)


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row per dtype and token count; `ratio` is the median over the rounds of jnp.dot's time over ours."""
    for dtype in args.dtypes:
        rhs = jax.random.normal(jax.random.key(0), (args.groups, args.columns, args.depth), jnp.dtype(dtype))
        for tokens in args.tokens:
            sizes = random_group_sizes(tokens, args.groups, args.top_k)
            lhs = jax.random.normal(jax.random.key(1), (tokens * args.top_k, args.depth), jnp.dtype(dtype))
            yield conditions() | _measure(args, lhs, rhs, sizes)


def random_group_sizes(tokens: int, groups: int, top_k: int) -> np.ndarray:
    """Rows of each group when each token goes to `top_k` different groups, all alike likely."""
    chosen = np.argsort(np.random.default_rng(0).random((tokens, groups)), axis=1)[:, :top_k]
    return np.bincount(chosen.ravel(), minlength=groups).astype(np.int32)


def _measure(args: argparse.Namespace, lhs: jax.Array, rhs: jax.Array, sizes: np.ndarray) -> dict[str, Any]:
    ours = functools.partial(grouped_matmul, group_sizes=jnp.asarray(sizes), activation=args.activation)
    matrix = rhs[0].T.copy()
    calls = {
        "grouped_matmul": functools.partial(jax.jit(ours), lhs, rhs),
        "jnp_dot": functools.partial(jax.jit(jnp.dot), lhs, matrix),
    }
    if args.gradient:
        calls = {
            "grouped_matmul": functools.partial(jax.jit(_gradient(ours)), lhs, rhs),
            "jnp_dot": functools.partial(jax.jit(_gradient(jnp.dot)), lhs, matrix),
        }
    seconds = alternate(calls, args.rounds)
    ratio = statistics.median(a / b for a, b in zip(seconds["jnp_dot"], seconds["grouped_matmul"], strict=True))
    shape = {"groups": rhs.shape[0], "rows": lhs.shape[0], "columns": rhs.shape[1], "depth": rhs.shape[2]}
    least, most = int(sizes.min()), int(sizes.max())
    return {
        "operation": "grouped_matmul" + (" gradient" if args.gradient else ""),
        "dtype": str(lhs.dtype),
        **shape,
        "group_rows": [least, most],
        "activation": args.activation,
        **{name: summary(values) for name, values in seconds.items()},
        "ratio": round(ratio, 3),
    }


def _gradient(fun: Any) -> Any:
    return jax.grad(lambda lhs, rhs: fun(lhs, rhs).astype(jnp.float32).sum(), (0, 1))
