"""Grouped matrix multiplication: consecutive groups of rows, each times its own matrix.

Seats: `api` the public function and its gradient; `reference` its meaning in plain jnp; `xla` the implementation that
runs everywhere; `tile` the sizes of the blocks it works in.
"""

from pallas_kernels.grouped_matmul.api import IMPLEMENTATIONS, choose, grouped_matmul
from pallas_kernels.grouped_matmul.tile import Tile

__all__ = ["IMPLEMENTATIONS", "Tile", "choose", "grouped_matmul"]
