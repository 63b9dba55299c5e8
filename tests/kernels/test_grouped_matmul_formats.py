"""Quantised matrices in grouped_matmul: every format in every implementation that takes it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import bound

from pallas_kernels.formats import FORMATS, quantize, to_float64
from pallas_kernels.grouped_matmul import IMPLEMENTATIONS, grouped_matmul
from pallas_kernels.grouped_matmul.tile import Tile

RUN = [row.name for row in IMPLEMENTATIONS if row.name != "mosaic"]
# The operand of a format whose scales vary along K is rounded to the rows' dtype once, NVFP4's is exact.
OPERAND_ROUNDINGS = {"fp8_tensor": 0, "fp8_channel": 0, "fp8_block": 1, "nvfp4": 0}
SIZES = {(144, 160): (7, 0, 50, 3), (1856, 64): (0, 5, 31, 1), (80, 2688): (2, 0, 0, 9), (928, 464): (0, 5, 31, 1)}


def draw(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def matrices(format, groups, n, k, seed=0):
    """Matrices whose scales are distinct: each is a power of two larger than the one before."""
    x = draw(seed, groups, n, k) * np.exp2(np.arange(groups))[:, None, None] / k**0.5
    return quantize(x.astype(jnp.float32), format)


def by_hand(rows, wide, sizes, activation=None):
    out, scale, start = (np.zeros((len(rows), wide.shape[1])) for _ in range(2)), None, 0
    out, scale = out
    for matrix, size in zip(wide, sizes, strict=True):
        part = slice(start, start + size)
        out[part], scale[part] = rows[part] @ matrix.T, np.abs(rows[part]) @ np.abs(matrix).T
        start += size
    return (np.maximum(out, 0) ** 2, 3 * scale**2) if activation else (out, scale)


@pytest.mark.parametrize("format", FORMATS)
def test_batches_of_tiles_as_a_gpu_takes_them(format):
    (n, k), sizes = (144, 160), (7, 0, 50, 3)
    q, lhs, dout = matrices(format, len(sizes), n, k), draw(1, sum(sizes) + 5, k), draw(2, sum(sizes) + 5, n)

    def both(lhs, dout, tile):
        run = functools.partial(grouped_matmul, rhs=q, group_sizes=jnp.array(sizes), implementation="xla", tile=tile)
        out, pull = jax.vjp(run, lhs)
        return out, *pull(dout)

    batches = jax.jit(both, static_argnames="tile")(lhs, dout, tile=Tile(rows=8, columns=64, batch=4))
    for got, rows, wide in zip(batches, (lhs, dout), (to_float64(q), to_float64(q).swapaxes(1, 2)), strict=True):
        wanted, scale = by_hand(np.asarray(rows, np.float64), wide, sizes)
        assert (
            np.abs(np.asarray(got, np.float64) - wanted) <= bound(jnp.float32, rows.shape[1] + 2, 1.0) * scale
        ).all()


@pytest.mark.parametrize("implementation", RUN)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_matches_its_dequantised_numbers_R43(format, dtype, implementation):
    for (n, k), sizes in SIZES.items():
        if implementation == "reference" and n * k > 10**5:
            continue  # dense
        q, lhs = matrices(format, len(sizes), n, k), draw(1, sum(sizes) + 5, k, dtype=dtype)
        for activation in (None, "relu2"):
            out = grouped_matmul(
                lhs, q, jnp.array(sizes), activation=activation, out_dtype=jnp.float32, implementation=implementation
            )
            wanted, scale = by_hand(np.asarray(lhs, np.float64), to_float64(q), sizes, activation)
            # 2: the two float32 scales' product with the sum.
            limit = bound(dtype, k + 2, 1.0, roundings=OPERAND_ROUNDINGS[format]) * scale
            assert (np.abs(np.asarray(out, np.float64) - wanted) <= limit).all(), (n, k, activation)


@pytest.mark.parametrize("implementation", RUN)
@pytest.mark.parametrize("format", FORMATS)
def test_the_gradient_of_rows_goes_through_the_dequantised_numbers(format, implementation):
    sizes, (n, k) = (7, 0, 50, 3), (144, 160)
    q, lhs, dout = matrices(format, 4, n, k), draw(1, 61, k), draw(2, 61, n)

    @jax.jit
    def gradient(lhs, q):
        return jax.vjp(lambda lhs: grouped_matmul(lhs, q, jnp.array(sizes), implementation=implementation), lhs)[1](
            dout
        )

    wanted, scale = by_hand(np.asarray(dout, np.float64), to_float64(q).swapaxes(1, 2), sizes)
    assert (
        np.abs(np.asarray(gradient(lhs, q)[0], np.float64) - wanted) <= bound(jnp.float32, n + 2, 1.0) * scale
    ).all()


@pytest.mark.parametrize("format", FORMATS)
def test_matrices_after_the_first_have_their_own_scales_R34(format):
    """Each alone, the last too, with scales that are powers of two: a foreign or a lost one would name itself."""
    q = matrices(format, 4, 64, 80)
    for group in range(4):
        sizes = np.zeros(4, np.int32)
        sizes[group] = 3
        out = grouped_matmul(draw(1, 3, 80), q, jnp.asarray(sizes))
        alone = grouped_matmul(draw(1, 3, 80), q[group : group + 1], jnp.array([3]))
        assert (np.asarray(out) == np.asarray(alone)).all()
        wanted, scale = by_hand(np.asarray(draw(1, 3, 80), np.float64), to_float64(q)[group : group + 1], [3])
        assert (np.abs(np.asarray(out) - wanted) <= bound(jnp.float32, 82, 1.0) * scale).all(), group


@pytest.mark.parametrize("format", FORMATS)
def test_nothing_as_large_as_the_matrices_is_made(format):
    """Tiles are widened one at a time: memory stays the same with four times as many groups."""
    memory = {}
    for groups in (16, 64):
        q = jax.eval_shape(lambda x: quantize(x, format), jax.ShapeDtypeStruct((groups, 1024, 1024), jnp.float32))
        shapes = (jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16), q, jax.ShapeDtypeStruct((groups,), jnp.int32))
        for name, fun in {"forward": grouped_matmul, "gradient": _gradient}.items():
            memory[name, groups] = jax.jit(fun).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
    for name in ("forward", "gradient"):
        assert memory[name, 64] <= 1.2 * memory[name, 16], memory
        assert memory[name, 64] < 64 * 1024 * 1024 * 2 / 4, "a quarter of the matrices in bfloat16"


def _gradient(lhs, q, sizes):
    return jax.grad(lambda lhs: grouped_matmul(lhs, q, sizes).astype(jnp.float32).sum())(lhs)


def test_what_does_not_fit_is_refused():
    q, sizes = matrices("nvfp4", 2, 32, 64), jnp.array([1, 2])
    with pytest.raises(ValueError, match=r"rhs is nvfp4; it takes bfloat16|compute capability"):
        grouped_matmul(draw(0, 3, 64), q, sizes, implementation="mosaic")
    with pytest.raises(ValueError, match="lhs has K = 32 but rhs has K = 64"):
        grouped_matmul(draw(0, 3, 32), q, sizes)
    with pytest.raises(ValueError, match=r"rhs.scale is float8_e4m3fn\[2, 32, 3\]; wanted float8_e4m3fn \[2, 32, 4\]"):
        grouped_matmul(draw(0, 3, 64), dataclasses.replace(q, scale=q.scale[..., :3]), sizes)
    with pytest.raises(ValueError, match="rhs"):
        grouped_matmul(draw(0, 3, 64), q[0], sizes)
