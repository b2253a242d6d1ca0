"""What rank 0 prints: progress and tables, in plain text if the output is not a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from parallel.accounts import TrafficTable
from parallel.cli import print_table, table_with
from parallel.runtime import ProgressCallback

EVERY = 20  # steps between two lines if the output is not a terminal


@contextmanager
def progress(console: Console, steps: int) -> Iterator[ProgressCallback]:
    """Yield a function of (steps done, loss) that moves a bar, or prints a line every 20 steps."""
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("training", total=steps)

        def show(done: int, loss: float) -> None:
            bar.update(task, completed=done, description=f"loss {loss:.4f}")
            if not console.is_terminal and (done % EVERY == 0 or done in (1, steps)):
                console.print(f"step {done:5d}  loss {loss:.4f}")

        yield show


def print_traffic(traffic: TrafficTable, console: Console) -> None:
    """Print the table and the matrix of bytes, and why nothing was observed if so."""
    console.print("Sent by all ranks together: p = predicted, r = recorded, o = observed by MPI")
    print_table(columns(traffic), console)
    console.print("Bytes from row to column")
    print_table(matrix(traffic), console)
    if traffic.reason is not None:
        console.print(f"observed: n/a ({traffic.reason})")


def columns(traffic: TrafficTable) -> Table:
    """Return a table with a row for each phase and collective; rows that differ are red."""
    counts = [f"{what} {column}" for what in ("messages", "bytes") for column in "pro"]
    table = table_with("phase", "collective", numbers=["calls p", "calls r", *counts])
    unseen = "n/a" if traffic.observed is None else ""  # another row has the sum of several rows
    for row in traffic.rows:
        calls = ["" if n is None else str(n) for n in (row.predicted.calls, row.recorded.calls)]
        cells = [
            unseen if tally is None else str(getattr(tally, what))
            for what in ("messages", "bytes")
            for tally in (row.predicted, row.recorded, row.observed)
        ]
        style = None if row.is_equal else "bold red"
        table.add_row(row.phase, row.collective, *calls, *cells, style=style)
    return table


def matrix(traffic: TrafficTable) -> Table:
    """Return a table of the recorded bytes, from row to column."""
    table = table_with("", numbers=range(traffic.size))
    for src, sent in enumerate(traffic.matrix):
        table.add_row(str(src), *(str(n) for n in sent.tolist()))
    return table


def print_rank_reports(ranks: Sequence[Mapping[str, Sequence[int]]], console: Console) -> None:
    """Print for each rank the bytes by formula and counted; `ranks` maps names to these pairs."""
    console.print("Peak bytes of each rank: f = by formula, c = counted from the arrays")
    names = [name for name in ranks[0] if any(any(each[name]) for each in ranks)]
    table = table_with("rank", numbers=[f"{name} {column}" for name in names for column in "fc"])
    for rank, each in enumerate(ranks):
        is_equal = all(formula == counted for formula, counted in each.values())
        numbers = [str(n) for name in names for n in each[name]]
        table.add_row(str(rank), *numbers, style=None if is_equal else "bold red")
    print_table(table, console)
