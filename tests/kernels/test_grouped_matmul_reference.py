"""The reference is held to the same contract as what is measured by it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.grouped_matmul_contract import GeneralContract

from pallas_kernels.grouped_matmul import Tile, grouped_matmul
from pallas_kernels.grouped_matmul.reference import group_bounds
from pallas_kernels.implementation import default_device, target


class TestReference(GeneralContract):
    implementation = "reference"


@pytest.mark.quick
@pytest.mark.parametrize("alignment", [1, 3, 8, 1000, 2**40])
@pytest.mark.parametrize("m", [0, 1, 40, 1000, 2**30 + 5, 2**31 - 1])
@pytest.mark.parametrize("groups", [0, 1, 4, 300])
def test_group_bounds_are_those_of_integers_without_a_limit(groups, m, alignment):
    draw = np.random.default_rng(0).integers
    for sizes in (draw(0, m, groups, endpoint=True), draw(0, m // (groups + 1), groups, endpoint=True), groups * [m]):
        want, free = [], 0
        for size in map(int, sizes):
            want.append((min(free, m), min(free + size, m)))
            free += -(-size // alignment) * alignment
        starts, ends = group_bounds(jnp.array(sizes, jnp.int32), alignment, m)
        assert (starts.dtype, ends.dtype) == (jnp.int32, jnp.int32)
        assert list(zip(starts.tolist(), ends.tolist(), strict=True)) == want


def test_a_tile_of_another_implementation_is_refused():
    arrays = jnp.ones((4, 3)), jnp.ones((2, 5, 3)), jnp.array([1, 3])
    with pytest.raises(ValueError, match=r"tile is Tile\(.*'reference' takes none"):
        grouped_matmul(*arrays, implementation="reference", tile=Tile(rows=8, columns=8))
    with pytest.raises(ValueError, match="tile is 8; implementation 'xla' takes a Tile"):
        grouped_matmul(*arrays, tile=8)


def test_the_default_device_decides():
    cpu = jax.devices("cpu")[-1]
    with jax.default_device(cpu):
        assert default_device() == cpu and target().platform == "cpu"
