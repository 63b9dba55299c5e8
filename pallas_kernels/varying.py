"""Inside `jax.shard_map`: the mesh axes along which arrays differ from device to device."""

from typing import Any

import jax
from jax import lax


def varying_axes(arrays: Any) -> frozenset[str]:
    """Those of any leaf of a tree of arrays."""
    return frozenset[str]().union(*(jax.typeof(array).manual_axis_type.varying for array in jax.tree.leaves(arrays)))


def vary_like[Tree](arrays: Tree, others: Any) -> Tree:
    """The same arrays, which from here on differ along the axes of any leaf of `others` too.

    A kernel's result has to be told that: jax takes it for equal on all devices.
    """
    axes = varying_axes(others)
    return jax.tree.map(lambda array: lax.pcast(array, tuple(axes - varying_axes(array)), to="varying"), arrays)
