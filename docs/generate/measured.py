"""Tables of measurements, from what `bench speed`, `bench strategies` and `make gpu` wrote."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.contenders.contender import CALL, FRESH, NATIVE, NATIVE_FRESH, PLAN
from bench.results.measurement import times_faster
from bench.speed.goals import PAIR
from bench.workloads.sizes import text
from docs.generate.devices import device_table, short
from docs.generate.sections import table
from docs.generate.steps_before import MILLISECONDS

Result = dict[str, Any]  # of one run of the speed command
NOT_BESIDE = "Collectives beside other libraries were not measured in this run."


def result(path: str) -> Result:
    """Return an argument's type: what the speed command wrote to a file."""
    result = read_json(path)
    if not {"mpi", "goals", "jobs", "provenance"} <= result.keys():
        raise argparse.ArgumentTypeError(f"{path} was not written by python -m bench speed --json")
    return result


def read_json(path: str) -> Result:
    """Return what a command wrote to a file; nothing if it is no dictionary."""
    try:
        written = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error}") from None
    return written if isinstance(written, dict) else {}


def sections(results: Sequence[Result]) -> dict[str, str]:
    """Return each section by its name; ValueError if runs have other goals or sizes."""
    measured = {"speed": goals_section(results), "bandwidth": sizes_section(results)}
    said = note_of_all(results)
    return {name: f"{section}\n\n{said}" for name, section in measured.items()}


def note_of_all(results: Sequence[Result]) -> str:
    """Return when and on what they were measured, each under its MPI.

    ValueError if that was not the same commit on the same machine.
    """
    facts = [result["provenance"] for result in results]
    for what in ("commit", "machine"):
        if len({of_mpi[what] for of_mpi in facts}) > 1:
            raise ValueError(f"the runs of the command are not of the same {what}")
    return note(facts[0], [result["mpi"] for result in results])


def note(facts: Mapping[str, Any], others: Sequence[str]) -> str:
    """Return the line under a table: when and where it was measured, and with which versions."""
    return (
        f"Measured on {facts['date']} at commit {facts['commit']} on {facts['machine']}, with "
        f"Python {facts['python']}, NumPy {facts['numpy']}, {' and '.join(others)}."
    )


def strategies_section(path: str) -> str:
    """Return the table of strategies from what `ring bench strategies --json` wrote."""
    result = read_json(path)
    if "provenance" not in result or "costs" not in result:
        raise argparse.ArgumentTypeError(f"{path} was not written by bench strategies --json")
    head = ["sent / 2 Psi", "between groups", "kept / 16 Psi", "at most", "ms a step"]
    rows = [[name, *_numbers(costs)] for name, costs in result["costs"].items()]
    facts = result["provenance"]
    return f"{table(['strategy'], head, rows)}\n\n{note(facts, [facts['mpi']])}"


def gpu_section(path: str) -> str:
    """Return the tables of collectives and of training on a GPU from what `make gpu` wrote."""
    steps = read_json(path)
    facts = steps.pop("provenance", {})
    beside = {name: step for name, step in steps.items() if name.startswith("devices ")}
    alone = [step for name, step in steps.items() if "summary" in step and name not in beside]
    if "gpu" not in facts or not alone:
        raise argparse.ArgumentTypeError(f"{path} was not written by make gpu with an MPI")
    tables = [*map(device_table, beside.values())] or [NOT_BESIDE]
    tables += [collectives_table(by_collective(alone)), training_table(steps)]
    where = f"CuPy {facts['cupy']}, one {facts['gpu']} for {alone[0]['ranks']} ranks"
    return "\n\n".join([*tables, note(facts, [where, alone[0]["mpi"]])])


def collectives_table(summaries: Mapping[str, Sequence[Result]]) -> str:
    """Return the times of each collective at each size."""
    sizes = [text(row["size"]) for row in next(iter(summaries.values()))]
    heads = [head for size in sizes for head in (f"{size}: best", "call")]
    rows = [[name, *gpu_cells(of_sizes)] for name, of_sizes in summaries.items()]
    return table(["collective"], heads, rows)


def training_table(steps: Mapping[str, Result]) -> str:
    """Return what each kind of training sent, and how long a step took, now and before."""
    kinds = {name.removeprefix("train "): step for name, step in steps.items() if "traffic" in step}
    rows = [
        [kind, *training_cells(training), str(MILLISECONDS.get(kind, ""))]
        for kind, training in kinds.items()
    ]
    heads = ["sent: predicted", "recorded", "first loss", "last", "ms a step", "before"]
    return table(["training"], heads, rows)


def by_collective(measured: Iterable[Result]) -> dict[str, list[Result]]:
    """Return the summaries of steps by collective, without the barrier."""
    summaries: dict[str, list[Result]] = {}
    for row in (row for result in measured for row in result["summary"]):
        if row["collective"] != "barrier":
            summaries.setdefault(row["collective"], []).append(row)
    return summaries


def gpu_cells(summary: Sequence[Result]) -> Iterator[str]:
    """Yield the times of a collective at each size: of the best algorithm, and of the call."""
    for row in summary:
        yield f"{short(row['best_seconds'])} ({row['best']})"
        yield short(row["call"])


def training_cells(training: Result) -> Iterator[str]:
    """Yield the bytes of a run as predicted and recorded, its losses, and the time of a step."""
    rows = training["traffic"]["rows"]
    alone = [row for row in rows if not row["collective"].startswith("(")]  # that is no sum of rows
    for who in ("predicted", "recorded"):
        yield f"{sum(row[who]['bytes'] for row in alone):,}"
    yield from (f"{training['losses'][place]:.4f}" for place in (0, -1))
    yield f"{training['seconds_per_step'] * 1e3:.1f}"


def _numbers(costs: Sequence[float]) -> list[str]:
    *shares, milliseconds = costs
    return [*(f"{share:.3f}" for share in shares), f"{milliseconds:.0f}"]


def goals_section(results: Sequence[Result]) -> str:
    """Return one line for each quantity, with what was found under each MPI."""
    quantities = [list(map(quantity, result["goals"])) for result in results]
    if any(of_mpi != quantities[0] for of_mpi in quantities):
        raise ValueError("the runs of the speed command are not of the same goals")
    rows = [
        [*words, *(goal_cell(result["goals"][line]) for result in results)]
        for line, words in enumerate(quantities[0])
    ]
    return table(["what", "by", "sizes", "measure"], list(map(name_of, results)), rows)


def quantity(goal: dict[str, Any]) -> list[str]:
    """Return the measured quantity, as text."""
    return [*goal["cells"][:3], goal["measure"]]


def goal_cell(goal: dict[str, Any]) -> str:
    """Return the mean, or the worst value and the size at which it is."""
    value, at, verdict = goal["cells"][4:]
    if goal["value"] is None:
        return str(verdict)
    if at == "the mean":
        return f"{value} in the mean"
    words = f"{value} at {at}" if at != "-" else value
    return words if goal["met"] is not None else f"{words} ({verdict})"


def sizes_section(results: Sequence[Result]) -> str:
    """Return the all-reduce on 2 ranks by size, in microseconds, and its ratios."""
    columns = [all_reduces(result) for result in results]
    if any(of_mpi.keys() != columns[0].keys() for of_mpi in columns):
        raise ValueError("the runs of the speed command are not of the same sizes")
    ours = ["plan", "ratio", "call", "ratio", "fresh: its own", "call", "ratio"]
    heads = [head for result in results for head in (f"{name_of(result)}'s own", *ours)]
    rows = [
        [text(size), *(cell for of_mpi in columns for cell in size_cells(of_mpi[size]))]
        for size in columns[0]
    ]
    return table([], ["size", *heads], rows)


def all_reduces(result: Result) -> dict[int, dict[str, float]]:
    """Return the seconds of each contender by size; nothing if they were not measured."""
    cases = result["jobs"].get(PAIR, {}).get("cases", [])
    return {case["size"]: case["seconds"] for case in cases if case["collective"] == "all_reduce"}


def size_cells(seconds: dict[str, float]) -> list[str]:
    """Return the times and the ratios of one size under one MPI."""
    cells = []
    for native, ours in ((NATIVE, [PLAN, CALL]), (NATIVE_FRESH, [FRESH])):
        cells.append(short(seconds[native]))
        for name in ours:
            cells += [short(seconds[name]), times_faster(seconds[native] / seconds[name])]
    return cells


def name_of(result: Result) -> str:
    """Return the MPI library without its version."""
    return str(result["mpi"]).rpartition(" ")[0] or str(result["mpi"])
