"""The weights' pytree: dtypes that survive, shardings, random initial values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from layers import BOTH, TINY_L, block, random_tokens, random_weights

import nemotron_moe as nm


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
