"""The tables of a fit: the costs of links, the errors of the fit, and the held-out check."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import sizes
from bench.fit.check import MEDIAN, REGRET, TAIL, Held, Verdict, by, verdict
from bench.fit.fitting import link_errors
from bench.fit.patterns import PATTERNS, Sample
from collectives.simulation import Link, Machine
from parallel.cli import print_table, table_with


def show_left_out(samples: Sequence[Sample], console: Console) -> None:
    """What is not fitted, because ranks lost their cores; nothing if that is nothing."""
    if samples:
        what = ", ".join(sizes.text(each.num_bytes) for each in samples)
        console.print(f"Left out, because ranks lost their cores: {samples[0].pattern} of {what}")


def show_machine(
    machine: Machine, samples: Sequence[Sample], base: Machine, console: Console
) -> None:
    """The links, with the relative errors of the fit, pattern by pattern.

    `base`: with the seconds of a call of a pattern, in addition to its operations.
    """
    table = table_with(
        "link",
        "sends",
        numbers=["up to bytes", "o us", "O ns/B", "L us", "g us", "G ns/B", "GB/s", *PATTERNS],
    )
    for name, links in machine.links.items():
        lowest = -1.0
        for link in links:
            inside = [
                each
                for each in samples
                if each.link_class == name and lowest < each.num_bytes <= link.up_to_bytes
            ]
            lowest = link.up_to_bytes
            table.add_row(
                name.replace("_", " "),
                "rendezvous" if link.is_rendezvous else "eager",
                "-" if link.up_to_bytes == math.inf else f"{link.up_to_bytes:.0f}",
                *(_us(link.overhead_seconds), _ns(link.overhead_seconds_per_byte)),
                *(_us(link.latency_seconds), _us(link.gap_seconds), _ns(link.seconds_per_byte)),
                f"{1e-9 / link.seconds_per_byte:.3g}" if link.seconds_per_byte else "-",
                *(_errors(inside, pattern, link, base) for pattern in PATTERNS),
            )
    console.print("\nLinks (LogGOPS), and the median error of the fit for each pattern")
    print_table(table, console)
    console.print(f"A call takes {_us(machine.call_seconds)} us in addition.")


def _errors(samples: Sequence[Sample], pattern: str, link: Link, base: Machine) -> str:
    """The median relative error of a pattern's samples."""
    found = [each for each in samples if each.pattern == pattern]
    if not found:
        return "-"
    return f"{np.median(np.abs(np.expm1(link_errors(found, link, base)))):.0%}"


def show_work(
    work_sizes: Sequence[int],
    work: Mapping[str, Sequence[float]],
    machine: Machine,
    console: Console,
) -> None:
    """The speed of copies and combinations by size, and what was fitted to it."""
    fitted = {"copy": machine.copy_seconds_per_byte, "combine": machine.combine_seconds_per_byte}
    table = table_with("GB/s", numbers=[*map(sizes.text, work_sizes), "fitted"])
    for kind, times in work.items():
        rates = [size / each / 1e9 for size, each in zip(work_sizes, times, strict=True)]
        table.add_row(kind, *(f"{each:.3g}" for each in (*rates, 1e-9 / fitted[kind])))
    print_table(table, console)


def show_check(found: Sequence[Held], console: Console) -> bool:
    """The held-out check; return whether all goals are met."""
    console.print("\nHeld out: calls that the fit has not seen")
    for field, title in (("collective", "collective"), ("num_bytes", "bytes"), ("size", "ranks")):
        print_table(_table(title, by(found, field)), console)
    whole = verdict(found)
    console.print(
        f"All {whole.num_calls} calls: median error {whole.median:.1%} (goal {MEDIAN:.0%}), "
        f"90th percentile {whole.tail:.1%} (goal {TAIL:.0%}); what is predicted to be best takes "
        f"{whole.regret:.2f} times the least time (goal {REGRET:.2f})"
    )
    console.print("All goals are met." if whole.is_met else "Not all goals are met.")
    return whole.is_met


def _table(title: str, found: Mapping[object, Verdict]) -> Table:
    numbers = ["calls", "median error", "90th percentile", "pick over best", "worst pick"]
    table = table_with(title, numbers=numbers)
    for value, each in found.items():
        table.add_row(
            *(str(value), str(each.num_calls), f"{each.median:.1%}", f"{each.tail:.1%}"),
            *(f"{each.regret:.2f}", f"{each.worst:.2f}"),
        )
    return table


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.3g}"


def _ns(seconds: float) -> str:
    return f"{seconds * 1e9:.3g}"
