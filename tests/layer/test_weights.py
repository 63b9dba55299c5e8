"""The weights' pytree: dtypes that survive, shardings, random initial values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from layers import BOTH, TINY_L, block, random_tokens, random_weights

import nemotron_moe as nm
from pallas_kernels.formats import FORMATS, quantize


def test_cast_keeps_the_router_R02():
    weights = random_weights(TINY_L)
    half = weights.astype(jnp.bfloat16)
    np.testing.assert_array_equal(half.gate_bias, weights.gate_bias)
    np.testing.assert_array_equal(half.gate, weights.gate)
    assert {leaf.dtype.name for name, leaf in half.items().items() if not name.startswith("gate")} == {"bfloat16"}
    assert half.astype(jnp.float32).gate.dtype == jnp.float32
    assert random_weights(TINY_L, dtype=jnp.bfloat16).astype(jnp.float32).gate.dtype == jnp.float32


def test_pytree():
    weights = random_weights(TINY_L)
    leaves, treedef = jax.tree.flatten(weights)
    assert len(leaves) == 9
    assert isinstance(jax.tree.unflatten(treedef, leaves), nm.MoEWeights)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(weights)]
    assert paths == [f".{name}" for name in weights.items()]
    assert repr(weights).count("\n") == 10 and "experts_up_proj: float32[16, 80, 32]" in repr(weights)
    assert weights.nbytes == sum(leaf.nbytes for leaf in leaves)


@pytest.mark.quick
@pytest.mark.parametrize("name", BOTH)
def test_initial_weights_match_the_abstract_ones(name):
    config = BOTH[name]
    weights = nm.init_weights(jax.random.key(0), config, dtype=jnp.bfloat16)
    abstract = nm.abstract_weights(config)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), weights) == jax.tree.map(lambda a: (a.shape, a.dtype), abstract)
    wide = nm.init_weights(jax.random.key(0), config, dtype=jnp.float32)
    assert np.asarray(wide.norm).tolist() == [1.0] * config.hidden_size
    assert not np.asarray(wide.gate_bias).any()
    for field in ("experts_up_proj", "experts_down_proj", "shared_experts_up_proj", "gate"):
        leaf = np.asarray(wide.items()[field], np.float64)
        assert leaf.std() == pytest.approx(leaf.shape[-1] ** -0.5, rel=0.1), field
    assert (np.asarray(wide.experts_up_proj[0]) != np.asarray(wide.experts_up_proj[1])).any()
    out = block(random_tokens(config, 32), wide, config=config)
    assert 0.5 < float(jnp.std(out)) < 10


@pytest.mark.devices
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_shardings_follow_the_rules(axis_type):
    mesh = jax.make_mesh((4, 2), ("ep", "tp"), axis_types=(axis_type,) * 2)
    rules = nm.ShardingRules(experts="ep", expert_inner="tp", shared_inner=("ep", "tp"))
    abstract = nm.abstract_weights(TINY_L, mesh=mesh, rules=rules)
    specs = {name: leaf.sharding.spec for name, leaf in abstract.items().items()}
    assert specs["experts_up_proj"] == PartitionSpec("ep", "tp", None)
    assert specs["experts_down_proj"] == PartitionSpec("ep", None, "tp")
    assert specs["shared_experts_up_proj"] == PartitionSpec(("ep", "tp"), None)
    assert specs["shared_experts_down_proj"] == PartitionSpec(None, ("ep", "tp"))
    for name in ("norm", "gate", "gate_bias", "fc1_latent_proj", "fc2_latent_proj"):
        assert set(specs[name]) <= {None}, name
    sharded = nm.init_weights(jax.random.key(0), TINY_L, dtype=jnp.float32, mesh=mesh, rules=rules)
    alone = nm.init_weights(jax.random.key(0), TINY_L, dtype=jnp.float32)
    for name, leaf in sharded.items().items():
        assert leaf.sharding == abstract.items()[name].sharding, name
        np.testing.assert_array_equal(leaf, alone.items()[name])
    assert sharded.experts_up_proj.addressable_shards[0].data.shape == (4, 40, 32)


@pytest.mark.devices
def test_bad_rules_are_named():
    mesh = jax.make_mesh((3,), ("ep",), devices=jax.devices()[:3])
    with pytest.raises(ValueError, match=r"experts_up_proj has 16 along its axis 'experts'.* 3 devices"):
        nm.abstract_weights(TINY_L, mesh=mesh, rules=nm.ShardingRules(experts="ep"))
    with pytest.raises(ValueError, match=r"ShardingRules.experts names mesh axis 'nope'.*\('ep',\)"):
        nm.abstract_weights(TINY_L, mesh=mesh, rules=nm.ShardingRules(experts="nope"))
    with pytest.raises(ValueError, match=r"'ep' twice"):
        nm.ShardingRules(experts="ep", expert_inner=("tp", "ep"))
    with pytest.raises(ValueError, match=r"'ep' twice"):
        nm.ShardingRules(experts=("ep", "ep"))
    with pytest.raises(ValueError, match=r"'tp' twice"):
        nm.ShardingRules(shared_inner=("tp", "tp"))
    assert hash(nm.ShardingRules(experts="ep")) == hash(nm.ShardingRules(experts="ep"))


def test_weights_are_not_changed_by_a_call():
    weights, h = random_weights(TINY_L), random_tokens(TINY_L, 4)
    before = jax.tree.map(np.array, weights)
    jax.block_until_ready(block(h, weights, config=TINY_L))
    jax.tree.map(np.testing.assert_array_equal, weights, before)
    assert dataclasses.is_dataclass(weights)
    with pytest.raises(dataclasses.FrozenInstanceError):
        weights.gate = None


# Quantised fields.

QUANTISED = nm.MoEConfig(
    hidden_size=64,
    moe_latent_size=32,
    moe_intermediate_size=256,
    moe_shared_expert_intermediate_size=48,
    n_routed_experts=4,
    num_experts_per_tok=2,
)


@pytest.mark.parametrize("form", FORMATS)
def test_abstract_weights_take_the_name_of_a_format_and_an_abstract_array(form):
    field = "experts_up_proj"
    named = nm.abstract_weights(QUANTISED, formats={field: form, "gate": jnp.float32})
    array = named.experts_up_proj
    assert (array.format, array.shape) == (form, (4, 256, 32))
    assert (named.gate.dtype, named.gate_bias.dtype, named.norm.dtype) == ("float32", "float32", "bfloat16")
    given = nm.abstract_weights(QUANTISED, formats={field: array, "gate": "float32"})
    assert jax.tree.structure(given) == jax.tree.structure(named) and given.experts_up_proj == array
    rest = nm.abstract_weights(QUANTISED, formats={"gate": "float32"})
    assert named.nbytes - array.nbytes == rest.nbytes - 2 * 4 * 256 * 32
    assert f"experts_up_proj: {form}[4, 256, 32]" in repr(named)


def test_formats_that_do_not_fit_are_named():
    for name in ("norm", "gate", "gate_bias"):
        with pytest.raises(ValueError, match=f"formats asks for {name} in nvfp4; it is never quantised"):
            nm.abstract_weights(QUANTISED, formats={name: "nvfp4"})
    with pytest.raises(ValueError, match=r"fc1_latent_proj in 'mxfp8'; wanted one of bfloat16.*, nvfp4"):
        nm.abstract_weights(QUANTISED, formats={"fc1_latent_proj": "mxfp8"})
    with pytest.raises(ValueError, match=r"fc1_latent_proj in int8; wanted one of"):
        nm.abstract_weights(QUANTISED, formats={"fc1_latent_proj": jnp.int8})
    narrow = dataclasses.replace(QUANTISED, moe_shared_expert_intermediate_size=40)
    with pytest.raises(ValueError, match=r"shared_experts_down_proj \[64, 40\] in nvfp4.* multiple of 16"):
        nm.abstract_weights(narrow, formats={"shared_experts_down_proj": "nvfp4"})
    other = nm.abstract_weights(QUANTISED, formats={"experts_up_proj": "nvfp4"}).experts_up_proj
    with pytest.raises(ValueError, match=r"experts_down_proj the shape \[4, 256, 32\].*the layer's is \[4, 32, 256\]"):
        nm.abstract_weights(QUANTISED, formats={"experts_down_proj": other})


@pytest.mark.devices
@pytest.mark.devices
def test_parts_of_quantised_fields_are_placed_as_the_field_is():
    mesh = jax.make_mesh((2, 2), ("ep", "tp"), devices=jax.devices()[:4])
    rules = nm.ShardingRules(experts="ep", expert_inner="tp")
    formats = {"experts_up_proj": "fp8_block", "experts_down_proj": "nvfp4", "shared_experts_up_proj": "fp8_channel"}
    abstract = nm.abstract_weights(QUANTISED, formats=formats, mesh=mesh, rules=rules)
    up, down, shared = (abstract.items()[name] for name in formats)
    assert up.values.sharding.spec == up.scale.sharding.spec == PartitionSpec("ep", "tp", None)
    assert down.packed.sharding.spec == down.scale.sharding.spec == PartitionSpec("ep", None, "tp")
    assert down.global_scale.sharding.spec == PartitionSpec("ep")
    assert shared.scale.sharding.spec == PartitionSpec(None)
    with pytest.raises(ValueError, match=r"experts_up_proj has 256 .* blocks of 128 .*'tp' would cut into parts of 64"):
        nm.abstract_weights(
            QUANTISED,
            formats=formats,
            mesh=jax.make_mesh((4,), ("tp",), devices=jax.devices()[:4]),
            rules=nm.ShardingRules(expert_inner="tp"),
        )


def test_a_cast_dequantises_and_the_pytree_keeps_parts():
    rng, quantized = np.random.default_rng(0), jax.jit(quantize, static_argnums=1)
    weights = jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), jnp.float32), nm.abstract_weights(QUANTISED)
    )
    packed = dataclasses.replace(
        weights,
        experts_up_proj=quantized(weights.experts_up_proj, "nvfp4"),
        fc1_latent_proj=quantized(weights.fc1_latent_proj, "fp8_channel"),
    )
    assert packed.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(packed)) < weights.nbytes
    half = packed.astype(jnp.bfloat16)
    for name in ("experts_up_proj", "fc1_latent_proj"):
        wanted = jax.jit(lambda array: array.dequantize(jnp.bfloat16))(packed.items()[name])
        np.testing.assert_array_equal(half.items()[name], wanted)
    assert {leaf.dtype.name for name, leaf in half.items().items() if not name.startswith("gate")} == {"bfloat16"}
    assert half.gate.dtype == half.gate_bias.dtype == jnp.float32
    traced = jax.jit(lambda weights: weights.astype(jnp.bfloat16))(packed)
    jax.tree.map(np.testing.assert_array_equal, traced, half)
