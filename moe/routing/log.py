"""The routings of a training run, in memory and in a file."""

from __future__ import annotations

import io
import re
import reprlib
import zipfile
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from collectives import Communicator
from moe.routing.routing import Integers, Routing, joined
from parallel.mesh import split

# What a broken file raises besides ValueError and OSError.
BROKEN = zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, MemoryError
MOST = 2**27, 2**16, 2**27  # tokens, experts and groups that a file may have


class RoutingLog:
    """The routing of each layer in each step.

    A mixture of experts adds what it routes.  The log of a run on one rank has the whole batch:
    from it follows what any division of the batch over ranks and micro-batches will send
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
        """Add the `routing` of rows from `first_row` on, in a `step`, by the layer `name`."""
        self.parts[step, name][first_row] = routing
        self._whole.pop((step, name), None)

    def whole(self, step: int, name: str) -> Routing:
        """Return the routing of all rows that were added for this `step` and this `name`.

        Raises ValueError if there are none.
        """
        if (step, name) not in self._whole:
            if (step, name) not in self.parts:
                raise ValueError(f"the log has no routing of layer {name!r} in step {step}")
            parts = self.parts[step, name]
            self._whole[step, name] = joined(parts[row] for row in sorted(parts))
        return self._whole[step, name]

    def merge(self, other: RoutingLog) -> None:
        """Add all that the log `other` has."""
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

        Raises ValueError if `data` is no such file.
        """
        log = cls()
        if not zipfile.is_zipfile(io.BytesIO(data)):
            raise ValueError("it is no log of routings, which is a file of NumPy, .npz")
        try:
            with np.load(io.BytesIO(data)) as arrays:
                for key in arrays.files:
                    step, name, row = parts_of_key(key)
                    log.add(step, name, row, routing_of(arrays[key], key))
                    if len({x.num_experts for x in log.parts[step, name].values()}) > 1:
                        raise ValueError(f"{key!r} has other experts than the rows before")
        except (*BROKEN, ValueError, OSError) as error:
            raise ValueError(f"it is no log of routings: {error}") from error
        return log

    @classmethod
    def read(cls, path: Path) -> RoutingLog:
        """Return the log in the file at `path`.  Raises OSError, or ValueError if it is none."""
        try:
            return cls.from_bytes(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def gathered(self, comm: Communicator) -> RoutingLog:
        """Return what the logs of all ranks of `comm` have together.  All ranks call this."""
        mine = np.frombuffer(self.to_bytes(), np.uint8)
        sizes = comm.all_gather(np.array([mine.size])).tolist()
        whole, log = comm.all_gather(mine, counts=sizes), RoutingLog()
        for part in split(whole, sizes):
            log.merge(RoutingLog.from_bytes(part.tobytes()))
        return log


def columns_of(routing: Routing) -> tuple[Integers, ...]:
    """Return the arrays of a routing."""
    return routing.token, routing.expert, routing.group, routing.slot


def numbers_of(routing: Routing) -> Integers:
    """Return the numbers of a routing; a capacity of -1 stands for none."""
    capacity = -1 if routing.capacity is None else routing.capacity
    numbers = (routing.num_tokens, routing.num_experts, routing.num_groups, capacity)
    return np.array(numbers, np.int64)


def routing_of(numbers: np.ndarray[Any, Any], what: str = "") -> Routing:
    """Return the routing of `numbers_of` and `columns_of`, one after the other.

    Raises ValueError, which names `what` it is, if it is no routing.
    """
    if numbers.dtype != np.int64 or numbers.ndim != 1 or len(numbers) % 4 or not len(numbers):
        raise ValueError(f"{what!r} is {numbers.dtype} of shape {numbers.shape}, not a routing")
    num_tokens, num_experts, num_groups, capacity = numbers[:4].tolist()
    token, expert, group, slot = np.split(numbers[4:], 4)
    limit = None if capacity < 0 else capacity
    routing = Routing(token, expert, group, slot, num_tokens, num_experts, num_groups, limit)
    if not is_possible(routing):
        raise ValueError(f"{what!r} has numbers that no routing has")
    return routing


def is_possible(routing: Routing) -> bool:
    """Return whether all entries are of tokens, experts and groups that the routing has."""
    numbers = routing.num_tokens, routing.num_experts, routing.num_groups
    columns = routing.token, routing.expert, routing.group, routing.slot + 1
    limits = *numbers, len(routing.slot) + 1
    return (
        all(0 <= number <= most for number, most in zip(numbers, MOST, strict=True))
        and routing.num_tokens % max(1, routing.num_groups) == 0
        and all(((x >= 0) & (x < limit)).all() for x, limit in zip(columns, limits, strict=True))
    )


def parts_of_key(key: str) -> tuple[int, str, int]:
    """Return the step, the layer and the first row of an array in a file; see `to_bytes`."""
    match = re.fullmatch("([0-9]{1,15})/([0-9]{1,15})/(.*)", key)
    if match is None:
        raise ValueError(f"{reprlib.repr(key)} is not STEP/ROW/LAYER")
    return int(match[1]), match[3], int(match[2])
