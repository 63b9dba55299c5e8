"""The one rounding recipe: which values are rounded to the activations' dtype, and that nothing else is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import bound
from layers import BOTH, block, mixer, random_tokens, random_weights

from nemotron_moe.dense import linear
from pallas_kernels.implementation import H200, Target, compiling_for

ROUNDED = ("n", "z", "act", "y", "r", "fc2", "shared act", "shared")
UNROUNDED = ("rms", "acc", "w", "sum of two slots", "shared acc", "r + shared")


def rounded_by_the_recipe(h, weights, config, routing, *, is_block, except_at=None):
    """The layer in float64 with a rounding wherever the recipe has one, and with the layer's own routing.

    At `except_at`, one of `ROUNDED` and `UNROUNDED`, it is the other way round.
    """
    dtype, squares = h.dtype, np.float32 if h.dtype == np.float16 else h.dtype
    w = {name: np.asarray(leaf).astype(np.float64) for name, leaf in weights.items().items()}

    def a(where, values, dtype=dtype):
        if (where in ROUNDED) == (where == except_at):
            return values
        return values.astype(np.float32).astype(dtype).astype(np.float64)

    def relu2(where, acc):
        return a(where, np.maximum(acc, 0) ** 2, squares)

    h = h.astype(np.float64)
    n = h
    if is_block:
        rms = a("rms", h / np.sqrt((h**2).mean(1, keepdims=True) + config.layer_norm_epsilon))
        n = a("n", rms * w["norm"])
    z = a("z", n @ w["fc1_latent_proj"].T) if config.moe_latent_size else n
    ids, chosen = np.asarray(routing.ids), a("w", np.asarray(routing.weights, np.float64))
    act = relu2("act", a("acc", np.einsum("ti,tkoi->tko", z, w["experts_up_proj"][ids])))
    y = chosen[:, :, None] * a("y", np.einsum("tki,tkoi->tko", act, w["experts_down_proj"][ids]))
    r = a("sum of two slots", y[:, :2].sum(1)) + y[:, 2:].sum(1)
    r = a("r", r)
    if config.moe_latent_size:
        r = a("fc2", r @ w["fc2_latent_proj"].T)
    act = relu2("shared act", a("shared acc", n @ w["shared_experts_up_proj"].T))
    sh = a("shared", act @ w["shared_experts_down_proj"].T)
    out = a("r + shared", r + sh)
    return (h + out if is_block else out).astype(np.float32).astype(dtype).astype(np.float64)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", BOTH)
def test_values_are_rounded_where_the_recipe_says(name, dtype):
    """More elements have the recipe's bits than those of any recipe with one rounding more or less.

    How many differ depends on the machine: its float32 sums move some values over the edge between two roundings, more
    of them where sums are coarser, as on tensor cores, and one such value of r moves others through fc2. A rounding
    more or less moves nearly all values in one place, by more.
    """
    config = BOTH[name]
    weights, h = random_weights(config, dtype=dtype), random_tokens(config, 64, dtype=dtype)
    # What only a latent layer has; and squares, which float16 keeps in float32.
    absent = set() if config.moe_latent_size else {"z", "fc2", "sum of two slots"}  # of its two slots r is the sum
    absent |= {"act", "shared act"} if dtype == "float16" else set()
    for layer in (block, mixer):
        out, aux = layer(h, weights, config=config, return_aux=True)
        of_block = {"rms", "n", "r + shared"} if layer is mixer else set()

        recipe = functools.partial(
            rounded_by_the_recipe, np.asarray(h), weights, config, aux.routing, is_block=layer is block
        )
        out, wanted = np.asarray(out).astype(np.float64), recipe()
        differ = (out != wanted).mean()
        others = {
            where: (out != recipe(except_at=where)).mean() for where in {*ROUNDED, *UNROUNDED} - absent - of_block
        }
        assert differ < min(others.values()), others
        assert np.abs(out - wanted).max() <= bound(dtype, config.hidden_size, np.abs(wanted).max(), roundings=2)


@pytest.mark.parametrize("target, stored", [(H200, "bf16"), (Target(kind="cpu", platform="cpu"), "f32")])
def test_a_gpus_projection_writes_no_sum_that_it_would_only_round(target, stored):
    x, weight = jnp.ones((4, 8), jnp.bfloat16), jnp.ones((6, 8), jnp.bfloat16)
    with compiling_for(target):
        for activation, wanted in ((None, stored), ("relu2", "f32")):
            program = jax.jit(functools.partial(linear, activation=activation)).lower(x, weight).as_text()
            product = next(line for line in program.splitlines() if "dot_general" in line)
            assert product.endswith(f"tensor<4x6x{wanted}>"), product
