"""Tables of mixtures of experts, from what `bench moe` and `bench balance` wrote with --json."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from docs.generate.measured import Result, name_of, note, note_of_all, read_json
from docs.generate.sections import table

BALANCE = "imbalance", "computed", "dropped", "loss"


def moe_result(path: str) -> Result:
    """Return an argument's type: what `bench moe --json` wrote to a file."""
    result = read_json(path)
    if "goals" not in result or not any(name.startswith("moe ") for name in result["jobs"]):
        raise argparse.ArgumentTypeError(f"{path} was not written by python -m bench moe --json")
    return result


def moe_section(results: Sequence[Result]) -> str:
    """Return one line for each ratio, with what was found under each MPI.

    ValueError if the runs are not of the same goals, or not of the same commit and machine.
    """
    goals = [{goal["what"]: goal for goal in result["goals"]} for result in results]
    if any(of_mpi.keys() != goals[0].keys() for of_mpi in goals):
        raise ValueError("the runs of the moe command are not of the same goals")
    rows = [
        [what, f"{goal['least']:.2f}", *(f"{of_mpi[what]['found']:.2f}" for of_mpi in goals)]
        for what, goal in goals[0].items()
    ]
    heads = ["goal", *map(name_of, results)]
    return f"{table(['ratio'], heads, rows)}\n\n{note_of_all(results)}"


def balance_section(path: str) -> str:
    """Return the table of balancing schemes from what `bench balance --json` wrote."""
    result = read_json(path)
    if "summaries" not in result:
        raise argparse.ArgumentTypeError(f"{path} was not written by bench balance --json")
    rows = [list(balance_cells(summary)) for summary in result["summaries"]]
    facts = result["provenance"]
    said = note(facts, [f"{result['seeds']} seeds"])
    return f"{table(['scheme'], ['k', *BALANCE, 'better than none'], rows)}\n\n{said}"


def balance_cells(summary: dict[str, Any]) -> Iterator[str]:
    """Yield the name, k, and the measures of a scheme, and in how many seeds it is better."""
    yield summary["name"].partition(", k=")[0]
    yield str(summary["k"])
    for name in BALANCE:
        least, median, most = summary["measures"][name].values()
        yield f"{median:.2f} ({least:.2f}-{most:.2f})"
    yield "" if summary["is_baseline"] else f"{summary['num_better']} of {summary['num_seeds']}"
