"""`self_check` finds what it is there to find, and forgives only what rounding explains."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from bounds import BFLOAT16_LAYER, FLOAT32_LAYER, bound
from layers import TINY_D, TINY_L, random_tokens, random_weights

import nemotron_moe as nm
from nemotron_moe import accuracy_by_stage, check
from pallas_kernels.implementation import H200, compiling_for

DTYPES = {"float32": FLOAT32_LAYER, "bfloat16": BFLOAT16_LAYER, "float16": BFLOAT16_LAYER / 4}


def report(**changes):
    errors = {"mixer_out": 0.0, "block_out": FLOAT32_LAYER / 10}
    good = {"errors": errors, "tolerance": FLOAT32_LAYER, "same_experts": 1.0, "unexplained": 0}
    return nm.CheckReport(**{**good, "load": (1, 2), **changes})


@pytest.mark.quick
def test_a_report_passes_up_to_its_tolerance():
    assert report().passed
    assert report(errors={"mixer_out": FLOAT32_LAYER, "block_out": 0.0}).passed
    assert report(same_experts=0.5).passed  # As long as rounding explains it.
    for error in (np.nextafter(FLOAT32_LAYER, 1), 1.0, np.inf, np.nan):
        assert not report(errors={"mixer_out": 0.0, "block_out": error}).passed
        assert not report(errors={"mixer_out": error, "block_out": 0.0}).passed
    assert not report(unexplained=1).passed


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sound_layer_passes(dtype):
    seen = nm.self_check(random_weights(TINY_L), TINY_L, dtype=dtype)
    assert seen.passed and seen.unexplained == 0
    assert list(seen.errors) == ["router_logits", "topk_weights", "mixer_out", "block_out"]
    assert 0 < max(seen.errors.values()) <= seen.tolerance <= DTYPES[dtype]
    assert sum(seen.load) == 64 * TINY_L.num_experts_per_tok  # Of its own 64 tokens.


def tamper(monkeypatch, name, change):
    """Has `self_check` see `change(out, aux)` of one of the two layers."""
    layer = getattr(nm, name)
    monkeypatch.setattr(check, name, lambda *args, **keywords: change(*layer(*args, **keywords)))


def times_logits(by, out, aux):
    return out, dataclasses.replace(aux, routing=dataclasses.replace(aux.routing, logits=by * aux.routing.logits))


def times_weights(by, out, aux):
    return out, dataclasses.replace(aux, routing=dataclasses.replace(aux.routing, weights=by * aux.routing.weights))


def times_out(by, out, aux):
    return by * out, aux


STAGES = {
    "router_logits": ("moe_block", times_logits),
    "topk_weights": ("moe_block", times_weights),
    "mixer_out": ("moe_mixer", times_out),
    "block_out": ("moe_block", times_out),
}


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_fails_by_itself_past_the_tolerance(monkeypatch, stage):
    """Off by twice the tolerance, by half of it, and NaN."""
    name, change = STAGES[stage]
    for by in (1 + 2 * FLOAT32_LAYER, jnp.nan):
        tamper(monkeypatch, name, functools.partial(change, by))
        seen = nm.self_check(random_weights(TINY_D), TINY_D)
        assert [name for name, error in seen.errors.items() if not error <= FLOAT32_LAYER] == [stage]
        assert not seen.passed
        monkeypatch.undo()
    tamper(monkeypatch, name, functools.partial(change, 1 + FLOAT32_LAYER / 2))
    assert nm.self_check(random_weights(TINY_D), TINY_D).passed


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_fail_past_their_tolerance(monkeypatch, dtype):
    by = jnp.asarray(1 + 2 * BFLOAT16_LAYER, dtype)
    tamper(monkeypatch, "moe_block", functools.partial(times_out, by))
    seen = nm.self_check(random_weights(TINY_D), TINY_D, dtype=dtype)
    assert not seen.passed and seen.errors["mixer_out"] <= seen.tolerance < seen.errors["block_out"]


@pytest.mark.parametrize("name", ["moe_block", "moe_mixer"])
def test_a_factor_applied_twice_fails_R08(monkeypatch, name):
    layer, factor = getattr(nm, name), TINY_L.routed_scaling_factor
    twice = dataclasses.replace(TINY_L, routed_scaling_factor=factor**2)
    monkeypatch.setattr(check, name, lambda x, weights, config, **keywords: layer(x, weights, twice, **keywords))
    seen = nm.self_check(random_weights(TINY_L), TINY_L)
    assert not seen.passed and seen.errors[name.removeprefix("moe_") + "_out"] > FLOAT32_LAYER
    if name == "moe_block":
        assert seen.errors["topk_weights"] == pytest.approx(factor - 1, rel=FLOAT32_LAYER)


def test_tokens_at_wrong_experts_fail_by_themselves(monkeypatch):
    """Half of the tokens go to their experts' neighbours, and everything else is right for where they went."""
    layer, experts = nm.moe_block, TINY_L.n_routed_experts

    def shifted(h, weights, config, **keywords):
        chosen = layer(h, weights, config, **keywords)[1].routing.ids
        chosen = chosen.at[:16].set((chosen[:16] + 1) % experts)
        return layer(h, weights, config, routing=nm.Routing(ids=chosen), **keywords)

    monkeypatch.setattr(check, "moe_block", shifted)
    weights, h = random_weights(TINY_L), random_tokens(TINY_L, 32)
    seen = nm.self_check(weights, TINY_L, h=h)
    assert max(seen.errors.values()) <= seen.tolerance
    assert (seen.same_experts, seen.unexplained, seen.passed) == (0.5, 16, False)
    ids = np.argsort(-_choice(weights, h), axis=1, kind="stable")[:, : TINY_L.num_experts_per_tok]
    ids[:16] = (ids[:16] + 1) % experts
    assert seen.load == tuple(np.bincount(ids.ravel(), minlength=experts))


def _choice(weights, h):
    logits = nm.reference.moe_block(h, weights, TINY_L)["router_logits"]
    return 1 / (1 + np.exp(-logits)) + np.asarray(weights.gate_bias)


def test_a_near_tie_is_explained():
    """Rounding the first token to bfloat16 swaps two rows of the gate; that says nothing against the layer."""
    weights, h = random_weights(TINY_D), random_tokens(TINY_D, 8, dtype=jnp.bfloat16)
    exact = nm.reference.moe_block(h, weights, TINY_D)["mixer_in"][0]
    rounded = np.asarray(nm.rms_norm(h, weights.norm, TINY_D.layer_norm_epsilon)[0]).astype(np.float64)
    noise = exact - rounded
    across = noise - (noise @ exact - noise @ noise / 2) / (exact @ exact) * exact
    assert across @ exact > 0 > across @ rounded
    gate = np.array(weights.gate)
    gate[1] = gate[0] + 100 * across
    # Expert 2 is always chosen, and of 0 and 1 one; the rest never.
    bias = jnp.asarray([0, 0, 3, -3, -3, -3, -3, -3], jnp.float32)
    weights = dataclasses.replace(weights, gate=jnp.asarray(gate), gate_bias=bias)
    margin = nm.reference.moe_block(h, weights, TINY_D)["margin"][0]
    assert margin > bound(jnp.float32, TINY_D.hidden_size, 1.0), "float32 noise alone would explain it"
    seen = nm.self_check(weights, TINY_D, h=h, dtype=jnp.bfloat16)
    assert (seen.same_experts, seen.unexplained, seen.passed) == (7 / 8, 0, True)


def test_no_tokens_pass_R57():
    seen = nm.self_check(random_weights(TINY_D), TINY_D, h=np.zeros((0, TINY_D.hidden_size)))
    assert seen.passed and seen.same_experts == 1.0 and seen.load == (0,) * TINY_D.n_routed_experts


def test_arguments_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="dtype is int8; the layer computes in float32, bfloat16, float16"):
        nm.self_check(random_weights(TINY_D), TINY_D, dtype=jnp.int8)
    with pytest.raises(ValueError, match="nonsense"):
        nm.self_check(random_weights(TINY_D), TINY_D, implementation="nonsense")


@pytest.mark.parametrize(
    "config, fp8, nvfp4", [(TINY_L, "fc1_latent_proj", "experts_down"), (TINY_D, "shared_expert", "experts_up")]
)
def test_accuracy_tells_ways_and_stages_apart(config, fp8, nvfp4):
    """What quantised activations cost is at the stage that has them and in the block, not at the stages after it."""
    fields = {"shared_expert": "shared_experts_up_proj", "fc1_latent_proj": "fc1_latent_proj"}
    packed = nm.quantize_weights(random_weights(config), {fields[fp8]: "fp8_tensor", f"{nvfp4}_proj": "nvfp4"})
    ways = nm.accuracy(packed, config, h=random_tokens(config, 8), dtypes=("float32",))
    assert list(ways) == ["float32 xla", "float32 xla fp8", "float32 xla nvfp4"]  # no input scales, so nothing static
    stages = {
        "norm",
        "router_logits",
        "topk_weights",
        "experts_up",
        "experts_down",
        "combine",
        "shared_expert",
        "block",
    }
    if config.moe_latent_size:
        stages |= {"fc1_latent_proj", "fc2_latent_proj"}
    for (way, errors), stage in zip(ways.items(), (None, fp8, nvfp4), strict=True):
        assert errors.keys() == stages, way
        large = {name for name, error in errors.items() if error > FLOAT32_LAYER}
        assert large == ({stage, "block"} if stage else set()), way
        assert max(errors.values()) < 2**-2, way


def test_a_narrow_stage_is_off_by_its_own_rounding_only():
    """The router, which is float32, is as exact after a norm in bfloat16 as after one in float32."""
    (errors,) = nm.accuracy(random_weights(TINY_L), TINY_L, dtypes=("bfloat16",)).values()
    assert 0 < max(errors.pop("router_logits"), errors.pop("topk_weights")) < FLOAT32_LAYER
    for stage in ("shared_expert", "block"):  # of several stages each
        assert 0 < errors.pop(stage) < BFLOAT16_LAYER
    # The float32 weights and the result are rounded to bfloat16, each by half an eps at most.
    assert 0 < max(errors.values()) < float(jnp.finfo(jnp.bfloat16).eps)


def test_accuracy_takes_every_implementation_that_serves():
    config, weights = nm.presets.NANO, nm.abstract_weights(nm.presets.NANO)
    with compiling_for(H200):
        assert accuracy_by_stage._serving(weights, config, 16, "bfloat16") == ["mosaic", "xla"]
        assert accuracy_by_stage._serving(weights, config, 16, "float32") == ["xla"]


def test_accuracy_refuses_other_dtypes():
    with pytest.raises(ValueError, match="dtypes has dtype float64"):
        nm.accuracy(random_weights(TINY_D), TINY_D, dtypes=("float64",))


def test_infinite_results_fail_without_a_warning(monkeypatch):
    tamper(monkeypatch, "moe_block", lambda out, aux: (out.at[0, :2].set(jnp.asarray([jnp.inf, -jnp.inf])), aux))
    seen = nm.self_check(random_weights(TINY_D), TINY_D)
    assert not seen.passed and not seen.errors["block_out"] <= seen.tolerance
