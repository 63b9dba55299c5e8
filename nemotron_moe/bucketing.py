"""Padding the number of tokens to few sizes, because `jax.jit` compiles again for each new shape."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def bucket_size(tokens: int) -> int:
    """The smallest power of two that holds `tokens` (1 for none): 64 lengths share 7 sizes."""
    return 1 << max(tokens - 1, 0).bit_length()


def pad_to_bucket(h: Any) -> tuple[Any, Any]:
    """Pads the tokens of h [..., T, H] with zeros to `bucket_size(T)`, outside of jit.

        padded, token_mask = pad_to_bucket(h)
        out = step(padded, weights, token_mask=token_mask)[..., : h.shape[-2], :]

    A NumPy array stays one, so that nothing is compiled for its length; a JAX array is padded by a small program that
    is compiled once for each length.

    Returns:
      The padded array, and the bool mask [..., bucket] that is True for the tokens of h.
    """
    if np.ndim(h) < 2:
        raise ValueError(f"h has shape {np.shape(h)}; wanted [..., tokens, hidden].")
    tokens = h.shape[-2]
    extra = bucket_size(tokens) - tokens
    pad = jnp.pad if isinstance(h, jax.Array) else np.pad
    padded = pad(h, [(0, 0)] * (h.ndim - 2) + [(0, extra), (0, 0)])
    return padded, np.broadcast_to(np.arange(tokens + extra) < tokens, padded.shape[:-1])
