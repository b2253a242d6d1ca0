"""The tables of `bench speed`: medians and goals."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from bench.commands.jobs import Jobs
from bench.contenders.contender import CALL, FRESH, MEMCPY, NATIVE, NATIVE_FRESH, PLAN
from bench.overlap.results import overlaps
from bench.overlap.results import show as show_overlaps
from bench.results.measurement import us
from bench.speed.goals import (
    CROWD,
    MPI4PY,
    OVERLAP,
    PAIR,
    RANKS,
    WAYS,
    WITH_GLOO,
    Finding,
    cells,
    summary,
)
from bench.speed.memory_limit import Limit
from bench.speed.timed_case import ENOUGH, Timed, Times
from bench.workloads.sizes import text
from collectives.console import Cell, Number, Table

Start = Mapping[str, Mapping[str, float]]  # by processes, and what they did


def show(findings: Sequence[Finding], times: Times, start: Start, jobs: Jobs) -> None:
    """Print the medians, and the goals that are judged by them."""
    say = jobs.console.print
    say(f"{jobs.mpi}, {os.cpu_count()} cores, float32, out of place")
    say(
        "Medians of the slowest rank, in us; ratios: its time / ours; sizes: of the whole vector; "
        "cores: the fraction of them that the ranks used"
    )
    jobs.show(tables(times))
    if overlapped := jobs.results.get(OVERLAP):
        say("\nOverlap")
        show_overlaps(overlapped, overlaps(overlapped), jobs.console)
    if start:
        jobs.show({"Start: medians in ms": start_table(start)})
    if (limit := limit_of(times)) is not None:
        say("\n" + "\n".join(limit.lines()))
    jobs.show({"Goals": goal_table(findings)})
    say(summary(findings))
    if (warning := disturbance(times)) is not None:
        say(warning)


def disturbance(times: Times) -> str | None:
    """Return how many cases other programs disturbed; None if none was.

    Judged by the jobs whose ranks all wait busily.
    """
    shares = [timed.cores for (job, *_), timed in times.items() if job in (PAIR, CROWD)]
    if not (disturbed := [share for share in shares if share < ENOUGH]):
        return None
    return (
        f"{len(disturbed)} of {len(shares)} cases were disturbed by other programs: their ranks "
        f"had less than {ENOUGH:.0%} of the cores, at worst {min(disturbed):.0%}."
    )


def limit_of(times: Times) -> Limit | None:
    """Return the limit of the largest case in which a copy was timed, if one was."""
    copied = [(timed.size, job) for (job, *_), timed in times.items() if MEMCPY in timed.seconds]
    if not copied:
        return None
    size, job = max(copied)
    return Limit(RANKS[job], times[job, "all_reduce", size])


def tables(times: Times) -> dict[str, Table]:
    """Return the table of what was measured, by title."""
    by_title: dict[str, Table] = {}
    for job in (PAIR, CROWD):
        if timed := of_job(times, job, ["all_reduce"]):
            by_title[f"All-reduce, {RANKS[job]} ranks"] = size_table(timed)
    names = dict.fromkeys(name for job, name, _ in times if job == PAIR and name != "all_reduce")
    if names:
        by_title["Other collectives, 2 ranks"] = size_table(of_job(times, PAIR, names))
    titles = {
        WAYS: "Other ways to make an all-reduce, 2 ranks",
        MPI4PY: "The drop-in for mpi4py, 2 ranks",
        WITH_GLOO: "PyTorch's Gloo, 2 ranks",
    }
    for job, title in titles.items():
        if timed := of_job(times, job, ["all_reduce"]):
            by_title[title] = contender_table(timed)
    return by_title


def of_job(times: Times, job: str, collectives: Iterable[str]) -> list[Timed]:
    """Return the cases of a job of these collectives."""
    names = set(collectives)
    return [timed for (its, name, _), timed in times.items() if its == job and name in names]


def size_table(cases: Sequence[Timed]) -> Table:
    """Return a line for each case: MPI's own, plan and call, and both on fresh arrays if timed."""
    is_fresh = all(FRESH in timed.seconds for timed in cases)
    columns = ["native", "plan", "native/plan", "call", "native/call"]
    fresh = ["fresh native", "fresh call", "native/call, fresh"] if is_fresh else []
    table = Table(
        "collective",
        "algorithm",
        Number("size"),
        *(Number(head, ".2f") for head in columns),
        Number("call - plan", "+.2f"),
        Number("%", "+.1f"),
        *(Number(head, ".2f") for head in [*fresh, "cores"]),
        Number("wrong"),
    )
    for timed in cases:
        numbers = [*beside_native(timed), *above_plan(timed)]
        numbers += fresh_cells(timed) if is_fresh else []
        wrong = sum(timed.wrong.values())
        size = text(timed.size)
        table.add(timed.collective, timed.algorithm, size, *numbers, timed.cores, wrong)
    return table


def beside_native(timed: Timed) -> list[Cell]:
    """Return MPI's own; plan and call, each with its ratio."""
    native, plan, call = (timed.seconds[name] for name in (NATIVE, PLAN, CALL))
    return [us(native), us(plan), native / plan, us(call), native / call]


def above_plan(timed: Timed) -> list[Cell]:
    """Return by how much a call takes longer than its plan, in us and in percent."""
    plan, call = timed.seconds[PLAN], timed.seconds[CALL]
    return [us(call - plan), (call / plan - 1) * 100]


def fresh_cells(timed: Timed) -> list[Cell]:
    """Return MPI's own and our call on fresh arrays, and the ratio."""
    native, ours = timed.seconds[NATIVE_FRESH], timed.seconds[FRESH]
    return [us(native), us(ours), native / ours]


def contender_table(cases: Sequence[Timed]) -> Table:
    """Return a line for each contender of each case."""
    times = [Number("us", ".2f"), Number("above the call", "+.2f")]
    table = Table("contender", Number("size"), *times, Number("wrong"))
    for timed in cases:
        for name, seconds in timed.seconds.items():
            base = timed.seconds.get(CALL)
            above = "-" if base is None or name == CALL else us(seconds - base)
            table.add(name, text(timed.size), us(seconds), above, timed.wrong[name])
    return table


def start_table(start: Start) -> Table:
    """Return a line for each thing that a fresh process did."""
    table = Table("", "what", Number("ms", ".3f"))
    for processes, medians in start.items():
        for name, seconds in medians.items():
            table.add(processes, name, seconds * 1e3)
    return table


def goal_table(findings: Sequence[Finding]) -> Table:
    """Return a line for each goal; those missed in red."""
    table = Table("what", "by", "sizes", "target", "found", "at", "verdict")
    for finding in findings:
        table.add(*cells(finding), is_wrong=finding.is_met is False)
    return table
