"""What every implementation of `grouped_matmul` must do. A test module subclasses the contract and names one.

The class attributes say what an implementation takes; one that takes less narrows them. `GeneralContract` is the
contract of those that take any alignment, and let rows, matrices and result differ in dtype.
"""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import bound
from kernels.arrays import assert_same, assert_within, draw, f64, operands, plain, put

from pallas_kernels.grouped_matmul import grouped_matmul

UNEVEN = (0, 5, 31, 1)
STATIC = ("activation", "out_dtype", "group_alignment", "implementation", "tile")
# One for all tests, so that what one has compiled another one need not.
run = jax.jit(grouped_matmul, static_argnames=STATIC)


@functools.partial(jax.jit, static_argnames=STATIC)
def run_both_ways(lhs, rhs, sizes, dout, pieces=None, **options):
    """(out, dlhs, drhs)."""
    out, pull = jax.vjp(lambda lhs, rhs: grouped_matmul(lhs, rhs, sizes, pieces=pieces, **options), lhs, rhs)
    return out, *pull(dout)


class GroupedMatmulContract:
    """Where one dtype or alignment will do, it is the first."""

    implementation: str
    dtypes = (jnp.float32, jnp.bfloat16, jnp.float16)
    activations = (None, "relu2")
    alignments = (1, 8, 16, 64)
    row_multiple = 1  # of M
    tile = None
    small, middle = (33, 47), (232, 336)  # (N, K)
    widths = ((1856, 928), (464, 232), (336, 2688), (1344, 672), (33, 47))  # Nemotron's, whole and split; and odd ones
    many = (0, 70, 1, 129)  # rows of groups, several tiles of them
    integers = (jnp.int8, jnp.uint8, jnp.int16, jnp.uint32)  # of group sizes

    def pytest_generate_tests(self, metafunc):
        for name, values, label in (
            ("dtype", self.dtypes, lambda dtype: dtype.__name__),
            ("activation", self.activations, str),
            ("alignment", self.alignments, str),
            ("width", self.widths, str),
            ("integer", self.integers, lambda dtype: dtype.__name__),
            ("width_and_alignment", ((self.middle, self.alignments[0]), (self.small, self.alignments[-1])), str),
        ):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values, ids=label)

    @property
    def options(self):
        implementation, alignment = self.implementation, self.alignments[0]
        return {"implementation": implementation, "group_alignment": alignment, "tile": self.tile, "activation": None}

    def gmm(self, lhs, rhs, group_sizes, **options):
        return plain(run(*map(plain, (lhs, rhs, group_sizes)), **(self.options | options)))

    def both_ways(self, lhs, rhs, sizes, dout, **options):
        return [*map(plain, run_both_ways(*map(plain, (lhs, rhs, sizes, dout)), **(self.options | options)))]

    def gradients(self, lhs, rhs, sizes, dout, **options):
        return self.both_ways(lhs, rhs, sizes, dout, **options)[1:]

    remat = staticmethod(jax.checkpoint)

    def compile(self, fun, *args):
        return jax.jit(fun).lower(*args).compile()

    def spans(self, sizes, m, alignment=None):
        """(group, first row, end row), cut off at m rows."""
        sizes, alignment = np.asarray(sizes, np.int64), alignment or self.alignments[0]
        padded = -(-sizes // alignment) * alignment
        starts = np.minimum(np.cumsum(padded) - padded, m)
        return list(zip(range(len(sizes)), starts, np.minimum(starts + sizes, m), strict=True))

    def rows(self, sizes, spare=0, alignment=None):
        """An M that holds groups of these sizes and `spare` more rows, and no more than it must."""
        end = self.spans(sizes, 2**31, alignment)[-1][2] + spare
        return int(-(-end // self.row_multiple) * self.row_multiple)

    def in_groups(self, sizes, m, alignment=None):
        """[m] bool: which rows belong to a group."""
        mine = np.zeros(m, bool)
        for _, start, end in self.spans(sizes, m, alignment):
            mine[start:end] = True
        return mine

    def oracle(self, lhs, rhs, sizes, *, activation=None, alignment=None):
        """(result, sum of the products' magnitudes) in float64, before the activation's magnitude."""
        lhs, rhs = f64(lhs), f64(rhs.astype(lhs.dtype))
        acc, size = (np.zeros((lhs.shape[0], rhs.shape[1])) for _ in range(2))
        for g, start, end in self.spans(sizes, lhs.shape[0], alignment):
            acc[start:end] = lhs[start:end] @ rhs[g].T
            size[start:end] = abs(lhs[start:end]) @ abs(rhs[g]).T
        return (acc, size) if activation is None else (np.maximum(acc, 0) ** 2, size)

    @pytest.mark.quick
    def test_every_pattern_of_empty_groups(self, dtype, alignment):
        full_sizes, (n, k) = (7, 3, 1, 8), self.small
        m = self.rows(full_sizes, spare=24, alignment=alignment)
        lhs, rhs = operands(m, n, k, 4, dtype)
        multiply = functools.partial(self.gmm, group_alignment=alignment)
        for full in itertools.product((0, 1), repeat=4):
            sizes = np.array(full) * full_sizes
            want, size = self.oracle(lhs, rhs, sizes, alignment=alignment)
            got = multiply(lhs, rhs, jnp.asarray(sizes, jnp.int32))
            assert_within(got, want, bound(dtype, k, size))
            assert not got[~self.in_groups(sizes, m, alignment)].any()

    def test_widths_that_no_tile_divides_R36(self, width, dtype):
        (n, k), m = width, self.rows(UNEVEN)
        lhs, rhs = operands(m, n, k, 4, dtype)
        want, size = self.oracle(lhs, rhs, UNEVEN)
        got = self.gmm(lhs, rhs, jnp.array(UNEVEN))
        assert got.dtype == dtype
        assert_within(got, want, bound(dtype, k, size))
        for group, start, end in self.spans(UNEVEN, m)[1:]:
            for row in (start, end - 1):  # both sides of every border, by themselves
                alone = f64(rhs[group]) @ f64(lhs)[row]
                assert_within(got[row], alone, bound(dtype, k, size[row]))

    @pytest.mark.quick
    def test_relu2_squares_the_float32_sum(self, dtype):
        (n, k), m = self.small, self.rows(UNEVEN)
        lhs, rhs = operands(m, n, k, 4, dtype)
        want, size = self.oracle(lhs, rhs, UNEVEN, activation="relu2")
        got = self.gmm(lhs, rhs, jnp.array(UNEVEN), activation="relu2")
        # The sum's error e becomes 2 acc e, with acc at most size; then one rounding of the square.
        assert_within(got, want, bound(dtype, 4 * k, size**2, roundings=0) + bound(dtype, 0, want))

    def test_rows_of_no_group_are_zero_and_their_nan_stays_there_R70(self, activation, alignment):
        sizes, (n, k), dtype = (3, 0, 9, 2), self.small, self.dtypes[-1]
        m = self.rows(sizes, spare=26, alignment=alignment)
        others = ~self.in_groups(sizes, m, alignment)
        lhs, rhs = operands(m, n, k, 4, dtype)
        dout = draw((m, n), dtype, 2)

        def everything(lhs, dout):
            options = {"activation": activation, "group_alignment": alignment}
            return self.both_ways(lhs, rhs, jnp.array(sizes), dout, **options)

        clean = everything(put(lhs, others, 0), put(dout, others, 0))
        for poison in (jnp.nan, jnp.inf):
            poisoned = everything(put(lhs, others, poison), put(dout, others, poison))
            assert not poisoned[0][others].any() and not poisoned[1][others].any()
            for got, want in zip(poisoned, clean, strict=True):
                assert_same(got, want)

    def test_nan_in_a_row_reaches_its_own_output_only(self):
        (n, k), m = self.small, self.rows(UNEVEN, spare=8)
        lhs, rhs = operands(m, n, k, 4, self.dtypes[0])
        bad = self.spans(UNEVEN, m)[1][2] - 1  # the last row of group 1
        infinite = self.spans(UNEVEN, m)[3][1]  # the row of group 3
        out = self.gmm(put(lhs, bad, jnp.nan), put(rhs, 3, jnp.inf), jnp.array(UNEVEN))
        clean = self.gmm(lhs, rhs, jnp.array(UNEVEN))
        assert np.isnan(out[bad]).all() and not np.isfinite(out[infinite]).any()
        others = np.delete(np.arange(m), [bad, infinite])
        assert_same(out[others], clean[others])

    @pytest.mark.parametrize("sizes", [(3, 70, 2, 1), (100, 1, 1, 1), (0, 0, 0, 57), (27, 27, 9, 1), (2**30,) * 4])
    def test_groups_beyond_the_last_row_are_cut_off_R70(self, sizes, alignment):
        (n, k), dtype = self.small, self.dtypes[0]
        lhs, rhs = operands(56, n, k, 4, dtype)
        want, size = self.oracle(lhs, rhs, sizes, alignment=alignment)
        got = self.gmm(lhs, rhs, jnp.array(sizes), group_alignment=alignment)
        assert_within(got, want, bound(dtype, k, size))

    def test_any_integer_group_sizes(self, integer):
        sizes = jnp.array([100, 0, 90, 99])
        lhs, rhs = operands(self.rows(sizes, spare=9), *self.small, 4, self.dtypes[0])
        assert_same(self.gmm(lhs, rhs, sizes.astype(integer)), self.gmm(lhs, rhs, sizes))

    def test_negative_group_sizes_count_as_zero(self):
        lhs, rhs = operands(56, *self.small, 4, self.dtypes[0])
        assert_same(self.gmm(lhs, rhs, jnp.array([3, -5, 9, -40])), self.gmm(lhs, rhs, jnp.array([3, 0, 9, 0])))

    @pytest.mark.parametrize("zero", ["m", "n", "k", "groups", "m groups"])
    def test_sizes_of_zero_R57(self, zero):
        shape = dict(zip(("m", "n", "k", "groups"), (8, *self.small, 4), strict=True)) | dict.fromkeys(zero.split(), 0)
        m, n, k, groups = shape.values()
        lhs, rhs = np.ones((m, k), self.dtypes[-1]), np.ones((groups, n, k), self.dtypes[-1])
        sizes = np.ones(groups, np.int32)
        out, dlhs, drhs = self.both_ways(lhs, rhs, sizes, np.ones((m, n), lhs.dtype))
        assert out.shape == (m, n) and not out.any()
        assert (dlhs.shape, drhs.shape) == (lhs.shape, rhs.shape) and not dlhs.any() and not drhs.any()

    @pytest.mark.quick
    def test_gradients_match_float64(self, width_and_alignment, dtype, activation):
        sizes, ((n, k), alignment) = UNEVEN, width_and_alignment
        m = self.rows(sizes, spare=8, alignment=alignment)
        lhs, rhs = operands(m, n, k, 4, dtype)
        dout = draw((m, n), dtype, 2)
        options = {"activation": activation, "group_alignment": alignment}
        out, *got = self.both_ways(lhs, rhs, jnp.array(sizes), dout, **options)
        dlhs, drhs = (np.zeros(x.shape) for x in (lhs, rhs))
        dlhs_size, drhs_size = np.zeros_like(dlhs), np.zeros_like(drhs)
        x, w, d = f64(lhs), f64(rhs), f64(dout)
        if activation:
            d = d * 2 * np.sqrt(f64(out))
        for g, a, b in self.spans(sizes, m, alignment):
            dlhs[a:b], dlhs_size[a:b] = d[a:b] @ w[g], abs(d[a:b]) @ abs(w[g])
            drhs[g], drhs_size[g] = d[a:b].T @ x[a:b], abs(d[a:b]).T @ abs(x[a:b])
        # The cotangent's own rounding, and the root's and two products' in float32, come before the sum.
        tiny = float(jnp.finfo(dtype).smallest_subnormal)  # float16 rounds what is near it worse than by an eps
        assert_within(got[0], dlhs, bound(dtype, n + 4, dlhs_size, roundings=2) + tiny)
        assert_within(got[1], drhs, bound(dtype, m + 4, drhs_size, roundings=2) + tiny)
        others = ~self.in_groups(sizes, m, alignment)
        assert not got[0][others].any() and not got[1][0].any()

    def test_relu2_gradient_is_the_true_slope_up_to_outs_rounding(self):
        (n, k), m, dtype = self.small, self.rows(UNEVEN, spare=8), self.dtypes[0]
        lhs, rhs = operands(m, n, k, 4, dtype)
        acc, size = self.oracle(lhs, rhs, UNEVEN)
        dout = np.ones((m, n), dtype)
        dlhs, _ = self.gradients(lhs, rhs, jnp.array(UNEVEN), dout, activation="relu2")
        slope, want, scale = 2 * np.maximum(acc, 0), np.zeros((m, k)), np.zeros((m, k))
        for g, a, b in self.spans(UNEVEN, m):
            want[a:b], scale[a:b] = slope[a:b] @ f64(rhs)[g], 2 * size[a:b] @ abs(f64(rhs)[g])
        # The root halves out's rounding.
        assert_within(dlhs, want, bound(dtype, n + k + 4, scale, roundings=2.5))

    def test_empty_groups_have_a_gradient_of_exactly_zero_R47(self):
        (n, k), sizes, dtype = self.small, jnp.array([8, 0, 48, 0]), self.dtypes[-1]
        lhs, rhs = operands(56, n, k, 4, dtype)
        _, drhs = self.gradients(lhs, rhs, sizes, np.ones((56, n), dtype))
        assert not drhs[1].any() and not drhs[3].any() and np.isfinite(drhs).all()
        assert drhs[0].any() and drhs[2].any()

    def test_a_rows_bits_do_not_depend_on_its_place_in_the_group(self, dtype):
        sizes, (n, k) = self.many, self.middle
        m = self.rows(sizes, spare=5)
        lhs, rhs = operands(m, n, k, 4, dtype)
        dout = draw((m, n), dtype, 2)
        order = np.arange(m)
        for _, a, b in self.spans(sizes, m):
            order[a:b] = np.random.default_rng(0).permutation(order[a:b])
        here, there = (
            self.both_ways(x, rhs, jnp.array(sizes), d, activation="relu2")[:2]
            for x, d in ((lhs, dout), (lhs[order], dout[order]))
        )
        for one, other in zip(here, there, strict=True):
            assert_same(one[order], other)

    def test_two_runs_give_the_same_bits_R65(self):
        (n, k), m, dtype = self.middle, self.rows(UNEVEN, spare=8), self.dtypes[-1]
        lhs, rhs = operands(m, n, k, 4, dtype)
        dout = draw((m, n), dtype, 2)
        first, second = (self.both_ways(lhs, rhs, jnp.array(UNEVEN), dout) for _ in range(2))
        for a, b in zip(first, second, strict=True):
            assert_same(a, b)

    def test_works_under_vmap_scan_checkpoint_and_eval_shape(self):
        both_sizes, (n, k), dtype = (UNEVEN, (9, 9, 0, 9)), self.small, self.dtypes[0]
        m = max(self.rows(sizes) for sizes in both_sizes)
        lhs, rhs = (jnp.stack([x, 2 * x]) for x in operands(m, n, k, 4, dtype))
        sizes = jnp.array(both_sizes)
        one = functools.partial(self.gmm, activation="relu2")
        want = jnp.stack([one(lhs[i], rhs[i], sizes[i]) for i in range(2)])
        limit = bound(dtype, k, float(np.abs(want).max()))

        def loss(fun):
            return lambda lhs, rhs: fun(lhs, rhs).astype(jnp.float32).sum()

        def mapped(lhs, rhs):
            return jax.vmap(one)(lhs, rhs, sizes)

        def scanned(lhs, rhs):
            return jax.lax.scan(lambda carry, x: (carry, self.remat(one)(*x)), 0, (lhs, rhs, sizes))[1]

        (out, *grads), (same, *others) = (
            jax.jit(lambda lhs, rhs, fun=fun: (fun(lhs, rhs), *jax.grad(loss(fun), (0, 1))(lhs, rhs)))(lhs, rhs)
            for fun in (mapped, scanned)
        )
        assert_within(out, f64(want), limit)
        assert_within(same, f64(want), limit)
        for a, b in zip(grads, others, strict=True):
            assert_within(a, f64(b), bound(dtype, n + k, float(np.abs(b).max()) * k))
        shape = jax.eval_shape(one, lhs[0], rhs[0], sizes[0])
        assert (shape.shape, shape.dtype) == ((m, n), dtype)

    @pytest.mark.quick
    def test_lowers_without_data_callbacks_or_scatter_add_R70_R65(self):
        (n, k), m, dtype = self.small, self.rows(UNEVEN), self.dtypes[-1]
        lhs, rhs, sizes = (
            jax.ShapeDtypeStruct(shape, dtype)
            for shape, dtype in (((m, k), dtype), ((4, n, k), dtype), ((4,), jnp.int32))
        )

        def loss(lhs, rhs, sizes):
            return self.gmm(lhs, rhs, sizes, activation="relu2").astype(jnp.float32).sum()

        for fun in (loss, jax.grad(loss, (0, 1))):
            assert "callback" not in str(jax.make_jaxpr(fun)(lhs, rhs, sizes))
            text = self.compile(fun, lhs, rhs, sizes).as_text()
            assert "xla_ffi_python" not in text and not re.search(r'\bscatter"?\(', text)

    def test_forward_mode_says_that_it_is_missing(self):
        lhs, rhs = operands(8, *self.small, 1, self.dtypes[0])
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(lambda lhs: self.gmm(lhs, rhs, jnp.array([4])), (lhs,), (lhs,))

    def test_works_under_shard_map_with_replicated_matrices(self):
        sizes, (n, k), dtype = (2, 0, 5, 1), self.small, self.dtypes[0]
        count = min(4, jax.device_count())
        mesh = jax.make_mesh((count,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec
        lhs, rhs = operands(count * self.rows(sizes, spare=1), n, k, 4, dtype)
        one = functools.partial(self.gmm, group_sizes=jnp.array(sizes), activation="relu2")
        mapped = jax.shard_map(one, mesh=mesh, in_specs=(spec("data"), spec()), out_specs=spec("data"))

        def parts(lhs, rhs):
            return jnp.concatenate([one(part, rhs) for part in jnp.split(lhs, count)])

        got, want = (
            (fun(lhs, rhs), *jax.grad(lambda *a, f=fun: f(*a).astype(jnp.float32).sum(), (0, 1))(lhs, rhs))
            for fun in (jax.jit(mapped), parts)
        )
        for a, b in zip(got, want, strict=True):
            assert_within(a, f64(b), bound(dtype, 64, float(np.abs(b).max()) * 8))


class GeneralContract(GroupedMatmulContract):
    def test_alignment_moves_rows_and_keeps_their_bits(self, activation):
        sizes, (n, k), dtype = (*UNEVEN, 0, 8, 9), self.small, self.dtypes[0]
        near, far = self.alignments[0], self.alignments[-1]
        m = self.rows(sizes, alignment=far)
        lhs, rhs = operands(m, n, k, len(sizes), dtype)
        dout = draw((m, n), dtype, 2)

        def out_and_dlhs(lhs, dout, alignment):
            options = {"activation": activation, "group_alignment": alignment}
            return self.both_ways(lhs, rhs, jnp.array(sizes), dout, **options)[:2]

        here, there = (np.flatnonzero(self.in_groups(sizes, m, alignment)) for alignment in (near, far))
        moved = (put(x, there, x[here]) for x in (lhs, dout))
        for got, want in zip(out_and_dlhs(*moved, far), out_and_dlhs(lhs, dout, near), strict=True):
            assert_same(got[there], want[here])

    def test_relu2_does_not_overflow_before_it_is_rounded_P4(self):
        lhs, rhs = jnp.full((1, 1), 300, jnp.float16), jnp.ones((1, 1, 1), jnp.float16)
        out = self.gmm(lhs, rhs, jnp.array([1]), activation="relu2", out_dtype=jnp.float32)
        assert out.tolist() == [[90000.0]]

    @pytest.mark.parametrize(
        "rows_dtype, rhs_dtype", [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "bfloat16")]
    )
    def test_matrices_are_taken_in_the_rows_dtype(self, rows_dtype, rhs_dtype):
        (n, k), m, dtype = self.small, self.rows(UNEVEN), jnp.dtype(rows_dtype)
        lhs, rhs = operands(m, n, k, 4, dtype, rhs_dtype)
        want, size = self.oracle(lhs, rhs, UNEVEN)
        assert_within(self.gmm(lhs, rhs, jnp.array(UNEVEN)), want, bound(dtype, k, size))
        dlhs, drhs = self.gradients(lhs, rhs, jnp.array(UNEVEN), draw((m, n), dtype, 2))
        assert (dlhs.dtype, drhs.dtype) == (dtype, rhs_dtype)

    def test_out_dtype_is_the_only_rounding(self):
        (n, k), m = self.small, self.rows(UNEVEN)
        lhs, rhs = operands(m, n, k, 4, jnp.bfloat16)
        want, size = self.oracle(lhs, rhs, UNEVEN)
        out = self.gmm(lhs, rhs, jnp.array(UNEVEN), out_dtype=jnp.float32)
        assert out.dtype == jnp.float32
        assert_within(out, want, bound(jnp.float32, k, size))
