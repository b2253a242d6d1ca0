"""What each rank reports when a run is over, gathered and compared on rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from collectives import Communicator
from parallel.accounts import gather_json
from parallel.layout import BatchSize
from parallel.nn import on_host
from parallel.run import Trainer, agreement, memory

Pair = tuple[int, int]  # predicted and counted


class RankReport(NamedTuple):
    """The report of one rank.

    Attributes
    ----------
    memory : dict of str to (int, int)
        The peak bytes of each category, by formula and counted.
    moved : dict of str to (int, int)
        The bytes that the offload moved in each direction, by formula and counted.
    parameters : dict of str to (int, int, str)
        The part of each unit that this rank has: its start and stop, and its SHA-256.
    """

    memory: dict[str, Pair]
    moved: dict[str, Pair]
    parameters: dict[str, tuple[int, int, str]]

    @classmethod
    def of(
        cls,
        trainer: Trainer,
        num_updates: int,
        rows: int,
        context: int,
        batches: Sequence[tuple[int, int, int]] = (),
    ) -> RankReport:
        """Return the report of the rank of `trainer`, after `num_updates` updates.

        Each of its batches has (`rows`, `context`) tokens; `batches` are the rows, the context and
        the number of each step, of all ranks together.
        """
        sizes = [BatchSize(*size) for size in batches]
        offload, batch = trainer.offload, (rows, context, sizes)
        kept = pairs(memory.peak_memory(trainer, *batch), trainer.memory.peak)
        if memory.is_offloaded(trainer):
            elsewhere = pairs(memory.peak_offloaded_memory(trainer), offload.memory.peak)
            kept |= {f"{name}, offloaded": pair for name, pair in elsewhere.items()}
        moved = pairs(memory.offload_traffic(trainer, num_updates), offload.storage.moved)
        saved = pairs(memory.activation_traffic(trainer, *batch), trainer.activations.moved)
        moved |= {f"activations {name}": pair for name, pair in saved.items()}
        digests = {}
        for unit, x in trainer.parameters.items():
            part, boxes = trainer.view.stored_slice(unit), trainer.model.boxes(unit)
            starts = [box.start for box in boxes.values()]
            box = f" from {starts}" if any(map(any, starts)) else ""  # the same on some ranks
            digests[unit + box] = part.start, part.stop, agreement.digest(on_host(x)).hex()
        return cls(kept, moved, digests)


def pairs(predicted: Mapping[str, int], counted: Mapping[str, int]) -> dict[str, Pair]:
    """Return (predicted, counted) for the keys of both; a missing value is 0."""
    names = dict.fromkeys([*predicted, *counted])
    return {name: (int(predicted.get(name, 0)), int(counted.get(name, 0))) for name in names}


def gather_reports(comm: Communicator, report: RankReport) -> list[RankReport] | None:
    """Return the `report` of every rank of `comm` on rank 0, and None on others; all call this."""
    reports = gather_json(comm, report)
    return None if reports is None else [RankReport(*report) for report in reports]


def differences(reports: Sequence[RankReport]) -> list[str]:
    """Return a sentence for each number not as predicted, and for parameters that differ."""
    differences = [
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
                differences.append(f"parameters of {unit} on ranks {other} and {rank}")
    return differences
