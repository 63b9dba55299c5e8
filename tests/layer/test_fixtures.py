"""The layer against Hugging Face's own numbers."""

import fixtures_io
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import BFLOAT16_LAYER, FLOAT32_LAYER, LOGITS, MARGIN, REFERENCES, WEIGHTS, bound, relative
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


def sorted_by_id(routing):
    order = np.argsort(routing.ids, axis=-1)
    return np.take_along_axis(np.asarray(routing.weights), order, axis=-1)


@pytest.mark.quick
def test_router_in_float32(case):
    weights, config, recorded = case
    routing = nm.route(jnp.asarray(recorded["f32.mixer_in"]), weights.gate, weights.gate_bias, config)
    assert routing.logits.dtype == routing.weights.dtype == jnp.float32
    np.testing.assert_array_equal(set_of(routing.ids), recorded["f32.topk_ids"])
    np.testing.assert_allclose(routing.logits, recorded["f32.router_logits"], rtol=0, atol=LOGITS)
    np.testing.assert_allclose(sorted_by_id(routing), recorded["f32.topk_weights"], rtol=0, atol=WEIGHTS)


@pytest.mark.quick
def test_block_in_float32(case):
    weights, config, recorded = case
    out, aux = block(jnp.asarray(recorded["x.f32"]), weights, config=config, return_aux=True)
    np.testing.assert_array_equal(set_of(aux.routing.ids), recorded["f32.topk_ids"])
    np.testing.assert_allclose(aux.margin, recorded["f32.margin"], rtol=0, atol=MARGIN)
    assert relative(out, recorded["f32.block_out"]) < FLOAT32_LAYER
    assert relative(out, recorded["f64.block_out"]) < FLOAT32_LAYER


def test_mixer_in_float32(case):
    weights, config, recorded = case
    out = mixer(jnp.asarray(recorded["f32.mixer_in"]), weights, config=config)
    assert relative(out, recorded["f32.mixer_out"]) < FLOAT32_LAYER
    assert relative(out, recorded["f64.mixer_out"]) < FLOAT32_LAYER


def test_block_and_mixer_in_bfloat16(case):
    weights, config, recorded = case
    h = jnp.asarray(recorded["x.bf16"])
    out, aux = block(h, weights, config=config, return_aux=True)
    assert out.dtype == jnp.bfloat16
    oracle = nm.reference.moe_block(h, weights, config)
    logits, gate = np.asarray(aux.routing.logits), np.asarray(weights.gate).astype(np.float64)
    # The normed activations are rounded once; then the logits are sums in float32.
    sizes = np.abs(oracle["mixer_in"]) @ np.abs(gate).T
    off = np.abs(logits - oracle["router_logits"])
    assert (off <= bound(jnp.bfloat16, config.hidden_size, 1.0) * sizes).all()
    # A sigmoid's slope is at most 1/4, and a gap between two scores has two ends.
    same = (set_of(aux.routing.ids) == recorded["f32_of_bf16.topk_ids"]).all(-1)
    assert same[oracle["margin"] > off.max(-1) / 2 + MARGIN].all()
    assert same.any()
    assert relative(out[same], recorded["f32_of_bf16.block_out"][same]) < BFLOAT16_LAYER
    x = nm.rms_norm(h, weights.norm, config.layer_norm_epsilon)
    assert relative(mixer(x, weights, config=config)[same], recorded["f32_of_bf16.mixer_out"][same]) < BFLOAT16_LAYER


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
        assert relative(one(expert), recorded["f32.each_expert_out"][expert]) < FLOAT32_LAYER, expert


def test_reference_is_hugging_face(case):
    """The oracle reads the same weights and agrees with float64 numbers that other code computed from the file."""
    weights, config, recorded = case
    stages = nm.reference.moe_block(recorded["x.f32"], weights, config)
    np.testing.assert_array_equal(set_of(stages["topk_ids"]), recorded["f64.topk_ids"])
    # One token's longest way: up, down and the sum over experts, between the latent projections.
    terms = 3 * config.hidden_size + config.moe_intermediate_size + config.n_routed_experts
    for stage in ("router_logits", "mixer_out", "block_out"):
        limit = bound(jnp.float64, terms, 1.0, accumulate=jnp.float64)
        assert relative(stages[stage], recorded[f"f64.{stage}"]) < limit, stage
    assert relative(stages["block_out"], recorded["f32.block_out"]) < REFERENCES


def test_self_check_passes(case):
    weights, config, _ = case
    for dtype in (jnp.float32, jnp.bfloat16):
        report = nm.self_check(weights, config, dtype=dtype)
        assert report.passed, report
