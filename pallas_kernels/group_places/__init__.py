"""Places in groups: how many earlier entries have the same group as each one, and how large the groups are.

It is what a stable sort by group comes to: entry i goes to the first row of its group plus its place.

Seats: `api` the public function; `reference` its meaning in plain jnp; `sort` the implementation that runs everywhere;
`compare` the one for GPUs. None is a kernel of ours: XLA makes few and fast ones of the comparisons.
"""

from pallas_kernels.group_places.api import IMPLEMENTATIONS, choose, group_places

__all__ = ["IMPLEMENTATIONS", "choose", "group_places"]
