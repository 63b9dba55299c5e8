"""The sizes of the blocks that the XLA implementation works in."""

import dataclasses

# Of one matrix, on a CPU: it is copied out of rhs, and must still be in the cache when it is multiplied.
BLOCK_BYTES = 5 << 20
# Of the matrices, rows and sums of a batch, on a GPU: enough for the time between two batches not to matter.
BATCH_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """A block of the output, `rows` rows of one group times `columns` columns, and how many are computed at once.

    Rows and columns are cut down to the output's size where that is smaller; columns are then evened out over the
    blocks.

    Raises:
      ValueError: on a size that is not a positive integer.
    """

    rows: int
    columns: int
    batch: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"Tile.{field.name} is {value!r}; wanted a positive integer.")

    def within(self, rows: int, columns: int, groups: int) -> "Tile":
        """This tile for an output of these sizes in this many groups, all at least 1."""
        height = min(self.rows, rows)
        blocks = -(-columns // min(self.columns, columns))
        batch = min(self.batch, most_tiles(rows, groups, height))
        return Tile(rows=height, columns=-(-columns // blocks), batch=batch)


def most_tiles(rows: int, groups: int, height: int) -> int:
    """How many tiles of `height` rows of one group there can be: each group may need one more for a single row."""
    return (rows + min(rows, groups) * (height - 1)) // height


def default_tile(*, platform: str, rows: int, groups: int, columns: int, column_bytes: int, row_bytes: int) -> Tile:
    """Rows just above the mean group's; of columns and tiles, as many as the platform is best with.

    Args:
      platform: what it will run on, such as "cpu" or "gpu".
      rows, groups, columns: of the output.
      column_bytes: that each column of a tile takes beside the output.
      row_bytes: that each row of a tile takes.
    """
    height = max(1 << (rows // groups).bit_length(), 16)
    if platform != "gpu":
        return Tile(rows=min(height, 128), columns=max(BLOCK_BYTES // column_bytes, 1))
    height = min(height, 512)
    width = max(min(columns, BATCH_BYTES // column_bytes), 1)
    return Tile(rows=height, columns=width, batch=max(BATCH_BYTES // (width * column_bytes + height * row_bytes), 1))


HEIGHTS = frozenset(range(8, 193, 8))  # more would not leave the accumulator's registers room
COLUMNS = 128  # of an output tile of the Hopper kernel
SHARED_MEMORY = 232448 - 4096  # bytes that a block may have, less the barriers and the compiler's scratch


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileConfig:
    """How the Hopper kernel cuts its work: an output tile is 128 columns times one of `heights` rows.

    Attributes:
      heights: ascending multiples of 8 up to 192; the kernel is compiled for each, and a piece of a group takes the
        smallest that holds it.
      stages: slots of the ring that is kept full of operands.
      depth: how much of the sum a slot holds, 64 or 128. It must divide K, and in the gradient of lhs N.

    Raises:
      ValueError: on values that are no such thing, or that do not fit into shared memory.
    """

    heights: tuple[int, ...]
    stages: int
    depth: int = 64

    def __post_init__(self) -> None:
        for name, wanted in (("stages", range(2, 33)), ("depth", (64, 128))):
            value = getattr(self, name)
            if isinstance(value, bool) or value not in wanted:
                raise ValueError(f"TileConfig.{name} is {value!r}; wanted one of {list(wanted)}.")
        heights = self.heights
        if not isinstance(heights, tuple) or not heights or list(heights) != sorted(set(heights) & HEIGHTS):
            raise ValueError(f"TileConfig.heights is {heights!r}; wanted ascending multiples of 8, 8 to 192.")
        if self.shared_memory > SHARED_MEMORY:
            raise ValueError(
                f"{self!r} needs {self.shared_memory} bytes of shared memory of {SHARED_MEMORY}; "
                "wanted fewer stages or smaller heights."
            )

    @property
    def shared_memory(self) -> int:
        """Bytes of the ring, of the two output buffers, and of their two rows of zeros, in bfloat16."""
        tallest = self.heights[-1]
        return 2 * (self.stages * (COLUMNS + tallest) * self.depth + 2 * tallest * 64 + 2 * COLUMNS)

    @property
    def label(self) -> str:
        """Short text for the kernel's name."""
        return f"{self.heights[0]}to{self.heights[-1]}by{COLUMNS}x{self.depth}_s{self.stages}"


def default_heights(*, rows: int, groups: int) -> tuple[int, ...]:
    """Heights of the pieces that groups of `rows / groups` rows on average are cut into."""
    mean = rows / groups
    if mean <= 16:
        return (8, 16)
    if mean <= 48:
        return (8, 16, 24, 32, 40, 48)
    if mean <= 160:
        return (64, 80, 96, 112)
    return tuple(range(128, 193, 8))


def default_tile_config(heights: tuple[int, ...], *, depth: int) -> TileConfig:
    """Measured at the sizes of Nemotron-3 Nano and Super on an H200.

    Up to some 160 rows a group, time is that of reading the matrices. What then counts is to have 130 to 180 KB in
    flight: with less memory waits, and with more it is slower again.
    """
    if heights[-1] <= 48:
        return TileConfig(heights=heights, stages=6)
    if heights[-1] <= 112:
        if depth <= 1024 and depth % 128 == 0:  # short sums: fewer, longer steps
            return TileConfig(heights=heights, stages=3, depth=128)
        return TileConfig(heights=heights, stages=5)
    return TileConfig(heights=heights, stages=4)
