"""Quantised arrays spread over devices: every part is cut where the array is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formats.golden import assert_numbers, assert_same, example
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.formats import to_float64

pytestmark = pytest.mark.devices


def mesh(*sizes):
    count = int(np.prod(sizes))
    return Mesh(np.array(jax.devices()[:count]).reshape(sizes), ("x", "y")[: len(sizes)])


CASES = [  # format, shape, sizes of the mesh, spec, and the shape of each part on a device
    ("fp8_tensor", (8, 4, 32), (8,), P("x"), {"values": (1, 4, 32), "scale": (1,)}),
    ("fp8_tensor", (2, 16, 32), (8,), P(None, "x"), {"values": (2, 2, 32), "scale": (2,)}),
    ("fp8_tensor", (2, 4, 24), (2, 4), P("x", None, "y"), {"values": (1, 4, 6), "scale": (1,)}),
    ("fp8_channel", (2, 32, 8), (2, 4), P("x", "y"), {"values": (1, 8, 8), "scale": (1, 8)}),
    ("fp8_channel", (1, 4, 32), (8,), P(None, None, "x"), {"values": (1, 4, 4), "scale": (1, 4)}),
    ("fp8_block", (8, 144, 160), (8,), P("x"), {"values": (1, 144, 160), "scale": (1, 2, 2)}),
    ("fp8_block", (2, 256, 160), (2,), P(None, "x"), {"values": (2, 128, 160), "scale": (2, 1, 2)}),
    ("fp8_block", (2, 144, 512), (2, 4), P("x", None, "y"), {"values": (1, 144, 128), "scale": (1, 2, 1)}),
    ("nvfp4", (8, 3, 48), (8,), P("x"), {"packed": (1, 3, 24), "scale": (1, 3, 3), "global_scale": (1,)}),
    ("nvfp4", (2, 8, 48), (8,), P(None, "x"), {"packed": (2, 1, 24), "scale": (2, 1, 3), "global_scale": (2,)}),
    ("nvfp4", (4, 6, 128), (2, 4), P("x", None, "y"), {"packed": (2, 6, 16), "scale": (2, 6, 2), "global_scale": (2,)}),
    ("nvfp4", (8, 6, 32), (2, 4), P(("x", "y")), {"packed": (1, 6, 16), "scale": (1, 6, 2), "global_scale": (1,)}),
]


@pytest.mark.parametrize("format, shape, sizes, spec, shards", CASES, ids=str)
def test_every_part_is_cut_where_the_array_is(format, shape, sizes, spec, shards):
    q, wanted = example(format, shape)
    q = dataclasses.replace(q, input_scale=jnp.ones(shape[0]))
    whole = NamedSharding(mesh(*sizes), spec)
    twin = q.placed(whole, "up_proj")
    twin.check("up_proj")
    shardings = jax.tree.map(lambda leaf: leaf.sharding, twin)
    assert type(twin) is type(q) and jax.tree.structure(twin) == jax.tree.structure(q)
    placed = jax.device_put(q, shardings)
    assert_same(placed, q)
    for name, shard in (shards | {"input_scale": shards.get("global_scale", (whole.shard_shape(shape)[0],))}).items():
        leaf = getattr(placed, name)
        assert isinstance(leaf.sharding, NamedSharding) and leaf.sharding == getattr(twin, name).sharding
        assert {one.data.shape for one in leaf.addressable_shards} == {shard}, name
    # A device's parts are those of the device's numbers.
    numbers = jax.device_put(jnp.asarray(wanted, jnp.float32), whole)
    for place, device in enumerate(whole.mesh.devices.flat):
        local = {name: getattr(placed, name).addressable_shards[place] for name in placed.parts()}
        assert {one.device for one in local.values()} == {device}
        one = dataclasses.replace(q, **{name: shard.data for name, shard in local.items()})
        mine = next(shard for shard in numbers.addressable_shards if shard.device == device)
        assert_numbers(to_float64(one), np.asarray(mine.data, np.float64))
    assert_numbers(jax.jit(lambda q: q.dequantize())(placed), wanted)


@pytest.mark.quick
@pytest.mark.parametrize(
    "format, shape, spec, message",
    [
        ("nvfp4", (2, 4, 32), P(None, None, "x"), r"down has 32 elements along axis 2, in blocks of 16 \(nvfp4\)"),
        ("nvfp4", (2, 3, 48), P(None, None, ("x", "y")), r"mesh axis \('x', 'y'\) would cut into parts of 6;"),
        ("fp8_block", (2, 144, 160), P(None, "x"), r"down has 144 elements along axis 1, in blocks of 128"),
        ("fp8_block", (2, 144, 160), P(None, None, "x"), r"axis 2, in .* mesh axis 'x' would cut into parts of 40; .*"),
        ("fp8_block", (256, 128), P(None, "y"), r"along axis 1, .* parts of 64; .* leaves multiples of 128, or deq"),
    ],
)
def test_a_block_is_never_cut(format, shape, spec, message):
    q, _ = example(format, shape)
    with pytest.raises(ValueError, match=message):
        q.placed(NamedSharding(mesh(4, 2), spec), "down")
