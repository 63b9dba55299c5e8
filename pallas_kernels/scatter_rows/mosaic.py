"""The implementation for Hopper: what it serves, and how it cuts the work. The kernel is in `mosaic_kernel`."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from pallas_kernels.implementation import Facts, hopper_cores, no_hopper_kernels
from pallas_kernels.varying import vary_like

LANES = 128  # a row is a box of [D / LANES, LANES]; no side of a box may be longer than 256
WIDEST = 256 * LANES
MOST_NAMED = 64  # stores of a token; they are unrolled
SHARED_MEMORY = 233472  # bytes of a core; each CTA takes RESERVED more than its ring has
RESERVED = 2048
DTYPE = jnp.bfloat16


class Mosaic:
    """The Hopper kernel."""

    name = "mosaic"

    def refuses(self, facts: Facts) -> str | None:
        sizes = facts.sizes
        if (reason := no_hopper_kernels(facts.target)) is not None:
            return reason
        if facts.dtypes["x"] != DTYPE:
            return f"x is {jnp.dtype(facts.dtypes['x']).name}; it accepts bfloat16"
        if sizes["width"] % LANES or sizes["width"] > WIDEST:
            return f"D is {sizes['width']}; it accepts multiples of {LANES} up to {WIDEST}"
        if sizes["named"] > MOST_NAMED:
            return f"K is {sizes['named']}; it accepts up to {MOST_NAMED}"
        if sizes["tokens"] * sizes["named"] >= 2**31:
            return f"there are {sizes['tokens'] * sizes['named']} row numbers; it accepts fewer than 2^31"
        ring = default_ring(sizes["tokens"], sizes["width"], sizes["named"], cores=1)  # however many there are
        if ring.slots < 2:
            return f"a block of {ring.tokens} tokens of {sizes['width']} fills more than half of the shared memory"
        return None

    def scatter(self, x: jax.Array, rows: jax.Array, n_rows: int) -> jax.Array:
        # Imported where a kernel runs: elsewhere nobody waits for Pallas to load.
        from pallas_kernels.scatter_rows.mosaic_kernel import scatter

        ring = default_ring(x.shape[0], x.shape[1], rows.shape[1], hopper_cores())

        @sequential_vmap  # Pallas has no rule for a batch of kernels with barriers.
        def run(x: jax.Array, rows: jax.Array) -> jax.Array:
            return scatter(x, rows, n_rows, ring)

        return vary_like(run(x, rows), (x, rows))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring:
    """How the kernel cuts its work.

    Attributes:
      tokens: of a block, and so of a slot.
      slots: of each CTA's ring.
      ctas: how many there are.
    """

    tokens: int
    slots: int
    ctas: int

    def shared_memory(self, width: int, named: int) -> int:
        """Bytes of a CTA's ring."""
        return self.slots * (2 * self.tokens * width + 4 * pitch(self.tokens * named))


def default_ring(tokens: int, width: int, named: int, cores: int) -> Ring:
    """Up to four slots, and up to four CTAs a core, of as few tokens as have their row numbers at whole 16 bytes.

    The TMA unit cannot read at another address: it faults, and only when the kernel runs.
    """
    block = 4 // math.gcd(named, 4)
    slot = Ring(tokens=block, slots=1, ctas=1).shared_memory(width, named)
    slots = min(4, (SHARED_MEMORY - RESERVED) // slot)
    per_core = min(4, SHARED_MEMORY // (slots * slot + RESERVED)) if slots else 0
    return Ring(tokens=block, slots=slots, ctas=min(per_core * cores, -(-tokens // block)))


def pitch(numbers: int) -> int:
    """Row numbers from one slot to the next: the TMA unit writes to multiples of 128 bytes; elsewhere it faults."""
    return -(-numbers // 32) * 32
