"""What command-line programs share: types of arguments, and what rank 0 prints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal, InvalidOperation
from typing import Any

from array_api_compat import numpy as numpy_namespace
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.progress import Progress
from rich.table import Table

from collectives import Communicator, Topology
from parallel.accounts import RankTimes, TrafficTable, between_hosts, renumbered

SUFFIXES = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
MAX_WIDTH = 1 << 16  # characters: wider than any table
EVERY = 20  # steps between two lines if the output is not a terminal
WRONG = "bold red"  # the style of a row whose numbers differ


# Arguments


def at_least(least: int) -> Callable[[str], int]:
    """Return an argument type: an integer that is at least `least`."""

    def integer(word: str) -> int:
        if (value := int(word)) < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return integer


def number(word: str) -> float:
    """Return 80e9 for "80G" and 3e11 for "300e9"; an argument type for numbers above 0."""
    factor = SUFFIXES.get(word[-1:].upper(), 1)
    try:
        value = float(Decimal(word[:-1] if factor > 1 else word) * factor)
    except InvalidOperation:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number, such as 80G") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{word} is not more than 0")
    return value


def mesh_axes(word: str) -> dict[str, int]:
    """Return {"data": 2, "tensor": 2} for "data=2,tensor=2"; an argument type."""
    axes: dict[str, int] = {}
    for part in word.split(","):
        name, _, size = part.partition("=")
        if not name or not size.isdecimal() or name in axes:
            raise argparse.ArgumentTypeError(f"{word!r} is not AXIS=N,..., such as data=4")
        axes[name] = int(size)
    return axes


def add_gpt_options(add: Callable[..., object]) -> None:
    """Add the options of a GPT; `add` is an `add_argument` method."""
    positive = at_least(1)
    add("--layers", type=positive, default=4, help="number of blocks; default: %(default)s")
    add("--hidden", type=positive, default=256, help="width; default: %(default)s")
    add("--heads", type=positive, default=4, help="attention heads; default: %(default)s")
    add("--context", type=positive, default=64, help="in bytes; default: %(default)s")
    add("--tied", action="store_true", help="use the embedding's table in the output layer")
    add("--shared", action="store_true", help="use the parameters of block 0 in all blocks")


def gpt_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `add_gpt_options` as arguments of `parallel.gpt`."""
    return {
        "num_layers": options.layers,
        "hidden": options.hidden,
        "num_heads": options.heads,
        "context": options.context,
        "is_tied": options.tied,
        "is_shared": options.shared,
    }


def device_namespace(device: str, comm: Communicator) -> Any:
    """Return the array namespace of a device, "cpu" or "cuda"; with it a rank uses its GPU."""
    if device == "cpu":
        return numpy_namespace
    try:
        comm.use_gpu()
    except RuntimeError as error:
        raise ValueError(f"--device cuda: {error}") from None
    from array_api_compat import cupy as cupy_namespace  # noqa: PLC0415 - an optional dependency

    return cupy_namespace


# Output


def console_of(rank: int, *, is_terminal: bool = False) -> Console:
    """Return a console that prints on rank 0 only, in plain text unless on a terminal.

    `is_terminal` says that rank 0 prints on a terminal, which a rank of a job cannot find out.
    """
    # Open MPI makes standard output a terminal on every rank, wherever the launcher writes to;
    # standard error is a terminal only if the launcher's is.
    is_terminal = is_terminal or (sys.stdout.isatty() and sys.stderr.isatty())
    return Console(quiet=rank != 0, highlight=False, soft_wrap=True, force_terminal=is_terminal)


def table_with(*words: str, numbers: Iterable[object]) -> Table:
    """Return an empty table with columns of words, then columns of numbers."""
    table = Table()
    for head in words:
        table.add_column(head, no_wrap=True)
    for number in numbers:
        table.add_column(str(number), justify="right", no_wrap=True)
    return table


def print_table(table: Table, console: Console) -> None:
    """Print a table as wide as it must be to cut off no digit; in ASCII if not on a terminal."""
    table.box = box.SIMPLE_HEAD if console.is_terminal else box.ASCII
    options = console.options.update(width=MAX_WIDTH)
    table.width = Measurement.get(console, options, table).maximum
    console.print(table, crop=False)


@contextmanager
def progress(console: Console, steps: int) -> Iterator[Callable[[int, float], None]]:
    """Yield a function of (steps done, loss) that moves a bar, or prints a line every 20 steps."""
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("training", total=steps)

        def show(done: int, loss: float) -> None:
            bar.update(task, completed=done, description=f"loss {loss:.4f}")
            if not console.is_terminal and (done % EVERY == 0 or done in (1, steps)):
                console.print(f"step {done:5d}  loss {loss:.4f}")

        yield show


def print_traffic(traffic: TrafficTable, console: Console) -> None:
    """Print the rows (red if they differ), the bytes between ranks, and why MPI saw nothing."""
    console.print("Sent by all ranks together: p = predicted, r = recorded, o = observed by MPI")
    counts = [f"{what} {column}" for what in ("messages", "bytes") for column in "pro"]
    table = table_with("phase", "collective", numbers=["calls p", "calls r", *counts])
    unseen = "n/a" if traffic.observed is None else ""  # another row has the sum of several rows
    for row in traffic.rows:
        cells = ["" if n is None else str(n) for n in (row.predicted.calls, row.recorded.calls)]
        for what in ("messages", "bytes"):
            tallies = row.predicted, row.recorded, row.observed
            cells += [str(getattr(tally, what)) if tally else unseen for tally in tallies]
        table.add_row(row.phase, row.collective, *cells, style=None if row.is_equal else WRONG)
    print_table(table, console)
    console.print("Bytes from row to column")
    table = table_with("", numbers=range(len(traffic.matrix)))
    for src, sent in enumerate(traffic.matrix.tolist()):
        table.add_row(str(src), *map(str, sent))
    print_table(table, console)
    if len([axis for axis in traffic.axes if axis]) > 1:
        print_axes(traffic, console)
    if traffic.reason is not None:
        console.print(f"observed: n/a ({traffic.reason})")


def print_axes(traffic: TrafficTable, console: Console) -> None:
    """Print how much ranks send along each axis, in how many messages, and of what size."""
    console.print("By axis: all messages, their mean size, and the bytes of the busiest rank")
    table = table_with("axis", numbers=["messages", "bytes", "bytes/message", "busiest rank"])
    for axis, (messages, nbytes) in traffic.axes.items():
        mean = f"{nbytes.sum() / messages.sum():.0f}"
        busiest = str(nbytes.sum(axis=1).max())
        table.add_row(axis or "(none)", str(messages.sum()), str(nbytes.sum()), mean, busiest)
    print_table(table, console)


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
    table = table_with(
        "rank", numbers=["computing ms", "waiting ms", "transfer ms", "all ms", "of all", "of work"]
    )
    for rank, of_rank in enumerate(times):
        numbers = [f"{1e3 * x:.2f}" for x in of_rank]
        table.add_row(str(rank), *numbers, *(f"{x:.1%}" for x in of_rank.fractions))
    print_table(table, console)


def print_rank_reports(ranks: Sequence[Mapping[str, Sequence[int]]], console: Console) -> None:
    """Print for each rank the bytes by formula and counted; `ranks` has these pairs by name."""
    console.print("Peak bytes of each rank: f = by formula, c = counted from the arrays")
    names = [name for name in ranks[0] if any(any(pairs[name]) for pairs in ranks)]
    table = table_with("rank", numbers=[f"{name} {column}" for name in names for column in "fc"])
    for rank, pairs in enumerate(ranks):
        is_equal = all(formula == counted for formula, counted in pairs.values())
        numbers = [str(n) for name in names for n in pairs[name]]
        table.add_row(str(rank), *numbers, style=None if is_equal else WRONG)
    print_table(table, console)
