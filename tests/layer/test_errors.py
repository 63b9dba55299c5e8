"""Bad input: a ValueError at trace time that names the argument, what was seen and what was wanted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layers import TINY_D, TINY_L, random_tokens, random_weights

import nemotron_moe as nm

WEIGHTS, H = random_weights(TINY_L), random_tokens(TINY_L, 4)
IDS = jnp.zeros((4, 6), jnp.int32)


def changed(**fields):
    return dataclasses.replace(WEIGHTS, **fields)


BAD = {
    "float64": (dict(h=np.zeros((4, 64))), r"h has dtype float64.*bfloat16, float16, float32"),
    "integers": (dict(h=jnp.zeros((4, 64), jnp.int32)), r"h has dtype int32"),
    "float8": (dict(h=jnp.zeros((4, 64), jnp.float8_e4m3fn)), r"h has dtype float8_e4m3fn"),
    "list": (dict(h=[1.0]), r"h is a list; wanted an array \[\.\.\., 64\]"),
    "width": (dict(h=jnp.zeros((4, 32))), r"h has shape \(4, 32\); wanted \[\.\.\., 64\]"),
    "scalar": (dict(h=jnp.zeros(())), r"h has shape \(\)"),
    "not weights": (dict(weights={}), r"weights is a dict; wanted MoEWeights"),
    "other config": (dict(config=TINY_D), r"missing \[\], surplus \['fc1_latent_proj', 'fc2_latent_proj'\]"),
    "missing": (dict(weights=changed(shared_experts_up_proj=None)), r"missing \['shared_experts_up_proj'\]"),
    "experts": (
        dict(weights=changed(experts_up_proj=jnp.zeros((15, 80, 32)))),
        r"weights.experts_up_proj has shape \(15, 80, 32\); wanted \(16, 80, 32\)",
    ),
    "transposed": (dict(weights=changed(gate=jnp.zeros((64, 16)))), r"weights.gate has shape \(64, 16\)"),
    "scaleless weights": (
        dict(weights=changed(shared_experts_up_proj=WEIGHTS.shared_experts_up_proj.astype(jnp.float8_e4m3fn))),
        r"shared_experts_up_proj has dtype float8_e4m3fn; wanted one of",
    ),
    "integer weights": (
        dict(weights=changed(experts_up_proj=jnp.zeros((16, 80, 32), jnp.int8))), r"experts_up_proj has dtype int8",
    ),
    "swept bias": (
        dict(weights=jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), WEIGHTS)),
        r"gate_bias has dtype bfloat16; it must be float32.*weights.astype",
    ),
    "mask shape": (dict(token_mask=jnp.ones(3, bool)), r"token_mask has shape \(3,\); wanted \(4,\)"),
    "mask dtype": (dict(token_mask=jnp.ones(4)), r"token_mask has dtype float32; wanted bool"),
    "ids shape": (dict(routing=nm.Routing(ids=IDS[:, :5])), r"routing.ids has shape \(4, 5\); wanted \(4, 6\)"),
    "ids dtype": (dict(routing=nm.Routing(ids=jnp.zeros((4, 6)))), r"routing.ids has dtype float32; wanted integers"),
    "weights shape": (dict(routing=nm.Routing(ids=IDS, weights=jnp.ones((4, 5)))), r"routing.weights has shape"),
    "weights dtype": (
        dict(routing=nm.Routing(ids=IDS, weights=jnp.ones((4, 6), jnp.bfloat16))),
        r"routing.weights has dtype bfloat16; wanted float32",
    ),
    "implementation": (dict(implementation="cuda"), r"implementation.*'cuda'.*xla"),
    "parallel": (dict(parallel="ep"), r"parallel is 'ep'"),
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name):
    changes, message = BAD[name]
    arguments = {"h": H, "weights": WEIGHTS, "config": TINY_L} | changes
    with pytest.raises(ValueError, match=message):
        nm.moe_block(**arguments)
    h, rest = arguments.pop("h"), arguments
    with pytest.raises(ValueError, match=message.replace("h has", "x has").replace("h is", "x is")):
        nm.moe_mixer(h, **rest)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: nm.route(H, WEIGHTS.gate[:3], WEIGHTS.gate_bias, TINY_L), r"gate has shape \(3, 64\)"),
        (lambda: nm.route(H, WEIGHTS.gate, WEIGHTS.gate_bias[:3], TINY_L), r"gate_bias has shape \(3,\)"),
        (lambda: nm.rms_norm(H, WEIGHTS.norm[:3]), r"weight has shape \(3,\); wanted \(64,\)"),
        (lambda: nm.linear(H, WEIGHTS.fc2_latent_proj), r"x has shape \(4, 64\); wanted \[\.\.\., 32\]"),
        (lambda: nm.linear(H, WEIGHTS.gate, activation="gelu"), r"activation is 'gelu'"),
        (lambda: nm.shared_expert(H, WEIGHTS.gate, WEIGHTS.fc1_latent_proj), r"down_proj has shape \(32, 64\)"),
        (lambda: nm.linear(H, WEIGHTS.norm), r"weight has shape \(64,\); wanted \[out, in\]"),
        (lambda: nm.route(H, WEIGHTS.gate, WEIGHTS.gate_bias.astype(jnp.bfloat16), TINY_L), r"gate_bias has dtype bf"),
        (lambda: nm.make_plan(IDS[None], 16), r"ids has shape \(1, 4, 6\); wanted \[tokens, experts per token\]"),
        (lambda: nm.make_plan(jnp.zeros((4, 6)), 16), r"ids has dtype float32; wanted integers"),
        (lambda: nm.gather_rows(H[:3], nm.make_plan(IDS, 16)), r"x has shape \(3, 64\); wanted \(4, 64\)"),
        (lambda: nm.combine(H, jnp.ones((4, 6)), nm.make_plan(IDS, 16)), r"y has shape \(4, 64\); wanted \(24, 64\)"),
        (lambda: nm.combine(jnp.ones((24, 8)), jnp.ones((4, 5)), nm.make_plan(IDS, 16)), r"weights has shape \(4, 5\)"),
        (
            lambda: nm.routed_experts(
                H, jnp.ones((4, 6)), nm.make_plan(IDS, 8), jnp.ones((9, 5, 64)), jnp.ones((9, 64, 5))
            ),
            r"up_proj has shape \(9, 5, 64\); wanted \(8, 5, 64\)",
        ),
        (lambda: nm.explain(TINY_L, tokens=4, dtype="float64"), r"float64"),
        (lambda: nm.explain(TINY_L, tokens=4, dtype="int8"), r"int8"),
        (lambda: nm.abstract_weights(TINY_L, formats={"gate": jnp.int8}), r"gate in int8"),
        (lambda: nm.routing_stats(nm.Routing(ids=IDS), 16), r"routing.weights is None"),
        (lambda: nm.self_check(WEIGHTS, TINY_L, dtype="int8"), r"dtype is int8"),
        (lambda: nm.abstract_weights(TINY_L, formats={"gates": jnp.float32}), r"formats names \['gates'\]"),
        (lambda: nm.abstract_weights(TINY_L, formats={"gate_bias": jnp.bfloat16}), r"gate_bias in bfloat16"),
        (lambda: nm.abstract_weights(TINY_L, rules=nm.ShardingRules()), r"rules is given without mesh"),
    ],
)  # fmt: skip
def test_bad_arguments_of_single_functions_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_numpy_arrays_are_arrays():
    """Outside jit too, in every argument."""
    h, mask = np.asarray(H), np.array([True, True, False, True])
    routing = nm.Routing(ids=np.asarray(IDS), weights=np.ones((4, 6), np.float32))
    for layer in (nm.moe_block, nm.moe_mixer):
        out = layer(h, jax.tree.map(np.asarray, WEIGHTS), TINY_L, token_mask=mask, routing=routing)
        wanted = layer(H, WEIGHTS, TINY_L, token_mask=jnp.asarray(mask), routing=jax.tree.map(jnp.asarray, routing))
        np.testing.assert_array_equal(out, wanted)


@pytest.mark.devices
def test_explicit_mesh_axes_are_refused_in_a_sentence():
    mesh = jax.make_mesh((2,), ("ep",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    place = lambda array, *spec: jax.device_put(  # noqa: E731
        array, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    )
    with jax.set_mesh(mesh):
        whole = jax.tree.map(place, WEIGHTS)
        np.testing.assert_array_equal(nm.moe_block(place(H), whole, TINY_L), nm.moe_block(H, WEIGHTS, TINY_L))
        split = dataclasses.replace(whole, experts_up_proj=place(WEIGHTS.experts_up_proj, "ep"))
        with pytest.raises(ValueError, match="weights is split over Explicit mesh axes"):
            nm.moe_block(place(H), split, TINY_L)
        with pytest.raises(ValueError, match="activations' array is split over Explicit mesh axes"):
            jax.jit(nm.moe_block, static_argnums=2)(place(H, "ep"), whole, TINY_L)
