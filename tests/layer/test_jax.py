"""The layer composes with what jax offers, and its programs hold what they promise."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import FLOAT32_LAYER, bound, relative
from layers import BOTH, TINY_D, TINY_L, block, random_tokens, random_weights

import nemotron_moe as nm


def loss_of(config, **keywords):
    return lambda h, weights: jnp.square(nm.moe_block(h, weights, config, **keywords)).sum()


@pytest.mark.quick
@pytest.mark.parametrize("name", BOTH)
def test_gradients_agree_with_the_oracle(name):
    """Central differences of the float64 oracle, with the experts' choice held, along random directions."""
    config = BOTH[name]
    weights, h = random_weights(config), random_tokens(config, 6)
    _, aux = block(h, weights, config=config, return_aux=True)
    ids = np.asarray(aux.routing.ids)
    dh, dweights = jax.jit(jax.grad(loss_of(config), (0, 1)))(h, weights)
    grads = {"h": dh, **dweights.items()}
    values = {"h": np.asarray(h, np.float64), **{k: np.asarray(v, np.float64) for k, v in weights.items().items()}}

    def loss(values):
        fields = {name: value for name, value in values.items() if name != "h"}
        out = nm.reference.moe_block(values["h"], nm.MoEWeights(**fields), config, ids=ids)["block_out"]
        return np.square(out).sum()

    rng = np.random.default_rng(0)
    for field, value in values.items():
        direction = rng.standard_normal(value.shape)
        step = 1e-6 * direction
        wanted = (loss({**values, field: value + step}) - loss({**values, field: value - step})) / 2e-6
        seen = (np.asarray(grads[field], np.float64) * direction).sum()
        size = np.linalg.norm(np.asarray(grads[field], np.float64)) * np.linalg.norm(direction)
        # A gradient is made of sums like the output's. The bias has none: both sides are exactly 0.
        assert abs(seen - wanted) <= FLOAT32_LAYER * size, field
    assert not np.asarray(dweights.gate_bias).any()


@pytest.mark.quick
def test_remat_and_scan_over_layers():
    """A stack of equal layers under scan and remat: the same values as a loop, gradients too."""
    layers = [random_weights(TINY_L, seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    h = random_tokens(TINY_L, 5)

    def scanned(h, stacked):
        body = jax.checkpoint(lambda h, weights: (nm.moe_block(h, weights, TINY_L), None))
        return jnp.square(jax.lax.scan(body, h, stacked)[0]).sum()

    def looped(h, stacked):
        for index in range(3):
            h = nm.moe_block(h, jax.tree.map(lambda leaf, index=index: leaf[index], stacked), TINY_L)
        return jnp.square(h).sum()

    seen = jax.jit(jax.value_and_grad(scanned, (0, 1)))(h, stacked)
    wanted = jax.jit(jax.value_and_grad(looped, (0, 1)))(h, stacked)
    for a, b in zip(jax.tree.leaves(seen), jax.tree.leaves(wanted), strict=True):
        assert relative(a, b) <= FLOAT32_LAYER


@pytest.mark.quick
@pytest.mark.parametrize("name", BOTH)
def test_vmap(name):
    config = BOTH[name]
    weights, h = random_weights(config), random_tokens(config, 3, 4)
    out = jax.jit(jax.vmap(lambda h: nm.moe_block(h, weights, config)))(h)
    wanted = block(h, weights, config=config)
    assert relative(out, wanted) <= FLOAT32_LAYER


def test_forward_mode_says_so():
    weights, h = random_weights(TINY_D), random_tokens(TINY_D, 3)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda h: nm.moe_block(h, weights, TINY_D), (h,), (h,))


@pytest.mark.quick
def test_shapes_and_compilation_need_no_data_R70():
    weights = nm.abstract_weights(TINY_L)
    h = jax.ShapeDtypeStruct((7, 64), jnp.bfloat16)
    out, aux = jax.eval_shape(lambda h, w: nm.moe_block(h, w, TINY_L, return_aux=True), h, weights)
    assert (out.shape, out.dtype) == ((7, 64), jnp.bfloat16)
    assert (aux.load.shape, aux.load.dtype) == ((16,), jnp.int32)
    compiled = jax.jit(nm.moe_block, static_argnums=2).lower(h, weights, TINY_L).compile()
    real = random_weights(TINY_L, dtype=jnp.bfloat16)
    tokens = random_tokens(TINY_L, 7, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(compiled(tokens, real), block(tokens, real, config=TINY_L))
    jaxpr = str(jax.make_jaxpr(jax.grad(loss_of(TINY_D), (0, 1)))(random_tokens(TINY_D, 3), random_weights(TINY_D)))
    assert "callback" not in jaxpr


def test_config_is_static_by_value():
    """A config made twice is the same static argument; another one compiles again."""
    step = jax.jit(lambda h, weights, config: nm.moe_block(h, weights, config), static_argnames="config")
    weights, h = random_weights(TINY_D), random_tokens(TINY_D, 3)
    for config in (TINY_D, nm.MoEConfig(**dataclasses.asdict(TINY_D))):
        step(h, weights, config=config)
    assert step._cache_size() == 1
    step(h, weights, config=dataclasses.replace(TINY_D, routed_scaling_factor=1.0))
    assert step._cache_size() == 2


@pytest.mark.quick
@pytest.mark.parametrize("name", BOTH)
def test_no_float_is_scattered_R65(name):
    """The plan scatters integers; no float, forward or backward, so the same call gives the same bits."""
    config = BOTH[name]
    weights, h = random_weights(config), random_tokens(config, 8)
    forward = jax.jit(lambda h, weights: nm.moe_block(h, weights, config))
    for program in (forward, jax.jit(jax.grad(loss_of(config), (0, 1)))):
        arguments = (h, weights)
        text = program.lower(*arguments).compile().as_text()
        assert "scatter(" in text
        assert not re.findall(r"= (?:f|bf)\d+\[.* scatter\(", text)
        first = program(*arguments)
        for _ in range(3):
            for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(program(*arguments)), strict=True):
                np.testing.assert_array_equal(a, b)


def test_nothing_is_carried_between_calls_C7_C23():
    """Pure: the same bits after calls on other data, NaN included."""
    weights, h = random_weights(TINY_L), random_tokens(TINY_L, 9)
    first = block(h, weights, config=TINY_L)
    block(jnp.full_like(h, jnp.nan), weights, config=TINY_L)
    block(1e3 * h, weights, config=TINY_L)
    np.testing.assert_array_equal(block(h, weights, config=TINY_L), first)


def test_aux_does_not_change_the_output_C48():
    weights, h = random_weights(TINY_L), random_tokens(TINY_L, 3, 5)
    out, aux = block(h, weights, config=TINY_L, return_aux=True)
    np.testing.assert_array_equal(block(h, weights, config=TINY_L), out)
    oracle = nm.reference.moe_block(h.reshape(15, -1), weights, TINY_L)
    np.testing.assert_array_equal(aux.load, oracle["load"])
    stats = jax.jit(nm.routing_stats, static_argnums=1)(aux.routing, TINY_L.n_routed_experts)
    np.testing.assert_array_equal(stats.load, aux.load)
    assert int(stats.load.sum()) == 15 * TINY_L.num_experts_per_tok
    # Sums over a token's weights and over all; each weight is a quotient times the factor.
    rel = bound(jnp.float32, 16 * TINY_L.num_experts_per_tok, 1.0, roundings=2)
    assert float(stats.weight_mass.sum()) == pytest.approx(15 * TINY_L.routed_scaling_factor, rel=rel)
    share = np.asarray(aux.load) / np.asarray(aux.load).sum()
    # A sum over experts of share, logarithm (exact to one eps, and divided by log 2) and their product.
    rel = bound(jnp.float32, TINY_L.n_routed_experts, 1.0, roundings=5)
    assert float(stats.entropy) == pytest.approx(-(share[share > 0] * np.log2(share[share > 0])).sum(), rel=rel)
    even = nm.Routing(ids=jnp.arange(16, dtype=jnp.int32)[:, None], weights=jnp.ones((16, 1)))
    assert float(nm.routing_stats(even, 16).entropy) == 4.0
    nobody = nm.Routing(ids=jnp.full((3, 2), -1, jnp.int32), weights=jnp.full((3, 2), jnp.nan))
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(nm.routing_stats(nobody, 16)))


def test_temporary_memory_does_not_grow_with_the_experts_R54():
    """Super's widths, 4096 tokens: below 4 times the rows' activations, nearly the same for 16 and 64 experts."""
    temporary = {}
    for experts in (16, 64):
        config = nm.MoEConfig(
            hidden_size=4096, moe_latent_size=1024, n_routed_experts=experts, num_experts_per_tok=16,
            moe_intermediate_size=2688, moe_shared_expert_intermediate_size=5376,
        )  # fmt: skip
        shapes = (jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16), nm.abstract_weights(config))
        grad = jax.grad(lambda h, w, config=config: nm.moe_block(h, w, config).astype(jnp.float32).sum(), (0, 1))
        for name, program in {"forward": lambda h, w, config=config: nm.moe_block(h, w, config), "grad": grad}.items():
            memory = jax.jit(program).lower(*shapes).compile().memory_analysis()
            temporary[name, experts] = memory.temp_size_in_bytes
            assert temporary[name, experts] < 4 * 4096 * 16 * (2688 + 2 * 1024) * 4, (name, experts)
    for name in ("forward", "grad"):
        assert temporary[name, 64] <= 1.2 * temporary[name, 16], temporary
