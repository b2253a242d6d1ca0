"""What each rank reports when a run is over, gathered on rank 0.

A report contains the memory kept and the bytes moved to and from where updates are made and
activations are kept, both predicted and counted, and digests of the parameters.  `differences`
compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from collectives import Communicator
from parallel.accounts import gather_json
from parallel.nn import on_host
from parallel.runtime import Trainer, agreement
from parallel.runtime.memory import (
    activation_traffic,
    is_offloaded,
    offload_traffic,
    peak_memory,
    peak_offloaded_memory,
)

Pair = tuple[int, int]  # predicted and counted


class RankReport(NamedTuple):
    """The report of one rank.

    Attributes
    ----------
    memory : dict of str to (int, int)
        The peak bytes of each category: predicted and counted.
    moved : dict of str to (int, int)
        The bytes that the offloads of updates and of activations moved, by column: predicted and
        counted.
    parameters : dict of str to (int, int, str)
        Of each unit: the first and the last (exclusive) element that the rank keeps, and their
        SHA-256.
    """

    memory: dict[str, Pair]
    moved: dict[str, Pair]
    parameters: dict[str, tuple[int, int, str]]

    @classmethod
    def of(cls, trainer: Trainer, num_updates: int, rows: int, context: int) -> RankReport:
        """Return this rank's report after updates on batches of (`rows`, `context`) tokens.

        `rows` are those of this rank.
        """
        offload = trainer.offload
        memory = pairs(peak_memory(trainer, rows, context), trainer.memory.peak)
        if is_offloaded(trainer):
            elsewhere = pairs(peak_offloaded_memory(trainer), offload.memory.peak)
            memory |= {f"{name}, offloaded": pair for name, pair in elsewhere.items()}
        digests = {}
        for unit, x in trainer.parameters.items():
            part = trainer.stored_slice(unit)
            digests[unit] = part.start, part.stop, agreement.digest(on_host(x)).hex()
        moved = pairs(offload_traffic(trainer, num_updates), offload.moved)
        of_batches = activation_traffic(trainer, rows, context)
        moved |= pairs(of_batches, trainer.activations.moved)
        return cls(memory, moved, digests)


def pairs(predicted: Mapping[str, int], counted: Mapping[str, int]) -> dict[str, Pair]:
    """Return (predicted, counted) for the keys of both; a missing value is 0."""
    names = dict.fromkeys([*predicted, *counted])
    return {name: (int(predicted.get(name, 0)), int(counted.get(name, 0))) for name in names}


def gather(comm: Communicator, report: RankReport) -> list[RankReport] | None:
    """Return every rank's report on rank 0, and None on others.  All ranks call this."""
    reports = gather_json(comm, report)
    return None if reports is None else [RankReport(*each) for each in reports]


def differences(reports: list[RankReport]) -> list[str]:
    """Return descriptions of what differs, and should not.

    That is: a predicted and a counted number, or the digests of the same parameters on two ranks.
    """
    found = [
        f"{name} of rank {rank}: {predicted} by formula, {counted} counted"
        for rank, report in enumerate(reports)
        for name, (predicted, counted) in (report.memory | report.moved).items()
        if predicted != counted
    ]
    first: dict[tuple[str, int, int], tuple[int, str]] = {}
    for rank, report in enumerate(reports):
        for unit, (start, stop, digest) in report.parameters.items():
            other, wanted = first.setdefault((unit, start, stop), (rank, digest))
            if digest != wanted:
                found.append(f"parameters of {unit} on ranks {other} and {rank}")
    return found
