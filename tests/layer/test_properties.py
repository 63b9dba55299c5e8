"""Properties of the layer over random weights, tokens and routings."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from bounds import FLOAT32_LAYER, bound, relative
from layers import BOTH, TINY_D, block, mixer, random_tokens, random_weights

import nemotron_moe as nm

few = hypothesis.settings(max_examples=20, deadline=None)
names, seeds = st.sampled_from(list(BOTH)), st.integers(0, 2**31)
models = st.integers(0, 3)  # Seeds of the weights: few, because each is made once.


@few
@hypothesis.given(seed=seeds, model=models, name=names, half=st.booleans())
def test_permuted_tokens_permute_the_output_bit_for_bit(seed, model, name, half):
    config, dtype = BOTH[name], jnp.bfloat16 if half else jnp.float32
    weights, h = random_weights(config, model, dtype=dtype), random_tokens(config, 37, seed=seed, dtype=dtype)
    order = np.random.default_rng(seed).permutation(37)
    out = block(h, weights, config=config)
    np.testing.assert_array_equal(block(h[order], weights, config=config), out[order])


@few
@hypothesis.given(seed=seeds, model=models, name=names)
def test_permuted_experts_with_gate_and_bias_change_nothing(seed, model, name):
    config = BOTH[name]
    weights, h = random_weights(config, model), random_tokens(config, 11, seed=seed)
    order = np.random.default_rng(seed).permutation(config.n_routed_experts)
    permuted = dataclasses.replace(
        weights,
        gate=weights.gate[order],
        gate_bias=weights.gate_bias[order],
        experts_up_proj=weights.experts_up_proj[order],
        experts_down_proj=weights.experts_down_proj[order],
    )
    out, aux = block(h, weights, config=config, return_aux=True)
    again, again_aux = block(h, permuted, config=config, return_aux=True)
    np.testing.assert_array_equal(order[again_aux.routing.ids], aux.routing.ids)
    np.testing.assert_array_equal(again_aux.load, np.asarray(aux.load)[order])
    # A GPU's product may round a logit differently at another place among the experts.
    places = 0.0 if jax.default_backend() == "cpu" else bound(jnp.float32, config.hidden_size, 1.0)
    np.testing.assert_allclose(again, out, rtol=0, atol=places * float(jnp.abs(out).max()))


@few
@hypothesis.given(seed=seeds, model=models, half=st.booleans())
def test_latent_of_full_width_with_identities_is_direct_bit_for_bit_C2(seed, model, half):
    dtype = jnp.bfloat16 if half else jnp.float32
    direct = dataclasses.replace(TINY_D, num_experts_per_tok=3)
    latent = dataclasses.replace(direct, moe_latent_size=direct.hidden_size)
    weights, h = random_weights(direct, model, dtype=dtype), random_tokens(direct, 7, seed=seed, dtype=dtype)
    identity = jnp.eye(direct.hidden_size, dtype=dtype)
    same = dataclasses.replace(weights, fc1_latent_proj=identity, fc2_latent_proj=identity)
    np.testing.assert_array_equal(block(h, same, config=latent), block(h, weights, config=direct))


@few
@hypothesis.given(seed=seeds, model=models, name=names, half=st.booleans())
def test_doubling_the_factor_doubles_the_routed_part_R08(seed, model, name, half):
    config, dtype = without_shared(BOTH[name]), jnp.bfloat16 if half else jnp.float32
    weights, x = random_weights(config, model, dtype=dtype), random_tokens(config, 9, seed=seed, dtype=dtype)
    doubled = dataclasses.replace(config, routed_scaling_factor=2 * config.routed_scaling_factor)
    once = mixer(x, weights, config=config)
    np.testing.assert_array_equal(mixer(x, weights, config=doubled), 2 * once)  # exact: a power of two


@few
@hypothesis.given(seed=seeds, model=models, name=names)
def test_shared_expert_has_weight_one_and_reads_the_full_width(seed, model, name):
    config = BOTH[name]
    weights, x = random_weights(config, model), random_tokens(config, 9, seed=seed)
    only_routed = dataclasses.replace(weights, shared_experts_up_proj=None, shared_experts_down_proj=None)
    routed = mixer(x, only_routed, config=without_shared(config))
    shared = shared_expert(x, weights.shared_experts_up_proj, weights.shared_experts_down_proj)
    np.testing.assert_array_equal(mixer(x, weights, config=config), routed + shared)
    silent = dataclasses.replace(weights, experts_down_proj=jnp.zeros_like(weights.experts_down_proj))
    np.testing.assert_array_equal(mixer(x, silent, config=config), shared)


@few
@hypothesis.given(seed=seeds, model=models, name=names)
def test_bias_changes_the_choice_and_never_a_weight_R17(seed, model, name):
    """Whatever the bias is, the weights are the chosen experts' own scores, normalised and scaled."""
    config = BOTH[name]
    rng = np.random.default_rng(seed)
    weights, x = random_weights(config, model), random_tokens(config, 9, seed=seed)
    bias = jnp.asarray(rng.standard_normal(config.n_routed_experts), jnp.float32)
    plain = route(x, weights.gate, jnp.zeros_like(bias), config)
    biased = route(x, weights.gate, bias, config)
    assert (np.sort(plain.ids) != np.sort(biased.ids)).any()
    replayed = route(x, weights.gate, jnp.zeros_like(bias), config, routing=nm.Routing(ids=biased.ids))
    np.testing.assert_array_equal(biased.weights, replayed.weights)


@hypothesis.settings(max_examples=1000, deadline=None)
@hypothesis.given(data=st.data(), name=names)
def test_no_routing_loses_a_row_C22(data, name):
    """Every (token, slot) pair keeps a row of its own, in its expert's group, from all on one expert to none at all."""
    experts, top_k = BOTH[name].n_routed_experts, BOTH[name].num_experts_per_tok
    most = data.draw(st.integers(0, experts))
    ids = data.draw(st.lists(st.integers(-1, most), min_size=8 * top_k, max_size=8 * top_k))
    ids = np.asarray(ids, np.int32).reshape(8, top_k)
    plan = make_plan(ids, experts)
    valid = (ids >= 0) & (ids < experts)
    np.testing.assert_array_equal(plan.group_sizes, np.bincount(ids[valid], minlength=experts))
    rows = np.asarray(plan.row_of_slot)
    assert sorted(rows.ravel()) == list(range(8 * top_k))
    np.testing.assert_array_equal(np.asarray(plan.slot_of_row)[rows.ravel()], np.arange(8 * top_k))
    ends = np.cumsum(plan.group_sizes)
    np.testing.assert_array_equal(np.searchsorted(ends, rows[valid], side="right"), ids[valid])
    assert (rows[~valid] >= ends[-1]).all()


def test_thousand_random_routings_compute_every_row_C22():
    """Skewed routings down to all tokens on one expert, through the whole layer, against the oracle."""
    for config in BOTH.values():
        rng = np.random.default_rng(22)
        experts, h = config.n_routed_experts, random_tokens(config, 8)
        for trial in range(500):
            reachable = experts if trial % 3 else 1 + trial % experts
            ids = jnp.asarray(rng.integers(0, reachable, (8, config.num_experts_per_tok)), jnp.int32)
            weights = random_weights(config, trial % 4)
            out, aux = block(h, weights, config=config, routing=nm.Routing(ids=ids), return_aux=True)
            assert int(aux.load.sum()) == ids.size
            wanted = nm.reference.moe_block(h, weights, config, ids=ids)["block_out"]
            assert relative(out, wanted) < FLOAT32_LAYER, trial


def without_shared(config):
    return dataclasses.replace(config, moe_shared_expert_intermediate_size=None)


make_plan = jax.jit(nm.make_plan, static_argnums=1)
route = jax.jit(nm.route, static_argnums=3)
shared_expert = jax.jit(nm.shared_expert)
