"""Our implementations of the layer's parts as programs, compiled in parallel before anything is timed."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from nemotron_moe import bench_check as check
from nemotron_moe.bench_data import draw_rows, matrices
from nemotron_moe.bench_work import Product, products
from nemotron_moe.config import MoEConfig
from nemotron_moe.dense import rms_norm
from nemotron_moe.dispatch import Plan, make_plan
from nemotron_moe.experts import expert_product, routed_experts
from nemotron_moe.layer import moe_block
from nemotron_moe.routing import choice_margin, route
from nemotron_moe.weights import MoEWeights, abstract_weights
from pallas_kernels.bench.ceilings import dense
from pallas_kernels.grouped_matmul import choose

ACTIVATION = {"up": "relu2", "down": None}
SAMPLE = {"routed": 8, "block": 4}  # tokens that are checked


@dataclasses.dataclass(frozen=True)
class Shape:
    """One layer at one number of tokens, by one implementation of ours (None: what the layer picks).

    The one place where the benchmark asks how the layer lays out its rows.
    """

    config: MoEConfig
    tokens: int
    implementation: str | None

    @property
    def alignment(self) -> int:
        """Each expert's rows begin at a multiple of it."""
        return self.abstract_plan.alignment

    @property
    def rows(self) -> int:
        """M, of the experts' rows in their order."""
        return self.abstract_plan.slot_of_row.shape[0]

    @functools.cached_property
    def name(self) -> str:
        """Of the implementation that multiplies."""
        lhs, rhs = self.product_arguments("up", self.rows)
        chosen = choose(lhs, rhs, group_alignment=self.alignment, implementation=self.implementation)
        return chosen.implementation.name

    @functools.cached_property
    def abstract_plan(self) -> Plan:
        return jax.eval_shape(self.plan, abstract((self.tokens, self.config.num_experts_per_tok), jnp.int32))

    def plan(self, ids: jax.Array) -> Plan:
        return make_plan(ids, self.config.n_routed_experts)

    def product(self, lhs: jax.Array, rhs: jax.Array, plan: Plan, *, activation: str | None) -> jax.Array:
        return expert_product(lhs, rhs, plan, activation=activation, implementation=self.implementation)

    def routed(self, x: jax.Array, slots: jax.Array, plan: Plan, up: jax.Array, down: jax.Array) -> jax.Array:
        return routed_experts(x, slots, plan, up, down, implementation=self.implementation)

    def block(self, h: jax.Array, weights: MoEWeights) -> jax.Array:
        return moe_block(h, weights, self.config, implementation=self.implementation)

    def product_arguments(self, part: str, rows: int) -> tuple[Any, Any]:
        """The abstract lhs and rhs of "up" or "down"."""
        weights = abstract_weights(self.config)
        rhs = weights.experts_up_proj if part == "up" else weights.experts_down_proj
        return abstract((rows, rhs.shape[2]), jnp.bfloat16), rhs


class Programs:
    """Programs that threads compile, by what they are for."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads)
        self._found: dict[tuple, Future] = {}

    def add(self, key: tuple, fun: Callable, *arguments: Any, tuned: bool = True) -> None:
        """Begins to compile `fun` for abstract arguments, unless there is a program of that key.

        Without `tuned`, XLA does not try which algorithms are fast.
        """
        options = None if tuned else {"xla_gpu_autotune_level": 0}
        if key not in self._found:
            work = functools.partial(_compiled, fun, arguments, options)
            self._found[key] = self._pool.submit(work)

    def __getitem__(self, key: tuple) -> Any:
        """The program; raises what compiling it raised."""
        return self._found[key].result()

    def wait(self) -> Iterator[str]:
        """Says how far it is, as the programs become ready."""
        for number, (key, future) in enumerate(self._found.items(), 1):
            if error := future.exception():
                yield f"{' '.join(map(str, key))} does not compile: {type(error).__name__}: {str(error)[:200]}"
            if number % 50 == 0 or number == len(self._found):
                yield f"{number} of {len(self._found)} programs compiled"

    def add_data(self, work: Sequence[Product], others: Sequence[tuple[tuple[int, int], bool]]) -> None:
        """Begins to compile dense products of these sizes and what draws their operands, and `others`."""
        for product in work:
            m, n, k = product.shape
            arguments = abstract((m, k), jnp.bfloat16), abstract((n, k), jnp.bfloat16)
            self.add(("dense", product.shape), dense, *arguments)
            self.add(("matrices", (n, k)), functools.partial(matrices, shape=(n, k)), _key())
            others = [*others, ((m, k), product.squared)]
        for shape, squared in others:
            fun = functools.partial(draw_rows, shape=shape, squared=squared)
            self.add(("rows", shape, squared), fun, _key())

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _compiled(fun: Callable, arguments: Sequence[Any], options: dict[str, Any] | None) -> Any:
    return jax.jit(fun).lower(*arguments).compile(compiler_options=options)


def add_parts(programs: Programs, model: str, shape: Shape, parts: Collection[str]) -> None:
    """Begins to compile what runs these parts, what checks them, and what draws their data."""
    config, tokens, key = shape.config, shape.tokens, (model, shape.tokens, shape.name)
    ids, slots, x, h, weights = _inputs(config, tokens)
    up, down = weights.experts_up_proj, weights.experts_down_proj
    if {"up", "down", "plan", "routed"} & set(parts):
        programs.add((*key, "plan"), shape.plan, ids)
    for part in ACTIVATION.keys() & set(parts):
        fun = functools.partial(shape.product, activation=ACTIVATION[part])
        programs.add((*key, part), fun, *shape.product_arguments(part, shape.rows), shape.abstract_plan)
    if "routed" in parts:
        programs.add((*key, "routed"), shape.routed, x, slots, shape.abstract_plan, up, down)
    if "block" in parts:
        programs.add((*key, "block"), shape.block, h, weights)
    add_checks(programs, model, shape, parts)


def add_checks(programs: Programs, model: str, shape: Shape, parts: Collection[str]) -> None:
    """Begins to compile the checks and the data of these parts, for rows as `shape` has them and rows without gaps."""
    config, tokens = shape.config, shape.tokens
    work = [product for part in parts for product in products(part, config, tokens, 1)]
    inputs = {
        "up": ((shape.rows, config.expert_width), False),
        "down": ((shape.rows, config.moe_intermediate_size), True),
        "routed": ((tokens, config.expert_width), False),
        "block": ((tokens, config.hidden_size), False),
    }
    programs.add_data(work, [inputs[part] for part in parts if part in inputs])
    ids, slots, x, h, weights = _inputs(config, tokens)
    for part in ACTIVATION.keys() & set(parts):
        fun = functools.partial(check.product_error, activation=ACTIVATION[part])
        for rows in {shape.rows, tokens * config.num_experts_per_tok}:
            lhs, rhs = shape.product_arguments(part, rows)
            out = abstract((rows, rhs.shape[1]), jnp.bfloat16)
            programs.add(
                (model, tokens, "check", part, rows), fun, out, lhs, rhs, abstract((12, 4), jnp.int32), tuned=False
            )
    sample = {part: abstract((min(tokens, count),), jnp.int32) for part, count in SAMPLE.items()}
    if "routed" in parts:
        arguments = x, sample["routed"], x, slots, ids, weights.experts_up_proj, weights.experts_down_proj
        programs.add((model, tokens, "check", "routed"), check.routed_error, *arguments, tuned=False)
    if "block" in parts:
        programs.add((model, tokens, "route"), functools.partial(_route, config=config), h, weights, tuned=False)
        fun = functools.partial(check.block_error, config=config)
        programs.add((model, tokens, "check", "block"), fun, h, sample["block"], h, ids, weights, tuned=False)


def _key() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))


def abstract(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _inputs(config: MoEConfig, tokens: int) -> tuple[Any, Any, Any, Any, MoEWeights]:
    ids = abstract((tokens, config.num_experts_per_tok), jnp.int32)
    x, h = (abstract((tokens, width), jnp.bfloat16) for width in (config.expert_width, config.hidden_size))
    return ids, abstract(ids.shape, jnp.float32), x, h, abstract_weights(config)


def _route(h: jax.Array, weights: MoEWeights, *, config: MoEConfig) -> tuple[jax.Array, jax.Array]:
    """The experts [T, K] that the block chooses, and the tokens whose choice is the clearest."""
    x = rms_norm(h, weights.norm, config.layer_norm_epsilon)
    routing = route(x, weights.gate, weights.gate_bias, config)
    margin = choice_margin(routing.logits, weights.gate_bias, config)
    clearest = jax.lax.top_k(margin, min(h.shape[0], SAMPLE["block"]))[1]
    return routing.ids, clearest.astype(jnp.int32)
