"""What a training run prints: its progress, and what it sent, kept and waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console

from collectives import Topology
from collectives.console import Cell, Number, Table, progress
from parallel.accounts import RankTimes, TrafficTable, between_hosts, renumbered


@contextmanager
def training_progress(console: Console, steps: int) -> Iterator[Callable[[int, float], None]]:
    """Yield a function of (steps done, loss) that shows how many of all `steps` are done.

    It moves a bar on the `console`, or prints a line every 20 steps if that is no terminal.
    """
    with progress(console, steps, lines=True) as show:
        yield lambda done, loss: show(done, f"step {done:5d}  loss {loss:.4f}")


def print_traffic(traffic: TrafficTable, console: Console) -> None:
    """Print the rows of `traffic`, the bytes between ranks, and why MPI saw nothing.

    Rows that differ are red.  Where all rows are as predicted and the `console` is narrow, each
    number is printed once.
    """
    is_equal = all(row.is_equal for row in traffic.rows)
    whole = traffic_table(traffic)
    if is_equal and not whole.fits(console):
        console.print("Sent by all ranks together, as predicted")
        equal_table(traffic).print(console)
    else:
        console.print("Sent by all ranks together: p = predicted, r = recorded, o = observed")
        whole.print(console)
    console.print("Bytes from row to column")
    matrix = Table("", *(Number(str(rank)) for rank in range(len(traffic.matrix))))
    for src, sent in enumerate(traffic.matrix.tolist()):
        matrix.add(src, *sent)
    matrix.print(console)
    if len([axis for axis in traffic.axes if axis]) > 1:
        print_axes(traffic, console)
    if traffic.reason is not None:
        console.print(f"observed: n/a ({traffic.reason})")


def traffic_table(traffic: TrafficTable) -> Table:
    """Return calls, messages and bytes of each row, each as predicted, recorded and observed."""
    counts = [f"{what} {column}" for what in ("messages", "bytes") for column in "pro"]
    table = Table("phase", "collective", *map(Number, ["calls p", "calls r", *counts]))
    unseen = "n/a" if traffic.observed is None else ""  # another row has the sum of several rows
    for row in traffic.rows:
        cells: list[Cell] = [row.predicted.calls, row.recorded.calls]
        for what in ("messages", "bytes"):
            tallies = row.predicted, row.recorded, row.observed
            cells += [getattr(tally, what) if tally else unseen for tally in tallies]
        table.add(row.phase, row.collective, *cells, is_wrong=not row.is_equal)
    return table


def equal_table(traffic: TrafficTable) -> Table:
    """Return calls, messages and bytes of rows that are as predicted, and what agrees on them."""
    table = Table("phase", "collective", *map(Number, ("calls", "messages", "bytes")), "equal")
    for row in traffic.rows:
        calls, messages, nbytes = row.predicted
        seen = "p = r" if row.observed is None else "p = r = o"
        table.add(row.phase, row.collective, calls, messages, nbytes, seen)
    return table


def print_axes(traffic: TrafficTable, console: Console) -> None:
    """Print how much ranks send along each axis, in how many messages, and of what size."""
    console.print("By axis: all messages, their mean size, and the bytes of the busiest rank")
    table = Table(
        "axis",
        Number("messages"),
        Number("bytes"),
        Number("bytes/message", ".0f"),
        Number("busiest rank"),
    )
    for axis, (messages, nbytes) in traffic.axes.items():
        num_messages, total = int(messages.sum()), int(nbytes.sum())
        busiest = int(nbytes.sum(axis=1).max())
        table.add(axis or "(none)", num_messages, total, total / num_messages, busiest)
    table.print(console)


def print_hosts(
    traffic: TrafficTable, axes: Mapping[str, int], topology: Topology, console: Console
) -> None:
    """Print the bytes between hosts, with the axes in this order and in the opposite order."""
    for order in (list(axes), list(axes)[::-1]):
        matrix = renumbered(traffic.matrix, axes, order)
        console.print(
            f"between hosts ({topology}), axes in the order {', '.join(order)}:"
            f" {between_hosts(matrix, topology)} bytes"
        )


def print_pipeline(times: Sequence[RankTimes], bubble: float, console: Console) -> None:
    """Print how long ranks computed and waited; `bubble` is the fraction for equal times."""
    console.print(
        "The last step, from a rank's first computation to its last; bubble: without computation,"
        f" as a fraction of all time and of the work (simulated, for F = I = W: {bubble:.1%})"
    )
    table = Table(
        "rank",
        *(Number(f"{what} ms", ".2f") for what in ("computing", "waiting", "transfer", "all")),
        Number("of all", ".1%"),
        Number("of work", ".1%"),
    )
    for rank, of_rank in enumerate(times):
        table.add(rank, *(1e3 * x for x in of_rank), *of_rank.fractions)
    table.print(console)


def print_rank_reports(ranks: Sequence[Mapping[str, Sequence[int]]], console: Console) -> None:
    """Print for each rank the bytes by formula and counted; `ranks` has these pairs by name.

    Where all are equal and the `console` is narrow, each number is printed once.
    """
    names = [name for name in ranks[0] if any(any(pairs[name]) for pairs in ranks)]
    is_equal = all(pairs[name][0] == pairs[name][1] for pairs in ranks for name in names)
    whole = rank_table(ranks, names)
    if is_equal and not whole.fits(console):
        console.print("Peak bytes of each rank, by formula and counted from the arrays: equal")
        table = Table("rank", *map(Number, names))
        for rank, pairs in enumerate(ranks):
            table.add(rank, *(pairs[name][0] for name in names))
        table.print(console)
    else:
        console.print("Peak bytes of each rank: f = by formula, c = counted from the arrays")
        whole.print(console)


def rank_table(ranks: Sequence[Mapping[str, Sequence[int]]], names: Sequence[str]) -> Table:
    """Return a row for each rank, with two columns for each of the names."""
    table = Table("rank", *(Number(f"{name} {column}") for name in names for column in "fc"))
    for rank, pairs in enumerate(ranks):
        is_equal = all(formula == counted for formula, counted in pairs.values())
        numbers = [n for name in names for n in pairs[name]]
        table.add(rank, *numbers, is_wrong=not is_equal)
    return table
