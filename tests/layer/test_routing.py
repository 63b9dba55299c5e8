"""The router: which experts, with what weight, in which precision."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import BFLOAT16_LAYER, FLOAT32_LAYER, MARGIN, bound, relative
from layers import BOTH, TINY_D, TINY_L, block, mixer, random_tokens, random_weights, set_of

import nemotron_moe as nm

# Roundings in 1 / (1 + exp(-x)): exp is exact to one eps, which is two, then a sum and a quotient.
SIGMOID = 4


def config_of(experts, top_k, hidden=8, **others):
    return nm.MoEConfig(
        hidden_size=hidden, moe_intermediate_size=8, n_routed_experts=experts, num_experts_per_tok=top_k, **others
    )


def route_logits(logits, bias, config, **keywords):
    """Routes given logits: the activations are the logits and the gate is the identity."""
    logits = jnp.asarray(logits, jnp.float32)
    config = dataclasses.replace(config, hidden_size=logits.shape[-1])
    return nm.route(logits, jnp.eye(logits.shape[-1]), jnp.asarray(bias, jnp.float32), config, **keywords)


def test_scores_that_underflow_leave_the_shared_expert_R04():
    weights = random_weights(TINY_D)
    h = random_tokens(TINY_D, 5)
    # A gate of equal rows -200 * x / |x|^2 makes every logit -200 for the token x.
    for token in range(2):
        x = nm.rms_norm(h[token : token + 1], weights.norm)
        gate = jnp.tile(-200.0 * x / jnp.square(x).sum(), (TINY_D.n_routed_experts, 1))
        cold = dataclasses.replace(weights, gate=gate)
        out = mixer(x, cold, config=TINY_D)
        shared = nm.shared_expert(x, weights.shared_experts_up_proj, weights.shared_experts_down_proj)
        np.testing.assert_array_equal(out, shared)
        grads = jax.grad(lambda x, weights: mixer(x, weights, config=TINY_D).sum(), (0, 1))(x, cold)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_experts_of_dropped_groups_never_win_R06():
    config = config_of(8, 2, n_group=2, topk_group=1)
    bias = [-2.5] * 4 + [-3.0] * 4
    ids = route_logits(np.zeros((3, 8)), bias, config).ids
    assert (np.asarray(ids) < 4).all()


@pytest.mark.parametrize("groups, kept", [(2, 1), (4, 2), (4, 3), (8, 8)])
def test_groups_agree_with_the_oracle(groups, kept):
    config = dataclasses.replace(TINY_L, n_group=groups, topk_group=kept, num_experts_per_tok=2)
    weights, x = random_weights(config), random_tokens(config, 200)
    oracle = nm.reference.moe_mixer(x, weights, config)
    routing = nm.route(x, weights.gate, weights.gate_bias, config)
    clear = oracle["margin"] > MARGIN
    assert clear.sum() > 190
    np.testing.assert_array_equal(set_of(routing.ids)[clear], set_of(oracle["topk_ids"])[clear])
    ungrouped = nm.route(x, weights.gate, weights.gate_bias, dataclasses.replace(config, n_group=1, topk_group=1))
    assert (set_of(routing.ids) != set_of(ungrouped.ids)).any() == (kept < groups)
    margin = mixer(x, weights, config=config, return_aux=True)[1].margin
    np.testing.assert_allclose(margin, oracle["margin"], atol=MARGIN, rtol=0)


def test_weights_and_scale_stay_float32_R10():
    """The combine is off by its one rounding and float32 noise: weights or sums in bfloat16 would be off by more."""
    top_k, eps = 22, float(jnp.finfo(jnp.bfloat16).eps)
    rng = np.random.default_rng(3)
    ids = jnp.asarray(np.stack([rng.permutation(32)[:top_k] for _ in range(50)]), jnp.int32)
    weights = 10 ** rng.uniform(-3, 0, (50, top_k))
    weights = jnp.asarray(5.0 * weights / weights.sum(1, keepdims=True), jnp.float32)
    y = jnp.asarray(rng.standard_normal((50 * top_k, 64)), jnp.bfloat16)
    plan = nm.make_plan(ids, 32)
    out = np.asarray(nm.combine(y, weights, plan)).astype(np.float64)
    terms = np.float64(weights)[:, :, None] * np.asarray(y).astype(np.float64)[np.asarray(plan.row_of_slot)]
    exact, size = terms.sum(1), np.abs(terms).sum(1)
    half_ulp = 2.0 ** np.floor(np.log2(np.abs(exact))) * eps / 2
    assert (np.abs(out - exact) <= half_ulp + bound(jnp.float32, top_k, 1.0) * size).all()
    coarse = np.float64(jnp.asarray(weights, jnp.bfloat16).astype(jnp.float32))[:, :, None]
    coarse = (coarse * np.asarray(y).astype(np.float64)[np.asarray(plan.row_of_slot)]).sum(1)
    assert (np.abs(coarse - exact) > half_ulp + bound(jnp.float32, top_k, 1.0) * size).any()


@pytest.mark.quick
@pytest.mark.parametrize("experts", [32, 128, 512])
def test_any_number_of_experts_per_token_R12(experts):
    rng = np.random.default_rng(experts)
    logits, bias = rng.standard_normal((20, experts)), 0.1 * rng.standard_normal(experts)
    scores = 1 / (1 + np.exp(-np.float32(logits).astype(np.float64)))
    choice = scores + np.float32(bias)
    for top_k in (1, 6, 8, 9, 16, 17, 22, 32, experts):
        config = config_of(experts, top_k, routed_scaling_factor=2.5)
        routing = route_logits(logits, bias, config)
        ids = np.argsort(-choice, axis=1, kind="stable")[:, :top_k]
        np.testing.assert_array_equal(set_of(routing.ids), set_of(ids))
        wanted = np.take_along_axis(scores, np.asarray(routing.ids), 1)
        wanted = 2.5 * wanted / wanted.sum(1, keepdims=True)
        # A score over a sum of top_k scores, times the factor: float32 throughout.
        limit = bound(jnp.float32, top_k, wanted.max(), roundings=2 * SIGMOID + 2)
        np.testing.assert_allclose(routing.weights, wanted, rtol=0, atol=limit)


def test_more_than_the_originals_limits_C4():
    routing = route_logits(np.random.default_rng(0).standard_normal((4, 513)), np.zeros(513), config_of(513, 33))
    assert routing.ids.shape == (4, 33)
    assert all(len(set(row)) == 33 for row in np.asarray(routing.ids))


def test_logits_are_float32_R15():
    """bfloat16 inputs at Super's sizes: fewer than 1 token in 1000 chooses other experts than in float64."""
    config = config_of(512, 22, hidden=4096)
    rng = np.random.default_rng(15)
    x = jnp.asarray(rng.standard_normal((2000, 4096)), jnp.bfloat16)
    gate = jnp.asarray(rng.standard_normal((512, 4096)) / 64, jnp.bfloat16)
    routing = jax.jit(nm.route, static_argnums=3)(x, gate, jnp.zeros(512), config)
    assert routing.logits.dtype == jnp.float32
    exact = np.asarray(x).astype(np.float64) @ np.asarray(gate).astype(np.float64).T
    wanted = np.argsort(-exact, axis=1, kind="stable")[:, :22]
    assert (set_of(routing.ids) != set_of(wanted)).any(1).mean() < 1e-3
    rounded = np.asarray(jnp.asarray(exact, jnp.bfloat16)).astype(np.float64)
    coarse = np.argsort(-rounded, axis=1, kind="stable")[:, :22]
    assert (set_of(coarse) != set_of(wanted)).any(1).mean() > 1e-2, "the test could not tell bfloat16 logits"


def test_float32_gate_multiplies_at_highest_precision_R15_C17():
    """Neither TF32 nor a bfloat16 pass: the lowered product asks for it by name, whatever the activations' dtype is."""
    gate = jnp.zeros((8, 64), jnp.float32)
    for dtype in (jnp.bfloat16, jnp.float32):
        text = (
            jax.jit(nm.route, static_argnums=3).lower(jnp.zeros((4, 64), dtype), gate, jnp.zeros(8), TINY_D).as_text()
        )
        products = [line for line in text.splitlines() if "dot_general" in line]
        assert len(products) == 1
        assert "precision = [HIGHEST, HIGHEST]" in products[0]


def test_float32_gate_is_used_to_the_last_bit_C17():
    """Two rows of the gate that are equal in bfloat16 still choose apart."""
    gate = np.zeros((4, 64), np.float32)
    gate[1], gate[3] = 1.0, 1.0 + 2**-12
    config = config_of(4, 1, hidden=64)
    x = jnp.ones((1, 64), jnp.bfloat16)
    assert int(nm.route(x, jnp.asarray(gate) / 64, jnp.zeros(4), config).ids[0, 0]) == 3


def test_bias_chooses_and_never_weighs_R17():
    scores = np.array([[0.9, 0.8, 0.1, 0.2]])
    routing = route_logits(np.log(scores) - np.log1p(-scores), [0, 0, 10, 0], config_of(4, 2))
    assert set(np.asarray(routing.ids)[0]) == {0, 2}
    by_id = dict(zip(np.asarray(routing.ids)[0].tolist(), np.asarray(routing.weights)[0].tolist(), strict=True))
    # Two scores, each divided and multiplied alike; rounding the logits of 0.1 and 0.9 weighs as 2.2 more roundings.
    limit = bound(jnp.float32, 0, 1.0, roundings=2 * (SIGMOID + 2) + 3)
    assert by_id[0] / by_id[2] == pytest.approx(9.0, rel=limit)


@pytest.mark.quick
def test_ties_go_to_the_lowest_id():
    assert np.asarray(route_logits(np.zeros((2, 16)), np.zeros(16), config_of(16, 6)).ids).tolist() == [[*range(6)]] * 2
    duplicated = np.tile(np.random.default_rng(0).standard_normal(8), 2)[None]
    ids = np.asarray(route_logits(duplicated, np.zeros(16), config_of(16, 3)).ids)[0]
    order = np.argsort(-duplicated[0, :8], kind="stable")
    assert ids.tolist() == [order[0], order[0] + 8, order[1]]


def test_unnormalised_weights_are_the_scores():
    config = config_of(8, 3, norm_topk_prob=False, routed_scaling_factor=2.0)
    logits = np.random.default_rng(0).standard_normal((5, 8))
    routing = route_logits(logits, np.zeros(8), config)
    scores = 2 / (1 + np.exp(-np.take_along_axis(logits, np.asarray(routing.ids), 1)))
    # Rounding a logit weighs less than one rounding of the score; doubling is exact.
    np.testing.assert_allclose(routing.weights, scores, rtol=0, atol=bound(jnp.float32, 0, 2.0, roundings=SIGMOID + 1))


@pytest.mark.parametrize("name", BOTH)
def test_replay_gives_the_same_bits_and_returns_the_ids(name):
    config = BOTH[name]
    weights, h = random_weights(config), random_tokens(config, 9)
    out, aux = block(h, weights, config=config, return_aux=True)
    for routing in (aux.routing, nm.Routing(ids=aux.routing.ids), nm.Routing(ids=aux.routing.ids.astype(jnp.uint8))):
        again, replayed = block(h, weights, config=config, routing=routing, return_aux=True)
        np.testing.assert_array_equal(out, again)
        np.testing.assert_array_equal(replayed.routing.ids, aux.routing.ids)
    other = nm.Routing(ids=(aux.routing.ids + 1) % config.n_routed_experts)
    again, replayed = block(h, weights, config=config, routing=other, return_aux=True)
    np.testing.assert_array_equal(replayed.routing.ids, other.ids)
    oracle = nm.reference.moe_block(h, weights, config, ids=other.ids)["block_out"]
    assert relative(again, oracle) < FLOAT32_LAYER
    assert relative(again, out) > BFLOAT16_LAYER, "no rounding explains this difference"


def test_ids_out_of_range_contribute_nothing_R63():
    weights, h = random_weights(TINY_D), random_tokens(TINY_D, 4)
    experts = TINY_D.n_routed_experts
    bad = jnp.asarray([[-1, 3], [experts, 2], [1, experts + 7], [2**31 - 1, -(2**31)]], jnp.int32)
    weight = jnp.asarray([[jnp.nan, 1.0], [jnp.inf, 0.5], [2.0, jnp.nan], [1.0, jnp.nan]], jnp.float32)
    good = jnp.asarray([[3, 3], [2, 2], [1, 1], [0, 0]], jnp.int32)
    zeroed = jnp.asarray([[0.0, 1.0], [0.0, 0.5], [2.0, 0.0], [0.0, 0.0]], jnp.float32)

    def run(ids, routing_weights, h, weights):
        return nm.moe_block(h, weights, TINY_D, routing=nm.Routing(ids=ids, weights=routing_weights), return_aux=True)

    out, aux = jax.jit(run)(bad, weight, h, weights)
    np.testing.assert_array_equal(out, jax.jit(run)(good, zeroed, h, weights)[0])
    assert np.asarray(aux.load).sum() == 3
    grad = jax.jit(jax.grad(lambda r, h, w, ids: run(ids, r, h, w)[0].sum(), (0, 1, 2)))
    seen, wanted = grad(weight, h, weights, bad), grad(zeroed, h, weights, good)
    routed = jnp.asarray([[False, True], [False, True], [True, False], [False, False]])
    assert not np.asarray(seen[0])[~routed].any()
    wanted = (jnp.where(routed, wanted[0], 0.0), *wanted[1:])
    for a, b in zip(jax.tree.leaves(seen), jax.tree.leaves(wanted), strict=True):
        assert relative(a, b) <= FLOAT32_LAYER
    # The router's own weights of such ids are finite too.
    again = nm.route(h, weights.gate, weights.gate_bias, TINY_D, routing=nm.Routing(ids=bad))
    assert np.isfinite(again.weights).all()
    assert np.asarray(again.weights)[3].tolist() == [0.0, 0.0]


def test_ids_may_be_of_any_integer_dtype():
    """Also one that cannot hold the number of experts, or -1 for a masked token."""
    config = config_of(512, 2)
    x = jnp.ones((3, 8))
    wanted = jnp.asarray([[0, 255], [7, 3], [255, 254]])
    token_mask = jnp.asarray([True, False, True])
    for dtype in (jnp.uint8, jnp.int16, jnp.int32, jnp.uint32):
        routing = nm.Routing(ids=wanted.astype(dtype))
        plan = nm.make_plan(routing.ids, 512)
        assert np.flatnonzero(np.asarray(plan.group_sizes)).tolist() == [0, 3, 7, 254, 255]
        seen = nm.route(x, jnp.ones((512, 8)), jnp.zeros(512), config, routing=routing, token_mask=token_mask)
        assert np.asarray(seen.ids).tolist() == [[0, 255], [-1, -1], [255, 254]]
        assert np.asarray(seen.weights).tolist() == [[0.5, 0.5], [0.0, 0.0], [0.5, 0.5]]


def test_combine_alone_keeps_out_what_no_expert_gave_R63():
    """NaN in the rows and weights of slots without an expert reaches neither the sum nor a gradient."""
    plan = nm.make_plan(jnp.asarray([[0, -1], [1, 2], [5, 1]], jnp.int32), 2)
    weights = jnp.asarray([[0.5, jnp.nan], [2.0, jnp.inf], [jnp.nan, 1.0]])
    y = jnp.full((6, 4), jnp.nan).at[:3].set(jnp.arange(12.0).reshape(3, 4))
    out, vjp = jax.vjp(lambda y, weights: nm.combine(y, weights, plan), y, weights)
    np.testing.assert_array_equal(out, [0.5 * y[0], 2 * y[1], y[2]])
    dy, dweights = vjp(jnp.ones((3, 4)))
    np.testing.assert_array_equal(dy[:, 0], [0.5, 2.0, 1.0, 0.0, 0.0, 0.0])
    np.testing.assert_array_equal(dweights, [[y[0].sum(), 0.0], [y[1].sum(), 0.0], [0.0, y[2].sum()]])
