"""The weights of one MoE layer: a pytree named after the checkpoint, and its abstract twin."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from nemotron_moe.config import MoEConfig
from nemotron_moe.sharding import ShardingRules

# What weights and activations may be.
DTYPES = ("bfloat16", "float16", "float32")

# A jax.Array; in an abstract tree a jax.ShapeDtypeStruct; None where the layer has no such weight.
Leaf = Any

# The logical axes of every field, outermost first; `ShardingRules` maps them to a mesh.
LOGICAL_AXES: dict[str, tuple[str, ...]] = {
    "norm": ("hidden",),
    "gate": ("router_experts", "hidden"),
    "gate_bias": ("router_experts",),
    "fc1_latent_proj": ("latent", "hidden"),
    "fc2_latent_proj": ("hidden", "latent"),
    "experts_up_proj": ("experts", "expert_inner", "expert_width"),
    "experts_down_proj": ("experts", "expert_width", "expert_inner"),
    "shared_experts_up_proj": ("shared_inner", "hidden"),
    "shared_experts_down_proj": ("hidden", "shared_inner"),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEWeights:
    """Weights of one layer in the checkpoint's layout `[out, in]`; the experts are stacked in front.

    H hidden, L latent, D = L or H, E experts, I inside a routed expert, S inside the shared expert. Fields that a layer
    does not have are None. Computation is in the activations' dtype, whatever the weights' dtype is.

    Attributes:
      norm: [H], the RMS norm before the mixer.
      gate: [E, H], the router.
      gate_bias: [E] float32, added to the scores for choosing only (`gate.e_score_correction_bias`).
      fc1_latent_proj, fc2_latent_proj: [L, H] and [H, L], or None in a direct MoE.
      experts_up_proj, experts_down_proj: [E, I, D] and [E, D, I].
      shared_experts_up_proj, shared_experts_down_proj: [S, H] and [H, S], or None.
    """

    norm: Leaf
    gate: Leaf
    gate_bias: Leaf
    fc1_latent_proj: Leaf = None
    fc2_latent_proj: Leaf = None
    experts_up_proj: Leaf
    experts_down_proj: Leaf
    shared_experts_up_proj: Leaf = None
    shared_experts_down_proj: Leaf = None

    def items(self) -> dict[str, Any]:
        """The fields that are present, by name."""
        pairs = ((name, getattr(self, name)) for name in LOGICAL_AXES)
        return {name: value for name, value in pairs if value is not None}

    def astype(self, dtype: DTypeLike) -> Self:
        """All weights in `dtype`, but `gate_bias`, which stays float32, and `gate`, which is never narrowed.

        (A router in bfloat16 chooses other experts for about 1 in 100 tokens.)
        """
        return dataclasses.replace(
            self, **{name: value.astype(stored_dtype(name, value.dtype, dtype)) for name, value in self.items().items()}
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def __repr__(self) -> str:
        # Shapes and dtypes only: the generated one would print gigabytes.
        lines = (f"  {name}: {_short(value)}" for name, value in self.items().items())
        return "MoEWeights(\n" + "\n".join(lines) + "\n)"


def stored_dtype(name: str, dtype: DTypeLike, wanted: DTypeLike | None) -> jnp.dtype:
    """The dtype of field `name` when a caller wants `wanted` (None: as it is) for an array of `dtype`."""
    dtype = jnp.dtype(dtype)
    if wanted is None or name == "gate_bias":
        return dtype
    wanted = jnp.dtype(wanted)
    return dtype if name == "gate" and wanted.itemsize < dtype.itemsize else wanted


def abstract_weights(
    config: MoEConfig,
    *,
    formats: Mapping[str, DTypeLike] | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    rules: ShardingRules | None = None,
) -> MoEWeights:
    """The layer's weights as `jax.ShapeDtypeStruct`s: the one source of names, shapes, dtypes and shardings.

    Args:
      config: the layer.
      formats: dtype by field name; bfloat16 where it is silent. `gate_bias` is always float32.
      mesh: if given, each leaf carries its NamedSharding on it.
      rules: how logical axes map to the mesh's axes; None leaves every leaf whole on every device.

    Raises:
      ValueError: on an unknown field in `formats`, `rules` without `mesh`, or sizes that the mesh does not divide.
    """
    formats = dict(formats or {})
    shapes = _shapes(config)
    if unknown := sorted(set(formats) - set(shapes)):
        raise ValueError(f"formats names {unknown}, which this layer does not have; it has {list(shapes)}.")
    for name, dtype in formats.items():
        if jnp.dtype(dtype).name not in DTYPES:
            raise ValueError(f"formats asks for {name} in {jnp.dtype(dtype)}; wanted one of {', '.join(DTYPES)}.")
    if jnp.dtype(formats.setdefault("gate_bias", jnp.float32)) != jnp.float32:
        raise ValueError(f"formats asks for gate_bias in {jnp.dtype(formats['gate_bias'])}; it is always float32.")
    if rules is not None and mesh is None:
        raise ValueError("rules is given without mesh; pass the mesh whose axes the rules name.")

    def leaf(name: str, shape: tuple[int, ...]) -> Any:
        sharding = None
        if mesh is not None:
            sharding = (rules or ShardingRules()).sharding(mesh, LOGICAL_AXES[name], shape, name)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(formats.get(name, jnp.bfloat16)), sharding=sharding)

    return MoEWeights(**{name: leaf(name, shape) for name, shape in shapes.items()})


def init_weights(
    key: jax.Array,
    config: MoEConfig,
    *,
    dtype: DTypeLike,
    mesh: Mesh | None = None,
    rules: ShardingRules | None = None,
) -> MoEWeights:
    """Random weights that keep activations of order 1: normal with variance 1 / in, norm ones, gate bias zeros.

    Args:
      key: a `jax.random` key. The values do not depend on `mesh`.
      config: the layer.
      dtype: of every leaf but `gate_bias`, which is float32.
      mesh, rules: where each leaf goes, as in `abstract_weights`.
    """
    formats = {name: dtype for name in _shapes(config) if name != "gate_bias"}
    abstract = abstract_weights(config, formats=formats, mesh=mesh, rules=rules)
    shardings = None if mesh is None else jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(_draw, static_argnums=(1, 2), out_shardings=shardings)(key, config, jnp.dtype(dtype))


def _draw(key: jax.Array, config: MoEConfig, dtype: jnp.dtype) -> MoEWeights:
    leaves = {}
    for index, (name, shape) in enumerate(_shapes(config).items()):
        if name == "norm":
            leaves[name] = jnp.ones(shape, dtype)
        elif name == "gate_bias":
            leaves[name] = jnp.zeros(shape, jnp.float32)
        else:
            draw = jax.random.normal(jax.random.fold_in(key, index), shape, dtype)
            leaves[name] = draw * jnp.asarray(shape[-1] ** -0.5, dtype)
    return MoEWeights(**leaves)


def _shapes(config: MoEConfig) -> dict[str, tuple[int, ...]]:
    sizes = {
        "hidden": config.hidden_size,
        "router_experts": config.n_routed_experts,
        "latent": config.moe_latent_size,
        "experts": config.n_routed_experts,
        "expert_inner": config.moe_intermediate_size,
        "expert_width": config.expert_width,
        "shared_inner": config.moe_shared_expert_intermediate_size,
    }
    shapes = {name: tuple(sizes[axis] for axis in axes) for name, axes in LOGICAL_AXES.items()}
    return {name: shape for name, shape in shapes.items() if None not in shape}  # type: ignore[misc]


def _short(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if hasattr(value, "shape") else repr(value)
