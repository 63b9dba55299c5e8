"""What every implementation of `top_k` must do. A test module subclasses the contract and names one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.top_k import top_k

NAN, NEGATIVE_NAN, LEAST_NAN = (np.uint32(bits).view(np.float32) for bits in (0x7FC00000, 0xFFC00000, 0xFFFFFFFF))
SHAPES = [(4, 128, 6), (7, 512, 22), (5, 1024, 64), (6, 384, 5), (9, 256, 1), (4, 128, 64)]  # T, E, k


def oracle(scores, k):
    """The total order of IEEE 754, in integers; np.lexsort is stable and ascending."""
    bits = np.asarray(scores).view(np.int32).astype(np.int64)
    keys = np.where(bits < 0, -(bits & 0x7FFFFFFF) - 1, bits)
    return np.argsort(-keys, axis=1, kind="stable")[:, :k]


def random(t, e, seed=0):
    return np.random.default_rng(seed).standard_normal((t, e)).astype(np.float32)


def some_of(values, t, e, seed=0):
    return np.random.default_rng(seed).choice(np.array(values, np.float32), (t, e))


class TopKContract:
    implementation: str

    def check(self, scores, k):
        run = functools.partial(top_k, k=k, implementation=self.implementation)
        ids = jax.jit(run)(jnp.asarray(scores))
        assert (ids.shape, ids.dtype) == ((scores.shape[0], k), jnp.int32)
        assert np.array_equal(ids, oracle(scores, k))

    @pytest.mark.quick
    @pytest.mark.parametrize("t, e, k", SHAPES)
    def test_random_scores(self, t, e, k):
        self.check(random(t, e), k)

    @pytest.mark.quick
    @pytest.mark.parametrize("t, e, k", SHAPES)
    def test_of_equal_scores_the_lowest_id_is_first(self, t, e, k):
        self.check(some_of([0.25, 0.5, 0.75], t, e), k)

    @pytest.mark.quick
    def test_any_four_scores_a_quarter_apart(self):
        """All 256 fours of 0 to 3, sixteen a token; a kernel that sorts lists of four sorts these."""
        scores = np.full((16, 4, 64), -1, np.float32)
        scores[:, :, :16] = np.arange(256).reshape(16, 1, 16) // np.array([1, 4, 16, 64])[None, :, None] % 4
        self.check(scores.reshape(16, 256), 64)

    @pytest.mark.parametrize("value", [0.0, -1.0, -np.inf, np.inf, NAN, NEGATIVE_NAN, LEAST_NAN])
    def test_all_equal(self, value):
        self.check(np.full((4, 128), value, np.float32), 64)

    @pytest.mark.parametrize("order", [1, -1])
    def test_sorted_scores(self, order):
        self.check(np.arange(5 * 512, dtype=np.float32).reshape(5, 512)[:, ::order], 22)

    def test_the_largest_all_in_one_lane_or_one_run(self):
        """32 experts apart, so that one list after the other is used up; and next to each other."""
        scores = random(8, 512)
        scores[:4, 5::32] += 100
        scores[4:, 40:70] += 100
        self.check(scores, 22)

    @pytest.mark.quick
    def test_experts_of_dropped_groups_come_last_by_id_R06(self):
        """-inf for all but 5 experts, with 22 to be found."""
        scores = np.full((6, 512), -np.inf, np.float32)
        scores[:, [3, 4, 100, 300, 511]] = -(random(6, 5) ** 2)
        self.check(scores, 22)

    @pytest.mark.quick
    def test_every_kind_of_number_has_its_place(self):
        kinds = [0.0, -0.0, 1e-40, -1e-40, 1.0, -1.0, np.inf, -np.inf, NAN, NEGATIVE_NAN, LEAST_NAN, 3e38, -3e38]
        self.check(some_of(kinds, 8, 128), 64)
        self.check(some_of([-np.inf, LEAST_NAN, NAN], 8, 128), 64)

    @pytest.mark.quick
    @pytest.mark.parametrize("t, e, k", [(0, 128, 6), (5, 128, 0), (0, 128, 0), (5, 0, 0), (0, 0, 0)])
    def test_sizes_of_zero_R57(self, t, e, k):
        self.check(random(t, e), k)

    def test_no_gradient_flows_but_it_may_be_asked_for(self):
        def chosen(scores):
            ids = top_k(scores, 6, implementation=self.implementation)
            return jnp.take_along_axis(scores, ids, axis=1).sum()

        scores = random(4, 128)
        gradient = np.asarray(jax.jit(jax.grad(chosen))(jnp.asarray(scores)))
        assert np.array_equal(np.nonzero(gradient)[1].reshape(4, 6), np.sort(oracle(scores, 6), axis=1))

    def test_works_under_vmap(self):
        scores = random(8, 128).reshape(2, 4, 128)
        ids = jax.jit(jax.vmap(functools.partial(top_k, k=6, implementation=self.implementation)))(jnp.asarray(scores))
        assert np.array_equal(ids.reshape(8, 6), oracle(scores.reshape(8, 128), 6))
