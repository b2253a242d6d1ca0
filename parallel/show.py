"""What rank 0 shows: progress, and the traffic table; plain where it is not a terminal."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

try:
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.progress import Progress
    from rich.table import Table
except ImportError as error:
    raise ImportError(
        "tables and progress are shown with rich: pip install 'ring-collectives[bench]'"
    ) from error

from parallel.traffic import TrafficRow, TrafficTable

EVERY = 20  # steps between two lines where there is no terminal to animate
WIDE = 1 << 16  # characters: wider than any table


def console_of(rank: int) -> Console:
    """Rank 0 writes; plain where it is not a terminal.

    Open MPI gives every rank a terminal of its own as standard output, wherever its launcher
    writes to; standard error tells.
    """
    is_terminal = sys.stdout.isatty() and sys.stderr.isatty()
    return Console(quiet=rank != 0, highlight=False, soft_wrap=True, force_terminal=is_terminal)


@contextmanager
def progress(console: Console, steps: int) -> Iterator[Callable[[int, float], None]]:
    """A function to call with (steps done, loss): it moves a bar, or prints a line now and then."""
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("training", total=steps)

        def show(done: int, loss: float) -> None:
            bar.update(task, completed=done, description=f"loss {loss:.4f}")
            if not console.is_terminal and (done % EVERY == 0 or done in (1, steps)):
                console.print(f"step {done:5d}  loss {loss:.4f}")

        yield show


def print_traffic(traffic: TrafficTable, console: Console) -> None:
    """The columns and the matrix of bytes; where there is no third column, why not."""
    console.print("Sent by all ranks together: p = predicted, r = recorded, o = observed by MPI")
    print_table(columns(traffic), console)
    console.print("Bytes from row to column")
    print_table(matrix(traffic), console)
    if traffic.reason is not None:
        console.print(f"observed: n/a ({traffic.reason})")


def columns(traffic: TrafficTable) -> Table:
    """One row per phase and collective; rows that differ are red."""
    counts = [f"{what} {column}" for what in ("messages", "bytes") for column in "pro"]
    table = table_with("phase", "collective", numbers=["calls p", "calls r", *counts])
    unseen = "n/a" if traffic.observed is None else ""  # of one row; their sum's has what was seen
    for row in traffic.rows:
        table.add_row(*cells(row, unseen), style=None if row.is_equal else "bold red")
    return table


def cells(row: TrafficRow, unseen: str) -> list[str]:
    """A row of the table as text; nothing for calls that nobody counts."""
    tallies = [row.predicted, row.recorded, row.observed]
    calls = [row.predicted.calls, row.recorded.calls]
    counts = [
        unseen if tally is None else str(getattr(tally, what))
        for what in ("messages", "bytes")
        for tally in tallies
    ]
    return [row.phase, row.collective, *("" if n is None else str(n) for n in calls), *counts]


def matrix(traffic: TrafficTable) -> Table:
    """The recorded bytes, p x p."""
    table = table_with("", numbers=range(traffic.size))
    for src, sent in enumerate(traffic.matrix):
        table.add_row(str(src), *(str(n) for n in sent.tolist()))
    return table


def print_accounts(ranks: Sequence[Mapping[str, Sequence[int]]], console: Console) -> None:
    """Of each rank: what is kept at most, or moved -> bytes by formula, and counted."""
    console.print("Bytes that each rank keeps at most: f = by formula, c = counted from the arrays")
    names = [name for name in ranks[0] if any(any(each[name]) for each in ranks)]
    table = table_with("rank", numbers=[f"{name} {column}" for name in names for column in "fc"])
    for rank, each in enumerate(ranks):
        is_equal = all(formula == counted for formula, counted in each.values())
        numbers = [str(n) for name in names for n in each[name]]
        table.add_row(str(rank), *numbers, style=None if is_equal else "bold red")
    print_table(table, console)


def print_curve(values: Sequence[float], console: Console) -> None:
    """The values from left to right, as a picture of letters."""
    for line in curve(values):
        console.print(line, markup=False)


def curve(values: Sequence[float], width: int = 64, height: int = 10) -> list[str]:
    """Lines from top to bottom; several values in a column are averaged, NaN and inf left out."""
    width = min(width, len(values))
    parts = (
        values[len(values) * i // width : len(values) * (i + 1) // width] for i in range(width)
    )
    columns = [sum(part) / len(part) for part in parts]
    finite = [value for value in columns if math.isfinite(value)]
    if not finite:
        return []
    low, high = min(finite), max(finite)
    places = [
        round((value - low) / (high - low or 1) * (height - 1)) if math.isfinite(value) else None
        for value in columns
    ]
    ends = {height - 1: f"{high:10.4f} |", 0: f"{low:10.4f} |"}
    return [
        ends.get(row, " " * 11 + "|") + "".join("*" if place == row else " " for place in places)
        for row in reversed(range(height))
    ]


def table_with(*words: str, numbers: Iterable[object]) -> Table:
    """An empty table: columns of words, then columns of numbers."""
    table = Table()
    for head in words:
        table.add_column(head, no_wrap=True)
    for number in numbers:
        table.add_column(str(number), justify="right", no_wrap=True)
    return table


def print_table(table: Table, console: Console) -> None:
    """As wide as it needs to be, for a digit must not be cut off; ASCII if not on a terminal."""
    table.box = box.SIMPLE_HEAD if console.is_terminal else box.ASCII
    table.width = Measurement.get(console, console.options.update(width=WIDE), table).maximum
    console.print(table, crop=False)
