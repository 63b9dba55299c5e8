"""The data of one cell of the benchmark, the calls that are timed on it, and what their results are checked against."""

import dataclasses
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nemotron_moe import bench_check as check
from nemotron_moe.bench_data import biased, random_ids, random_slots
from nemotron_moe.bench_programs import SAMPLE, Programs, Shape
from nemotron_moe.bench_work import Product
from nemotron_moe.config import MoEConfig
from nemotron_moe.dispatch import Plan
from nemotron_moe.weights import MoEWeights
from pallas_kernels.bench.device import Call

Judge = Callable[[jax.Array], tuple[float, bool]]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One implementation of one part.

    Attributes:
      calls: one for each routing.
      check: runs the first call on dirty memory: its relative error, and whether any of its output was not written.
    """

    part: str
    implementation: str
    calls: list[Call]
    check: Callable[[], tuple[float, bool]]


class Cell:
    """One layer at one number of tokens with several routings of one kind.

    The weights are not rotated: a layer of any released model is much larger than any cache.
    """

    def __init__(
        self,
        model: str,
        config: MoEConfig,
        tokens: int,
        routing: str,
        *,
        draws: int,
        weights: MoEWeights,
        programs: Programs,
    ) -> None:
        self.model, self.config, self.tokens, self.weights = model, config, tokens, weights
        self.block_weights = biased(weights, routing, config)
        self._programs = programs
        seeds = range(tokens, tokens + draws)
        with ThreadPoolExecutor(draws) as pool:  # A second each, of the largest.
            self._ids = list(pool.map(functools.partial(random_ids, routing, config, tokens), seeds))
        self._sizes = [np.bincount(ids.ravel(), minlength=config.n_routed_experts) for ids in self._ids]
        self.ids = [jnp.asarray(ids) for ids in self._ids]
        self.sizes = [jnp.asarray(sizes, jnp.int32) for sizes in self._sizes]
        self.slots = [random_slots(config, tokens, seed) for seed in seeds]

    @functools.cached_property
    def x(self) -> list[jax.Array]:
        """Inputs [T, D] of the routed experts."""
        shape = self.tokens, self.config.expert_width
        return [self._draw(10 + number, shape) for number in range(len(self.ids))]

    @functools.cached_property
    def h(self) -> list[jax.Array]:
        """Inputs [T, H] of the block."""
        shape = self.tokens, self.config.hidden_size
        return [self._draw(100 + number, shape) for number in range(len(self.ids))]

    def rows(self, part: str, count: int) -> jax.Array:
        """Inputs [count, D] of "up" or [count, I] of "down", in the experts' order; drawn once."""
        if (key := (part, count)) not in self._rows:
            width = self.config.expert_width if part == "up" else self.config.moe_intermediate_size
            self._rows[key] = self._draw(1, (count, width), squared=part == "down")
        return self._rows[key]

    @functools.cached_property
    def _rows(self) -> dict[tuple[str, int], jax.Array]:
        return {}

    def dense(self, product: Product) -> tuple[Any, jax.Array, jax.Array]:
        """The dense product of a size, and operands [m, k] and [n, k] such as they are in the layer."""
        m, n, k = product.shape
        rhs = self._programs["matrices", (n, k)](jax.random.key(2))
        return self._programs["dense", product.shape], self._draw(3, (m, k), squared=product.squared), rhs

    def hit(self, part: str) -> float:
        """How many experts have rows: the median over the routings."""
        if part != "block":
            return float(np.median([np.count_nonzero(sizes) for sizes in self._sizes]))
        return float(np.median([np.unique(np.asarray(self._route(h)[0])).size for h in self.h]))

    def ours(self, part: str, shape: Shape) -> Entry:
        """Our implementation of a part; raises what compiling it raised."""
        program = self._programs[self.model, self.tokens, shape.name, part]
        calls: list[Call] = [functools.partial(program, *arguments) for arguments in self._arguments(part, shape)]
        judge = self._judge_plan(shape) if part == "plan" else self.judge(part, shape.rows, shape.alignment)

        def run_check() -> tuple[float, bool]:
            check.dirty(check.sizes_of(program))
            return judge(calls[0]())

        return Entry(part, shape.name, calls, run_check)

    def _arguments(self, part: str, shape: Shape) -> list[tuple[Any, ...]]:
        up, down = self.weights.experts_up_proj, self.weights.experts_down_proj
        if part == "plan":
            return [(ids,) for ids in self.ids]
        if part == "block":
            return [(h, self.block_weights) for h in self.h]
        plans = self._plans(shape)
        if part in ("up", "down"):
            return [(self.rows(part, shape.rows), up if part == "up" else down, plan) for plan in plans]
        each = zip(self.x, self.slots, plans, strict=True)
        return [(x, slots, plan, up, down) for x, slots, plan in each]

    def _plans(self, shape: Shape) -> list[Plan]:
        """Of the routings; made once, before anything is timed."""
        if shape.name not in self._made:
            make_plan = self._programs[self.model, self.tokens, shape.name, "plan"]
            self._made[shape.name] = [make_plan(ids) for ids in self.ids]
        return self._made[shape.name]

    @functools.cached_property
    def _made(self) -> dict[str, list[Plan]]:
        return {}

    def judge(self, part: str, rows: int, alignment: int = 1) -> Judge:
        """What checks a result for the first routing: [rows, N] of "up" or "down", or [T, ...]."""
        key: tuple = (self.model, self.tokens, "check", part)
        up, down = self.weights.experts_up_proj, self.weights.experts_down_proj
        if part == "block":
            ids, clearest = self._route(self.h[0])
            arguments: tuple = (clearest, self.h[0], ids, self.block_weights)
        elif part == "routed":
            sample = np.linspace(0, self.tokens - 1, min(self.tokens, SAMPLE[part])).astype(np.int32)
            arguments = (jnp.asarray(sample), self.x[0], self.slots[0], self.ids[0], up, down)
        else:
            windows = check.windows(self._sizes[0], starts(self._sizes[0], alignment), rows)
            arguments = (self.rows(part, rows), up if part == "up" else down, jnp.asarray(windows))
            key = (*key, rows)
        program = self._programs[key]

        def judge(out: jax.Array) -> tuple[float, bool]:
            error, unwritten = program(out, *arguments)
            return float(error), bool(unwritten)

        return judge

    def _judge_plan(self, shape: Shape) -> Callable[[Any], tuple[float, bool]]:
        def judge(plan: Any) -> tuple[float, bool]:
            first = starts(self._sizes[0], shape.alignment)
            wrong = check.plan_error(np.asarray(plan.row_of_slot), self._ids[0], first)
            return wrong, not np.array_equal(plan.group_sizes, self._sizes[0])

        return judge

    def _draw(self, seed: int, shape: tuple[int, int], *, squared: bool = False) -> jax.Array:
        return self._programs["rows", shape, squared](jax.random.key(seed))

    def _route(self, h: jax.Array) -> Any:
        return self._programs[self.model, self.tokens, "route"](h, self.block_weights)


def starts(sizes: np.ndarray, alignment: int) -> np.ndarray:
    """The first row of each expert, from [E] sizes."""
    return np.append(0, np.cumsum(-(-sizes // alignment) * alignment))[:-1]
