"""Products and the whole layer compiled for an H200, on any machine: kernels fit, and nothing spills.

By default each family of kernels is compiled at its most demanding size, here and in the tests of the other kernels;
`-m aot_full` compiles all that can be chosen at the models' sizes.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from kernels.compiled import resources

from nemotron_moe import explain, moe_block, presets
from nemotron_moe.weights import abstract_weights
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


def product(config, part, tokens, tile=None):
    """(function, arguments) of a grouped product of the layer and its cotangent of lhs."""
    groups, width, inner = config.n_routed_experts, config.expert_width, config.moe_intermediate_size
    n, k = (inner, width) if part == "up" else (width, inner)
    activation = "relu2" if part == "up" else None
    run = functools.partial(
        grouped_matmul, activation=activation, group_alignment=8, implementation="mosaic", tile=tile
    )

    def both(lhs, rhs, sizes, dout):
        out, pull = jax.vjp(lambda lhs: run(lhs, rhs, sizes), lhs)
        return out, *pull(dout)

    m = rows_of(config, tokens)
    return both, (spec((m, k)), spec((groups, n, k)), spec((groups,), jnp.int32), spec((m, n)))


def block(config, tokens, request):
    run = functools.partial(moe_block, config=config)
    return resources(request, run, spec((tokens, config.hidden_size)), abstract_weights(config))


def test_the_widest_product_fits(request):
    """The most registers and shared memory, and a last band of half the width: Nano's up product in the tallest tiles.

    Of the nine heights that it has with so many tokens the two tallest, because every one takes long to compile.
    """
    usual = default_tile_config(default_heights(rows=rows_of(presets.NANO, 8192), groups=128), depth=2688)
    tile = dataclasses.replace(usual, heights=usual.heights[-2:])
    fun, args = product(presets.NANO, "up", 8192, tile)
    wanted = {f"grouped_matmul_{kind}_{tile.label}" for kind in ("relu2", "dlhs")}
    assert resources(request, fun, *args).kernels.keys() == wanted


@pytest.mark.aot_full
@pytest.mark.parametrize("part", ["up", "down"])
@pytest.mark.parametrize("model", MODELS)
def test_every_product_that_can_be_chosen_fits(model, part, request):
    config, seen = MODELS[model], set()
    for tokens in TOKENS:
        fun, args = product(config, part, tokens)
        (m, k), (groups, n, _) = args[0].shape, args[1].shape
        heights = default_heights(rows=m, groups=groups)
        tiles = tuple(default_tile_config(heights, depth=depth) for depth in (k, n))
        if tiles not in seen:
            seen.add(tiles)
            kernels = resources(request, fun, *args).kernels
            assert all(any(tile.label in name for name in kernels) for tile in tiles) and len(kernels) == 2
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
def test_the_kernels_that_explain_names_are_in_the_program(model, tokens, request):
    config = MODELS[model]
    text = block(config, tokens, request).text
    with compiling_for(H200):
        steps = explain(config, tokens=tokens).steps
    for step in steps:
        is_there = re.search(rf"/{step.name}/{step.operation}/{step.operation}_[^/]*/mpmd_map", text) is not None
        assert is_there == (step.implementation == "mosaic"), step
    calls = [line for line in text.splitlines() if 'custom_call_target="mosaic_gpu' in line]
    assert len(calls) == sum(step.implementation == "mosaic" for step in steps)
    tables = {line.split("custom-call(")[1].split(")")[0].split(", ")[2] for line in calls if "/experts_" in line}
    assert len(tables) == 1  # both of the experts' products use one table of pieces, made once


@pytest.mark.aot_full
def test_temporary_memory_of_the_block_R54(request):
    """Below 1.5 times the rows of the two products: it does not grow with the experts."""
    config, tokens = presets.SUPER, 8192
    rows = tokens * config.num_experts_per_tok
    limit = 1.5 * rows * (config.moe_intermediate_size + 2 * config.expert_width) * 2
    assert block(config, tokens, request).temporary_memory < limit
