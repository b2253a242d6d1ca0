"""The checks of the demo, with one verdict for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bench.results.measurement import times_faster
from bench.training.strategies import largest_difference
from collectives.console import Table

TOLERANCES = {"float64": 1e-9, "float32": 1e-5}  # of the losses, relative


class Verdict(NamedTuple):
    """Something that must be so, whether it is, and what was found."""

    check: str
    is_good: bool
    remark: str


def bandwidth(status: int, result: dict[str, Any]) -> Verdict:
    """Return whether every element is right; how fast it was is only told."""
    check = "all-reduce: every element right"
    if status or not result:
        return Verdict(check, False, f"exit status {status}, wrong: {result.get('wrong', '?')}")
    ratios = [case["best_ratio"] for case in result["summary"]]
    wins = f"faster than {result['mpi']} at {sum(r >= 1 for r in ratios)} of {len(ratios)} sizes"
    mean = times_faster(result["geometric_mean"]["best"])
    return Verdict(check, True, f"{wins}; geometric mean of native/best {mean}")


def traffic(
    status: int, result: dict[str, Any], *, is_watched: bool, what: str = "traffic"
) -> Verdict:
    """Return whether the columns are equal, as the exit status says; three if MPI can count."""
    check = f"{what}: predicted = recorded" + " = observed" * is_watched
    if status or not result:
        return Verdict(check, False, f"exit status {status}")
    sent, reason = np.sum(result["traffic"]["matrix"]), result["traffic"]["not_observed"]
    remark = f"{sent} bytes" + (f"; not observed: {reason}" if reason else "")
    return Verdict(check, not (is_watched and reason), remark)


def learning(result: dict[str, Any]) -> Verdict:
    """Return whether the model knows more than how frequent each byte is."""
    check = "training: loss below unigram entropy"
    if not result:
        return Verdict(check, False, "no result")
    loss, entropy = result["losses"][-1], result["unigram_entropy"]
    return Verdict(check, loss < entropy, f"{loss:.4f} against {entropy:.4f} nats per byte")


def equality(
    dtype: str, ours: Sequence[float], reference: Sequence[float], *, steps: int, ranks: int = 4
) -> Verdict:
    """Return whether losses agree at every step, but for the order in which sums are rounded."""
    tolerance = TOLERANCES[dtype]
    check = f"training: {ranks} ranks = 1 rank to {tolerance:g}, {dtype}"
    if not len(ours) == len(reference) == steps:
        return Verdict(check, False, f"{len(ours)} and {len(reference)} losses of {steps}")
    difference = largest_difference(ours, reference)
    return Verdict(check, difference <= tolerance, f"{steps} steps, at most {difference:.1e} apart")


def jobs(statuses: Mapping[str, int]) -> Verdict:
    """Return whether every job ended well; a training job does not if its traffic is unequal."""
    failed = [f"{name}: {status}" for name, status in statuses.items() if status]
    return Verdict("jobs: exit status 0", not failed, ", ".join(failed) or f"all {len(statuses)}")


def table(verdicts: Sequence[Verdict]) -> Table:
    """Return the table of all verdicts, failures in red."""
    made = Table("check", "", "found")
    for verdict in verdicts:
        word = "ok" if verdict.is_good else "FAILED"
        made.add(verdict.check, word, verdict.remark, is_wrong=not verdict.is_good)
    return made
