"""The one door to the operations of `pallas_kernels`: which of them the layer computes with."""

from pallas_kernels.formats import quantize
from pallas_kernels.group_places import group_places
from pallas_kernels.grouped_matmul import IMPLEMENTATIONS, Pieces, cut_for_kernels, grouped_matmul
from pallas_kernels.grouped_matmul import choose as choose_product
from pallas_kernels.grouped_matmul import preferred_alignment as row_alignment
from pallas_kernels.implementation import target
from pallas_kernels.scatter_rows import scatter_rows
from pallas_kernels.sums import count_up_to, sums_before
from pallas_kernels.top_k import top_k

__all__ = [
    "Pieces",
    "choose_product",
    "count_up_to",
    "cut_for_kernels",
    "group_places",
    "grouped_matmul",
    "implementations",
    "quantize",
    "row_alignment",
    "scatter_rows",
    "steps_around",
    "sums_before",
    "target",
    "top_k",
]


def steps_around(implementation: str | None) -> str | None:
    """What the layer's `implementation`, which names one of the grouped products, means for the steps around them.

    They have no kernel for all that the products' kernels take, so "mosaic" leaves the choice to them.

    Raises:
      ValueError: if it is no such name.
    """
    if implementation not in (None, *implementations()):
        raise ValueError(f"implementation is {implementation!r}; wanted None or one of {implementations()}.")
    return None if implementation == "mosaic" else implementation


def implementations() -> list[str]:
    """The names that the layer's `implementation` may have."""
    return [row.name for row in IMPLEMENTATIONS]
