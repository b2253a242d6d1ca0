"""The bytes of some calls: all bytes, and the bytes that leave a rank or a host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from collectives import Topology
from moe.routing import Integers
from parallel import PredictedCall
from parallel.accounts import between_hosts, off_host


class Amounts(NamedTuple):
    """What all ranks send together, and the rank that sends most.

    Attributes
    ----------
    logical : int
        The bytes of all rows, with the rows that a rank has for itself and does not send.
    off_rank, off_host : int
        The bytes that leave their rank, and the bytes that leave their host.
    busiest, busiest_off_host : int
        The most bytes that leave one rank, and the most that leave the host of one rank.
    messages, messages_off_host : int
        The messages from a rank to another one, and the messages to another host.
    """

    logical: int = 0
    off_rank: int = 0
    off_host: int = 0
    busiest: int = 0
    busiest_off_host: int = 0
    messages: int = 0
    messages_off_host: int = 0


def amounts_of(matrices: Integers, hosts: Topology) -> Amounts:
    """Return what some calls send together, on these `hosts`.

    `matrices` is the sum of the matrices of the calls (`matrices_of`).

    Examples
    --------
    >>> from collectives import Topology
    >>> from moe.plan import amounts_of, matrices_of
    >>> from parallel import PredictedCall
    >>> call = PredictedCall("dispatch", "all_to_all", "linear", ((1, 2), (3, 4)), itemsize=8)
    >>> amounts_of(matrices_of([call], num_ranks=2), Topology.consecutive(2, 1))[:4]
    (80, 40, 40, 24)
    """
    messages, whole = matrices
    others = whole * ~np.eye(len(whole), dtype=bool)
    outside = whole * off_host(hosts)
    return Amounts(
        int(whole.sum()),
        int(others.sum()),
        between_hosts(whole, hosts),
        int(others.sum(axis=1).max()),
        int(outside.sum(axis=1).max()),
        int(messages.sum()),
        between_hosts(messages, hosts),
    )


def matrices_of(calls: Iterable[PredictedCall], num_ranks: int) -> Integers:
    """Return the messages and bytes of all `calls` from each rank to each, int64 (2, p, p).

    `num_ranks` is p.  The diagonal has the bytes that a rank has for itself in an all-to-all; they
    are no message.
    """
    total = np.zeros((2, num_ranks, num_ranks), np.int64)
    for call in calls:
        total += call.matrices(num_ranks)
        for group in call.groups or (tuple(range(num_ranks)),):
            if call.collective == "all_to_all":
                own = np.diagonal(call.counts) * call.itemsize * call.num_calls
                total[1, group, group] += own
    return total
