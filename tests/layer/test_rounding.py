"""The one rounding recipe: which values are rounded to the activations' dtype, and that nothing else is."""

import numpy as np
import pytest
from bounds import bound
from layers import BOTH, block, mixer, random_tokens, random_weights


def rounded_by_the_recipe(h, weights, config, routing, *, is_block):
    """The layer in float64 with a rounding wherever the recipe has one, and with the layer's own routing."""
    dtype, squares = h.dtype, np.float32 if h.dtype == np.float16 else h.dtype
    w = {name: np.asarray(leaf).astype(np.float64) for name, leaf in weights.items().items()}

    def a(values, dtype=dtype):
        return values.astype(np.float32).astype(dtype).astype(np.float64)

    def relu2(acc):
        return a(np.maximum(acc, 0) ** 2, squares)

    h = h.astype(np.float64)
    n = h
    if is_block:
        n = a(h / np.sqrt((h**2).mean(1, keepdims=True) + config.layer_norm_epsilon) * w["norm"])
    z = a(n @ w["fc1_latent_proj"].T) if config.moe_latent_size else n
    r = np.zeros_like(z)
    for token, ids in enumerate(np.asarray(routing.ids)):
        for slot, expert in enumerate(ids):
            y = a(w["experts_down_proj"][expert] @ relu2(w["experts_up_proj"][expert] @ z[token]))
            r[token] += np.float64(routing.weights[token, slot]) * y
    r = a(r)
    if config.moe_latent_size:
        r = a(r @ w["fc2_latent_proj"].T)
    sh = a(relu2(n @ w["shared_experts_up_proj"].T) @ w["shared_experts_down_proj"].T)
    return (h + r + sh if is_block else r + sh).astype(np.float32).astype(dtype)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", BOTH)
def test_values_are_rounded_where_the_recipe_says(name, dtype):
    """Nearly all elements have the recipe's bits.

    float32 sums instead of float64 ones move a value over the edge between two roundings with a probability of about
    terms * eps32 / eps(dtype), below 1 in 100 with what follows from it. One rounding more or less, anywhere, changes a
    fifth of the elements or more: the square or the norm in bfloat16, expert outputs or the shared expert unrounded.
    """
    config = BOTH[name]
    weights, h = random_weights(config, dtype=dtype), random_tokens(config, 64, dtype=dtype)
    for layer in (block, mixer):
        out, aux = layer(h, weights, config=config, return_aux=True)
        wanted = rounded_by_the_recipe(np.asarray(h), weights, config, aux.routing, is_block=layer is block)
        out, wanted = (np.asarray(x).astype(np.float64) for x in (out, wanted))
        assert (out != wanted).mean() < 0.02
        assert np.abs(out - wanted).max() <= bound(dtype, config.hidden_size, np.abs(wanted).max(), roundings=2)
