"""`top_k`: the contract of every implementation, the choice, and the refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.top_k_contract import TopKContract, random

from pallas_kernels.implementation import H200, compiling_for
from pallas_kernels.top_k import choose, top_k


class AnyNumber(TopKContract):
    @pytest.mark.parametrize("t, e, k", [(1, 128, 6), (3, 7, 7), (2, 1, 1), (5, 100, 99)])
    def test_any_number_of_tokens_and_experts_R12(self, t, e, k):
        self.check(random(t, e), k)


class TestReference(AnyNumber):
    implementation = "reference"


class TestXla(AnyNumber):
    implementation = "xla"


def chosen(t=8192, e=512, k=22):
    return choose(jax.ShapeDtypeStruct((t, e), jnp.float32), k)


@pytest.mark.quick
@pytest.mark.parametrize(
    "arguments, reason",
    [
        (dict(e=500), "E is 500; it accepts multiples of 128 up to 1024"),
        (dict(e=1152), "E is 1152; it accepts multiples of 128 up to 1024"),
        (dict(k=65), "k is 65; it accepts up to 64"),
        (dict(t=3), "with T = 3 XLA's sort is as fast; it accepts 4 tokens or more"),
    ],
)
def test_what_the_kernel_refuses_runs_in_xla(arguments, reason):
    with compiling_for(H200):
        choice = chosen(**arguments)
        assert chosen().implementation.name == "mosaic"
    assert choice.implementation.name == "xla"
    assert choice.passed_over == (("mosaic", reason),)


@pytest.mark.quick
@pytest.mark.parametrize(
    "scores, k, message",
    [
        (jnp.ones(3), 1, r"scores has shape \(3,\); wanted \[T, E\]"),
        (jnp.ones((3, 4), jnp.bfloat16), 1, "scores is bfloat16; wanted float32"),
        (jnp.ones((3, 4)), 5, "k is 5; wanted an integer from 0 to 4, the experts"),
        (jnp.ones((3, 4)), -1, "k is -1"),
        (jnp.ones((3, 4)), 1.0, r"k is 1\.0"),
        (jnp.ones((3, 4)), True, "k is True"),
        ([[1.0]], 1, r"scores is a list; wanted an array \[T, E\]"),
    ],
)
def test_wrong_arguments_are_named(scores, k, message):
    with pytest.raises(ValueError, match=message):
        top_k(scores, k)


@pytest.mark.quick
def test_numpys_arrays_and_integers_are_taken():
    assert top_k(np.array([[1, 3, 2]], np.float32), np.int64(2)).tolist() == [[1, 2]]
