"""Which logical axis of the weights is split over which axis of the caller's mesh."""

import dataclasses
import math

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

MeshAxes = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingRules:
    """Maps logical axes to mesh axes; None leaves an axis whole on every device.

    The router and the latent projections are small and always whole.

    Attributes:
      experts: the stacked routed experts (expert parallelism).
      expert_inner: the width I inside the routed experts (tensor parallelism).
      shared_inner: the width S inside the shared expert (tensor parallelism).

    A value is a mesh axis name, a tuple of them (major first), or None.

    Raises:
      ValueError: if a mesh axis is named twice where one array would need it twice.
    """

    experts: MeshAxes = None
    expert_inner: MeshAxes = None
    shared_inner: MeshAxes = None

    def __post_init__(self) -> None:
        # The logical axes that meet in one array.
        for used in ((*_names(self.experts), *_names(self.expert_inner)), _names(self.shared_inner)):
            if twice := [name for name in used if used.count(name) > 1]:
                raise ValueError(
                    f"ShardingRules uses mesh axis {twice[0]!r} twice for one array: {self}. An array can be split "
                    "over a mesh axis only once."
                )

    def spec(self, logical_axes: tuple[str, ...]) -> PartitionSpec:
        """The PartitionSpec of an array with these logical axes."""
        return PartitionSpec(*(getattr(self, axis, None) for axis in logical_axes))

    def sharding(
        self, mesh: Mesh | AbstractMesh, logical_axes: tuple[str, ...], shape: tuple[int, ...], name: str
    ) -> NamedSharding:
        """The NamedSharding of one array.

        Raises:
          ValueError: on a mesh axis that `mesh` lacks, or a size that its mesh axes do not divide; `name` says whose.
        """
        spec = self.spec(logical_axes)
        for size, logical, axes in zip(shape, logical_axes, spec, strict=True):
            for axis in _names(axes):
                if axis not in mesh.shape:
                    raise ValueError(
                        f"ShardingRules.{logical} names mesh axis {axis!r}, but the mesh has {tuple(mesh.shape)}."
                    )
            parts = math.prod(mesh.shape[axis] for axis in _names(axes))
            if size % parts:
                raise ValueError(
                    f"{name} has {size} along its axis {logical!r}, which does not divide over the {parts} devices of "
                    f"mesh axis {axes!r}; choose a mesh axis whose size divides {size}."
                )
        return NamedSharding(mesh, spec)


def _names(axes: MeshAxes) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
