"""Compare two results of the microbenchmark, and print what changed by more than the noise.

    ring bench compare before.json after.json
    ring bench compare before.json after.json --fail-on-regression 10

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
from typing import Any, NamedTuple

from bench.commands.options import add_output, option
from bench.results.files import Key, Result, result
from bench.results.measurement import us
from bench.workloads import sizes
from collectives.console import Command, Number, Table, console_for, refusing, write_json
from collectives.selection.fields import shown

# The heads of what names a measurement, by the fields of its key.
WORDS = {
    "collective": "collective",
    "dtype": "type",
    "op": "redop",
    "root": "root",
    "name": "contender",
    "form": "form",
}
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

    def as_dict(self) -> dict[str, Any]:
        """Return the measurement and its times for JSON."""
        times = {"before": self.before, "after": self.after}
        return self.key._asdict() | times | {"slowdown": self.slowdown, "noise": self.noise}

    @property
    def is_beyond_noise(self) -> bool:
        """Whether one time is greater than the other by more than the noise."""
        longer, shorter = max(self.before, self.after), min(self.before, self.after)
        return longer / shorter - 1 > self.noise


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    wrote = "what bench COLLECTIVE -J wrote"
    parse.add_argument("before", type=result, metavar="A.json", help=wrote)
    parse.add_argument("after", type=result, metavar="B.json", help="the same, later")
    about = (
        "exit with status 1 if anything is slower by more than the noise and than PERCENT; "
        "default: 0"
    )
    more = {"nargs": "?", "const": 0.0, "metavar": "PERCENT"}
    option(parse, "--fail-on-regression", about, type=percent, **more)
    add_output(parse)


def percent(text: str) -> float:
    """Return a number of at least 0, in percent, as a fraction; an argument type."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of percent")
    return value / 100


def run(options: argparse.Namespace) -> int:
    """Print what changed; return 0, or 1 after a regression if asked.  Raises Refused."""
    with refusing():
        compared = changes(options.before, options.after)
    changed = sorted((c for c in compared if c.is_beyond_noise), key=lambda c: -c.slowdown)
    slower = sum(change.slowdown > 0 for change in changed)
    console = console_for(0, options)
    if changed:
        console.print(common(changed))
        table(changed).print(console)
    console.print(
        f"{len(changed)} of {len(compared)} times changed by more than the noise: "
        f"{slower} slower, {len(changed) - slower} faster",
        soft_wrap=True,
    )
    dicts = [change.as_dict() for change in changed]
    write_json({"compared": len(compared), "changed": dicts}, options.json)
    return int(any(is_regression(change, options.fail_on_regression) for change in compared))


def changes(before: Result, after: Result) -> list[Change]:
    """Return everything that both have measured.  ValueError if it cannot be compared."""
    for name in SAME:
        one, other = (result.facts.get(name) for result in (before, after))
        if one != other:
            a, b = f"{name} {shown(one)}", f"{name} {shown(other)}"
            raise ValueError(f"{before.path} has {a}, {after.path} has {b}")
    both = [key for key in before.measurements if key in after.measurements]
    if not both:
        raise ValueError(f"{before.path} and {after.path} have measured nothing in common")
    return [change(key, before, after) for key in both]


def change(key: Key, before: Result, after: Result) -> Change:
    """Return one measurement, with the noise of both results."""
    a, b = before.measurements[key], after.measurements[key]
    noise = max(FLOOR, a.noise, b.noise, a.spread + b.spread)
    return Change(key, a.seconds, b.seconds, noise)


def is_regression(change: Change, allowed: float | None) -> bool:
    """Return whether it is slower by more than the noise and than what is allowed; None: all is."""
    return allowed is not None and change.is_beyond_noise and change.slowdown > allowed


def table(changed: Sequence[Change]) -> Table:
    """Return a line for each change; what all have in common is not in it."""
    differing = [name for name in WORDS if len(values_of(name, changed)) > 1]
    times = [Number(f"{when} us", ".2f") for when in ("before", "after")]
    numbers = (Number("size"), *times, Number("change", "+.1%"), Number("noise", ".1%"))
    made = Table(*[WORDS[name] for name in differing] or ["contender"], *numbers)
    for change in changed:
        words = [str(getattr(change.key, name)) for name in differing] or [change.key.name]
        seconds = (us(change.before), us(change.after))
        cells = (sizes.text(change.key.size), *seconds, change.slowdown, change.noise)
        made.add(*words, *cells, is_wrong=change.slowdown > 0)
    return made


def common(changed: Sequence[Change]) -> str:
    """Return what all changes have in common, such as "all_reduce, float32"."""
    shared = (values.pop() for name in WORDS if len(values := values_of(name, changed)) == 1)
    return ", ".join(value for value in shared if value not in ("none", "-1"))


def values_of(name: str, changed: Sequence[Change]) -> set[str]:
    """Return the values of a field in the keys of all changes."""
    return {str(getattr(change.key, name)) for change in changed}


COMMAND = Command("bench.results.compare", __doc__, add_options, run)
