"""The calls that are written and read back: every algorithm, on several numbers of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from collectives import algorithms
from collectives.export import Call
from collectives.selection import even_parts, predict
from collectives.simulation import OTHER_HOST, SAME_HOST, Link, Machine

# What costs nanoseconds in whole numbers.
LINKS = (
    Link(64, 500e-9, 0, 2000e-9, 300e-9, 1e-9),
    Link(
        overhead_seconds=500e-9,
        latency_seconds=2000e-9,
        gap_seconds=300e-9,
        seconds_per_byte=1e-9,
        is_rendezvous=True,
    ),
)
MACHINE = Machine({SAME_HOST: LINKS, OTHER_HOST: LINKS}, 100e-9, 1e-9, 2e-9)

COLLECTIVES = algorithms.collectives()
SIZES = (1, 2, 3, 8)


def calls(collective: str, *, sizes: tuple[int, ...] = SIZES) -> Iterator[Call]:
    """All algorithms on several numbers of ranks, with many bytes, and one (so some are empty)."""
    for name in algorithms.names(collective):
        for size in filter(algorithms.info(collective, name).serves, sizes):
            for num_bytes in (1, 30 * size) if collective != "barrier" else (0,):
                yield Call(collective, size, num_bytes, name, root=size // 2)


def predicted(call: Call) -> dict[tuple[int, int], tuple[int, int]]:
    """The messages and bytes of a call from rank to rank, as the ledger would record them."""
    prediction = predict(
        call.collective,
        call.size,
        even_parts(call.collective, call.size, call.num_bytes),
        algorithm=call.algorithm,
        root=call.root,
    )
    return {
        (int(source), int(destination)): (
            int(prediction.messages[source, destination]),
            int(prediction.bytes[source, destination]),
        )
        for source, destination in np.argwhere(prediction.messages)
    }


def summed(sizes: dict[tuple[int, int], list[int]]) -> dict[tuple[int, int], tuple[int, int]]:
    """The number and the sum of the sizes between ranks."""
    return {ends: (len(of_pair), sum(of_pair)) for ends, of_pair in sizes.items()}
