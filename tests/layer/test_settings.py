"""The layer under jax's settings and inside other programs: 64-bit types, shard_map, a derivative of its derivative."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import bound
from jax.sharding import PartitionSpec
from layers import BOTH, TINY_D, TINY_L, block, random_tokens, random_weights

import nemotron_moe as nm
from pallas_kernels.grouped_matmul import grouped_matmul


@pytest.mark.parametrize("name", BOTH)
def test_64_bit_types_change_nothing(name):
    config = BOTH[name]
    weights, h = random_weights(config), random_tokens(config, 6)

    def both(h, weights):
        loss = lambda h, w: jnp.square(nm.moe_block(h, w, config)).sum()  # noqa: E731
        return nm.moe_block(h, weights, config, return_aux=True), jax.grad(loss, (0, 1))(h, weights)

    wanted = jax.jit(both)(h, weights)
    with jax.enable_x64(True):
        seen = jax.jit(both)(h, weights)
    for a, b in zip(jax.tree.leaves(seen), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.quick
@pytest.mark.parametrize("name", BOTH)
def test_tokens_may_vary_over_a_mesh_axis_of_shard_map(name):
    """check_vma is on: each device computes its own tokens with whole weights, whose gradient jax sums."""
    config, devices = BOTH[name], min(4, jax.device_count())
    weights, h = random_weights(config), random_tokens(config, 3 * devices)
    mesh = jax.make_mesh((devices,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    tokens = PartitionSpec("d")
    mapped = jax.shard_map(
        lambda h, weights: nm.moe_block(h, weights, config),
        mesh=mesh,
        in_specs=(tokens, PartitionSpec()),
        out_specs=tokens,
    )
    wanted = block(h, weights, config=config)
    np.testing.assert_allclose(
        jax.jit(mapped)(h, weights), wanted, atol=bound(jnp.float32, config.hidden_size, float(jnp.abs(wanted).max()))
    )
    grads = [
        jax.jit(jax.grad(lambda h, w, f=f: f(h, w).sum(), (0, 1)))(h, weights)
        for f in (mapped, lambda h, w: nm.moe_block(h, w, config))
    ]
    for a, b in zip(*map(jax.tree.leaves, grads), strict=True):
        size = float(jnp.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=0, atol=bound(jnp.float32, config.hidden_size, size, roundings=8))


def test_second_derivative_of_relu2_is_finite_and_right():
    """sum(relu(x @ w)^2 @ 1): the slope's slope is 2 w w^T where x @ w is positive, and 0 elsewhere."""
    x, w = jnp.asarray([[1.0, 2.0], [-1.0, -3.0]]), jnp.ones((1, 1, 2))
    loss = lambda x: grouped_matmul(  # noqa: E731
        x, w, jnp.asarray([2]), activation="relu2", implementation="reference"
    ).sum()
    seen = jax.grad(lambda x: jnp.square(jax.grad(loss)(x)).sum())(x)
    # d loss / dx = 2 (x1 + x2) for each of both; its square sums to 8 s^2, whose derivative is 16 s.
    np.testing.assert_allclose(seen, [[48.0, 48.0], [0.0, 0.0]], rtol=bound(jnp.float32, 4, 1.0, roundings=8))


def test_64_bit_ids_and_sizes_do_not_wrap_R63():
    """NumPy's, which jax would cut to 32 bits: 2^33 is no expert, and a size of 2^32 is more than all rows."""
    ids = np.asarray([[2**33, 1], [2**32 + 1, -(2**33)]], np.int64)
    assert np.asarray(nm.make_plan(ids, 8).group_sizes).tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    lhs, rhs = jnp.ones((4, 3)), jnp.stack([jnp.full((2, 3), 1.0), jnp.full((2, 3), 2.0)])
    for size, dtype in ((2**32, np.int64), (2**33 + 4, np.int64), (2**63, np.uint64)):
        out = grouped_matmul(lhs, rhs, np.asarray([size, 2], dtype))
        np.testing.assert_array_equal(out, jnp.full((4, 2), 3.0))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_self_check_fails_where_the_bias_is_not_finite(value):
    weights = random_weights(TINY_L)
    broken = dataclasses.replace(weights, gate_bias=weights.gate_bias.at[3].set(value))
    report = nm.self_check(broken, TINY_L)
    assert report.passed == (report.same_experts == 1.0)


def test_no_epsilon_that_float32_takes_for_zero():
    with pytest.raises(ValueError, match="layer_norm_epsilon is 1e-60; wanted a positive number that float32 holds"):
        dataclasses.replace(TINY_D, layer_norm_epsilon=1e-60)
    with pytest.raises(ValueError, match="routed_scaling_factor is 1000"):
        dataclasses.replace(TINY_D, routed_scaling_factor=10**400)
