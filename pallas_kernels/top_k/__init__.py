"""The experts of each token: the ids of its k largest scores.

Seats: `api` the public function; `reference` its meaning in plain jnp; `xla` the implementation that runs everywhere;
`mosaic` the one for Hopper, and `mosaic_kernel` its kernel.
"""

from pallas_kernels.top_k.api import IMPLEMENTATIONS, choose, top_k

__all__ = ["IMPLEMENTATIONS", "choose", "top_k"]
