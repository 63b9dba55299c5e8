"""What every implementation of `grouped_matmul` must do. A test module subclasses the contract and names one."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import bound

from pallas_kernels.grouped_matmul import grouped_matmul

UNEVEN = (0, 5, 31, 1)
SHAPES = ((1856, 928), (464, 232), (336, 2688), (1344, 672), (33, 47))  # (N, K): Nemotron's widths, whole and split


def draw(shape, dtype, seed):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def operands(m, n, k, groups, dtype, rhs_dtype=None):
    """Rows of order 1, and matrices that keep them so."""
    return draw((m, k), dtype, 0), draw((groups, n, k), jnp.float32, 1).astype(rhs_dtype or dtype) / k**0.5


def f64(array):
    return np.asarray(array.astype(jnp.float32), np.float64)


def spans(sizes, m):
    """(group, first row, end row) with the sizes cut off at m rows."""
    ends = np.minimum(np.cumsum(sizes), m)
    return list(zip(range(len(sizes)), np.concatenate([[0], ends[:-1]]), ends, strict=True))


def oracle(lhs, rhs, sizes, activation=None):
    """(result, sum of the products' magnitudes) in float64, before the activation's magnitude."""
    lhs, rhs = f64(lhs), f64(rhs.astype(lhs.dtype))
    acc, size = (np.zeros((lhs.shape[0], rhs.shape[1])) for _ in range(2))
    for g, start, end in spans(sizes, lhs.shape[0]):
        acc[start:end] = lhs[start:end] @ rhs[g].T
        size[start:end] = abs(lhs[start:end]) @ abs(rhs[g]).T
    return (acc, size) if activation is None else (np.maximum(acc, 0) ** 2, size)


def assert_within(got, want, limit):
    got = f64(got)
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    excess = np.abs(got - want) - limit
    assert (excess <= 0).all(), f"{excess.max()} over the bound at {np.unravel_index(excess.argmax(), excess.shape)}"


class GroupedMatmulContract:
    implementation: str

    @property
    def gmm(self):
        return functools.partial(grouped_matmul, implementation=self.implementation)

    def gradients(self, lhs, rhs, sizes, dout, **options):
        def both(lhs, rhs):
            return jax.vjp(lambda lhs, rhs: self.gmm(lhs, rhs, sizes, **options), lhs, rhs)[1](dout)

        return jax.jit(both)(lhs, rhs)

    @pytest.mark.quick
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__)
    def test_every_pattern_of_empty_groups(self, dtype):
        m, n, k = 28, 7, 5
        lhs, rhs = operands(m, n, k, 4, dtype)
        run = jax.jit(self.gmm)
        for full in itertools.product((0, 1), repeat=4):
            sizes = np.array(full) * (7, 3, 1, 8)
            want, size = oracle(lhs, rhs, sizes)
            got = run(lhs, rhs, jnp.asarray(sizes, jnp.int32))
            assert_within(got, want, bound(dtype, k, size))
            assert not got[sizes.sum() :].any()

    @pytest.mark.parametrize("n, k", SHAPES)
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda d: d.__name__)
    def test_widths_that_no_tile_divides_R36(self, n, k, dtype):
        lhs, rhs = operands(37, n, k, 4, dtype)
        want, size = oracle(lhs, rhs, UNEVEN)
        got = jax.jit(self.gmm)(lhs, rhs, jnp.array(UNEVEN))
        assert got.dtype == dtype
        assert_within(got, want, bound(dtype, k, size))
        for row, group in (
            (36, 3),
            (35, 2),
            (0, 1),
        ):  # the last group and row by themselves, and both sides of a border
            alone = f64(rhs[group].astype(dtype)) @ f64(lhs)[row]
            assert_within(got[row], alone, bound(dtype, k, size[row]))

    @pytest.mark.quick
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__)
    def test_relu2_squares_the_float32_sum(self, dtype):
        k = 40
        lhs, rhs = operands(37, 24, k, 4, dtype)
        want, size = oracle(lhs, rhs, UNEVEN, "relu2")
        got = jax.jit(functools.partial(self.gmm, activation="relu2"))(lhs, rhs, jnp.array(UNEVEN))
        # The sum's error e becomes 2 acc e, with acc at most size; then one rounding of the square.
        assert_within(got, want, bound(dtype, 4 * k, size**2, roundings=0) + bound(dtype, 0, want))

    def test_relu2_does_not_overflow_before_it_is_rounded_P4(self):
        lhs, rhs = jnp.full((1, 1), 300, jnp.float16), jnp.ones((1, 1, 1), jnp.float16)
        out = self.gmm(lhs, rhs, jnp.array([1]), activation="relu2", out_dtype=jnp.float32)
        assert out.tolist() == [[90000.0]]

    @pytest.mark.parametrize(
        "dtype, rhs_dtype", [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "bfloat16")]
    )
    def test_matrices_are_taken_in_the_rows_dtype(self, dtype, rhs_dtype):
        lhs, rhs = operands(37, 24, 40, 4, jnp.dtype(dtype), rhs_dtype)
        want, size = oracle(lhs, rhs, UNEVEN)
        assert_within(self.gmm(lhs, rhs, jnp.array(UNEVEN)), want, bound(jnp.dtype(dtype), 40, size))
        dlhs, drhs = self.gradients(lhs, rhs, jnp.array(UNEVEN), draw((37, 24), jnp.dtype(dtype), 2))
        assert (dlhs.dtype, drhs.dtype) == (dtype, rhs_dtype)

    def test_out_dtype_is_the_only_rounding(self):
        lhs, rhs = operands(37, 24, 40, 4, jnp.bfloat16)
        want, size = oracle(lhs, rhs, UNEVEN)
        out = self.gmm(lhs, rhs, jnp.array(UNEVEN), out_dtype=jnp.float32)
        assert out.dtype == jnp.float32
        assert_within(out, want, bound(jnp.float32, 40, size))

    @pytest.mark.parametrize("activation", [None, "relu2"])
    def test_rows_after_the_last_group_are_zero_and_their_nan_stays_there_R70(self, activation):
        sizes, used = jnp.array([3, 0, 9, 2]), 14
        lhs, rhs = operands(40, 6, 5, 4, jnp.bfloat16)
        dout = draw((40, 6), jnp.bfloat16, 2)

        @jax.jit
        def everything(lhs, dout):
            out, pull = jax.vjp(lambda lhs, rhs: self.gmm(lhs, rhs, sizes, activation=activation), lhs, rhs)
            return out, *pull(dout)

        clean = everything(lhs, dout.at[used:].set(0))
        for poison in (jnp.nan, jnp.inf):
            out, dlhs, drhs = everything(lhs.at[used:].set(poison), dout.at[used:].set(poison))
            assert not out[used:].any() and not dlhs[used:].any()
            for got, want in zip((out, dlhs, drhs), clean, strict=True):
                np.testing.assert_array_equal(got.astype(jnp.float32), want.astype(jnp.float32))

    def test_nan_in_a_row_reaches_its_own_output_only(self):
        lhs, rhs = operands(37, 24, 40, 4, jnp.float32)
        out = self.gmm(lhs.at[4].set(jnp.nan), rhs.at[3].set(jnp.inf), jnp.array(UNEVEN))
        clean = self.gmm(lhs, rhs, jnp.array(UNEVEN))
        assert jnp.isnan(out[4]).all() and not jnp.isfinite(out[36]).any()
        others = np.delete(np.arange(37), [4, 36])
        np.testing.assert_array_equal(out[others], clean[others])

    @pytest.mark.parametrize("sizes", [(3, 50, 2, 1), (100, 1, 1, 1), (0, 0, 0, 41), (2**30, 2**30, 2**30, 2**30)])
    def test_groups_beyond_the_last_row_are_cut_off_R70(self, sizes):
        lhs, rhs = operands(40, 6, 5, 4, jnp.float32)
        want, size = oracle(lhs, rhs, np.array(sizes, np.int64))
        assert_within(jax.jit(self.gmm)(lhs, rhs, jnp.array(sizes)), want, bound(jnp.float32, 5, size))

    @pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int16, jnp.uint32], ids=lambda d: d.__name__)
    def test_any_integer_group_sizes(self, dtype):
        lhs, rhs = operands(300, 6, 5, 4, jnp.float32)
        sizes = jnp.array([100, 0, 90, 99])
        np.testing.assert_array_equal(self.gmm(lhs, rhs, sizes.astype(dtype)), self.gmm(lhs, rhs, sizes))

    def test_negative_group_sizes_count_as_zero(self):
        lhs, rhs = operands(40, 6, 5, 4, jnp.float32)
        got = self.gmm(lhs, rhs, jnp.array([3, -5, 9, -40]))
        np.testing.assert_array_equal(got, self.gmm(lhs, rhs, jnp.array([3, 0, 9, 0])))

    @pytest.mark.parametrize("m, n, k, groups", [(0, 3, 5, 4), (4, 0, 5, 4), (4, 3, 0, 4), (4, 3, 5, 0), (0, 3, 5, 0)])
    def test_sizes_of_zero_R57(self, m, n, k, groups):
        lhs, rhs = operands(m, n, k, groups, jnp.bfloat16) if k else (jnp.ones((m, k)), jnp.ones((groups, n, k)))
        sizes = jnp.ones(groups, jnp.int32)
        out = jax.jit(self.gmm)(lhs, rhs, sizes)
        assert out.shape == (m, n) and not out.any()
        dlhs, drhs = self.gradients(lhs, rhs, sizes, jnp.ones_like(out))
        assert (dlhs.shape, drhs.shape) == (lhs.shape, rhs.shape) and not dlhs.any() and not drhs.any()

    @pytest.mark.quick
    @pytest.mark.parametrize("activation", [None, "relu2"])
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda d: d.__name__)
    @pytest.mark.parametrize("n, k", [(33, 47), (232, 336)])
    def test_gradients_match_float64(self, n, k, dtype, activation):
        m = 45
        lhs, rhs = operands(m, n, k, 5, dtype)
        sizes, dout = (*UNEVEN, 0), draw((m, n), dtype, 2)
        got = self.gradients(lhs, rhs, jnp.array(sizes), dout, activation=activation)
        dlhs, drhs = (np.zeros(x.shape) for x in (lhs, rhs))
        dlhs_size, drhs_size = np.zeros_like(dlhs), np.zeros_like(drhs)
        x, w, d = f64(lhs), f64(rhs), f64(dout)
        if activation:
            out = self.gmm(lhs, rhs, jnp.array(sizes), activation=activation)
            d = d * 2 * np.sqrt(f64(out))
        for g, a, b in spans(sizes, m):
            dlhs[a:b], dlhs_size[a:b] = d[a:b] @ w[g], abs(d[a:b]) @ abs(w[g])
            drhs[g], drhs_size[g] = d[a:b].T @ x[a:b], abs(d[a:b]).T @ abs(x[a:b])
        # The cotangent's own rounding, and the root's and two products' in float32, come before the sum.
        assert_within(got[0], dlhs, bound(dtype, n + 4, dlhs_size, roundings=2))
        assert_within(got[1], drhs, bound(dtype, m + 4, drhs_size, roundings=2))
        assert not got[0][37:].any() and not got[1][0].any() and not got[1][4].any()

    def test_relu2_gradient_is_the_true_slope_up_to_outs_rounding(self):
        lhs, rhs = operands(37, 24, 40, 4, jnp.float32)
        acc, size = oracle(lhs, rhs, UNEVEN)
        dout = jnp.ones((37, 24))
        dlhs, _ = self.gradients(lhs, rhs, jnp.array(UNEVEN), dout, activation="relu2")
        slope, want, scale = 2 * np.maximum(acc, 0), np.zeros((37, 40)), np.zeros((37, 40))
        for g, a, b in spans(UNEVEN, 37):
            want[a:b], scale[a:b] = slope[a:b] @ f64(rhs)[g], 2 * size[a:b] @ abs(f64(rhs)[g])
        assert_within(dlhs, want, bound(jnp.float32, 24 + 40 + 4, scale, roundings=2))

    def test_empty_groups_have_a_gradient_of_exactly_zero_R47(self):
        lhs, rhs = operands(16, 32, 64, 4, jnp.bfloat16)
        _, drhs = self.gradients(lhs, rhs, jnp.array([8, 0, 8, 0]), jnp.ones((16, 32), jnp.bfloat16))
        assert not drhs[1].any() and not drhs[3].any() and jnp.isfinite(drhs).all()
        assert drhs[0].any() and drhs[2].any()

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda d: d.__name__)
    def test_a_rows_bits_do_not_depend_on_its_place_in_the_group(self, dtype):
        sizes = (0, 70, 1, 129)
        lhs, rhs = operands(210, 232, 336, 4, dtype)
        dout = draw((210, 232), dtype, 2)
        order = np.arange(210)
        for _, a, b in spans(sizes, 210):
            order[a:b] = np.random.default_rng(0).permutation(order[a:b])
        run = jax.jit(functools.partial(self.gmm, activation="relu2"))
        np.testing.assert_array_equal(
            run(lhs, rhs, jnp.array(sizes))[order].astype(jnp.float32),
            run(lhs[order], rhs, jnp.array(sizes)).astype(jnp.float32),
        )
        dlhs, _ = self.gradients(lhs, rhs, jnp.array(sizes), dout)
        moved, _ = self.gradients(lhs[order], rhs, jnp.array(sizes), dout[order])
        np.testing.assert_array_equal(dlhs[order].astype(jnp.float32), moved.astype(jnp.float32))

    def test_two_runs_give_the_same_bits_R65(self):
        lhs, rhs = operands(37, 232, 336, 4, jnp.bfloat16)
        dout = draw((37, 232), jnp.bfloat16, 2)
        for first, second in zip(
            *(
                (self.gmm(lhs, rhs, jnp.array(UNEVEN)), *self.gradients(lhs, rhs, jnp.array(UNEVEN), dout))
                for _ in range(2)
            ),
            strict=True,
        ):
            np.testing.assert_array_equal(first.astype(jnp.float32), second.astype(jnp.float32))

    def test_works_under_vmap_scan_checkpoint_and_eval_shape(self):
        lhs, rhs = (jnp.stack([x, 2 * x]) for x in operands(37, 24, 40, 4, jnp.float32))
        sizes = jnp.array([UNEVEN, (9, 9, 0, 9)])
        one = functools.partial(self.gmm, activation="relu2")
        want = jnp.stack([jax.jit(one)(lhs[i], rhs[i], sizes[i]) for i in range(2)])
        limit = bound(jnp.float32, 40, float(jnp.abs(want).max()))

        def loss(fun):
            return lambda lhs, rhs: fun(lhs, rhs).sum()

        def mapped(lhs, rhs):
            return jax.vmap(one)(lhs, rhs, sizes)

        def scanned(lhs, rhs):
            return jax.lax.scan(lambda carry, x: (carry, jax.checkpoint(one)(*x)), 0, (lhs, rhs, sizes))[1]

        grads = [jax.jit(jax.grad(loss(fun), (0, 1)))(lhs, rhs) for fun in (mapped, scanned)]
        assert_within(mapped(lhs, rhs), f64(want), limit)
        assert_within(jax.jit(scanned)(lhs, rhs), f64(want), limit)
        for a, b in zip(*grads, strict=True):
            assert_within(a, f64(b), bound(jnp.float32, 40 + 24, float(jnp.abs(b).max()) * 40))
        shape = jax.eval_shape(one, lhs[0], rhs[0], sizes[0])
        assert (shape.shape, shape.dtype) == ((37, 24), jnp.float32)

    @pytest.mark.quick
    def test_lowers_without_data_callbacks_or_scatter_add_R70_R65(self):
        lhs, rhs, sizes = (
            jax.ShapeDtypeStruct(s, d)
            for s, d in (((37, 40), jnp.bfloat16), ((4, 24, 40), jnp.bfloat16), ((4,), jnp.int32))
        )

        def loss(lhs, rhs, sizes):
            return self.gmm(lhs, rhs, sizes, activation="relu2", out_dtype=jnp.float32).sum()

        for fun in (loss, jax.grad(loss, (0, 1))):
            assert "callback" not in str(jax.make_jaxpr(fun)(lhs, rhs, sizes))
            text = jax.jit(fun).lower(lhs, rhs, sizes).compile().as_text()
            assert "xla_ffi_python" not in text and "scatter(" not in text

    def test_forward_mode_says_that_it_is_missing(self):
        lhs, rhs = operands(4, 3, 5, 1, jnp.float32)
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(lambda lhs: self.gmm(lhs, rhs, jnp.array([4])), (lhs,), (lhs,))

    def test_works_under_shard_map_with_replicated_matrices(self):
        count = min(4, jax.device_count())
        mesh = jax.make_mesh((count,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec
        lhs, rhs = operands(count * 9, 6, 5, 4, jnp.float32)
        sizes, one = jnp.array([2, 0, 5, 1]), functools.partial(self.gmm, activation="relu2")
        mapped = jax.shard_map(
            lambda lhs, rhs: one(lhs, rhs, sizes), mesh=mesh, in_specs=(spec("data"), spec()), out_specs=spec("data")
        )

        def parts(lhs, rhs):
            return jnp.concatenate([one(part, rhs, sizes) for part in jnp.split(lhs, count)])

        got, want = (
            (fun(lhs, rhs), *jax.grad(lambda *a, f=fun: f(*a).sum(), (0, 1))(lhs, rhs))
            for fun in (jax.jit(mapped), parts)
        )
        for a, b in zip(got, want, strict=True):
            assert_within(a, f64(b), bound(jnp.float32, 64, float(jnp.abs(b).max()) * 8))
