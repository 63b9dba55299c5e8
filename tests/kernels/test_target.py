"""Which targets have Hopper kernels: one answer for all operations."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import grouped_matmul, scatter_rows, top_k
from pallas_kernels.implementation import H200, Target, compiling_for, hopper_cores, no_hopper_kernels

pytestmark = pytest.mark.quick
WITHOUT = {
    "another GPU": (
        Target(kind="NVIDIA A100", platform="gpu", cores=108),
        "it runs on NVIDIA GPUs of compute capability 9.0, not on NVIDIA A100",
    ),
    "no number of cores": (
        dataclasses.replace(H200, cores=None),
        "it runs on GPUs that say how many cores they have, not on this NVIDIA H200",
    ),
}


def spec(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def choices(name=None):
    return [
        grouped_matmul.choose(spec(64, 64), spec(4, 128, 64), group_alignment=8, implementation=name),
        scatter_rows.choose(spec(8, 128), spec(8, 3, dtype=jnp.int32), 24, implementation=name),
        top_k.choose(spec(8, 128, dtype=jnp.float32), 6, implementation=name),
    ]


@pytest.mark.parametrize("target, reason", WITHOUT.values(), ids=WITHOUT)
def test_a_target_without_hopper_kernels_is_refused_by_all_in_one_sentence(target, reason):
    assert no_hopper_kernels(target) == reason
    with compiling_for(target):
        for choice in choices():
            assert choice.implementation.name == "xla"
            assert choice.passed_over == (("mosaic", reason),)
        assert grouped_matmul.preferred_alignment() == 1
        assert grouped_matmul.cut_for_kernels(jnp.array([3, 4]), 16) is None
        with pytest.raises(ValueError, match=reason):
            choices("mosaic")
        with pytest.raises(ValueError, match=reason):
            hopper_cores()


def test_an_h200_has_them():
    assert no_hopper_kernels(H200) is None
    with compiling_for(H200):
        assert {choice.implementation.name for choice in choices("mosaic")} == {"mosaic"}
        assert grouped_matmul.preferred_alignment() == 8
        assert hopper_cores() == H200.cores
