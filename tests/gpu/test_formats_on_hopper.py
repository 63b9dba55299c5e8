"""Packed weights on a GPU: the layer's numbers, and the memory that they take.

Collected with --gpu only: no other machine can run it.
"""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import pytest
from gpu.common import MODELS

import nemotron_moe as nm
from checkpoints.bench import CASES, write_layer
from pallas_kernels.formats import FORMATS, quantize


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("model", ["nano", "super"])
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_the_oracle_s_layer_R43(format, model, dtype):
    config = dataclasses.replace(MODELS[model], n_routed_experts=32)
    weights = nm.init_weights(jax.random.key(0), config, dtype=jnp.bfloat16)
    fields = [field for field, leaf in weights.items().items() if leaf.ndim > 1 and field != "gate"]
    packed = dataclasses.replace(weights, **{field: quantize(getattr(weights, field), format) for field in fields})
    report = nm.self_check(packed, config, dtype=dtype)
    assert report.passed, report


def test_a_loaded_layer_of_super_takes_the_memory_of_its_file(tmp_path):
    config, format, stacked, dtype = CASES["super nvfp4"]
    size = write_layer(tmp_path, config, format, stacked=stacked)
    [device] = jax.local_devices()[:1]
    gc.collect()  # what other tests had would go in between
    before = device.memory_stats()["bytes_in_use"]
    weights, _ = nm.load_layer(tmp_path, 0, dtype=dtype)
    jax.block_until_ready(weights)
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(weights)]
    assert abs(sum(sizes) - size) <= size / 100
    # The allocator splits no free piece of which less than 128 MiB would be left.
    slack = sum(min(one, 1 << 27) for one in sizes if one > 1 << 27)
    assert device.memory_stats()["bytes_in_use"] - before <= sum(sizes) + slack + size / 100
