"""The sizes of the blocks that the XLA implementation works in."""

import dataclasses

BLOCK_BYTES = 5 << 20  # of one matrix: it is copied out of rhs, and must still be in the cache when it is multiplied


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """A block of the output: `rows` rows of one group times `columns` columns.

    Either is cut down to the output's size where that is smaller; columns are then evened out over the blocks.

    Raises:
      ValueError: on a size that is not a positive integer.
    """

    rows: int
    columns: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"Tile.{field.name} is {value!r}; wanted a positive integer.")

    def within(self, rows: int, columns: int) -> "Tile":
        """This tile for an output of these sizes, both at least 1."""
        blocks = -(-columns // min(self.columns, columns))
        return Tile(rows=min(self.rows, rows), columns=-(-columns // blocks))


def default_tile(*, rows: int, groups: int, column_bytes: int) -> Tile:
    """Rows just above the mean group's, 16 to 128; as many columns, of `column_bytes` each, as fill a block."""
    return Tile(rows=min(max(1 << (rows // groups).bit_length(), 16), 128), columns=max(BLOCK_BYTES // column_bytes, 1))
