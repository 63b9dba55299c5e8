"""Scattering rows: each token's row is written to the rows of the output that the token names.

Seats: `api` the public function; `reference` its meaning in plain jnp; `xla` the implementation that runs everywhere;
`mosaic` the one for Hopper, and `mosaic_kernel` its kernel.
"""

from pallas_kernels.scatter_rows.api import IMPLEMENTATIONS, choose, scatter_rows

__all__ = ["IMPLEMENTATIONS", "choose", "scatter_rows"]
