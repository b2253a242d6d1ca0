"""Tables of measurements, from what `bench speed`, `bench strategies` and `make gpu` wrote."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.case import CALL, FRESH, NATIVE, NATIVE_FRESH, PLAN
from bench.docs.devices import device_table, short
from bench.docs.provenance import note
from bench.docs.sections import table
from bench.docs.steps_before import MILLISECONDS
from bench.goals import PAIR
from bench.report import times_faster
from bench.sizes import text

Result = dict[str, Any]  # of one run of the speed command
NOT_BESIDE = "Collectives beside other libraries were not measured in this run."


def result(path: str) -> Result:
    """An argument's type: what the speed command wrote to a file."""
    found = read_json(path)
    if not {"mpi", "goals", "jobs", "provenance"} <= found.keys():
        raise argparse.ArgumentTypeError(f"{path} was not written by python -m bench speed --json")
    return found


def read_json(path: str) -> Result:
    """What a command wrote to a file; nothing if it is no dictionary."""
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error}") from None
    return found if isinstance(found, dict) else {}


def sections(results: Sequence[Result]) -> dict[str, str]:
    """Each section by its name.  ValueError if the runs are not of the same goals and sizes."""
    measured = {"speed": goals_section(results), "bandwidth": sizes_section(results)}
    said = note_of_all(results)
    return {name: f"{section}\n\n{said}" for name, section in measured.items()}


def note_of_all(results: Sequence[Result]) -> str:
    """When and on what they were measured, each under its MPI.

    ValueError if that was not the same code.
    """
    facts = [result["provenance"] for result in results]
    if any(each["code"] != facts[0]["code"] for each in facts):
        raise ValueError("the runs of the command are not of the same code")
    return note(facts[0], [result["mpi"] for result in results])


def strategies_section(path: str) -> str:
    """The table of strategies from what `python -m bench strategies --json` wrote."""
    result = read_json(path)
    if "provenance" not in result or "costs" not in result:
        raise argparse.ArgumentTypeError(f"{path} was not written by bench strategies --json")
    head = ["sent / 2 Psi", "between groups", "kept / 16 Psi", "at most", "ms a step"]
    rows = [[name, *_numbers(costs)] for name, costs in result["costs"].items()]
    facts = result["provenance"]
    return f"{table(['strategy'], head, rows)}\n\n{note(facts, [facts['mpi']])}"


def gpu_section(path: str) -> str:
    """The tables of collectives and of training on a GPU from what `make gpu` wrote."""
    result = read_json(path)
    facts = result.pop("provenance", {})
    devices = {name: found for name, found in result.items() if name.startswith("devices ")}
    measured = {
        name: found for name, found in result.items() if "summary" in found and name not in devices
    }
    trained = {name: found for name, found in result.items() if "traffic" in found}
    if "gpu" not in facts or not measured:
        raise argparse.ArgumentTypeError(f"{path} was not written by make gpu with an MPI")
    first = next(iter(measured.values()))
    collectives = by_collective(measured.values())
    sizes = [text(row["size"]) for row in next(iter(collectives.values()))]
    heads = [head for size in sizes for head in (f"{size}: best", "call")]
    rows = [[name, *gpu_cells(found)] for name, found in collectives.items()]
    heads_trained = ["sent: predicted", "recorded", "first loss", "last", "ms a step", "before"]
    rows_trained = [
        [kind, *training_cells(found), str(MILLISECONDS.get(kind, ""))]
        for kind, found in ((name.removeprefix("train "), found) for name, found in trained.items())
    ]
    where = f"CuPy {facts['cupy']}, one {facts['gpu']} for {first['ranks']} ranks"
    said = note(facts, [where, first["mpi"]])
    tables = table(["collective"], heads, rows), table(["training"], heads_trained, rows_trained)
    beside = [*map(device_table, devices.values())] or [NOT_BESIDE]
    return "\n\n".join([*beside, *tables, said])


def by_collective(measured: Iterable[Result]) -> dict[str, list[Result]]:
    """The summaries of steps that measured one collective or several, without the barrier."""
    found: dict[str, list[Result]] = {}
    for row in (row for result in measured for row in result["summary"]):
        if row["collective"] != "barrier":
            found.setdefault(row["collective"], []).append(row)
    return found


def gpu_cells(summary: Sequence[Result]) -> Iterator[str]:
    """The times of a collective at each size: of the best algorithm, and of the call."""
    for row in summary:
        yield f"{short(row['best_seconds'])} ({row['best']})"
        yield short(row["call"])


def training_cells(found: dict[str, Any]) -> Iterator[str]:
    """The bytes of a run as predicted and recorded, its losses, and the time of a step."""
    rows = found["traffic"]["rows"]
    alone = [row for row in rows if not row["collective"].startswith("(")]  # that is no sum of rows
    for who in ("predicted", "recorded"):
        yield f"{sum(row[who]['bytes'] for row in alone):,}"
    yield from (f"{found['losses'][place]:.4f}" for place in (0, -1))
    yield f"{found['seconds_per_step'] * 1e3:.1f}"


def _numbers(costs: Sequence[float]) -> list[str]:
    *shares, milliseconds = costs
    return [*(f"{share:.3f}" for share in shares), f"{milliseconds:.0f}"]


def goals_section(results: Sequence[Result]) -> str:
    """One line for each quantity, with what was found under each MPI."""
    quantities = [list(map(quantity, result["goals"])) for result in results]
    if any(each != quantities[0] for each in quantities):
        raise ValueError("the runs of the speed command are not of the same goals")
    rows = [
        [*words, *(goal_cell(result["goals"][line]) for result in results)]
        for line, words in enumerate(quantities[0])
    ]
    return table(["what", "by", "sizes", "measure"], list(map(name_of, results)), rows)


def quantity(goal: dict[str, Any]) -> list[str]:
    """The measured quantity, as text."""
    return [*goal["cells"][:3], goal["measure"]]


def goal_cell(goal: dict[str, Any]) -> str:
    """The mean, or the worst value and the size at which it is."""
    value, at, verdict = goal["cells"][4:]
    if goal["value"] is None:
        return str(verdict)
    if at == "the mean":
        return f"{value} in the mean"
    words = f"{value} at {at}" if at != "-" else value
    return words if goal["met"] is not None else f"{words} ({verdict})"


def sizes_section(results: Sequence[Result]) -> str:
    """The all-reduce on 2 ranks by size, in microseconds, and its ratios."""
    columns = [all_reduces(result) for result in results]
    if any(found.keys() != columns[0].keys() for found in columns):
        raise ValueError("the runs of the speed command are not of the same sizes")
    ours = ["plan", "ratio", "call", "ratio", "fresh: its own", "call", "ratio"]
    heads = [head for result in results for head in (f"{name_of(result)}'s own", *ours)]
    rows = [
        [text(size), *(cell for found in columns for cell in size_cells(found[size]))]
        for size in columns[0]
    ]
    return table([], ["size", *heads], rows)


def all_reduces(result: Result) -> dict[int, dict[str, float]]:
    """The seconds of each contender by size; nothing if they were not measured."""
    cases = result["jobs"].get(PAIR, {}).get("cases", [])
    return {case["size"]: case["seconds"] for case in cases if case["collective"] == "all_reduce"}


def size_cells(seconds: dict[str, float]) -> list[str]:
    """Of one size under one MPI."""
    cells = []
    for native, ours in ((NATIVE, [PLAN, CALL]), (NATIVE_FRESH, [FRESH])):
        cells.append(short(seconds[native]))
        for name in ours:
            cells += [short(seconds[name]), times_faster(seconds[native] / seconds[name])]
    return cells


def name_of(result: Result) -> str:
    """The MPI library without its version."""
    return str(result["mpi"]).rpartition(" ")[0] or str(result["mpi"])
