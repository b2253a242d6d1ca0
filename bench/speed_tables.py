"""The output of the speed command: medians and goals."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import overlap_table
from bench.case import CALL, FRESH, MEMCPY, NATIVE, NATIVE_FRESH, PLAN
from bench.goals import CROWD, MPI4PY, OVERLAP, PAIR, RANKS, WAYS, WITH_GLOO, Finding, summary
from bench.limit import Limit
from bench.report import times_faster, us
from bench.sizes import text
from bench.timed import ENOUGH, Timed, Times, overlaps
from parallel.cli import print_table, table_with

Start = Mapping[str, Mapping[str, float]]  # by processes, and what they did


def show(
    found: Sequence[Finding],
    times: Times,
    start: Start,
    results: Mapping[str, Mapping[str, Any]],
    console: Console,
) -> None:
    """The medians, and the goals that are judged by them."""
    console.print(f"{mpi_of(results)}, {os.cpu_count()} cores, float32, out of place")
    console.print(
        "Medians of the slowest rank, in us; ratios: its time / ours; sizes: of the whole vector; "
        "cores: the fraction of them that the ranks used"
    )
    for title, table in tables(times):
        console.print(f"\n{title}")
        print_table(table, console)
    if overlapped := results.get(OVERLAP):
        console.print("\nOverlap")
        overlap_table.show(overlapped, overlaps(overlapped), console)
    if start:
        console.print("\nStart: medians in ms")
        print_table(start_table(start), console)
    if (limit := limit_of(times)) is not None:
        console.print("\n" + "\n".join(limit.lines()))
    console.print("\nGoals")
    print_table(goal_table(found), console)
    console.print(summary(found))
    if (warning := disturbance(times)) is not None:
        console.print(warning)


def disturbance(times: Times) -> str | None:
    """How many cases other programs disturbed; None if none was.

    Judged by the jobs whose ranks all wait busily.
    """
    shares = [timed.cores for (job, *_), timed in times.items() if job in (PAIR, CROWD)]
    if not (disturbed := [share for share in shares if share < ENOUGH]):
        return None
    return (
        f"{len(disturbed)} of {len(shares)} cases were disturbed by other programs: their ranks "
        f"had less than {ENOUGH:.0%} of the cores, at worst {min(disturbed):.0%}."
    )


def mpi_of(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The MPI library that the jobs ran under."""
    return next((result["mpi"] for result in results.values() if "mpi" in result), "no MPI")


def limit_of(times: Times) -> Limit | None:
    """Of the largest case in which a copy was timed, if one was."""
    copied = [(timed.size, job) for (job, *_), timed in times.items() if MEMCPY in timed.seconds]
    if not copied:
        return None
    size, job = max(copied)
    return Limit(RANKS[job], times[job, "all_reduce", size])


# Tables of medians


def tables(times: Times) -> Iterable[tuple[str, Table]]:
    """Title and table of what was measured."""
    all_reduces = {job: of_job(times, job, ["all_reduce"]) for job in (PAIR, CROWD)}
    for job, cases in all_reduces.items():
        if cases:
            yield f"All-reduce, {RANKS[job]} ranks", size_table(cases)
    names = dict.fromkeys(name for job, name, _ in times if job == PAIR and name != "all_reduce")
    if names:
        yield "Other collectives, 2 ranks", size_table(of_job(times, PAIR, names))
    titles = {
        WAYS: "Other ways to make an all-reduce",
        MPI4PY: "The drop-in for mpi4py",
        WITH_GLOO: "PyTorch's Gloo",
    }
    for job, title in titles.items():
        if cases := of_job(times, job, ["all_reduce"]):
            yield f"{title}, 2 ranks", contender_table(cases)


def of_job(times: Times, job: str, collectives: Iterable[str]) -> list[Timed]:
    """Its cases of these collectives."""
    names = set(collectives)
    return [timed for (its, name, _), timed in times.items() if its == job and name in names]


def size_table(cases: Sequence[Timed]) -> Table:
    """One line for each case: MPI's own, plan and call, and both on fresh arrays if timed."""
    is_fresh = all(FRESH in timed.seconds for timed in cases)
    fresh = ["fresh native", "fresh call", "ratio"] if is_fresh else []
    numbers = ["size", "native", "plan", "ratio", "call", "ratio", "call - plan", "%", *fresh]
    table = table_with("collective", "algorithm", numbers=[*numbers, "cores", "wrong"])
    for timed in cases:
        cells = [text(timed.size), *beside_native(timed), *above_plan(timed)]
        cells += fresh_cells(timed) if is_fresh else []
        checks = [f"{timed.cores:.2f}", str(sum(timed.wrong.values()))]
        table.add_row(timed.collective, timed.algorithm, *cells, *checks)
    return table


def beside_native(timed: Timed) -> list[str]:
    """MPI's own; plan and call, each with its ratio."""
    native = timed.seconds[NATIVE]
    ours = (timed.seconds[name] for name in (PLAN, CALL))
    return [us(native), *(cell for s in ours for cell in (us(s), times_faster(native / s)))]


def above_plan(timed: Timed) -> list[str]:
    """By how much a call takes longer than its plan."""
    plan, call = timed.seconds[PLAN], timed.seconds[CALL]
    return [f"{(call - plan) * 1e6:+.2f}", f"{call / plan - 1:+.1%}"]


def fresh_cells(timed: Timed) -> list[str]:
    """MPI's own and our call on fresh arrays, and the ratio."""
    native, ours = timed.seconds[NATIVE_FRESH], timed.seconds[FRESH]
    return [us(native), us(ours), times_faster(native / ours)]


def contender_table(cases: Sequence[Timed]) -> Table:
    """One line for each contender of each case."""
    table = table_with("contender", numbers=["size", "us", "above the call", "wrong"])
    for timed in cases:
        for name, seconds in timed.seconds.items():
            base = timed.seconds.get(CALL)
            above = "-" if base is None or name == CALL else f"{(seconds - base) * 1e6:+.2f}"
            table.add_row(name, text(timed.size), us(seconds), above, str(timed.wrong[name]))
    return table


def start_table(start: Start) -> Table:
    """One line for each thing that a fresh process did."""
    table = table_with("", "what", numbers=["ms"])
    for processes, found in start.items():
        for what, seconds in found.items():
            table.add_row(processes, what, f"{seconds * 1e3:.3f}")
    return table


# Goals


def goal_table(found: Sequence[Finding]) -> Table:
    """One line for each goal; those missed in red."""
    table = table_with("what", "by", "sizes", "target", "found", "at", "verdict", numbers=())
    for each in found:
        table.add_row(*goal_dict(each)["cells"], style="bold red" if each.is_met is False else None)
    return table


def goal_dict(each: Finding) -> dict[str, Any]:
    """One goal for JSON: numbers, and the cells of the table."""
    goal, shown = each.goal, "-" if each.value is None else each.goal.measure.text(each.value)
    at = "-" if each.worst is None or len(goal.sizes) == 1 else text(each.worst)
    if goal.in_the_mean and each.value is not None:
        at = "the mean"
    cells = [goal.what, goal.measure.ours, span(goal.sizes), goal.target, shown, at, each.verdict]
    numbers: dict[str, Any] = {"sizes": list(goal.sizes), "bound": goal.bound, "value": each.value}
    numbers["measure"] = goal.measure.words
    return {"cells": cells, **numbers, "worst": each.worst, "met": each.is_met}


def span(sizes: Sequence[int]) -> str:
    """From the least to the greatest."""
    ends = list(dict.fromkeys(map(text, (sizes[0], sizes[-1]))))
    return " to ".join(ends)
