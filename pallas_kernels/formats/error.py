"""How far quantised numbers are from the original ones."""

import dataclasses
import math
from typing import Any

import numpy as np

from pallas_kernels.formats.reference import to_float64


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantisationError:
    """Differences are quantised less original numbers.

    Attributes:
      relative: norm of the differences over norm of the original; 0 where all is zero.
      cosine: of the angle between both, 1 where both are zero.
      largest: largest magnitude of a difference.
      bias: mean of the differences over mean magnitude of the original; about 0 where rounding is fair.
      shrinkage: the same with each number counted away from zero; negative where numbers became smaller, as those do
        that are cut off at the largest code.
    """

    relative: float
    cosine: float
    largest: float
    bias: float
    shrinkage: float


def quantisation_error(seen: Any, wanted: Any) -> QuantisationError:
    """Compares an array [*lead, N, K], quantised or not, with the original, in float64, a matrix at a time.

    Raises:
      ValueError: if their shapes differ.
    """
    if tuple(seen.shape) != tuple(wanted.shape):
        raise ValueError(f"seen has shape {tuple(seen.shape)}, but wanted {tuple(wanted.shape)}; they must agree.")
    sums, largest = np.zeros(7), 0.0
    for index in np.ndindex(*seen.shape[:-2]):
        a, b = to_float64(seen[index]), to_float64(wanted[index])
        d = a - b
        sums += [np.sum(one) for one in (d * d, a * a, b * b, a * b, d, d * np.sign(b), np.abs(b))]
        largest = float(np.maximum(largest, np.abs(d).max(initial=0.0)))  # NaN stays, which max() may drop.
    differences, seen_squares, squares, product, signed, outward, size = map(float, sums)

    def ratio(a: float, b: float) -> float:
        return a / b if b else 0.0 if not a else math.inf

    norms = math.sqrt(seen_squares) * math.sqrt(squares)
    return QuantisationError(
        relative=ratio(math.sqrt(differences), math.sqrt(squares)),
        cosine=product / norms if norms else float(not differences),
        largest=largest,
        bias=ratio(signed, size),
        shrinkage=ratio(outward, size),
    )
