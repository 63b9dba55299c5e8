"""Checkpoints of other people's quantisers: the layer on packed weights against the numbers that came with them."""

import fixtures_io
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import FLOAT32_LAYER, LOGITS, REFERENCES, WEIGHTS, relative
from layers import block, set_of

import nemotron_moe as nm
from pallas_kernels.formats import Quantised

QUANTISED = sorted(set(fixtures_io.manifest()["fixtures"]) - set(fixtures_io.UNQUANTISED))


@pytest.fixture(params=QUANTISED, scope="module")
def case(request):
    layer, row = next(iter(fixtures_io.layers_of(request.param).items()))
    prefix = row["key"] + "."
    recorded = {
        key.removeprefix(prefix): array
        for key, array in fixtures_io.expected(request.param).items()
        if key.startswith(prefix)
    }
    return *nm.load_layer(fixtures_io.FIXTURES / request.param, layer), recorded


def test_the_block_on_packed_weights(case):
    weights, config, recorded = case
    assert any(isinstance(leaf, Quantised) for leaf in weights.items().values())
    out, aux = block(jnp.asarray(recorded["x.f32"]), weights, config=config, return_aux=True)
    np.testing.assert_array_equal(set_of(aux.routing.ids), recorded["f32.topk_ids"])
    np.testing.assert_allclose(aux.routing.logits, recorded["f32.router_logits"], rtol=0, atol=LOGITS)
    order = np.argsort(aux.routing.ids, axis=-1)
    its_weights = np.take_along_axis(np.asarray(aux.routing.weights), order, axis=-1)
    np.testing.assert_allclose(its_weights, recorded["f32.topk_weights"], rtol=0, atol=WEIGHTS)
    for numbers in ("f32", "f64"):
        assert relative(out, recorded[f"{numbers}.block_out"]) < FLOAT32_LAYER


def test_each_expert_on_packed_weights(case):
    """Every expert is visited on purpose, the last too: one call routes the first two tokens to it with weight 1."""
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


def test_the_oracle_on_packed_weights(case):
    weights, config, recorded = case
    stages = nm.reference.moe_block(recorded["x.f32"], weights, config)
    np.testing.assert_array_equal(set_of(stages["topk_ids"]), recorded["f64.topk_ids"])
    for stage in ("router_logits", "mixer_out", "block_out"):
        # The recorded numbers are of weights that were dequantised in float32.
        assert relative(stages[stage], recorded[f"f64.{stage}"]) < REFERENCES, stage
