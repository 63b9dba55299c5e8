"""The public function: checks its arguments and chooses an implementation."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import check_array, is_integer
from pallas_kernels.group_places.compare import Compare
from pallas_kernels.group_places.reference import Reference
from pallas_kernels.group_places.sort import Sort
from pallas_kernels.implementation import Choice, Facts, select, target

IMPLEMENTATIONS = (Compare(), Sort(), Reference())  # in order of preference


def group_places(groups: jax.Array, n_groups: int, *, implementation: str | None = None) -> tuple[jax.Array, jax.Array]:
    """The place of each entry among those of its group, counted from 0 in their order, and the groups' sizes.

    Args:
      groups: [S] int32, the group of each entry, from 0 to `n_groups`; `n_groups` itself stands for none, and entries
        with it have places among each other.
      n_groups: an integer that is no traced one.
      implementation: a name in `IMPLEMENTATIONS`, or None for the first one that serves these arguments.

    Returns:
      places [S] and sizes [n_groups], int32.

    Raises:
      ValueError: naming the argument, what was seen and what was wanted.
    """
    check_array("groups", groups, "[S]")
    if groups.dtype != jnp.int32:
        raise ValueError(f"groups is {groups.dtype}; wanted int32.")
    if not is_integer(n_groups) or n_groups < 0:
        raise ValueError(f"n_groups is {n_groups!r}; wanted an integer from 0 on.")
    groups, n_groups = jnp.asarray(groups), int(n_groups)
    chosen = choose(groups, n_groups, implementation=implementation).implementation
    if 0 in (groups.shape[0], n_groups):
        return jnp.arange(groups.shape[0], dtype=jnp.int32), jnp.zeros(n_groups, jnp.int32)
    with jax.named_scope("group_places"):
        return chosen.places(groups, n_groups)


def choose(
    groups: jax.Array | jax.ShapeDtypeStruct, n_groups: int, *, implementation: str | None = None
) -> Choice[Any]:
    """Which implementation `group_places` uses for an array (or a ShapeDtypeStruct) like this, and why.

    Raises:
      ValueError: if `implementation` names none, or one that refuses these arguments.
    """
    sizes = {"entries": groups.shape[0], "groups": n_groups}
    facts = Facts(target=target(), dtypes={"groups": groups.dtype}, sizes=sizes)
    return select("group_places", IMPLEMENTATIONS, facts, implementation)
