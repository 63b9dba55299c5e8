"""The implementation for Hopper: what it serves. The kernel is in `mosaic_kernel`."""

import jax
from jax.custom_batching import sequential_vmap

from pallas_kernels.implementation import Facts, no_hopper_kernels
from pallas_kernels.varying import vary_like

LANES = 32
BLOCK = 4  # tokens, one for each warp of a warpgroup
MOST_EXPERTS, MOST_TAKEN = 1024, 64
FEWEST_TOKENS = BLOCK  # with fewer, XLA's sort is estimated to be as fast


class Mosaic:
    """The Hopper kernel."""

    name = "mosaic"

    def refuses(self, facts: Facts) -> str | None:
        sizes = facts.sizes
        if (reason := no_hopper_kernels(facts.target)) is not None:
            return reason
        if sizes["experts"] % (4 * LANES) or sizes["experts"] > MOST_EXPERTS:
            return f"E is {sizes['experts']}; it accepts multiples of {4 * LANES} up to {MOST_EXPERTS}"
        if sizes["k"] > MOST_TAKEN:
            return f"k is {sizes['k']}; it accepts up to {MOST_TAKEN}"
        if 0 < sizes["tokens"] < FEWEST_TOKENS:
            return f"with T = {sizes['tokens']} XLA's sort is as fast; it accepts {FEWEST_TOKENS} tokens or more"
        return None

    def ids(self, scores: jax.Array, k: int) -> jax.Array:
        # Imported where a kernel runs: elsewhere nobody waits for Pallas to load.
        from pallas_kernels.top_k.mosaic_kernel import take

        @sequential_vmap  # Pallas has no rule for a batch of kernels with barriers.
        def run(scores: jax.Array) -> jax.Array:
            return take(scores, k)

        return vary_like(run(scores), scores)
