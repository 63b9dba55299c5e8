"""Quantised layers on meshes: each part goes where its numbers go, and blocks are never cut."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures_io import FIXTURES, assert_same_bits, layer_tensors, moe_config, with_quantised, written
from jax.sharding import AxisType, PartitionSpec

from checkpoints import CheckpointError, load_layer
from checkpoints.directory import Checkpoint
from checkpoints.find import find_layer
from checkpoints.load import _plan
from checkpoints.slices import plan_reads
from nemotron_moe.sharding import ShardingRules
from nemotron_moe.weights import dequantized
from pallas_kernels.formats import Quantised

pytestmark = pytest.mark.devices

P = "backbone.layers.1."
SCHEMES = ["fp8_tensor", "fp8_channel", "fp8_block", "nvfp4", "nvfp4_ct"]
# 256 divides into blocks of 128 and of 16; 160 only into those of 16.
CONFIG = moe_config(
    hidden_size=32, moe_intermediate_size=256, moe_shared_expert_intermediate_size=256, n_routed_experts=4
)
RULES = ShardingRules(experts="ep", expert_inner="tp", shared_inner="tp")


def mesh_of(experts, inner, axis_type=AxisType.Auto):
    devices = jax.devices()[: experts * inner]
    return jax.make_mesh((experts, inner), ("ep", "tp"), axis_types=(axis_type,) * 2, devices=devices)


def folder_of(tmp_path, scheme, config=CONFIG):
    return written(tmp_path, with_quantised(layer_tensors(P, config), scheme, "proj"), config)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_shards_are_the_bits_of_the_whole_and_what_slicing_gives(tmp_path, scheme, axis_type):
    folder, mesh, steps = folder_of(tmp_path, scheme), mesh_of(4, 2, axis_type), []
    alone, _ = load_layer(folder, 1)
    weights, _ = load_layer(folder, 1, mesh=mesh, rules=RULES, progress=lambda *step: steps.append(step))
    assert steps[-1] == (alone.nbytes, alone.nbytes)  # Each byte once, however many devices hold it.
    jax.tree.map(lambda a, b: assert_same_bits(a, np.asarray(b)), weights, alone)
    for field, axis in {"experts_up_proj": 1, "experts_down_proj": 2}.items():
        array = weights.items()[field]
        codes = getattr(array, array.codes)
        assert codes.sharding.spec == PartitionSpec(*({0: "ep", axis: "tp"}.get(one) for one in range(3)))
        for number, shard in enumerate(codes.addressable_shards):
            expert, part = divmod(number, 2)
            cut = [slice(expert, expert + 1), slice(None), slice(None)]
            cut[axis] = slice(128 * part, 128 * part + 128)
            wanted = alone.items()[field][*cut]
            for name in array.parts():
                here = next(s for s in getattr(array, name).addressable_shards if s.device == shard.device)
                assert_same_bits(here.data, np.asarray(getattr(wanted, name)))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("scheme", ["fp8_block", "nvfp4"])
def test_dequantised_on_a_mesh_is_dequantised_alone(tmp_path, scheme, axis_type):
    folder, mesh = folder_of(tmp_path, scheme), mesh_of(4, 2, axis_type)
    alone, _ = load_layer(folder, 1, dtype="bfloat16")
    weights, _ = load_layer(folder, 1, dtype="bfloat16", mesh=mesh, rules=RULES)
    for field, leaf in weights.items().items():
        assert_same_bits(leaf, np.asarray(alone.items()[field]))
    assert weights.experts_down_proj.sharding.spec == PartitionSpec("ep", None, "tp")
    assert weights.experts_down_proj.addressable_shards[0].data.shape == (1, 32, 128)


@pytest.mark.parametrize(
    "scheme, field, block", [("fp8_block", "experts_up_proj", 128), ("nvfp4", "experts_down_proj", 16)]
)
def test_a_mesh_that_would_cut_blocks_is_refused_packed_and_taken_dequantised(tmp_path, scheme, field, block):
    config = CONFIG | {"moe_intermediate_size": 160}  # 8 parts of 20.
    folder, mesh, rules, steps = (
        folder_of(tmp_path, scheme, config),
        mesh_of(1, 8),
        ShardingRules(expert_inner="tp"),
        [],
    )
    with pytest.raises(ValueError, match=rf"{field} has 160 .* blocks of {block} .*'tp' would cut into parts of 20"):
        load_layer(folder, 1, mesh=mesh, rules=rules, progress=lambda *step: steps.append(step))
    assert not steps
    weights, _ = load_layer(folder, 1, dtype="float32", mesh=mesh, rules=rules)
    whole = load_layer(folder, 1)[0].items()[field]
    leaf = weights.items()[field]
    assert_same_bits(leaf, np.asarray(dequantized(whole, jnp.float32)))
    assert 20 in leaf.addressable_shards[0].data.shape


@pytest.mark.parametrize("uncalibrated", [[], [2]])
def test_an_expert_parallel_rank_reads_the_scales_of_its_experts_only_R73(tmp_path, uncalibrated):
    config = CONFIG | {"n_routed_experts": 8}
    tensors = with_quantised(layer_tensors(P, config), "nvfp4", "proj")
    for expert in uncalibrated:
        del tensors[f"{P}mixer.experts.{expert}.up_proj.input_scale"]
    folder = written(tmp_path, tensors, config)
    mesh = mesh_of(8, 1)
    with Checkpoint(folder) as checkpoint:
        found = find_layer(checkpoint, 1)
        plan = _plan(found, None, mesh, ShardingRules(experts="ep"))
    everything = {source.name for source in found.sources}
    assert {read.source.name for read in plan.reads} == everything
    mine = {
        leaf: [part for part in parts if not leaf.startswith("experts_") or part[0] == (5, 6)]
        for leaf, parts in plan.wanted.items()
    }
    names = {read.source.name for read in plan_reads(found.sources, mine)}
    assert names == {name for name in everything if ".experts." not in name or ".experts.5." in name}
    assert len([name for name in names if ".experts." in name]) == 8


def test_uncalibrated_experts_keep_their_numbers_on_a_mesh():
    weights, _ = load_layer(
        FIXTURES / "broken" / "uncalibrated_experts", 0, mesh=mesh_of(4, 2), rules=ShardingRules(experts="ep")
    )
    assert weights.experts_up_proj.uncalibrated == (2, 5)
    assert isinstance(weights.experts_up_proj, Quantised)


def test_a_bad_input_scale_is_found_on_a_mesh_though_another_expert_has_none_P5(tmp_path):
    tensors = with_quantised(layer_tensors(P, CONFIG), "nvfp4", "proj")
    names = [f"{P}mixer.experts.{expert}.up_proj.input_scale" for expert in range(4)]
    del tensors[names[1]]
    tensors[names[3]] = np.zeros((), np.float32)
    with pytest.raises(CheckpointError, match=re.escape(f"{names[3]} has the scale 0.0 at [], in ")):
        load_layer(written(tmp_path, tensors, CONFIG), 1, mesh=mesh_of(4, 2), rules=RULES)


@pytest.mark.parametrize("last, place", [("up_proj", (200, 1)), ("down_proj", (31, 15)), ("down_proj", (2, 3))])
def test_a_bad_scale_is_found_in_rows_and_columns_that_are_read_in_parts_P5(tmp_path, last, place):
    tensors, name = with_quantised(layer_tensors(P, CONFIG), "nvfp4", "proj"), f"{P}mixer.experts.3.{last}.weight_scale"
    tensors[name][place] = np.nan
    with pytest.raises(CheckpointError, match=re.escape(f"{name} has the scale nan at {list(place)}, in ")):
        load_layer(written(tmp_path, tensors, CONFIG), 1, mesh=mesh_of(4, 2), rules=RULES)
