"""The Hopper kernels compiled for an H200, on any machine: they fit, and nothing spills."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from kernels.compiled import REGISTERS, SHARED_MEMORY, resources

from nemotron_moe import explain, moe_block, presets
from nemotron_moe.weights import abstract_weights
from pallas_kernels.aot import compile_for_h200
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.tile import default_heights, default_tile_config
from pallas_kernels.implementation import H200, compiling_for

pytestmark = pytest.mark.aot
MODELS = {"nano": presets.NANO, "super": presets.SUPER, "ultra": presets.ULTRA}
TOKENS = (1, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 65536)


def spec(shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def rows_of(config, tokens):
    pairs = tokens * config.num_experts_per_tok
    return -(-(pairs + 7 * min(config.n_routed_experts, pairs)) // 8) * 8


def product(config, part, tokens, *, gradient):
    """(function, arguments) of a grouped product of the layer, or of its cotangent of lhs."""
    groups, width, inner = config.n_routed_experts, config.expert_width, config.moe_intermediate_size
    n, k = (inner, width) if part == "up" else (width, inner)
    activation = "relu2" if part == "up" else None
    run = functools.partial(grouped_matmul, activation=activation, group_alignment=8, implementation="mosaic")

    def backward(lhs, rhs, sizes, dout):
        return jax.vjp(lambda lhs: run(lhs, rhs, sizes), lhs)[1](dout)

    m = rows_of(config, tokens)
    forward = (spec((m, k)), spec((groups, n, k)), spec((groups,), jnp.int32))
    return (backward, (*forward, spec((m, n)))) if gradient else (run, forward)


def assert_fits(cache, prefix, fun, args):
    found = resources(cache, fun, *args)
    assert any(name.startswith(prefix) for name in found), found
    for one in found.values():
        assert one.spilled == 0, one
        assert one.registers <= REGISTERS[3], one
        assert one.shared_memory <= SHARED_MEMORY, one


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "dlhs"])
def test_the_widest_product_fits(gradient, request):
    """All heights, a last band of half the width, and all of the shared memory: Nano's up product."""
    fun, args = product(presets.NANO, "up", 8192, gradient=gradient)
    assert_fits(request.config.cache, "grouped_matmul_dlhs" if gradient else "grouped_matmul_relu2", fun, args)


@pytest.mark.aot_full
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "dlhs"])
@pytest.mark.parametrize("part", ["up", "down"])
@pytest.mark.parametrize("model", MODELS)
def test_every_product_that_can_be_chosen_fits(model, part, gradient, request):
    config, seen = MODELS[model], set()
    for tokens in TOKENS:
        fun, args = product(config, part, tokens, gradient=gradient)
        (m, k), (groups, n, _) = args[0].shape, args[1].shape
        tile = default_tile_config(default_heights(rows=m, groups=groups), depth=n if gradient else k)
        if tile not in seen:
            seen.add(tile)
            assert_fits(request.config.cache, "grouped_matmul", fun, args)
    assert len(seen) > 1


@pytest.mark.parametrize(
    "model, tokens",
    [
        ("nano", 64),
        pytest.param("nano", 8192, marks=pytest.mark.aot_full),
        pytest.param("super", 1, marks=pytest.mark.aot_full),
        pytest.param("super", 8192, marks=pytest.mark.aot_full),
        pytest.param("ultra", 512, marks=pytest.mark.aot_full),
    ],
)
def test_the_kernels_that_explain_names_are_in_the_program(model, tokens):
    config = MODELS[model]
    h = spec((tokens, config.hidden_size))
    program = compile_for_h200(functools.partial(moe_block, config=config), h, abstract_weights(config))
    text = program.as_text()
    with compiling_for(H200):
        steps = explain(config, tokens=tokens).steps
    for step in steps:
        is_there = re.search(rf"/{step.operation}_[^/]*/mpmd_map", text) is not None
        assert is_there == (step.implementation == "mosaic"), step
    calls = [line for line in text.splitlines() if 'custom_call_target="mosaic_gpu' in line]
    assert len(calls) == sum(step.implementation == "mosaic" for step in steps)
    tables = {line.split("custom-call(")[1].split(")")[0].split(", ")[2] for line in calls if "grouped_matmul" in line}
    assert len(tables) == 1  # both products use one table of pieces, made once


@pytest.mark.aot_full
def test_temporary_memory_of_the_block_R54():
    """Below 1.5 times the rows of the two products: it does not grow with the experts."""
    config, tokens = presets.SUPER, 8192
    h = spec((tokens, config.hidden_size))
    program = compile_for_h200(functools.partial(moe_block, config=config), h, abstract_weights(config))
    rows = tokens * config.num_experts_per_tok
    limit = 1.5 * rows * (config.moe_intermediate_size + 2 * config.expert_width) * 2
    assert program.memory_analysis().temp_size_in_bytes < limit
