"""The sizes of the blocks that the XLA implementation works in."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """A block of the output: `rows` rows of one group times `columns` columns.

    Both are at least 1 and are cut down to the array's size where that is smaller.

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
