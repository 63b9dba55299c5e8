"""Quantised arrays as pytrees: what goes through jax comes out as it was, and what would ruin them raises."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formats.golden import FORMATS, assert_numbers, assert_same, bits, example

from pallas_kernels.formats import abstract

SHAPES = {format: (3, 20, 32) for format in FORMATS} | {"fp8_block": (3, 144, 160)}


def array(format, *, calibrated=True):
    q, wanted = example(format, SHAPES[format])
    return (dataclasses.replace(q, input_scale=jnp.asarray([0.5, 1.0, 2.0])) if calibrated else q), wanted


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("calibrated", [False, True])
def test_through_jax_and_back(format, calibrated):
    q, _ = array(format, calibrated=calibrated)
    q = dataclasses.replace(q, uncalibrated=(1,))
    leaves, structure = jax.tree.flatten(q)
    assert len(leaves) == len(q.parts()) and hash(structure) == hash(jax.tree.structure(q))
    for seen in (jax.tree.unflatten(structure, leaves), jax.jit(lambda q: q)(q), jax.device_put(q, jax.devices()[-1])):
        assert_same(seen, q)
        assert seen.uncalibrated == (1,) and seen.parts().keys() == q.parts().keys()
    shapes = jax.eval_shape(lambda q: q, q)
    assert shapes.shape == q.shape and shapes.nbytes == q.nbytes == sum(leaf.nbytes for leaf in leaves)
    shapes.check("q")
    assert repr(shapes) == repr(q) and len(repr(q)) < 300


@pytest.mark.quick
@pytest.mark.parametrize("format", FORMATS)
def test_abstract_is_the_arrays_shape(format):
    q, _ = array(format, calibrated=False)
    seen = abstract(q.shape, format)
    assert jax.tree.structure(seen) == jax.tree.structure(q)
    assert jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), seen, q)
    assert seen.nbytes == q.nbytes and seen.format == format


@pytest.mark.parametrize("format", ["fp8_block", "nvfp4"])
def test_over_the_experts(format):
    q, wanted = array(format)
    assert_numbers(jax.vmap(lambda one: one.dequantize())(q), wanted)
    assert_numbers(jax.lax.scan(lambda _, one: (None, one.dequantize()), None, q)[1], wanted)
    assert_numbers(jax.jit(lambda q: jax.tree.map(lambda leaf: leaf[2], q).dequantize())(q), wanted[2])


@pytest.mark.quick
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e5m2", "float8_e4m3fn"])
def test_casting_all_leaves_raises(format, dtype):
    q, _ = array(format)

    def cast(q):
        return jax.tree.map(lambda leaf: leaf.astype(dtype), q)

    for run in (cast, lambda tree: jax.eval_shape(cast, tree)):
        with pytest.raises(ValueError, match=rf"is {dtype}; wanted .*cast over all leaves.*dequantize\(dtype\)"):
            run({"weights": q})


@pytest.mark.parametrize("format", FORMATS)
def test_other_trees_keep_the_structure(format):
    q, _ = array(format)
    structure = jax.tree.structure(q)
    for tree in (
        jax.tree.map(lambda leaf: leaf == leaf.dtype.type(0), q),
        jax.tree.map(jnp.isfinite, q),
        jax.tree.map(jnp.zeros_like, q),
        jax.tree.map(lambda leaf: leaf.shape, q, is_leaf=lambda leaf: leaf is None),
        jax.tree.map(lambda leaf: None if leaf.ndim else "scalar", q),
    ):
        assert type(tree) is type(q)
    assert jax.tree.structure(jax.tree.map(jnp.isfinite, q)) == structure
    assert all(bool(leaf.all()) for leaf in jax.tree.leaves(jax.tree.map(jnp.isfinite, q)))


@pytest.mark.parametrize("format", FORMATS)
def test_gradients_of_something_else(format):
    q, wanted = example(format, SHAPES[format])
    q, wanted = q[0], wanted[0]
    x = jnp.ones((2, q.shape[-1]))

    def total(x, q):
        return jnp.sum(jnp.matmul(x, q.dequantize().T))

    sums = np.tile(wanted.sum(0), (2, 1))
    scale = np.abs(wanted).sum(0).max()
    for grad in (jax.grad(lambda x: total(x, q))(x), jax.grad(total)(x, q)):
        np.testing.assert_allclose(np.asarray(grad) / scale, sums / scale, atol=q.shape[0] * 2.0**-23, rtol=0)
    if format == "nvfp4":  # Integers among the leaves.
        grads = jax.grad(total, argnums=(0, 1), allow_int=True)(x, q)
        assert type(grads[1]) is type(q) and grads[1].packed.dtype == jax.dtypes.float0
        assert bits(grads[0]) == bits(jax.grad(total)(x, q))
