"""What goes wrong with files on disk."""

import json
from typing import Any

from nemotron_moe.hf_config import without_duplicates

# How many names of a list a message shows.
LISTED = 10


class CheckpointError(ValueError):
    """A checkpoint that is incomplete, damaged, not understood, or not what its config says."""


def shown(text: object, limit: int = 200) -> str:
    """`text` for an error message: names in a stranger's file may be unprintable or endless."""
    text = str(text)
    safe = text if text.isprintable() else ascii(text)[1:-1]
    return safe if len(safe) <= limit else safe[:limit] + "..."


def listed(names: list[str], limit: int = LISTED) -> str:
    """The first names of a list, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(shown(name) for name in names[:limit]) + more


def refuse_pointer(beginning: bytes, path: str) -> None:
    """Raises a CheckpointError if a file starts as the note that Git LFS leaves in place of a large file."""
    if beginning.startswith(b"version https://git-lfs.github.com/spec/"):
        raise CheckpointError(
            f"{path} is a Git LFS pointer, not the file itself: the download is incomplete. Fetch it with "
            "`git lfs pull` or `hf download`."
        )


def parse_json(raw: bytes, where: str) -> dict[str, Any]:
    """Parses a stranger's JSON object.

    Raises:
      CheckpointError: if it is none, or gives a key twice; `where` says whose text it was.
    """
    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} cannot be read as JSON: {shown(str(error).rstrip('.'))}.") from None
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{where} is a JSON {type(parsed).__name__}; wanted an object.")
    return parsed
