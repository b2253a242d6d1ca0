"""Compare two results of the microbenchmark, and print what changed by more than the noise.

    python -m bench compare before.json after.json
    python -m bench compare before.json after.json --fail-on-regression 10

A difference is beyond the noise if it is greater than these three: 2 %; what a contender differed
from itself that was measured twice in either run; and the spreads of both times together (half the
distance between quartiles).  Times of different runs differ more than times of one run, because
the machine does other things: measure both in the same conditions, and more than once.

The exit status is 1 after a regression with --fail-on-regression, and 2 if the results have nothing
in common.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from bench import sizes
from bench.report import us
from bench.results import Key, Result, result
from collectives.selection.fields import shown
from parallel.cli import console_of, print_table, table_with

FLOOR = 0.02  # differences of less are never beyond the noise
SAME = ("ranks", "hosts", "arrays", "average")  # what must be equal for times to be comparable


class Change(NamedTuple):
    """One measurement in two results, in seconds, and the noise as a fraction."""

    key: Key
    before: float
    after: float
    noise: float

    @property
    def slowdown(self) -> float:
        """How much more time it takes, as a fraction; negative if it takes less."""
        return self.after / self.before - 1

    @property
    def is_beyond_noise(self) -> bool:
        """Whether one time is greater than the other by more than the noise."""
        longer, shorter = max(self.before, self.after), min(self.before, self.after)
        return longer / shorter - 1 > self.noise


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.set_defaults(run=run)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("before", type=result, metavar="A.json", help="what bench COLLECTIVE -J wrote")
    add("after", type=result, metavar="B.json", help="the same, later")
    add(
        "--fail-on-regression",
        type=percent,
        nargs="?",
        const=0.0,
        metavar="PERCENT",
        help="exit with status 1 if anything is slower by more than the noise, and by more than "
        "PERCENT; default: 0",
    )


def percent(text: str) -> float:
    """An argument's type: a number of at least 0, in percent, as a fraction."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of percent")
    return value / 100


def run(options: argparse.Namespace) -> int:
    """Print what changed; 0, 1 after a regression if asked, 2 if nothing can be compared."""
    console = console_of(0)
    try:
        compared = changes(options.before, options.after)
    except ValueError as error:
        console.print(f"bench: {error}", markup=False)
        return 2
    show(compared, console)
    failing = [each for each in compared if is_regression(each, options.fail_on_regression)]
    return 1 if failing else 0


def changes(before: Result, after: Result) -> list[Change]:
    """Everything that both have measured.  ValueError if it cannot be compared."""
    for name in SAME:
        one, other = (each.facts.get(name) for each in (before, after))
        if one != other:
            a, b = f"{name} {shown(one)}", f"{name} {shown(other)}"
            raise ValueError(f"{before.path} has {a}, {after.path} has {b}")
    both = [key for key in before.found if key in after.found]
    if not both:
        raise ValueError(f"{before.path} and {after.path} have measured nothing in common")
    return [change(key, before, after) for key in both]


def change(key: Key, before: Result, after: Result) -> Change:
    """One measurement, with the noise of both results."""
    a, b = before.found[key], after.found[key]
    noise = max(FLOOR, a.noise, b.noise, a.spread + b.spread)
    return Change(key, a.seconds, b.seconds, noise)


def is_regression(each: Change, allowed: float | None) -> bool:
    """Whether it is slower by more than the noise and than what is allowed; None: all is."""
    return allowed is not None and each.is_beyond_noise and each.slowdown > allowed


def show(compared: Sequence[Change], console: Console) -> None:
    """The changes beyond the noise, the worst first, and how many there are of how many."""
    changed = sorted((c for c in compared if c.is_beyond_noise), key=lambda c: -c.slowdown)
    if changed:
        print_table(table(changed), console)
    slower = sum(each.slowdown > 0 for each in changed)
    console.print(
        f"{len(changed)} of {len(compared)} times changed by more than the noise: "
        f"{slower} slower, {len(changed) - slower} faster"
    )


def table(changed: Sequence[Change]) -> Table:
    """One line for each change."""
    made = table_with(
        "collective",
        "type",
        "redop",
        "root",
        "contender",
        "form",
        numbers=["size", "before us", "after us", "change", "noise"],
    )
    for each in changed:
        key = each.key
        words = [key.collective, key.dtype, key.op, str(key.root), key.name, key.form]
        numbers = [sizes.text(key.size), us(each.before), us(each.after)]
        style = "bold red" if each.slowdown > 0 else None
        made.add_row(*words, *numbers, f"{each.slowdown:+.1%}", f"{each.noise:.1%}", style=style)
    return made
