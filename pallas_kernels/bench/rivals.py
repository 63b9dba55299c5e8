"""What other libraries offer for the same work. None is a dependency: each is looked for when it is wanted."""

import dataclasses
import importlib
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp


class NotPresentError(RuntimeError):
    """A rival that cannot run here, and why."""


def find(name: str) -> ModuleType:
    """The module.

    Raises:
      NotPresentError: if it cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except Exception as error:  # What a foreign library raises while it is imported is its own affair.
        raise NotPresentError(f"{type(error).__name__}: {error}"[:200]) from error


def find_torch() -> ModuleType:
    """torch, if it computes where jax does.

    Raises:
      NotPresentError: if there is none, or it does not see jax's GPU.
    """
    torch = find("torch")
    if jax.default_backend() == "gpu" and not torch.cuda.is_available():
        raise NotPresentError(f"torch {torch.__version__} sees no GPU")
    return torch


def to_torch(torch: ModuleType, array: jax.Array) -> Any:
    """The same memory as a tensor."""
    return torch.from_dlpack(jax.block_until_ready(array))


def to_jax(tensor: Any) -> jax.Array:
    """The same memory as an array, once torch has written it."""
    if tensor.is_cuda:
        find("torch").cuda.synchronize()
    return jax.dlpack.from_dlpack(tensor.detach().contiguous())


@dataclasses.dataclass(frozen=True)
class TorchRouting:
    """What `TorchExperts.routed` needs besides tokens and weights.

    Attributes:
      slot_of_row: [T K] int64, the place in the flattened [T, K] of each row, rows sorted by expert.
      row_of_slot: [T K] int64, the inverse.
      offsets: [E] int32, the row after the last of each expert.
    """

    slot_of_row: Any
    row_of_slot: Any
    offsets: Any

    @classmethod
    def of(cls, torch: ModuleType, ids: jax.Array, experts: int) -> "TorchRouting":
        """From the chosen experts ids [T, K]."""
        flat = to_torch(torch, ids).reshape(-1).long()
        slot_of_row = torch.argsort(flat, stable=True)
        offsets = torch.cumsum(torch.bincount(flat, minlength=experts), 0, dtype=torch.int32)
        return cls(slot_of_row, torch.argsort(slot_of_row), offsets)


class TorchExperts:
    """Routed experts by torch's `grouped_mm`, step by step as Hugging Face's `grouped_mm` experts do it.

    Args:
      up_proj, down_proj: [E, I, D] and [E, D, I] bfloat16, whose memory it shares.

    Raises:
      NotPresentError: if torch or its `grouped_mm` is not there.
    """

    def __init__(self, up_proj: jax.Array, down_proj: jax.Array) -> None:
        self.torch = torch = find_torch()
        product = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
        if product is None:
            raise NotPresentError(f"torch {torch.__version__} has no grouped_mm")
        self._product: Any = product
        self._up_proj, self._down_proj = (to_torch(torch, w).transpose(1, 2) for w in (up_proj, down_proj))

    def up(self, rows: Any, offsets: Any) -> Any:
        """relu(rows [M, D] @ up^T)^2 -> [M, I]."""
        return self.torch.relu(self._product(rows, self._up_proj, offs=offsets)).square()

    def down(self, rows: Any, offsets: Any) -> Any:
        """rows [M, I] @ down^T -> [M, D]."""
        return self._product(rows, self._down_proj, offs=offsets)

    def routed(self, x: Any, weights: Any, routing: TorchRouting) -> Any:
        """x [T, D] and weights [T, K] float32 -> [T, D]: gather, up, down, weighted sum over a token's slots."""
        tokens, slots = weights.shape
        rows = x.index_select(0, routing.slot_of_row // slots)
        out = self.down(self.up(rows, routing.offsets), routing.offsets)
        out = out * weights.reshape(-1)[routing.slot_of_row].unsqueeze(-1)
        return out.index_select(0, routing.row_of_slot).view(tokens, slots, -1).sum(1).to(x.dtype)


def tokamax_product(rhs: jax.Array, activation: str | None) -> Any:
    """A function of (lhs [M, K], group_sizes) by tokamax's `ragged_dot` in its default configuration.

    It wants its matrices the other way round: `rhs` [G, N, K] is copied to [G, K, N], not in the time measured.

    Raises:
      NotPresentError: if tokamax is not there.
    """
    ragged_dot = find("tokamax").ragged_dot
    turned = jnp.swapaxes(rhs, 1, 2)

    def product(lhs: jax.Array, sizes: jax.Array, matrices: jax.Array) -> jax.Array:
        out = ragged_dot(lhs, matrices, sizes, preferred_element_type=jnp.float32)
        if activation == "relu2":
            out = jnp.square(jax.nn.relu(out))
        return out.astype(lhs.dtype)

    jitted = jax.jit(product)
    return lambda lhs, sizes: jitted(lhs, sizes, turned)
