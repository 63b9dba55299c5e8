"""Weights in other formats and layouts."""

import dataclasses
from collections.abc import Mapping

import jax
from jax import lax

from nemotron_moe.kernels import implementations, quantize
from nemotron_moe.weights import PLAIN, MoEWeights
from pallas_kernels.formats import FORMATS, Quantised


def quantize_weights(weights: MoEWeights, formats: Mapping[str, str]) -> MoEWeights:
    """The weights with some fields quantised, a matrix at a time.

    What it costs is `quantisation_error(new.experts_up_proj, weights.experts_up_proj)`.

    Args:
      formats: by field, one of "nvfp4", "fp8_tensor", "fp8_channel" and "fp8_block".

    Raises:
      ValueError: on an unknown field or format, a field that is never quantised, or one that is quantised already.
    """
    fields = weights.items()
    for name, format in formats.items():
        if name not in fields or name in PLAIN:
            wanted = [field for field in fields if field not in PLAIN]
            raise ValueError(f"formats names {name!r}; wanted some of {wanted}.")
        if isinstance(fields[name], Quantised):
            raise ValueError(f"weights.{name} is {fields[name].format} already; dequantise it first, with astype.")
        if format not in FORMATS:
            raise ValueError(f"formats asks for {name} in {format!r}; wanted one of {', '.join(FORMATS)}.")
    return dataclasses.replace(weights, **{name: _quantize(fields[name], format) for name, format in formats.items()})


@jax.jit(static_argnums=1)
def _quantize(array: jax.Array, format: str) -> Quantised:
    if array.ndim == 2:
        return quantize(array, format)
    # One after the other, because each passes through float32.
    return lax.map(lambda matrix: quantize(matrix, format), array)


def prepare(weights: MoEWeights, implementation: str | None = None) -> MoEWeights:
    """The weights laid out as an implementation wants them, with the same values.

    Every implementation there is reads the checkpoint's own layout, so these are the weights themselves.

    Args:
      implementation: as in `moe_block`.

    Raises:
      ValueError: on an unknown implementation.
    """
    if implementation is not None and implementation not in implementations():
        raise ValueError(f"implementation is {implementation!r}; wanted None or one of {', '.join(implementations())}.")
    return weights
