"""Grouped matrix multiplication: consecutive groups of rows, each times its own matrix.

Seats: `api` the public function and its gradient; `reference` its meaning in plain jnp; `xla` the implementation that
runs everywhere, with `matrices`, which reads quantised ones; `mosaic` the one for Hopper GPUs, with its kernel and the
cutting of groups into pieces; `tile` the sizes of the blocks that they work in.
"""

from pallas_kernels.grouped_matmul.api import (
    IMPLEMENTATIONS,
    choose,
    cut_for_kernels,
    grouped_matmul,
    preferred_alignment,
)
from pallas_kernels.grouped_matmul.matrices import format_of
from pallas_kernels.grouped_matmul.pieces import Pieces
from pallas_kernels.grouped_matmul.tile import Tile, TileConfig

__all__ = [
    "IMPLEMENTATIONS",
    "Pieces",
    "Tile",
    "TileConfig",
    "choose",
    "cut_for_kernels",
    "format_of",
    "grouped_matmul",
    "preferred_alignment",
]
