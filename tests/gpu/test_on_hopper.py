"""What only a Hopper GPU can show: sizes past 2^31, the same bits on dirtied memory, programs as users run them.

Collected with --gpu only: no other machine can run it.
"""

import dataclasses
import functools
import hashlib
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import BFLOAT16_LAYER, relative

import nemotron_moe as nm
from pallas_kernels.grouped_matmul import grouped_matmul

MODELS = {"nano": nm.presets.NANO, "super": nm.presets.SUPER}
block = jax.jit(nm.moe_block, static_argnames=("config", "implementation"))


@functools.cache
def layer(name):
    return nm.init_weights(jax.random.key(0), MODELS[name], dtype=jnp.bfloat16)


@functools.partial(jax.jit, static_argnums=(0, 1))
def draw(seed, shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def digest(array):
    return hashlib.sha256(np.asarray(array).tobytes()).hexdigest()


def dirty():
    """Fills free memory with NaN, so that what is read before it is written shows."""
    jax.block_until_ready([jnp.full((1 << 29,), jnp.nan, jnp.bfloat16) for _ in range(4)])


def test_on_a_hopper_gpu_the_kernels_run():
    for config in MODELS.values():
        assert {step.implementation for step in nm.explain(config, tokens=512).steps} == {"mosaic"}


@pytest.mark.parametrize("m, n, k, groups", [(520 * 16, 2048, 2048, 520), (1_200_000, 2048, 64, 8)], ids=str)
def test_more_than_2_31_elements_R55(m, n, k, groups):
    lhs, rhs = draw(0, (m, k)), draw(1, (groups, n, k))
    sizes = np.full(groups, m // groups // 8 * 8, np.int32)
    dirty()
    out = jax.jit(functools.partial(grouped_matmul, implementation="mosaic", group_alignment=8))(lhs, rhs, sizes)
    for group in (0, groups // 2, groups - 1):
        start = group * int(sizes[0])
        rows = slice(start, start + 8) if group == 0 else slice(start + int(sizes[0]) - 8, start + int(sizes[0]))
        want = np.asarray(lhs[rows], np.float64) @ np.asarray(rhs[group], np.float64).T
        assert relative(out[rows], want) < BFLOAT16_LAYER
    assert not out[groups * int(sizes[0]) :].any()
    assert jnp.isfinite(out[::997]).all()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tokens", [8, 512, 8192])
def test_kernels_agree_with_xla(model, tokens):
    h = draw(2, (tokens, MODELS[model].hidden_size))
    dirty()
    got, want = (block(h, layer(model), MODELS[model], implementation=name) for name in (None, "xla"))
    assert relative(got - h, want - h) < BFLOAT16_LAYER


@pytest.mark.parametrize("tokens", [1, 200, 3000])
def test_twenty_runs_give_the_same_bits_R65(tokens):
    h, bits = draw(3, (tokens, MODELS["nano"].hidden_size)), set()
    other = draw(4, (4096, 4096))
    for _ in range(20):
        dirty()
        other = jnp.tanh(other @ other)
        bits.add(digest(block(h, layer("nano"), MODELS["nano"])))
    assert len(bits) == 1


def test_a_fresh_process_gives_the_same_bits_R65():
    h = draw(5, (300, MODELS["nano"].hidden_size))
    script = (
        "import sys; sys.path[:0] = ['tests', '.']\n"
        "from gpu.test_on_hopper import MODELS, block, digest, draw, layer\n"
        "print(digest(block(draw(5, (300, MODELS['nano'].hidden_size)), layer('nano'), MODELS['nano'])))"
    )
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == digest(block(h, layer("nano"), MODELS["nano"])), done.stderr


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
    h = draw(8, (tokens, config.hidden_size))
    run = jax.jit(nm.moe_block, static_argnames=("config", "implementation"))
    got, want = (run(h, layer("nano"), config, routing=routing, implementation=name) for name in (None, "xla"))
    error = jnp.linalg.norm((got - want).astype(jnp.float32), axis=1)
    assert float((error / jnp.linalg.norm((want - h).astype(jnp.float32), axis=1)).max()) < 4 * BFLOAT16_LAYER


def test_gradients_agree_with_xla():
    config = MODELS["nano"]
    h = draw(9, (256, config.hidden_size))

    @functools.partial(jax.jit, static_argnums=2)
    def gradient(h, up, implementation):
        weights = layer("nano")
        run = functools.partial(nm.moe_block, config=config, implementation=implementation)

        def loss(h, up):
            return run(h, dataclasses.replace(weights, experts_up_proj=up)).astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1))(h, up)

    up = layer("nano").experts_up_proj
    for got, want in zip(gradient(h, up, None), gradient(h, up, "xla"), strict=True):
        assert relative(got, want) < BFLOAT16_LAYER
