"""A barrier that names the ranks that have not come."""

from __future__ import annotations

import numpy as np
from torch.distributed import DistBackendError

from collectives.communicator import Communicator
from collectives.engines import deadline_in, poll_until
from collectives.errors import CollectiveTimeout

_TAG = (1 << 24) - 1  # larger than the tags of programs


def monitored_barrier(comm: Communicator, limit: float | None) -> None:
    """Wait until all ranks have called it.

    Raises DistBackendError after `limit` seconds.  On rank 0 it names all ranks that have not come.
    """
    if comm.rank == 0:
        _wait_for_others(comm, limit)
    else:
        _wait_for_answer(comm, limit)


def _wait_for_others(comm: Communicator, limit: float | None) -> None:
    """Receive a message from every other rank, and answer when all have come."""
    peers = range(1, comm.size)
    works = [comm.recv(np.empty(1, np.uint8), peer, _TAG, async_op=True) for peer in peers]
    poll_until(lambda: all(work.test() for work in works), deadline_in(limit))
    missing = [peer for peer, work in zip(peers, works, strict=True) if not work.test()]
    if missing:
        assert limit is not None, "without a limit all have come"
        for work in works:
            work.expire(limit)
        names = ", ".join(map(str, missing))
        who = f"ranks {names} have" if len(missing) > 1 else f"rank {names} has"
        raise DistBackendError(f"{who} not come to the monitored barrier within {limit} s")
    for peer in peers:
        comm.send(np.zeros(1, np.uint8), peer, _TAG)


def _wait_for_answer(comm: Communicator, limit: float | None) -> None:
    """Tell rank 0 that this rank has come, and receive its answer."""
    comm.send(np.zeros(1, np.uint8), 0, _TAG)
    try:
        comm.recv(np.empty(1, np.uint8), 0, _TAG, timeout=limit)
    except CollectiveTimeout as error:
        error.work.expire(limit)
        raise DistBackendError(
            f"rank {comm.rank} has come to the monitored barrier, but rank 0 has not said within "
            f"{limit} s that all have; the error on rank 0 names the others"
        ) from None
