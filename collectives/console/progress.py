"""Progress of a command: a bar on a terminal, and lines elsewhere where that is wanted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Show(Protocol):
    """Shows the number of steps that are done, a text, and the number of all steps if it is new."""

    def __call__(self, done: int, text: str, total: int | None = None) -> None: ...


EVERY = 20  # steps between two lines if the output is not a terminal


@contextmanager
def progress(
    console: Console, total: int | None = None, *, lines: bool = False, refresh: bool = True
) -> Iterator[Show]:
    """Yield a function that shows how far the work of a command is.

    Parameters
    ----------
    console : Console
        Where the bar moves, if it is a terminal; the bar is removed in the end.
    total : int, optional
        The number of steps, if it is known.
    lines : bool
        Print the text of every 20th step, the first and the last where there is no terminal.
    refresh : bool
        Whether the bar moves by itself.  If not it is drawn only when the function is called, so
        that it takes no time from what is measured.
    """
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    is_hidden = console.quiet or not console.is_terminal
    bar = Progress(
        *columns, console=console, disable=is_hidden, auto_refresh=refresh, transient=True
    )
    with bar:
        task = bar.add_task("", total=total)

        def show(done: int, text: str, total: int | None = total) -> None:
            bar.update(task, completed=done, total=total, description=text, refresh=not refresh)
            if lines and not console.is_terminal and (done % EVERY == 0 or done in (1, total)):
                console.print(text)

        yield show
