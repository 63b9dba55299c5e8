"""What the parts of the layer must do at least: the bytes, the floating-point operations, and the floor they set."""

import dataclasses
from collections.abc import Mapping, Sequence

from nemotron_moe.config import MoEConfig

PARTS = ("up", "down", "plan", "routed", "block")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """Rows [m, k] bfloat16 times their matrices [n, k] bfloat16, each matrix, row and output read or written once.

    Attributes:
      matrices: how many different ones the rows meet.
      out_bytes: of one output element.
      squared: the rows are squares of relu, so that half of them is 0.
    """

    m: int
    n: int
    k: int
    matrices: float = 1
    out_bytes: int = 2
    squared: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """(m, n, k) of the dense product of the same size."""
        return self.m, self.n, self.k

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k

    @property
    def bytes(self) -> float:
        return 2.0 * (self.matrices * self.n * self.k + self.m * self.k) + self.out_bytes * self.m * self.n


def products(part: str, config: MoEConfig, tokens: int, hit: float) -> tuple[Product, ...]:
    """The products of a part; `hit` is how many experts have rows. "plan" has none."""
    rows, width, inner = tokens * config.num_experts_per_tok, config.expert_width, config.moe_intermediate_size
    up = Product(m=rows, n=inner, k=width, matrices=hit)
    down = Product(m=rows, n=width, k=inner, matrices=hit, squared=True)
    routed = {"up": (up,), "down": (down,), "plan": (), "routed": (up, down)}
    if part in routed:
        return routed[part]
    hidden = config.hidden_size
    dense = [Product(m=tokens, n=config.n_routed_experts, k=hidden, out_bytes=4)]  # the router's logits
    for size, squared in ((config.moe_latent_size, False), (config.moe_shared_expert_intermediate_size, True)):
        if size:
            dense += [Product(m=tokens, n=size, k=hidden), Product(m=tokens, n=hidden, k=size, squared=squared)]
    return *dense, up, down


def floor_us(work: Sequence[Product], dense_us: Mapping[tuple[int, int, int], float], read_tbps: float) -> float:
    """Microseconds that the products take at least, one after the other.

    Args:
      dense_us: microseconds of the dense product of each shape (m, n, k).
      read_tbps: terabytes a second that reading memory reaches.
    """
    return sum(max(one.bytes / (read_tbps * 1e6), dense_us[one.shape]) for one in work)
