"""Explain a choice: the algorithm, the reason, predicted times, and restrictions of the others."""

from __future__ import annotations

from typing import NamedTuple

from collectives import algorithms
from collectives.arrays import Operator
from collectives.schedule import Topology
from collectives.selection.decisions import Decisions
from collectives.selection.labels import parse_label
from collectives.selection.select import choose, predicted, preferred, restriction_of


class Candidate(NamedTuple):
    """An algorithm that could run, and its predicted time in seconds."""

    label: str
    seconds: float


class Rejected(NamedTuple):
    """An algorithm that cannot run, and the restriction as text."""

    label: str
    restriction: str


class Explanation(NamedTuple):
    """What a call would run, and why.

    Attributes
    ----------
    collective : str
    size : int
    num_bytes : int
        The n of the formulas.
    chosen : str
        The algorithm as a caller names it.
    reason : str
        Who or what chose it.
    candidates : tuple of Candidate
        All that could run, by predicted time between arrays in host memory.  The predictions decide
        only where nothing was measured and a machine was fitted.
    rejected : tuple of Rejected
    run_by : str
        What runs the program, and why it is not compiled code if it is not.
    links : str
        For arrays on a GPU, how this rank and the others reach each other.
    if_staged : str
        For such a call, what runs instead if it is staged in host memory, and why; "": the same.
    """

    collective: str
    size: int
    num_bytes: int
    chosen: str
    reason: str
    candidates: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]
    run_by: str = ""
    links: str = ""
    if_staged: str = ""

    def __str__(self) -> str:
        width = max(len(label) for label, _ in (*self.candidates, *self.rejected))
        lines = [
            f"{self.collective} of {self.num_bytes} bytes on {self.size} ranks: {self.chosen}",
            f"why: {self.reason}",
            *([f"run by: {self.run_by}"] if self.run_by else []),
            *([f"links: {self.links}"] if self.links else []),
            *([f"if staged: {self.if_staged}"] if self.if_staged else []),
            f"  {'algorithm':{width}}  predicted us{' in host memory' if self.links else ''}",
        ]
        for label, seconds in self.candidates:
            mark = "*" if label == self.chosen else " "
            lines.append(f"{mark} {label:{width}} {seconds * 1e6:13.1f}")
        lines += [f"  {label:{width}}  {restriction}" for label, restriction in self.rejected]
        return "\n".join(lines)


def explain(
    collective: str,
    algorithm: str | None,
    size: int,
    num_bytes: int,
    operator: Operator | None = None,
    decisions: Decisions | None = None,
    topology: Topology | None = None,
    *,
    on_device: bool = False,
) -> Explanation:
    """Return the explanation of a call.

    The arguments and errors are those of `choose`.
    """
    text = preferred(collective) if algorithm is None else algorithm
    call = collective, text, size, num_bytes, operator, decisions, topology
    choice, staged = choose(*call, on_device=on_device), choose(*call)
    is_preferred = algorithm is None and text is not None
    reason = "named by collectives.using" if is_preferred else choice.reason
    labels = dict.fromkeys(
        [*algorithms.names(collective), choice.label]
    )  # the choice may have options
    restrictions = {
        label: restriction_of(parse_label(collective, label), size, operator) for label in labels
    }
    machine = None if decisions is None else decisions.machine_for(topology)
    seconds = predicted(collective, size, num_bytes, machine, topology, labels=(choice.label,))
    candidates = [Candidate(label, time) for label, time in seconds if restrictions[label] is None]
    rejected = [
        Rejected(label, words) for label, words in restrictions.items() if words is not None
    ]
    return Explanation(
        collective,
        size,
        num_bytes,
        choice.label,
        reason,
        tuple(candidates),
        tuple(rejected),
        if_staged="" if choice.label == staged.label else f"{staged.label}, {staged.reason}",
    )
