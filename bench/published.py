"""The tables of speed in README.md, from what `python -m bench speed --json FILE` wrote."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.case import CALL, FRESH, NATIVE, NATIVE_FRESH, PLAN
from bench.goals import PAIR
from bench.report import times_faster
from bench.sizes import text

Result = dict[str, Any]  # of one run of the speed command


def result(path: str) -> Result:
    """An argument's type: what the speed command wrote to a file."""
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error}") from None
    if not isinstance(found, dict) or not {"mpi", "goals", "jobs"} <= found.keys():
        raise argparse.ArgumentTypeError(f"{path} was not written by python -m bench speed --json")
    return found


def sections(results: Sequence[Result]) -> dict[str, str]:
    """Each section by its name.  ValueError if the runs are not of the same goals and sizes."""
    return {"speed": goals_section(results), "bandwidth": sizes_section(results)}


def goals_section(results: Sequence[Result]) -> str:
    """One line for each goal, with what was found under each MPI, bold where it is met."""
    demands = [[each["cells"][:4] for each in result["goals"]] for result in results]
    if any(demand != demands[0] for demand in demands):
        raise ValueError("the runs of the speed command are not of the same goals")
    rows = [
        [*demand, *(goal_cell(result["goals"][line]) for result in results)]
        for line, demand in enumerate(demands[0])
    ]
    return markdown(["what", "by", "sizes", "wanted"], list(map(name_of, results)), rows)


def goal_cell(goal: dict[str, Any]) -> str:
    """The value, and the size at which it is."""
    value, at, verdict = goal["cells"][4:]
    if goal["value"] is None:
        return str(verdict)
    words = f"{value} at {at}" if goal["worst"] is not None and at != "-" else value
    if goal["met"] is None:
        return f"{words} ({verdict})"
    return f"**{words}**" if goal["met"] else words


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
    return markdown([], ["size", *heads], rows)


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


def short(seconds: float) -> str:
    """Microseconds with about three digits."""
    us = seconds * 1e6
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"


def name_of(result: Result) -> str:
    """The MPI library without its version."""
    return str(result["mpi"]).rpartition(" ")[0] or str(result["mpi"])


def markdown(words: Sequence[str], numbers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; columns of numbers to the right."""
    lines = [[*words, *numbers], ["---"] * len(words) + ["---:"] * len(numbers), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
