"""What each rank reports when a run is over, gathered and compared on rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from collectives import Communicator
from parallel.accounts import gather_json
from parallel.nn import on_host
from parallel.runtime import BatchSize, Trainer, agreement, memory

Pair = tuple[int, int]  # predicted and counted


class RankReport(NamedTuple):
    """The report of one rank."""

    memory: dict[str, Pair]  # the peak bytes of each category
    moved: dict[str, Pair]  # the bytes that the offload moved, by direction
    parameters: dict[str, tuple[int, int, str]]  # start and stop in each unit, and their SHA-256

    @classmethod
    def of(
        cls,
        trainer: Trainer,
        num_updates: int,
        rows: int,
        context: int,
        batches: Sequence[BatchSize] = (),
    ) -> RankReport:
        """Return this rank's report after updates on its batches of (`rows`, `context`) tokens.

        `batches` are those of all ranks in each step.
        """
        offload, batch = trainer.offload, (rows, context, batches)
        kept = pairs(memory.peak_memory(trainer, *batch), trainer.memory.peak)
        if memory.is_offloaded(trainer):
            elsewhere = pairs(memory.peak_offloaded_memory(trainer), offload.memory.peak)
            kept |= {f"{name}, offloaded": pair for name, pair in elsewhere.items()}
        moved = pairs(memory.offload_traffic(trainer, num_updates), offload.place.moved)
        saved = pairs(memory.activation_traffic(trainer, *batch), trainer.activations.moved)
        moved |= {f"activations {name}": pair for name, pair in saved.items()}
        digests = {}
        for unit, x in trainer.parameters.items():
            part, boxes = trainer.stored_slice(unit), trainer.model.boxes(unit)
            starts = [box.start for box in boxes.values()]
            box = f" from {starts}" if any(map(any, starts)) else ""  # the same on some ranks
            digests[unit + box] = part.start, part.stop, agreement.digest(on_host(x)).hex()
        return cls(kept, moved, digests)


def pairs(predicted: Mapping[str, int], counted: Mapping[str, int]) -> dict[str, Pair]:
    """Return (predicted, counted) for the keys of both; a missing value is 0."""
    names = dict.fromkeys([*predicted, *counted])
    return {name: (int(predicted.get(name, 0)), int(counted.get(name, 0))) for name in names}


def gather(comm: Communicator, report: RankReport) -> list[RankReport] | None:
    """Return every rank's report on rank 0, and None on others.  All ranks call this."""
    reports = gather_json(comm, report)
    return None if reports is None else [RankReport(*each) for each in reports]


def differences(reports: list[RankReport]) -> list[str]:
    """Describe what is not as predicted, and parameters of which two ranks' digests differ."""
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
