"""The layer with quantised weights: every format, the activations' formats, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import FLOAT32_LAYER, bound, relative
from layers import BOTH, TINY_D, TINY_L, block, mixer, random_tokens, random_weights

import nemotron_moe as nm
from pallas_kernels.formats import FORMATS, Fp8Array, quantize, to_float64


@functools.cache
def quantised(name, format):
    weights = random_weights(BOTH[name])
    changed = {field: quantize(leaf, format) for field, leaf in weights.items().items() if leaf.ndim > 1}
    changed.pop("gate")
    return dataclasses.replace(weights, **changed)


def dequantised(weights):
    return dataclasses.replace(
        weights,
        **{field: leaf.dequantize() for field, leaf in weights.items().items() if hasattr(leaf, "dequantize")},
    )


# Every format by every implementation is in tests/kernels/test_grouped_matmul_formats.py.
ORACLE = [
    *(("latent", format, dtype, "xla") for format in FORMATS for dtype in ("float32", "bfloat16")),
    ("direct", "nvfp4", "float16", "xla"),
    ("direct", "fp8_block", "float32", "reference"),
]


@pytest.mark.parametrize("name, format, dtype, implementation", ORACLE)
def test_every_format_is_the_oracle_s_layer_R43(name, format, dtype, implementation):
    report = nm.self_check(quantised(name, format), BOTH[name], dtype=dtype, implementation=implementation)
    assert report.passed, report


@pytest.mark.parametrize("format", FORMATS)
def test_packed_and_dequantised_weights_give_the_same_gradient(format):
    config, packed = TINY_L, quantised("latent", format)
    h = random_tokens(config, 9)
    gradient = jax.jit(jax.grad(lambda h, w: jnp.sum(jnp.sin(nm.moe_block(h, w, config)))))
    assert relative(gradient(h, packed), gradient(h, dequantised(packed))) < FLOAT32_LAYER


def test_formats_mix_in_one_layer_C19():
    """Experts, shared expert and latents each in another format, as in Super's release."""
    weights, h = random_weights(TINY_L), random_tokens(TINY_L, 9)
    mixed = dataclasses.replace(
        weights,
        experts_up_proj=quantize(weights.experts_up_proj, "nvfp4"),
        experts_down_proj=quantize(weights.experts_down_proj, "fp8_channel"),
        shared_experts_up_proj=quantize(weights.shared_experts_up_proj, "fp8_tensor"),
        fc1_latent_proj=quantize(weights.fc1_latent_proj, "fp8_block"),
    )
    assert nm.self_check(mixed, TINY_L, h=h).passed
    with pytest.raises(ValueError, match=r"weights\.gate is fp8_tensor; it is kept unquantised"):
        nm.moe_block(h, dataclasses.replace(weights, gate=quantize(weights.gate, "fp8_tensor")), TINY_L)


@pytest.mark.parametrize("format", FORMATS)
def test_each_expert_has_its_own_scale_C10(format):
    """Scales are distinct powers of two; another expert's, or none, would name itself. The last is visited too."""
    config, weights = TINY_D, random_weights(TINY_D)
    steps = jnp.exp2(jnp.arange(config.n_routed_experts))[:, None, None]
    up, down = weights.experts_up_proj * steps, weights.experts_down_proj / steps**2
    up, down = quantize(up, format), quantize(down, format)
    z = random_tokens(config, 3)

    @jax.jit
    def run(expert, up, down):
        plan = nm.make_plan(jnp.full((3, 1), expert), config.n_routed_experts)
        return nm.routed_experts(z, jnp.ones((3, 1)), plan, up, down)

    for expert in range(config.n_routed_experts):
        out = run(expert, up, down)
        inner = np.maximum(np.asarray(z, np.float64) @ to_float64(up)[expert].T, 0) ** 2
        assert relative(out, inner @ to_float64(down)[expert].T) < FLOAT32_LAYER, expert


def test_permuted_experts_change_nothing_C10():
    config, weights = TINY_D, quantised("direct", "nvfp4")
    order = np.random.default_rng(3).permutation(config.n_routed_experts)
    permuted = dataclasses.replace(
        weights,
        gate=weights.gate[order],
        gate_bias=weights.gate_bias[order],
        **{name: jax.tree.map(lambda leaf: leaf[order], getattr(weights, name)) for name in
           ("experts_up_proj", "experts_down_proj")},
    )  # fmt: skip
    h = random_tokens(config, 9)
    # The slots are summed in another order.
    assert relative(block(h, permuted, config=config), block(h, weights, config=config)) < FLOAT32_LAYER


@pytest.mark.parametrize("name, format", [("direct", "fp8_block"), ("latent", "fp8_tensor"), ("latent", "nvfp4")])
def test_the_scaling_factor_is_applied_once_R08(name, format):
    """Every expert returns ones, so the routed part is the factor itself (behind fc2, which is the identity there)."""
    config = dataclasses.replace(BOTH[name], moe_latent_size=64 if BOTH[name].moe_latent_size else None)
    zero = jax.tree.map(jnp.zeros_like, nm.init_weights(jax.random.key(0), config, dtype=jnp.float32))
    up = jnp.zeros_like(zero.experts_up_proj).at[:, 0].set(1 / 8)  # 64 numbers of 1 make 8, and 64 squared
    down = jnp.zeros_like(zero.experts_down_proj).at[:, :, 0].set(1 / 64)
    latents = {"fc1_latent_proj": jnp.eye(64), "fc2_latent_proj": jnp.eye(64)} if config.moe_latent_size else {}
    weights = dataclasses.replace(zero, experts_up_proj=up, experts_down_proj=down, **latents)
    changed = {field: quantize(leaf, format) for field, leaf in weights.items().items() if leaf.ndim > 1}
    changed.pop("gate")
    out = mixer(jnp.ones((5, 64)), dataclasses.replace(weights, **changed), config=config)
    limit = bound(jnp.float32, 64 + config.num_experts_per_tok, config.routed_scaling_factor, roundings=4)
    np.testing.assert_allclose(out, config.routed_scaling_factor, rtol=0, atol=limit)


def test_the_layer_names_formats_in_what_it_explains():
    weights = nm.abstract_weights(TINY_D, formats={"experts_up_proj": "nvfp4", "experts_down_proj": "fp8_block"})
    shapes = [step.shapes for step in nm.explain(TINY_D, tokens=4, weights=weights).steps]
    assert any("nvfp4[8, 48, 64]" in one for one in shapes) and any("fp8_block[8, 64, 48]" in one for one in shapes)
    assert isinstance(weights.experts_down_proj, Fp8Array)
