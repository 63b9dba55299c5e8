"""`group_places`: the contract of every implementation, the choice, and the refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.group_places import choose, group_places
from pallas_kernels.group_places.compare import BLOCK, MOST_ENTRIES
from pallas_kernels.implementation import H200, Target, compiling_for


def oracle(groups, n_groups):
    sizes, places = np.zeros(n_groups + 1, np.int32), np.empty_like(groups)
    for entry, group in enumerate(groups):
        places[entry] = sizes[group]
        sizes[group] += 1
    return places, sizes[:n_groups]


def random(entries, n_groups, seed=0):
    return np.random.default_rng(seed).integers(0, n_groups + 1, entries, dtype=np.int32)


class GroupPlacesContract:
    implementation: str

    @pytest.fixture(autouse=True)
    def choose_as_for_its_platform(self):
        with compiling_for(H200):  # Compiled for this machine all the same.
            yield

    def check(self, groups, n_groups):
        run = jax.jit(functools.partial(group_places, n_groups=n_groups, implementation=self.implementation))
        for got, want in zip(run(jnp.asarray(groups)), oracle(groups, n_groups), strict=True):
            assert got.dtype == jnp.int32
            np.testing.assert_array_equal(got, want)

    @pytest.mark.quick
    @pytest.mark.parametrize("entries", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK + 77])
    @pytest.mark.parametrize("n_groups", [1, 5, 128, 513])
    def test_random_groups(self, entries, n_groups):
        self.check(random(entries, n_groups), n_groups)

    def test_one_group_has_all_and_the_others_none_C22(self):
        for group in (0, 5, 31, 32):  # 32 is none
            self.check(np.full(3 * BLOCK, group, np.int32), 32)

    def test_entries_in_order_and_backwards(self):
        groups = np.sort(random(4 * BLOCK + 3, 16))
        self.check(groups, 16)
        self.check(groups[::-1].copy(), 16)

    @pytest.mark.quick
    @pytest.mark.parametrize("entries, n_groups", [(0, 4), (5, 0), (0, 0)])
    def test_sizes_of_zero_R57(self, entries, n_groups):
        self.check(np.zeros(entries, np.int32), n_groups)

    def test_works_under_vmap_and_scan(self):
        groups = random(2 * 700, 9).reshape(2, 700)
        one = functools.partial(group_places, n_groups=9, implementation=self.implementation)
        mapped = jax.jit(jax.vmap(one))(jnp.asarray(groups))
        scanned = jax.jit(lambda groups: jax.lax.scan(lambda carry, x: (carry, one(x)), 0, groups)[1])(groups)
        wanted = [np.stack(parts) for parts in zip(*(oracle(row, 9) for row in groups), strict=True)]
        for got in (mapped, scanned):
            for a, b in zip(got, wanted, strict=True):
                np.testing.assert_array_equal(a, b)


class TestReference(GroupPlacesContract):
    implementation = "reference"


class TestSort(GroupPlacesContract):
    implementation = "sort"


class TestCompare(GroupPlacesContract):
    implementation = "compare"


@pytest.mark.quick
def test_only_a_gpu_compares_and_not_too_many():
    groups = jax.ShapeDtypeStruct((MOST_ENTRIES,), jnp.int32)
    with compiling_for(Target(kind="cpu", platform="cpu")):
        assert choose(groups, 8).implementation.name == "sort"
        assert choose(groups, 8).passed_over == (("compare", "it is for GPUs, and cpu sorts faster"),)
    with compiling_for(H200):
        assert choose(groups, 8).implementation.name == "compare"
        more = choose(jax.ShapeDtypeStruct((MOST_ENTRIES + 1,), jnp.int32), 8)
    assert more.implementation.name == "sort"
    assert more.passed_over == (("compare", "S is 524289; it accepts up to 524288 entries"),)


@pytest.mark.quick
@pytest.mark.parametrize(
    "groups, n_groups, message",
    [
        (jnp.ones((3, 4), jnp.int32), 4, r"groups has shape \(3, 4\); wanted \[S\]"),
        (jnp.ones(3), 4, "groups is float32; wanted int32"),
        (jnp.ones(3, jnp.int32), -1, "n_groups is -1; wanted an integer from 0 on"),
        (jnp.ones(3, jnp.int32), 1.0, r"n_groups is 1\.0"),
        ([1], 4, r"groups is a list; wanted an array \[S\]"),
    ],
)
def test_wrong_arguments_are_named(groups, n_groups, message):
    with pytest.raises(ValueError, match=message):
        group_places(groups, n_groups)


@pytest.mark.quick
def test_numpys_arrays_and_integers_are_taken():
    places, sizes = group_places(np.array([1, 0, 1], np.int32), np.int64(2))
    assert places.tolist() == [0, 0, 1] and sizes.tolist() == [1, 2]
