"""What was routed in a training run, to be compared, counted, and predicted from."""

from __future__ import annotations

import io
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from collectives import Communicator
from moe.routing import Integers, Routing, digest, joined
from parallel.placement import split


class RoutingLog:
    """The routing of each layer in each step.

    A mixture of experts adds what it routes.  The log of a run on one rank has the whole batch, and
    says what any division of that batch over ranks and micro-batches will send
    (`moe.MixtureOfExperts.expected`).

    Attributes
    ----------
    parts : dict
        By step and name of the layer, the routings by the number of their first row in the batch.
    """

    def __init__(self) -> None:
        self.parts: defaultdict[tuple[int, str], dict[int, Routing]] = defaultdict(dict)
        self._whole: dict[tuple[int, str], Routing] = {}

    def add(self, step: int, name: str, first_row: int, routing: Routing) -> None:
        """Add the `routing` of consecutive rows in a `step` by the layer `name`."""
        self.parts[step, name][first_row] = routing
        self._whole.pop((step, name), None)

    def whole(self, step: int, name: str) -> Routing:
        """Return the routing of all rows that were added for this `step` and this `name`.

        Raises KeyError if there are none.
        """
        if (step, name) not in self._whole:
            if (step, name) not in self.parts:
                raise KeyError(f"the log has no routing of layer {name!r} in step {step}")
            parts = self.parts[step, name]
            self._whole[step, name] = joined(parts[row] for row in sorted(parts))
        return self._whole[step, name]

    def merge(self, other: RoutingLog) -> None:
        """Add all that another log has."""
        for (step, name), parts in other.parts.items():
            for row, routing in parts.items():
                self.add(step, name, row, routing)

    def to_bytes(self) -> bytes:
        """Return all routings as a file of NumPy, ``.npz``."""
        arrays: dict[str, Any] = {
            f"{step}/{row}/{name}": np.concatenate([numbers_of(routing), *columns_of(routing)])
            for (step, name), parts in self.parts.items()
            for row, routing in parts.items()
        }
        file = io.BytesIO()
        np.savez_compressed(file, **arrays)
        return file.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> RoutingLog:
        """Return the log that `to_bytes` has written as `data`.

        Raises ValueError if it is no such file.
        """
        log = cls()
        if not zipfile.is_zipfile(io.BytesIO(data)):
            raise ValueError("it is no log of routings, which is a file of NumPy, .npz")
        try:
            with np.load(io.BytesIO(data)) as arrays:
                for key in arrays.files:
                    step, row, name = key.split("/", 2)
                    log.add(int(step), name, int(row), routing_of(arrays[key]))
        except (zipfile.BadZipFile, ValueError, OSError) as error:
            raise ValueError(f"it is no log of routings: {error}") from error
        return log

    def gathered(self, comm: Communicator) -> RoutingLog:
        """Return what the logs of all ranks of `comm` have together.  All ranks call this."""
        mine = np.frombuffer(self.to_bytes(), np.uint8)
        sizes = comm.all_gather(np.array([mine.size])).tolist()
        whole, log = comm.all_gather(mine, counts=sizes), RoutingLog()
        for part in split(whole, sizes):
            log.merge(RoutingLog.from_bytes(part.tobytes()))
        return log

    def tables(self, tokens_per_row: int) -> Iterator[tuple[int, str, Integers]]:
        """Yield the step, the layer, and the table of each part, with tokens numbered in the batch.

        See `Routing.table`.
        """
        for (step, name), parts in sorted(self.parts.items()):
            for row, routing in sorted(parts.items()):
                yield step, name, routing.table(row * tokens_per_row)


def columns_of(routing: Routing) -> tuple[Integers, ...]:
    """Return the arrays of a routing."""
    return routing.token, routing.expert, routing.group, routing.slot


def numbers_of(routing: Routing) -> Integers:
    """Return the numbers of a routing; a capacity of -1 stands for none."""
    capacity = -1 if routing.capacity is None else routing.capacity
    numbers = (routing.num_tokens, routing.num_experts, routing.num_groups, capacity)
    return np.array(numbers, np.int64)


def routing_of(numbers: Integers) -> Routing:
    """Return the routing of `numbers_of` and `columns_of`, one after the other."""
    num_tokens, num_experts, num_groups, capacity = numbers[:4].tolist()
    token, expert, group, slot = np.split(numbers[4:], 4)
    limit = None if capacity < 0 else capacity
    return Routing(token, expert, group, slot, num_tokens, num_experts, num_groups, limit)


def digests(logs: list[RoutingLog], tokens_per_row: int) -> dict[tuple[int, str], str]:
    """Return the SHA-256 of the whole routing in each step by each layer (`moe.routing.digest`).

    `logs` are those of all ranks, which have different rows.
    """
    tables: dict[tuple[int, str], list[Integers]] = {}
    for log in logs:
        for step, name, table in log.tables(tokens_per_row):
            tables.setdefault((step, name), []).append(table)
    return {key: digest(each) for key, each in tables.items()}
