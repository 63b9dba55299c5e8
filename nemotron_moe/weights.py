"""The weights of one MoE layer: a pytree named after the checkpoint, and its abstract twin."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.typing import DTypeLike

from nemotron_moe.config import MoEConfig
from nemotron_moe.sharding import ShardingRules
from pallas_kernels.formats import FORMATS, Quantised, abstract

# What weights and activations may be.
DTYPES = ("bfloat16", "float16", "float32")

# The fields that are never quantised: the router chooses, and vectors are too small for it to be worth it.
PLAIN = ("norm", "gate", "gate_bias")

# How a field is stored: a dtype, the name of a quantised format ("nvfp4"), or an abstract array of such a format.
Format = DTypeLike | Quantised

# A jax.Array or a quantised array; in an abstract tree with jax.ShapeDtypeStructs; None where the layer has no such
# weight.
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
    does not have are None. Computation is in the activations' dtype, whatever the weights' dtype is. Every matrix but
    `gate` may be a quantised array (`Fp8Array`, `Nvfp4Array` of `pallas_kernels.formats`) of the same shape.

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

        (A router in bfloat16 chooses other experts for about 1 in 100 tokens.) Quantised weights are dequantised.
        """

        def cast(name: str, value: Leaf) -> Leaf:
            if isinstance(value, Quantised):
                return dequantized(value, dtype)
            return value.astype(stored_format(name, value.dtype, dtype))

        return dataclasses.replace(self, **{name: cast(name, value) for name, value in self.items().items()})

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def __repr__(self) -> str:
        # Shapes and dtypes only: the generated one would print gigabytes.
        lines = (f"  {name}: {_short(value)}" for name, value in self.items().items())
        return "MoEWeights(\n" + "\n".join(lines) + "\n)"


def dequantized(array: Quantised, dtype: DTypeLike, sharding: NamedSharding | None = None) -> jax.Array:
    """`array.dequantize(dtype)` as one program, which takes no memory but that of the result.

    Args:
      sharding: of the result; None leaves it to the compiler, which keeps the array's own.
    """
    return jax.jit(Quantised.dequantize, static_argnums=1, out_shardings=sharding)(array, jnp.dtype(dtype))


def stored_format(name: str, stored: Format, wanted: DTypeLike | None) -> Format:
    """The dtype or quantised format of field `name` when a caller wants dtype `wanted` (None: as it is stored)."""
    if isinstance(stored, Quantised):
        return stored if wanted is None else jnp.dtype(wanted)
    dtype = jnp.dtype(stored)
    if wanted is None or name == "gate_bias":
        return dtype
    wanted = jnp.dtype(wanted)
    return dtype if name == "gate" and wanted.itemsize < dtype.itemsize else wanted


def abstract_weights(
    config: MoEConfig,
    *,
    formats: Mapping[str, Format] | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    rules: ShardingRules | None = None,
) -> MoEWeights:
    """The layer's weights as `jax.ShapeDtypeStruct`s: the one source of names, shapes, dtypes and shardings.

    Args:
      config: the layer.
      formats: by field name a dtype, a quantised format ("fp8_tensor", "fp8_channel", "fp8_block", "nvfp4"), or an
        abstract quantised array of the field's shape; bfloat16 where it is silent. `gate_bias` is always float32, and
        `norm` and `gate` are never quantised.
      mesh: if given, each leaf carries its NamedSharding on it.
      rules: how logical axes map to the mesh's axes; None leaves every leaf whole on every device.

    Raises:
      ValueError: on an unknown field in `formats`, or a format that does not fit it, `rules` without `mesh`, or sizes
        that the mesh does not divide or where it would cut the blocks of a quantised format.
    """
    formats = dict(formats or {})
    shapes = _shapes(config)
    if unknown := sorted(set(formats) - set(shapes)):
        raise ValueError(f"formats names {unknown}, which this layer does not have; it has {list(shapes)}.")
    formats = {name: _format(name, shape, formats.get(name)) for name, shape in shapes.items()}
    if rules is not None and mesh is None:
        raise ValueError("rules is given without mesh; pass the mesh whose axes the rules name.")

    def leaf(name: str, shape: tuple[int, ...]) -> Any:
        stored, sharding = formats[name], None
        if mesh is not None:
            sharding = (rules or ShardingRules()).sharding(mesh, LOGICAL_AXES[name], shape, name)
        if isinstance(stored, Quantised):
            return stored if sharding is None else stored.placed(sharding, name)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(stored), sharding=sharding)

    return MoEWeights(**{name: leaf(name, shape) for name, shape in shapes.items()})


def _format(name: str, shape: tuple[int, ...], asked: Format | None) -> jnp.dtype | Quantised:
    """The format that `abstract_weights` is asked for, checked."""
    if asked is None:
        return jnp.dtype(jnp.float32 if name == "gate_bias" else jnp.bfloat16)
    if isinstance(asked, Quantised) or (isinstance(asked, str) and asked in FORMATS):
        return _quantised(name, shape, asked)
    known = f"{', '.join(DTYPES)}, {', '.join(FORMATS)}, or an abstract quantised array"
    try:
        dtype = jnp.dtype(asked)
    except TypeError:
        raise ValueError(f"formats asks for {name} in {asked!r}; wanted one of {known}.") from None
    if dtype.name not in DTYPES:
        raise ValueError(f"formats asks for {name} in {dtype}; wanted one of {known}.")
    if name == "gate_bias" and dtype != jnp.float32:
        raise ValueError(f"formats asks for gate_bias in {dtype}; it is always float32.")
    return dtype


def _quantised(name: str, shape: tuple[int, ...], asked: Quantised | str) -> Quantised:
    if name in PLAIN:
        raise ValueError(f"formats asks for {name} in {asked}; it is never quantised: wanted {', '.join(DTYPES)}.")
    try:
        array = abstract(shape, asked) if isinstance(asked, str) else asked
        array.check(name)
    except ValueError as error:
        raise ValueError(f"formats asks for {name} {list(shape)} in {asked}, which does not fit: {error}") from None
    if array.shape != shape:
        raise ValueError(
            f"formats gives {name} the shape {list(array.shape)}, as {array!r}; the layer's is {list(shape)}."
        )
    return array


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


def format_name(leaf: Leaf) -> str:
    """The name of a leaf's dtype, or of its quantised format."""
    return leaf.format if isinstance(leaf, Quantised) else str(leaf.dtype)


def _short(value: Any) -> str:
    return f"{format_name(value)}{list(value.shape)}" if hasattr(value, "shape") else repr(value)
