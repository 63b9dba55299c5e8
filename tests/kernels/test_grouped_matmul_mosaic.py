"""The Hopper kernel: the contract, and what is its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import bound
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernels.arrays import assert_same, assert_within, draw, operands
from kernels.grouped_matmul_contract import UNEVEN, GroupedMatmulContract
from kernels.hopper import OnHopper, has_hopper

from pallas_kernels.grouped_matmul import TileConfig, cut_for_kernels, grouped_matmul
from pallas_kernels.implementation import H200, compiling_for

SIZES = (0, 30, 1, 100)  # none, one, and more rows than fit into the lowest tiles


class TestMosaic(OnHopper, GroupedMatmulContract):
    implementation = "mosaic"
    dtypes = (jnp.bfloat16,)
    alignments = (8,)
    row_multiple = 8
    small, middle = (128, 64), (64, 192)  # (N, K): whole bands of columns, and short ones in both directions
    many, integers = (0, 37, 1, 3), (jnp.uint8,)
    nemotrons = ((1856, 2688), (2688, 1856), (2688, 1024), (1344, 2688))

    @property
    def widths(self):
        return ((320, 128), *(self.nemotrons if has_hopper() else ()))

    @property
    def tile(self):
        """On a GPU the one that is chosen; two heights compile sooner in the interpreter."""
        return None if has_hopper() else TileConfig(heights=(8, 24), stages=3)

    @staticmethod
    def remat(fun):
        """The interpreter's ordered callbacks cannot be in a checkpoint; a kernel can."""
        return jax.checkpoint(fun) if has_hopper() else fun

    def compile(self, fun, *args):
        """For CUDA, without the interpreter and its callbacks."""
        with plgpu.force_gpu_interpret_mode(None):
            return jax.jit(lambda *args: fun(*args)).trace(*args).lower(lowering_platforms=("cuda",))

    def test_works_under_shard_map_with_replicated_matrices(self):
        if has_hopper():
            super().test_works_under_shard_map_with_replicated_matrices()
        else:  # the mesh's own devices decide, and these are no GPUs
            with pytest.raises(ValueError, match=r"'mosaic' refuses: .* not on cpu"):
                super().test_works_under_shard_map_with_replicated_matrices()

    @pytest.mark.parametrize(
        "tile, n, k",
        [
            (TileConfig(heights=(8,), stages=2), 192, 64),
            (TileConfig(heights=(8, 32, 56), stages=3), 64, 320),
            (TileConfig(heights=(16, 192), stages=4), 192, 192),
            (TileConfig(heights=(64, 80, 96, 112), stages=2, depth=128), 128, 256),
        ],
        ids=lambda value: getattr(value, "label", str(value)),
    )
    def test_every_tile_gives_the_same_product_and_cotangent(self, tile, n, k):
        m = self.rows(SIZES, spare=30)
        lhs, rhs = operands(m, n, k, len(SIZES), jnp.bfloat16)
        dout = draw((m, n), jnp.bfloat16, 2)

        @jax.jit
        def out_and_dlhs(lhs, dout):
            out, pull = jax.vjp(lambda lhs: self.gmm(lhs, rhs, jnp.array(SIZES), tile=tile), lhs)
            return out, *pull(dout)

        out, dlhs = out_and_dlhs(lhs, dout)
        others = ~self.in_groups(SIZES, m)
        for got, (want, size), terms in (
            (out, self.oracle(lhs, rhs, SIZES), k),
            (dlhs, self.oracle(dout, rhs.swapaxes(1, 2), SIZES), n),
        ):
            assert_within(got, want, bound(jnp.bfloat16, terms, size))
            assert not np.asarray(got)[others].any()

    def test_a_slot_that_is_no_part_of_the_sum_is_refused_in_both_directions(self):
        deep = TileConfig(heights=(8, 16), stages=4, depth=128)
        run = functools.partial(self.gmm, group_sizes=jnp.array([8]), tile=deep)
        with pytest.raises(ValueError, match=r"TileConfig\.depth is 128, .* sum of K = 192"):
            run(*operands(8, 128, 192, 1, jnp.bfloat16))
        lhs, rhs = operands(8, 192, 128, 1, jnp.bfloat16)
        with pytest.raises(ValueError, match=r"TileConfig\.depth is 128, .* sum of N = 192"):
            jax.eval_shape(jax.grad(lambda lhs: run(lhs, rhs).sum()), lhs)

    def test_pieces_that_are_made_once_serve_both_directions(self):
        m = self.rows(UNEVEN, spare=8)
        lhs, rhs = operands(m, *self.small, len(UNEVEN), jnp.bfloat16)
        sizes, dout = jnp.array(UNEVEN), draw((m, self.small[0]), jnp.bfloat16, 2)
        pieces = cut_for_kernels(sizes, m)
        shared = self.both_ways(lhs, rhs, sizes, dout, tile=None, pieces=pieces)
        for got, want in zip(shared, self.both_ways(lhs, rhs, sizes, dout), strict=True):
            assert_same(got, want)
        with pytest.raises(ValueError, match=r"pieces were cut for heights \(.*but tile has \(8,\)"):
            self.gmm(lhs, rhs, sizes, pieces=pieces, tile=TileConfig(heights=(8,), stages=2))


@pytest.mark.quick
@pytest.mark.parametrize(
    "change, message",
    [
        ({"lhs": jnp.ones((64, 64))}, "lhs is float32; it takes bfloat16"),
        ({"rhs": jnp.ones((2, 128, 64))}, "rhs is float32; it takes bfloat16"),
        ({"out_dtype": jnp.float32}, "out is float32; it takes bfloat16"),
        ({"rhs": jnp.ones((2, 72, 64), jnp.bfloat16)}, "columns is 72; it takes multiples of 64"),
        ({"lhs": jnp.ones((63, 64), jnp.bfloat16)}, "rows is 63; it takes multiples of 8"),
        ({"group_alignment": 1}, "alignment is 1; it takes 8, up to which it clears the rows behind a group"),
        ({"group_alignment": 16}, "alignment is 16; it takes 8"),
    ],
)
def test_what_the_kernel_does_not_take_is_said(change, message):
    good = {"lhs": jnp.ones((64, 64), jnp.bfloat16), "rhs": jnp.ones((2, 128, 64), jnp.bfloat16)}
    with compiling_for(H200), pytest.raises(ValueError, match=f"'mosaic' refuses: {message}"):
        grouped_matmul(
            **({"group_sizes": jnp.array([8, 8]), "group_alignment": 8} | good | change), implementation="mosaic"
        )


@pytest.mark.quick
def test_without_kernels_there_are_no_pieces():
    assert has_hopper() or cut_for_kernels(jnp.array([3, 4]), 16) is None
    with compiling_for(H200):
        assert cut_for_kernels(jnp.array([3, 4]), 16) is not None
