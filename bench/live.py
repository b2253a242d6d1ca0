"""A live display of a benchmark on a terminal: what is being measured, and how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Show = Callable[[str], None]


@contextmanager
def live(console: Console, steps: int) -> Iterator[Show]:
    """Yield a function that is called with the name of each step before it.

    Nothing is shown if the console is no terminal, or quiet.  The display does not move while a
    step is measured, because that would take time from it.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    hidden = console.quiet or not console.is_terminal
    bar = Progress(*columns, console=console, disable=hidden, auto_refresh=False, transient=True)
    with bar:
        task, begun = bar.add_task("", total=steps), False

        def show(what: str) -> None:
            nonlocal begun
            bar.update(task, description=what, advance=int(begun), refresh=True)
            begun = True

        yield show
