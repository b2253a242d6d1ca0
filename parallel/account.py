"""What each rank says of itself when a run is over, brought together on rank 0.

Memory by formula and counted, bytes moved to and from where updates are made, and a digest of the
parameters: columns that must be equal like those of the traffic.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np

from collectives import Communicator
from parallel import agreement, shards
from parallel.memory import predicted, predicted_there
from parallel.nn import on_host
from parallel.offload import predicted_moves
from parallel.strategy import Strategy

Pair = tuple[int, int]  # by formula, and counted


class Account(NamedTuple):
    """Of one rank.  `kept` and `moved`: by category, the most bytes kept, and all that moved.

    `parameters`: of each unit the elements that the rank has, first and last, and their SHA-256.
    """

    kept: dict[str, Pair]
    moved: dict[str, Pair]
    parameters: dict[str, tuple[int, int, str]]

    @classmethod
    def of(cls, strategy: Strategy, updates: int, rows: int, context: int) -> Account:
        """After so many updates, of batches of `rows` rows of this rank's own, `context` tokens."""
        place = strategy.place
        kept = pairs(predicted(strategy, rows, context), strategy.memory.peak)
        there = pairs(predicted_there(strategy), place.memory.peak)
        if place.memory is not strategy.memory:
            kept |= {f"{name}, elsewhere": pair for name, pair in there.items()}
        digests = {}
        for unit, x in strategy.parameters.items():
            part = strategy.held(unit)
            digests[unit] = part.start, part.stop, agreement.digest(on_host(x)).hex()
        return cls(kept, pairs(predicted_moves(strategy, updates), place.moved), digests)


def pairs(formula: Any, counted: Any) -> dict[str, Pair]:
    """Of two mappings with the same keys, or some that are missing, which are 0."""
    names = dict.fromkeys([*formula, *counted])
    return {name: (int(formula.get(name, 0)), int(counted.get(name, 0))) for name in names}


def gather(comm: Communicator, account: Account) -> list[Account] | None:
    """Every rank's on rank 0, None elsewhere.  All ranks call this."""
    every = gather_json(comm, account)
    return None if every is None else [Account(*each) for each in every]


def gather_json(comm: Communicator, value: Any) -> list[Any] | None:
    """What JSON can say, of every rank, on rank 0; None elsewhere.  All ranks call this."""
    mine = json.dumps(value).encode()
    sizes = comm.all_gather(np.array([len(mine)])).tolist()
    every = comm.gather(np.frombuffer(mine, np.uint8), counts=sizes)
    if every is None:
        return None
    return [json.loads(bytes(each)) for each in shards.split(every, sizes)]


def differences(accounts: list[Account]) -> list[str]:
    """In words, where formulas and counts, or the same parameters on two ranks, differ."""
    found = [
        f"{name} of rank {rank}: {formula} by formula, {counted} counted"
        for rank, account in enumerate(accounts)
        for name, (formula, counted) in (account.kept | account.moved).items()
        if formula != counted
    ]
    first: dict[tuple[str, int, int], tuple[int, str]] = {}
    for rank, account in enumerate(accounts):
        for unit, (start, stop, digest) in account.parameters.items():
            other, wanted = first.setdefault((unit, start, stop), (rank, digest))
            if digest != wanted:
                found.append(f"parameters of {unit} on ranks {other} and {rank}")
    return found
