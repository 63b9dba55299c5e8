"""What is refused, and the words."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest
from formats.golden import FORMATS, example, fp8

from pallas_kernels.formats import Fp8Array, Nvfp4Array, abstract, quantize


@pytest.mark.parametrize("format", FORMATS)
def test_every_part_is_checked(format):
    q, _ = example(format, (3, 20, 32))
    q = dataclasses.replace(q, input_scale=jnp.ones(3))
    q.check("up")
    for name, part in q.parts().items():
        leaf = getattr(q, name)
        for wrong in (leaf[None], leaf[:2], leaf == leaf.dtype.type(0)):
            message = rf"^up\.\w+ is \w+\[.*\]; wanted {' or '.join(part.dtypes)} \[.*\], beside {q.codes} "
            broken = dataclasses.replace(q, **{name: wrong})
            if name != q.codes:
                message = message.replace(r"\w+ is", f"{name} is")
                message = message.replace(r" \[.*\], beside", f" {re.escape(str(list(leaf.shape)))}, beside")
            elif wrong.dtype == leaf.dtype:  # Then the others do not fit.
                message = r"^up\.\w+ is .* wanted .* beside " + q.codes
            with pytest.raises(ValueError, match=message):
                broken.check("up")
        with pytest.raises(ValueError, match=rf"up\.{name} is 'text'|up\.{name} is .*wanted an array"):
            dataclasses.replace(q, **{name: "text"}).check("up")


@pytest.mark.parametrize("format", FORMATS)
def test_a_vector_is_no_matrix(format):
    q, _ = example(format, (20, 32))
    broken = dataclasses.replace(q, **{q.codes: getattr(q, q.codes)[0]})
    with pytest.raises(ValueError, match=rf"^up\.{q.codes} is .*\[\d+\]; wanted an array \[\.\.\., N, K\]"):
        broken.check("up")
    with pytest.raises(ValueError, match=r"wants matrices \[\.\.\., N, K\]; the shape is \(32,\)"):
        abstract((32,), format)
    with pytest.raises(ValueError, match=r"wants matrices \[\.\.\., N, K\]; the shape is \(32,\)"):
        quantize(jnp.ones(32), format)


@pytest.mark.quick
@pytest.mark.parametrize("k", [8, 17, 24, 31, 40])
def test_nvfp4_wants_whole_blocks(k):
    for make in (lambda: abstract((2, 3, k), "nvfp4"), lambda: quantize(jnp.ones((2, 3, k)), "nvfp4")):
        with pytest.raises(ValueError, match=rf"has K = {k}; NVFP4 wants a multiple of 16"):
            make()


def test_unknown_names():
    for make in (lambda: abstract((2, 16), "int4"), lambda: quantize(jnp.ones((2, 16)), "int4")):
        with pytest.raises(
            ValueError, match="format is 'int4'; wanted one of fp8_tensor, fp8_channel, fp8_block, nvfp4"
        ):
            make()
    with pytest.raises(ValueError, match="granularity is 'row'; wanted one of tensor, channel, block"):
        fp8(np.zeros((2, 16)), 1.0, "row")


def test_either_a_format_or_scales():
    q, _ = example("fp8_tensor", (2, 3, 32))
    x = jnp.ones((2, 3, 32))
    for arguments in ({}, {"format": "nvfp4", "scales_of": q}):
        with pytest.raises(ValueError, match="wants either a format or scales_of"):
            quantize(x, **arguments)
    with pytest.raises(ValueError, match="outer_scale beside scales_of"):
        quantize(x, scales_of=q, outer_scale=q.scale)
    with pytest.raises(ValueError, match=r"x has shape \(2, 3, 16\), but scales_of \(2, 3, 32\)"):
        quantize(x[..., :16], scales_of=q)
    with pytest.raises(ValueError, match=r"scales_of\.scale is float32\[1\]; wanted"):
        quantize(x, scales_of=dataclasses.replace(q, scale=q.scale[:1]))


@pytest.mark.parametrize(
    "format, outer, message",
    [
        ("fp8_tensor", jnp.ones(3), r"outer_scale is float32\[3\]; .* wants float32\[2\]"),
        ("fp8_channel", jnp.ones(2), r"outer_scale is float32\[2\]; .* wants float32\[2, 3\]"),
        ("fp8_block", jnp.ones(2), r"outer_scale is float32\[2\]; .* wants none"),
        ("nvfp4", jnp.ones(2, jnp.bfloat16), r"outer_scale is bfloat16\[2\]; .* wants float32\[2\]"),
    ],
)
def test_outer_scales_that_do_not_fit(format, outer, message):
    with pytest.raises(ValueError, match=message):
        quantize(jnp.ones((2, 3, 32)), format, outer_scale=outer)


@pytest.mark.quick
@pytest.mark.parametrize(
    "x, seen",
    [
        (np.ones((2, 16)), "float64"),
        (np.ones((2, 16), np.int32), "int32"),
        (np.ones((2, 16), bool), "bool"),
        (jnp.ones((2, 16), jnp.float8_e4m3fn), "float8_e4m3fn"),
        ([[1.0] * 16], "list"),
    ],
)
def test_only_three_dtypes_are_quantised(x, seen):
    for arguments in ({"format": "nvfp4"}, {"scales_of": example("nvfp4", (2, 16))[0]}):
        with pytest.raises(ValueError, match=f"x is {seen}; wanted an array of bfloat16, float16 or float32"):
            quantize(x, **arguments)


def test_parts_of_other_floating_dtypes_are_refused_at_once():
    codes = jnp.zeros((2, 16), jnp.float8_e4m3fn)
    with pytest.raises(ValueError, match="scale of a Fp8Array is float16; wanted float32 or bfloat16"):
        Fp8Array(values=codes, scale=jnp.ones((), jnp.float16), granularity="tensor")
    with pytest.raises(ValueError, match="scale of a Nvfp4Array is float32; wanted float8_e4m3fn"):
        Nvfp4Array(packed=jnp.zeros((2, 8), jnp.uint8), scale=jnp.ones((2, 1)), global_scale=jnp.ones(()))
