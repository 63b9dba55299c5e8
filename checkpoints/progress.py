"""Tells the user how far a load is."""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator

Progress = Callable[[int, int], object]

_LONG = 1 << 30


@contextlib.contextmanager
def reporting(progress: Progress | None, total: int) -> Iterator[Callable[[int], None]]:
    """Gives a function that takes the bytes of each step.

    Args:
      progress: called after each step with (bytes done, bytes in total). None shows a bar on stderr, if the total is
        1 GiB or more and stderr is a terminal or a notebook with ipywidgets.
      total: bytes in total.
    """
    done = 0

    def step(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    if progress is not None or total < _LONG:
        yield step
        return
    from rich.console import Console
    from rich.progress import DownloadColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    # In a notebook without ipywidgets rich warns instead of drawing.
    if not (console.is_terminal or (console.is_jupyter and importlib.util.find_spec("ipywidgets"))):
        yield step
        return
    with Bar(
        *Bar.get_default_columns(), DownloadColumn(), TransferSpeedColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task("Loading", total=total)
        yield lambda nbytes: bar.advance(task, nbytes)
