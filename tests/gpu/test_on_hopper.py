"""What only a Hopper GPU can show: sizes past 2^31, the same bits on dirtied memory, programs as users run them.

Collected with --gpu only: no other machine can run it.
"""

import dataclasses
import functools
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import BFLOAT16_LAYER, bound, relative
from gpu.common import MODELS, block, both_ways, dirty, draw, layer, same_bits

import nemotron_moe as nm

ROOT = Path(__file__).parents[2]
mixer = jax.jit(nm.moe_mixer, static_argnames=("config", "implementation"))


def digest(array):
    return hashlib.sha256(np.asarray(array).tobytes()).hexdigest()


def test_on_a_hopper_gpu_the_kernels_run():
    for config in MODELS.values():
        assert {step.implementation for step in nm.explain(config, tokens=2048).steps} == {"mosaic", "compare"}


@pytest.mark.parametrize("model, experts, tokens", [("nano", 8, 133_200), ("super", 32, 95_400)])
def test_more_than_2_31_elements_R55(model, experts, tokens):
    """Of the rows that are scattered and combined (and in Super of those between the products): the last 64 tokens."""
    config = dataclasses.replace(MODELS[model], n_routed_experts=experts)
    assert tokens * config.num_experts_per_tok * config.expert_width > 2**31
    weights = nm.init_weights(jax.random.key(0), config, dtype=jnp.bfloat16)
    h = draw(11, (tokens, config.hidden_size))
    out = block(h, weights, config)
    assert bool(jnp.isfinite(out).all())
    some = h[-64:]
    want = block(some, weights, config, implementation="xla")
    assert relative(out[-64:] - some, want - some) < BFLOAT16_LAYER


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tokens", [8, 512, 8192])
def test_kernels_agree_with_xla(model, tokens):
    h = draw(2, (tokens, MODELS[model].hidden_size))
    dirty()
    got, want = (block(h, layer(model), MODELS[model], implementation=name) for name in (None, "xla"))
    assert relative(got - h, want - h) < BFLOAT16_LAYER


@pytest.mark.parametrize("tokens", [1, 200, 3000])
def test_twenty_runs_give_the_same_bits_R65(tokens):
    """Forward and backward, beside other work and in memory that is dirty."""
    h, first = draw(3, (tokens, MODELS["nano"].hidden_size)), None
    other = draw(4, (4096, 4096))
    for _ in range(20):
        dirty()
        other = jnp.tanh(other @ other)
        results = both_ways(h, layer("nano"), MODELS["nano"])
        for name, array in results.items():
            assert bool(jnp.isfinite(array).all() & (array != 0).any()), name
        first = results if first is None else first
        assert same_bits(results, first)


def test_a_fresh_process_gives_the_same_bits_R65():
    h = draw(5, (300, MODELS["nano"].hidden_size))
    script = (
        "import sys; sys.path[:0] = ['tests', '.']\n"
        "from gpu.test_on_hopper import MODELS, block, digest, draw, layer\n"
        "print(digest(block(draw(5, (300, MODELS['nano'].hidden_size)), layer('nano'), MODELS['nano'])))"
    )
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    out = block(h, layer("nano"), MODELS["nano"])
    assert bool(jnp.isfinite(out).all()) and done.stdout.strip() == digest(out)


def test_a_token_does_not_see_the_others():
    config, bits = MODELS["nano"], set()
    for seed in range(4):
        h = draw(10 + seed, (512, config.hidden_size)).at[0].set(draw(6, (config.hidden_size,)))
        bits.add(digest(block(h, layer("nano"), config)[0]))
    assert len(bits) == 1


def test_in_a_scan_and_with_a_donated_input():
    config = MODELS["nano"]
    h = draw(7, (64, config.hidden_size))

    @functools.partial(jax.jit, donate_argnums=0)
    def three(h, weights):
        return jax.lax.scan(lambda h, _: (nm.moe_block(h, weights, config), None), h, None, length=3)[0]

    want = h
    for _ in range(3):
        want = block(want, layer("nano"), config)
    got = three(h.copy(), layer("nano"))
    assert digest(got) == digest(want)


@pytest.mark.parametrize("kind", ["one", "zipf"])
def test_uneven_routing_loses_no_row(kind):
    config, tokens = MODELS["nano"], 2000
    rng = np.random.default_rng(0)
    if kind == "one":
        ids = np.tile(np.arange(config.num_experts_per_tok), (tokens, 1))
    else:
        odds = -np.log(np.arange(1, config.n_routed_experts + 1)) + rng.gumbel(size=(tokens, config.n_routed_experts))
        ids = np.argsort(-odds, axis=1)[:, : config.num_experts_per_tok]
    routing = nm.Routing(ids=jnp.asarray(ids, jnp.int32))
    x = draw(8, (tokens, config.hidden_size))
    got, want = (
        np.asarray(mixer(x, layer("nano"), config, routing=routing, implementation=name), np.float32)
        for name in (None, "xla")
    )
    error, norm = (np.linalg.norm(rows, axis=1) for rows in (got - want, want))
    # Each of the two rounds the square, the down product, its weighted sum and the mixer's.
    assert (error <= bound(jnp.bfloat16, 0, norm, roundings=8)).all()


def test_gradients_agree_with_xla():
    h = draw(9, (256, MODELS["nano"].hidden_size))
    dirty()
    got, want = (both_ways(h, layer("nano"), MODELS["nano"], name) for name in (None, "xla"))
    for name in got.keys() - {"out"}:
        assert (want[name] != 0).any() and relative(got[name], want[name]) < BFLOAT16_LAYER, name
