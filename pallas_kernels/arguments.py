"""What the operations' public functions ask of their arguments alike."""

from typing import Any

import numpy as np

from pallas_kernels.formats import Quantised


def check_array(name: str, value: Any, axes: str) -> None:
    """`value` is an array of JAX or NumPy, or a quantised one, with these axes, such as "[M, K]".

    Raises:
      ValueError: if it is none, or has another number of axes.
    """
    if not (hasattr(value, "shape") and (hasattr(value, "dtype") or isinstance(value, Quantised))):
        raise ValueError(f"{name} is a {type(value).__name__}; wanted an array {axes}.")
    if len(value.shape) != len(axes.split(",")):
        raise ValueError(f"{name} has shape {value.shape}; wanted {axes}.")


def is_integer(value: Any) -> bool:
    """Whether `value` is an integer of Python or NumPy, known while tracing; True and False are none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
