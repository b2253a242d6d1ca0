"""Programs written by hand, and compiled ones, for tests of the simulation."""

from __future__ import annotations

import numpy as np

from collectives import choose
from collectives.programs import CallSpec, Kind, Program, Row, compile_call


def program(*rows: Row) -> Program:
    """A program of these rows; its bytes are elements of one byte."""
    slots = 1 + max((row.slot + row.size * (row.kind == Kind.WAIT) for row in rows), default=0)
    table = np.array(rows, np.int64).reshape(-1, len(Row._fields))
    return Program(table, 1, slots, 0, 1, ())


def send(peer: int, size: int, slot: int = 0) -> Row:
    return Row(Kind.SEND, 0, peer, size=size, slot=slot)


def receive(peer: int, size: int, slot: int = 0) -> Row:
    return Row(Kind.RECEIVE, 0, peer, size=size, slot=slot)


def wait(count: int = 1, slot: int = 0) -> Row:
    return Row(Kind.WAIT, 0, 0, size=count, slot=slot)


def copy(size: int) -> Row:
    return Row(Kind.COPY, 0, size=size)


def one_way(num_ranks: int, *pairs: tuple[int, int], size: int = 1001) -> list[Program]:
    """Each first rank of a pair sends a message to the second one."""
    rows: list[list[Row]] = [[] for _ in range(num_ranks)]
    for source, destination in pairs:
        rows[source] += [send(destination, size, len(rows[source]))]
        rows[destination] += [receive(source, size, len(rows[destination]))]
    return [program(*mine, wait(len(mine))) if mine else program() for mine in rows]


def spec(algorithm: str, size: int, num_bytes: int, collective: str = "all_reduce") -> CallSpec:
    """A call on elements of one byte."""
    choice = choose(collective, algorithm, size, num_bytes)
    counts = num_bytes if collective in ("all_reduce", "broadcast", "reduce") else None
    return CallSpec(
        collective,
        choice.algorithm,
        tuple(choice.options.items()),
        choice.segments,
        choice.label,
        np.dtype(np.int8),
        (num_bytes // size,) * size if counts is None else counts,
    )


def programs(
    algorithm: str, size: int, num_bytes: int, collective: str = "all_reduce"
) -> list[Program]:
    """The programs of all ranks."""
    call = spec(algorithm, size, num_bytes, collective)
    return [compile_call(call, rank, size) for rank in range(size)]
