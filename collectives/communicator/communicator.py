"""What the user holds: a communicator, the groups made from it, its ledger and its decisions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from collectives import algorithms
from collectives.arrays import HOST, Array, Backend, Operator, operator, validation
from collectives.communicator.collectives import Collectives
from collectives.communicator.making import Calling
from collectives.communicator.planner import Planner
from collectives.communicator.point_to_point import PointToPoint
from collectives.diagnostics import Counters, Ledger, MonitorUnavailable
from collectives.engines import deadline_in
from collectives.runtime import (
    Session,
    all_gather_integers,
    broadcast_bytes,
    gather_bytes,
    meet,
    runs_by,
)
from collectives.schedule import SPECS
from collectives.selection import Decisions, Explanation, explain


class Communicator(Collectives, PointToPoint):
    """A group of ranks that communicate.

    All ranks call the same collectives in the same order; a call that is refused does not count.
    `timeout`, in seconds, is the default of every call; None waits for ever.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(Calling(session))

    def __repr__(self) -> str:
        return f"<Communicator{self._session.name}: rank {self.rank} of {self.size}>"

    @property
    def timeout(self) -> float | None:
        """The default time limit of every call made from now on, in seconds."""
        return self._session.timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        self._session.timeout = validation.seconds(seconds)

    @property
    def check(self) -> bool | str:
        """Whether calls are checked: False, True or "finite", as given to `collectives.wrap`."""
        checker = self._session.checker
        return checker is not None and (checker.mode == "calls" or checker.mode)

    @property
    def plan(self) -> Planner:
        """The same calls, but each returns a `Plan`, to run many times.

        A plan keeps its arrays and its requests; every run reads the input afresh.  Making one is
        itself a collective call: all ranks make the same plans in the same order.
        """
        return Planner(self._session)

    def last_calls(self) -> list[dict[str, Any]]:
        """What this rank called lately, in all its communicators; the latest at the end.

        At most 256 calls.  Each has its `members` (ranks of the job), `call` (its number),
        `collective`, `algorithm`, `bytes` sent, `seconds_ago` it began, and `state`: "complete",
        "failed", or "under way", then with `round`, `among` (so many) and `waiting_for`.
        """
        return self._session.transport.flight.calls()

    # Groups

    def split(
        self, color: int | None, key: int = 0, *, timeout: float | None = None
    ) -> Communicator | None:
        """One communicator for each `color`, its ranks ordered by `key`, then by rank here.

        All ranks call it; `color=None` takes no part and gets None.  If it fails, and be it because
        a rank does not call it in time (CollectiveTimeout), nothing more can be called here.
        """
        limit = self._session.limit(timeout)
        deadline = deadline_in(limit)
        chosen = -1 if color is None else validation.small_integer(color, "color")
        if color is not None and chosen < 0:
            raise ValueError(f"color must not be negative, got {color}")
        mine = (chosen, validation.small_integer(key, "key"))
        table = all_gather_integers(self._session, mine, "split", limit)
        members = [rank for rank in range(self.size) if table[rank, 0] == chosen]
        members.sort(key=lambda rank: (table[rank, 1], rank))
        make = partial(self._session.transport.split, None if color is None else members)
        transport = self._session.made("split", make, deadline)
        return None if transport is None else Communicator(self._session.child(transport, members))

    def subgroup(self, ranks: Sequence[int], *, timeout: float | None = None) -> Communicator:
        """A communicator of these ranks, in this order.  Exactly these ranks call it.

        If it fails, and be it because a rank does not call it in time (CollectiveTimeout), nothing
        more can be called here.
        """
        limit = self._session.limit(timeout)
        deadline = deadline_in(limit)
        members = [validation.rank(rank, self.size, "an entry of ranks") for rank in ranks]
        if len(set(members)) != len(members):
            raise ValueError(f"ranks names a rank twice: {members}")
        if self.rank not in members:
            raise ValueError(f"rank {self.rank} asks for a subgroup it is not in: {members}")
        meet(self._session, members, limit)
        make = partial(self._session.transport.subgroup, members)
        transport = self._session.made("subgroup", make, deadline)
        return Communicator(self._session.child(transport, members))

    @property
    def can_shrink(self) -> bool:
        """Whether `shrink` works here: under an Open MPI started with fault tolerance."""
        return self._session.transport.can_shrink

    def shrink(self, *, timeout: float | None = None) -> Communicator:
        """A communicator of the ranks that are still alive, in their order here.

        All of these call it, after a PeerFailed or without; afterwards nothing else can be called
        here but `free`.  It needs an Open MPI started with fault tolerance (ULFM, Bland et al.
        2013): `python -m collectives.launch --fault-tolerant`; without it raises CollectiveError.
        Raises CollectiveTimeout if a rank is alive and does not call it within `timeout` seconds.
        """
        deadline = deadline_in(self._session.limit(timeout))
        transport, members = self._session.transport.shrink(deadline)
        return Communicator(self._session.child(transport, members))

    def free(self) -> None:
        """Give the communicator back to MPI.  All its ranks call this; it is of no use after."""
        self._session.free()

    # Selection

    def explain(
        self,
        collective: str,
        x: Array | None = None,
        *,
        op: str | Operator = "sum",
        algorithm: str | None = None,
    ) -> Explanation:
        """What a call here and now would run, and why.  Print it.  Nothing is sent.

        `x`: as the call takes it on this rank; for a broadcast or scatter the root's.  All ranks
        are taken to bring equally many rows to a gather or all-gather.  A barrier takes none.  An
        algorithm or operator that cannot serve is refused as the call would refuse it.
        """
        algorithms.names(collective)
        num_bytes, combine, dtype = 0, None, np.dtype(np.uint8)
        backend: Backend = HOST
        if collective != "barrier":
            backend, array = validation.readable(x)
            dtype = array.dtype
            num_parts = self.size if collective in ("gather", "all_gather") else 1
            num_bytes = int(array.size) * array.dtype.itemsize * num_parts
            if SPECS[collective].is_reduction:
                combine = operator(op, collective)
                combine.check(array.dtype)
        decisions = self._session.decisions
        found = explain(collective, algorithm, self.size, num_bytes, combine, decisions)
        return found._replace(run_by=runs_by(self._session.transport, backend, combine, dtype))

    @property
    def decisions(self) -> Decisions | None:
        """What was measured and decides which algorithm runs; None: the built-in rules do."""
        return self._session.decisions

    def load_decisions(self, path: str | Path) -> None:
        """Let what `python -m bench tune` wrote decide which algorithm runs when a call names none.

        A collective call.  Rank 0 reads the file, the others get it from there.  Holds for this
        communicator, and those made from it afterwards.  Raises ValueError, the same on every rank,
        if the file cannot be read or is wrong.
        """
        path = Path(path)
        found = json.dumps(_read(path)).encode() if self.rank == 0 else b""
        text, problem = json.loads(broadcast_bytes(self._session, found, "decisions"))
        if problem:
            raise ValueError(problem)
        self._session.decisions = Decisions.from_json(text)
        self._session.forget_calls()  # what they would run was decided before

    # Traffic

    @contextmanager
    def record(self) -> Iterator[Ledger]:
        """Record what this communicator, and those made from it, send inside the block."""
        collect = partial(gather_bytes, self._session, label="ledger")
        ledger = Ledger(self.rank, self.size, collect=collect)
        with self._session.recording(ledger):
            yield ledger

    def counters(self) -> Counters:
        """The MPI library's own count of this process's messages, by rank of COMM_WORLD.

        Raises MonitorUnavailable where there is none.
        """
        if not hasattr(self._session.transport, "counters"):
            raise MonitorUnavailable("threads of one process have no MPI to count their messages")
        counters: Counters = self._session.transport.counters()
        return counters


def _read(path: Path) -> tuple[str, str]:
    """The decisions in a file, as checked JSON; and what is wrong with it, or nothing."""
    try:
        return Decisions.from_json(path.read_bytes()).to_json(), ""
    except (OSError, ValueError) as error:
        return "", f"cannot load decisions from {path}: {error}"
