"""What quantised arrays have in common: codes and scales that cover a matrix in blocks, cut and placed together."""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

# An array, a jax.ShapeDtypeStruct, or whatever else a caller of jax.tree.map puts in place of one.
Leaf = Any

# The first index and the number of the rows or columns that are wanted of a matrix; None means all of them.
Window = tuple[Any, int] | None


@dataclasses.dataclass(frozen=True)
class Part:
    """One of the arrays that a quantised array [*lead, N, K] consists of.

    Attributes:
      block: how many rows and columns share an element; None where all along an axis do, and then the part has no such
        axis.
      dtypes: what it may be.
    """

    block: tuple[int | None, int | None]
    dtypes: tuple[str, ...]

    def shape(self, lead: tuple[int, ...], matrix: tuple[int, ...]) -> tuple[int, ...]:
        """Its shape, where `matrix` is (N, K)."""
        return (*lead, *(-(-size // block) for size, block in zip(matrix, self.block, strict=True) if block))

    def spread(self, leaf: jax.Array, matrix: tuple[int, ...], windows: tuple[Window, Window]) -> jax.Array:
        """The element for each row and column of the windows; an axis that the part does not have gets size 1."""
        for axis in (-1, -2):
            if self.block[axis] is None:
                leaf = jnp.expand_dims(leaf, axis)
        for axis in (-2, -1):
            if block := self.block[axis]:
                leaf = _spread(leaf, axis, block, matrix[axis], windows[axis])
        return leaf


def _spread(leaf: jax.Array, axis: int, block: int, size: int, window: Window) -> jax.Array:
    if window is None:
        return leaf if block == 1 else lax.slice_in_dim(jnp.repeat(leaf, block, axis), 0, size, axis=axis)
    start, count = window
    if block == 1:
        return moved(leaf, lambda leaf: lax.dynamic_slice_in_dim(leaf, start, count, axis))
    index = (start + lax.iota(jnp.int32, count)) // block
    return moved(leaf, lambda leaf: jnp.take(leaf, index, axis, mode="clip"))


def moved(leaf: jax.Array, move: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """`move(leaf)`, where that only takes elements elsewhere, on bytes: of an e4m3 array XLA would first widen all."""
    if leaf.dtype != jnp.float8_e4m3fn:
        return move(leaf)
    return lax.bitcast_convert_type(move(lax.bitcast_convert_type(leaf, jnp.uint8)), leaf.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Quantised(abc.ABC):
    """An array [*lead, N, K] kept as codes and their scales; each subclass is one number format.

    A pytree whose leaves are its parts. They keep their dtypes: a cast over all leaves of a tree, as in
    `jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights)`, would make numbers of codes and round scales; it raises.

    Indexing takes integers and slices, as in `q[3]`, `q[:2, :64]` and `q[..., :32]`: on the last two axes slices only,
    and only on the borders of blocks.

    Attributes:
      input_scale: [*lead], the scale with which activations may be quantised before they meet the matrix; None where
        the file has none, or not for every matrix.
      uncalibrated: which matrices have none, along the first axis, where others have one.
    """

    input_scale: Leaf = None
    uncalibrated: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})

    codes: ClassVar[str]  # the part that holds the codes
    inner: ClassVar[str | None]  # the part that scales blocks along K, or None
    outer: ClassVar[str | None]  # the part that scales whole rows or the whole matrix, or None

    def __post_init__(self) -> None:
        for name, part in self.parts().items():
            dtype = getattr(getattr(self, name), "dtype", None)
            # Masks may stand in the leaves' places, as trees of other things are made; other numbers may not.
            if dtype is not None and jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).name not in part.dtypes:
                raise ValueError(
                    f"{name} of a {type(self).__name__} is {jnp.dtype(dtype)}; wanted {' or '.join(part.dtypes)}. A "
                    "cast over all leaves of a tree does this, and would ruin the array; dequantize(dtype) widens it."
                )

    @property
    @abc.abstractmethod
    def format(self) -> str:
        """The format's name, as `quantize` and `abstract` take it."""

    @abc.abstractmethod
    def all_parts(self) -> dict[str, Part]:
        """The parts that the format can have, by field."""

    @abc.abstractmethod
    def _numbers(self, codes: jax.Array, columns: Window) -> jax.Array:
        """What spread codes stand for, exact in bfloat16, float16 and float32."""

    @classmethod
    def abstract(cls, shape: tuple[int, ...], **static: Any) -> Self:
        """The array of this shape [*lead, N, K] with a jax.ShapeDtypeStruct for every part but `input_scale`.

        Args:
          static: the fields that are no parts.

        Raises:
          ValueError: if the format does not take the shape.
        """
        if len(shape) < 2:
            raise ValueError(f"{cls.__name__} wants matrices [..., N, K]; the shape is {tuple(shape)}.")
        names = [field.name for field in dataclasses.fields(cls) if not field.metadata.get("static")]
        blank = cls(**{**dict.fromkeys(names), **static})
        leaves: dict[str, Any] = {
            name: jax.ShapeDtypeStruct(part.shape(shape[:-2], shape[-2:]), jnp.dtype(part.dtypes[0]))
            for name, part in blank.all_parts().items()
            if name != "input_scale"
        }
        array = dataclasses.replace(blank, **leaves)
        array.check(f"an array of shape {tuple(shape)}")
        return array

    def parts(self) -> dict[str, Part]:
        """The parts that are there, by field."""
        return {name: part for name, part in self.all_parts().items() if getattr(self, name) is not None}

    @property
    def shape(self) -> tuple[int, ...]:
        """[*lead, N, K]."""
        shape = tuple(getattr(self, self.codes).shape)
        packed = self.all_parts()[self.codes].block[1]
        return (*shape[:-1], shape[-1] * packed) if packed else shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        leaves = [getattr(self, name) for name in self.parts()]
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)

    def __repr__(self) -> str:
        # Shapes and dtypes only: the generated one would print gigabytes.
        parts = (f"{name}={_text(getattr(self, name))}" for name in self.parts())
        return f"{type(self).__name__}({self.format}, {', '.join(parts)})"

    def check(self, name: str) -> None:
        """Raises ValueError, calling the array `name`, unless every part has the shape and dtype of its place."""
        codes = getattr(self, self.codes)
        if len(getattr(codes, "shape", ())) < 2:
            raise ValueError(f"{name}.{self.codes} is {_text(codes)}; wanted an array [..., N, K].")
        *lead, n, k = self.shape
        for field, part in self.parts().items():
            leaf, wanted = getattr(self, field), part.shape(tuple(lead), (n, k))
            if getattr(leaf, "shape", None) != wanted or jnp.dtype(leaf.dtype).name not in part.dtypes:
                raise ValueError(
                    f"{name}.{field} is {_text(leaf)}; wanted {' or '.join(part.dtypes)} {list(wanted)}, beside "
                    f"{self.codes} {_text(codes)}."
                )

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """[*lead, N, K] in `dtype`: codes times scales in float32, rounded once more where `dtype` is narrower."""
        values = self.operand(jnp.float32)
        scale = self.row_scale()
        return (values if scale is None else values * scale).astype(dtype)

    def operand(self, dtype: DTypeLike, rows: Window = None, columns: Window = None) -> jax.Array:
        """[*lead, N, K], or those rows and columns of it, in `dtype` and without `row_scale`.

        That scale is constant along K, so a sum over K can be multiplied by it instead. The operand is exact where no
        scale varies along K, and for NVFP4, whose codes times e4m3 scales have six significant bits.
        """
        numbers = self._numbers(self.spread(self.codes, rows, columns), columns)
        if self.inner is None:
            return numbers.astype(dtype)
        return (numbers * self.spread(self.inner, rows, columns).astype(jnp.float32)).astype(dtype)

    def row_scale(self, rows: Window = None) -> jax.Array | None:
        """[*lead, N or 1, 1] float32, what the operand lacks; None if nothing."""
        return None if self.outer is None else self.spread(self.outer, rows, None).astype(jnp.float32)

    def spread(self, name: str, rows: Window = None, columns: Window = None) -> jax.Array:
        """The part's element for each row and column, or those in the windows; size 1 along an axis that all share."""
        return self.all_parts()[name].spread(getattr(self, name), self.shape[-2:], (rows, columns))

    def __getitem__(self, index: Any) -> Self:
        lead, *matrix = self._split(index)

        def part_of(name: str, part: Part) -> Leaf:
            cuts = (_in_blocks(cut, block) for cut, block in zip(matrix, part.block, strict=True) if block)
            return getattr(self, name)[*lead, *cuts]

        changes: dict[str, Any] = {name: part_of(name, part) for name, part in self.parts().items()}
        if self.uncalibrated and lead:
            left = np.isin(np.arange(self.shape[0]), self.uncalibrated)[lead[0]]
            changes["uncalibrated"] = tuple(int(one) for one in np.flatnonzero(left)) if np.ndim(left) else ()
        return dataclasses.replace(self, **changes)

    def _split(self, index: Any) -> tuple[tuple[int | slice, ...], slice, slice]:
        """An index for every axis: those of the leading ones, of N and of K; the last two on borders of blocks."""
        index = index if isinstance(index, tuple) else (index,)
        if (place := next((i for i, one in enumerate(index) if one is Ellipsis), None)) is not None:
            index = (*index[:place], *[slice(None)] * (self.ndim - len(index) + 1), *index[place + 1 :])
        index = (*index, *[slice(None)] * (self.ndim - len(index)))
        kinds = (int, np.integer, slice)
        if len(index) != self.ndim or any(not isinstance(one, kinds) or isinstance(one, bool) for one in index):
            raise ValueError(f"index {index} of {self!r}; wanted at most {self.ndim} integers and slices.")
        for axis, (one, size) in enumerate(zip(index[:-2], self.shape, strict=False)):
            if not isinstance(one, slice) and not -size <= one < size:
                # jax would take the last one, and iteration would not end.
                raise IndexError(f"index {one} of axis {axis} of {self!r} is not from {-size} to {size - 1}.")
        return index[:-2], self._cut(index[-2], -2), self._cut(index[-1], -1)

    def _cut(self, cut: Any, axis: int) -> slice:
        size, block = self.shape[axis], self._border(axis)
        if not isinstance(cut, slice) or cut.step not in (None, 1):
            raise ValueError(
                f"axis {self.ndim + axis} of {self!r} is indexed with {cut}; wanted a slice in steps of 1."
            )
        start, stop, _ = cut.indices(size)
        if start % block or (stop % block and stop != size):
            raise ValueError(
                f"axis {self.ndim + axis} of {self!r} has {size} elements in blocks of {block}, which "
                f"{start}:{stop} would cut; begin and end at multiples of that, or dequantize() first."
            )
        return slice(start, stop)

    def placed(self, sharding: NamedSharding, name: str) -> Self:
        """Its abstract twin, every part with the sharding that splits it as `sharding` splits the whole array.

        Raises:
          ValueError: if that cuts a block, calling the array `name`.
        """
        spec = (*sharding.spec, *[None] * (self.ndim - len(sharding.spec)))
        local = sharding.shard_shape(self.shape)
        for axis in (-2, -1):
            if local[axis] != self.shape[axis] and local[axis] % (block := self._border(axis)):
                raise ValueError(
                    f"{name} has {self.shape[axis]} elements along axis {self.ndim + axis}, in blocks of {block} "
                    f"({self.format}), which mesh axis {spec[axis]!r} would cut into parts of {local[axis]}; choose a "
                    f"mesh axis that leaves multiples of {block}, or dequantise the array."
                )

        def leaf(field: str, part: Part) -> Any:
            own = (axes for axes, block in zip(spec[-2:], part.block, strict=True) if block)
            array, where = getattr(self, field), NamedSharding(sharding.mesh, PartitionSpec(*spec[:-2], *own))
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where)

        return dataclasses.replace(self, **{field: leaf(field, part) for field, part in self.parts().items()})

    def _border(self, axis: int) -> int:
        """Cuts along `axis`, -2 or -1, may lie at multiples of this."""
        return math.lcm(*(part.block[axis] or 1 for part in self.parts().values()))


def _in_blocks(cut: slice, block: int) -> slice:
    """The elements that cover a cut along an axis whose elements cover `block` each."""
    return slice(cut.start // block, -(-cut.stop // block))


def _text(leaf: Leaf) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") and hasattr(leaf, "shape") else repr(leaf)
