"""The reference is held to the same contract as what is measured by it."""

import jax
import jax.numpy as jnp
import pytest
from kernels.grouped_matmul_contract import GroupedMatmulContract

from pallas_kernels.grouped_matmul import Tile, grouped_matmul
from pallas_kernels.implementation import default_device, target


class TestReference(GroupedMatmulContract):
    implementation = "reference"


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
