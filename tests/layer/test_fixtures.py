"""The layer against Hugging Face's own numbers. Tolerances are those of tests/fixtures/README.md."""

import fixtures_io
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layers import block, mixer, set_of

import nemotron_moe as nm

CASES = [(name, layer) for name in fixtures_io.UNQUANTISED for layer in fixtures_io.layers_of(name)]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}", scope="module")
def case(request):
    name, layer = request.param
    weights, config = nm.load_layer(fixtures_io.FIXTURES / name, layer)
    prefix = fixtures_io.layers_of(name)[layer]["key"] + "."
    recorded = {
        key.removeprefix(prefix): array for key, array in fixtures_io.expected(name).items() if key.startswith(prefix)
    }
    return weights, config, recorded


def relative(seen, wanted):
    wanted = np.asarray(wanted, np.float64)
    return np.linalg.norm(np.asarray(seen).astype(np.float64) - wanted) / np.linalg.norm(wanted)


def sorted_by_id(routing):
    order = np.argsort(routing.ids, axis=-1)
    return np.take_along_axis(np.asarray(routing.weights), order, axis=-1)


@pytest.mark.quick
def test_router_in_float32(case):
    weights, config, recorded = case
    routing = nm.route(jnp.asarray(recorded["f32.mixer_in"]), weights.gate, weights.gate_bias, config)
    assert routing.logits.dtype == routing.weights.dtype == jnp.float32
    np.testing.assert_array_equal(set_of(routing.ids), recorded["f32.topk_ids"])
    np.testing.assert_allclose(routing.logits, recorded["f32.router_logits"], rtol=0, atol=3e-5)
    np.testing.assert_allclose(sorted_by_id(routing), recorded["f32.topk_weights"], rtol=0, atol=1e-5)


@pytest.mark.quick
def test_block_in_float32(case):
    weights, config, recorded = case
    out, aux = block(jnp.asarray(recorded["x.f32"]), weights, config=config, return_aux=True)
    np.testing.assert_array_equal(set_of(aux.routing.ids), recorded["f32.topk_ids"])
    np.testing.assert_allclose(aux.margin, recorded["f32.margin"], rtol=0, atol=1e-5)
    assert relative(out, recorded["f32.block_out"]) < 1e-5
    assert relative(out, recorded["f64.block_out"]) < 1e-5


def test_mixer_in_float32(case):
    weights, config, recorded = case
    out = mixer(jnp.asarray(recorded["f32.mixer_in"]), weights, config=config)
    assert relative(out, recorded["f32.mixer_out"]) < 1e-5
    assert relative(out, recorded["f64.mixer_out"]) < 1e-5


def test_block_and_mixer_in_bfloat16(case):
    weights, config, recorded = case
    h = jnp.asarray(recorded["x.bf16"])
    out, aux = block(h, weights, config=config, return_aux=True)
    assert out.dtype == jnp.bfloat16
    same = (set_of(aux.routing.ids) == recorded["f32_of_bf16.topk_ids"]).all(-1)
    assert same.mean() > 0.9
    assert relative(out[same], recorded["f32_of_bf16.block_out"][same]) < 1e-2
    x = nm.rms_norm(h, weights.norm, config.layer_norm_epsilon)
    assert relative(mixer(x, weights, config=config)[same], recorded["f32_of_bf16.mixer_out"][same]) < 1e-2


def test_each_expert_by_itself(case):
    """Every expert is visited on purpose: one call routes the first two tokens to it with weight 1."""
    weights, config, recorded = case
    z = jnp.asarray(recorded["f32.mixer_in"])[:2]
    if config.moe_latent_size:
        z = nm.linear(z, weights.fc1_latent_proj)

    @jax.jit
    def one(expert):
        plan = nm.make_plan(jnp.full((2, 1), expert, jnp.int32), config.n_routed_experts)
        return nm.routed_experts(z, jnp.ones((2, 1)), plan, weights.experts_up_proj, weights.experts_down_proj)

    for expert in range(config.n_routed_experts):
        assert relative(one(expert), recorded["f32.each_expert_out"][expert]) < 1e-5, expert


def test_reference_is_hugging_face(case):
    """The oracle reads the same weights and agrees with float64 numbers that other code computed from the file."""
    weights, config, recorded = case
    stages = nm.reference.moe_block(recorded["x.f32"], weights, config)
    np.testing.assert_array_equal(set_of(stages["topk_ids"]), recorded["f64.topk_ids"])
    for stage in ("router_logits", "mixer_out", "block_out"):
        assert relative(stages[stage], recorded[f"f64.{stage}"]) < 1e-12, stage
    assert relative(stages["block_out"], recorded["f32.block_out"]) < 1e-6


def test_self_check_passes(case):
    weights, config, _ = case
    for dtype in (jnp.float32, jnp.bfloat16):
        report = nm.self_check(weights, config, dtype=dtype)
        assert report.passed, report
