"""What goes wrong with files on disk."""

import json
from typing import Any

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
    """Parses a stranger's JSON object; a key given twice is an error, since readers would disagree on which one counts.

    Raises:
      CheckpointError: `where` says whose text it was.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        items: dict[str, Any] = {}
        for key, value in pairs:
            if key in items:
                raise CheckpointError(f"{where} has the key {shown(key)!r} twice.")
            items[key] = value
        return items

    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not valid JSON ({shown(error)}).") from None
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{where} is a JSON {type(parsed).__name__}; wanted an object.")
    return parsed
