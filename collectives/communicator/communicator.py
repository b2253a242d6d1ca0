"""The communicator: its collectives, the groups made from it, its ledger and its decisions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from collectives import algorithms
from collectives.arrays import HOST, Array, Backend, Operator, operator, use_gpu, validation
from collectives.communicator.collectives import Collectives
from collectives.communicator.planner import Planner
from collectives.communicator.point_to_point import PointToPoint
from collectives.diagnostics import Counters, Ledger, MonitorUnavailable
from collectives.engines import deadline_in
from collectives.runtime import (
    all_gather_integers,
    broadcast_bytes,
    gather_bytes,
    runs_by,
    subgroup_barrier,
)
from collectives.schedule import SPECS, Topology
from collectives.selection import Decisions, Explanation, explain


class Communicator(Collectives, PointToPoint):
    """A group of ranks that communicate.  `collectives.world` and `wrap` make one.

    All ranks call the same collectives in the same order; a call that raises TypeError or
    ValueError before anything is sent does not count.  Two threads that call collectives at the
    same time need a communicator each.

    Attributes
    ----------
    rank : int
        The number of this process, or thread, from 0 to `size` - 1.
    size : int
        The number of ranks.
    """

    def __repr__(self) -> str:
        return f"<Communicator{self._session.name}: rank {self.rank} of {self.size}>"

    @property
    def name(self) -> str:
        """The name that `split` or `subgroup` was given; "" by default.  It can be set."""
        return self._session.axis

    @name.setter
    def name(self, name: str) -> None:
        self._session.rename(name)

    @property
    def timeout(self) -> float | None:
        """The time limit, in seconds, of calls without their own; None: no limit.

        It can be set.  Raises TypeError or ValueError for an invalid number of seconds.
        """
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
    def topology(self) -> Topology:
        """The hosts of the ranks, which the MPI library reported when the communicator was made.

        In a communicator made from another one it is that of its ranks.  Ranks that are threads
        have one host, unless `collectives.run` was given others.

        Examples
        --------
            comm.topology.num_hosts, comm.topology.mates(comm.rank)
        """
        return self._session.topology

    @property
    def local_rank(self) -> int:
        """The number of this rank among the ranks of its host, from 0; see `topology`."""
        return self.topology.place(self.rank)

    def use_gpu(self) -> int:
        """Let CuPy use a GPU of this host, which the ranks of the host take in turn.

        The GPU is number `local_rank` of those that CUDA_VISIBLE_DEVICES leaves this process,
        modulo their number.  It becomes the current device of this thread.  If there are several, a
        log message of rank 0 of the host says once which rank uses which.  Nothing is sent.

        Nothing else in the library chooses a GPU: a call runs on the GPU of its arrays.

        Returns
        -------
        int
            The number of the GPU in this process.

        Raises
        ------
        RuntimeError
            If there is none.

        Examples
        --------
            comm = collectives.world()
            comm.use_gpu()                              # before arrays are made
            x = cupy.ones(1000)
        """
        return use_gpu(self.local_rank, len(self.topology.mates(self.rank)))

    @property
    def plan(self) -> Planner:
        """The same calls, each of which returns a `Plan` to be run many times.

        A plan keeps its arrays; every run reads the input anew.  Making a plan is itself a
        collective call: all ranks make the same plans in the same order.

        Examples
        --------
            plan = comm.plan.all_reduce(x, out=y)
            plan.run()                                  # or start(), then test() or wait()
        """
        return Planner(self._session)

    def last_calls(self) -> list[dict[str, Any]]:
        """Return the last calls of this rank, in all its communicators.

        Any thread may ask at any time.

        Returns
        -------
        list of dict
            At most 256 calls, the latest last.  Each has `members` (ranks of the job), `call` (its
            number), `collective`, `algorithm`, `bytes` (that this rank sends in it), `seconds_ago`
            (that it began), and `state`: "complete", "failed" or "under way".  A call under way
            also has `round`, `num_rounds` and `waiting_for` (the messages that were not complete
            when the rank last looked, which it does while it waits).
        """
        return self._session.transport.flight.calls()

    def synchronize(self, timeout: float | None = None) -> None:
        """Wait until all calls of this rank are complete, on the host and on its device.

        Calls on arrays of a GPU return when their work is enqueued.  What they compute is valid if
        a later `synchronize` raises nothing.

        Parameters
        ----------
        timeout : float, optional
            The seconds that a call may take on the device from the moment at which its stream comes
            to it; and the seconds to wait for calls that are not enqueued.  None: the time limits
            of the calls.

        Raises
        ------
        CollectiveTimeout, PeerFailed
            If a device has waited too long for a rank, or for one that has died, on any rank of
            this host; all results since the last `synchronize` are void then, and the communicator
            is unusable.

        Examples
        --------
            y = comm.all_reduce(x)      # of CuPy arrays: returns when it is enqueued
            comm.synchronize()          # now y is known to be right
        """
        self._session.synchronize(timeout)

    # Groups

    def split(
        self, color: int | None, key: int = 0, *, name: str = "", timeout: float | None = None
    ) -> Communicator | None:
        """Make one communicator for each color.  All ranks call it.

        Parameters
        ----------
        color : int or None
            A number of at least 0; ranks with the same color are together.  None: this rank is in
            no new communicator.
        key : int
            The new ranks are ordered by `key`, and by the old rank if keys are equal.
        name : str
            The name of the new communicator, such as that of an axis of a mesh.  Ledgers show it in
            the column ``axis`` of what is sent there.
        timeout : float, optional
            The seconds to wait for all ranks.  None: the communicator's `timeout`.

        Returns
        -------
        Communicator or None
            The communicator of this rank's color; None if `color` is None.

        Raises
        ------
        TypeError, ValueError
            For an invalid argument, before anything is sent.
        CollectiveTimeout
            If a rank does not call it in time.  After that, or after any other failure half-way,
            this communicator is unusable.

        Examples
        --------
            half = comm.split(comm.rank % 2)
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
        transport = self._session.made_by_engine("split", make, deadline)
        return (
            None
            if transport is None
            else Communicator(self._session.child(transport, members, name))
        )

    def subgroup(
        self, ranks: Sequence[int], *, name: str = "", timeout: float | None = None
    ) -> Communicator:
        """Make a communicator of some ranks.  Exactly these ranks call it.

        Parameters
        ----------
        ranks : sequence of int
            The ranks, in their order in the new communicator.  It names each rank once, and
            includes this rank.
        name : str
            The name of the new communicator; see `split`.
        timeout : float, optional
            The seconds to wait for the ranks.  None: the communicator's `timeout`.

        Returns
        -------
        Communicator

        Raises
        ------
        TypeError, ValueError
            If `ranks` is wrong, before anything is sent.
        CollectiveTimeout
            If a rank does not call it in time.  After that, or after any other failure half-way,
            this communicator is unusable.

        Examples
        --------
            if comm.rank < 2:
                pair = comm.subgroup([0, 1])
        """
        limit = self._session.limit(timeout)
        deadline = deadline_in(limit)
        members = [validation.rank(rank, self.size, "an entry of ranks") for rank in ranks]
        if len(set(members)) != len(members):
            raise ValueError(f"ranks names a rank twice: {members}")
        if self.rank not in members:
            raise ValueError(f"rank {self.rank} is not in the subgroup that it makes: {members}")
        subgroup_barrier(self._session, members, limit)
        make = partial(self._session.transport.subgroup, members)
        transport = self._session.made_by_engine("subgroup", make, deadline)
        return Communicator(self._session.child(transport, members, name))

    @property
    def can_shrink(self) -> bool:
        """Whether `shrink` works here: under an Open MPI started with fault tolerance."""
        return self._session.transport.can_shrink

    def shrink(self, *, timeout: float | None = None, interrupt: bool = True) -> Communicator:
        """Make a communicator of the ranks that are still alive, in their order here.

        All ranks that are alive call it, whether or not `PeerFailed` was raised before.  After it
        only `free` can be called on this communicator.

        Parameters
        ----------
        timeout : float, optional
            The seconds to wait for the ranks.  None: the communicator's `timeout`.
        interrupt : bool
            Whether calls that other ranks are still making here fail with `PeerFailed`.  False:
            they complete, unless a rank dies.

        Returns
        -------
        Communicator

        Raises
        ------
        CollectiveError
            Unless the job runs under an Open MPI started with fault tolerance, as
            `ring launch --fault-tolerant` does (ULFM, Bland et al. 2013).
        CollectiveTimeout
            If a rank is alive and does not call it in time.

        Examples
        --------
            try:
                comm.all_reduce(x)
            except collectives.PeerFailed:
                comm = comm.shrink()
        """
        deadline = deadline_in(self._session.limit(timeout))
        transport, members = self._session.transport.shrink(deadline, interrupt)
        return Communicator(self._session.child(transport, members, self._session.axis))

    def free(self) -> None:
        """Free the communicator.  All its ranks call this; it is unusable after that.

        Raises
        ------
        RuntimeError
            If a call or a plan of it is still in progress.
        """
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
        """Return which algorithm a call would run, and why, without sending anything.

        Parameters
        ----------
        collective : str
            Its name, such as "all_reduce".
        x : array, optional
            The array of the call on this rank; for a broadcast or scatter the root's array; for a
            barrier None.  All ranks of a gather or all-gather are assumed to have equally many
            rows.
        op : str or Operator
            The operator of a reduction.
        algorithm : str, optional
            As in the call.

        Returns
        -------
        Explanation
            The choice, the reason, the predicted times of all candidates, the restrictions of the
            others, what runs the program, and for arrays on a GPU which ranks this one can reach
            without the host, and what runs if the call is staged.

        Raises
        ------
        TypeError, ValueError
            As in the call.

        Examples
        --------
            print(comm.explain("all_reduce", x))
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
        session = self._session
        why_staged = "" if backend.is_host else session.devices.why_staged(backend, combine, dtype)
        explanation = explain(
            *(collective, algorithm, self.size, num_bytes, combine, self.decisions, self.topology),
            on_device=not (backend.is_host or why_staged),
        )
        run_by = runs_by(session.transport, backend, combine, dtype)
        return explanation._replace(
            run_by=run_by, links=session.devices.explain(backend, why_staged)
        )

    @property
    def decisions(self) -> Decisions | None:
        """The measured decisions that choose algorithms; None: the built-in rules choose."""
        return self._session.decisions

    def load_decisions(self, path: str | Path) -> None:
        """Let measurements choose the algorithms of calls that name none.  All ranks call it.

        They apply to this communicator, and to communicators made from it later.

        Parameters
        ----------
        path : str or path
            A file that `ring bench tune` wrote.  Rank 0 reads it and sends it to the others.

        Raises
        ------
        ValueError
            On every rank, if the file cannot be read or is invalid.

        Examples
        --------
            comm.load_decisions("decisions.json")
        """
        path = Path(path)
        content = json.dumps(_read(path)).encode() if self.rank == 0 else b""
        text, problem = json.loads(broadcast_bytes(self._session, content, "decisions"))
        if problem:
            raise ValueError(problem)
        self._session.decisions = Decisions.from_json(text)
        self._session.forget_calls()  # their algorithms were chosen before

    # Traffic

    @contextmanager
    def record(self) -> Iterator[Ledger]:
        """Return a context manager that records what this communicator sends.

        It also records what communicators made from this one send.  Other ranks need not record.

        Yields
        ------
        Ledger
            The ledger of this rank.

        Examples
        --------
            with comm.record() as ledger, collectives.phase("backward"):
                comm.all_reduce(x)
            print(ledger.summary())
        """
        collect = partial(gather_bytes, self._session, label="ledger")
        ledger = Ledger(self.rank, self.topology, collect=collect)
        with self._session.recording(ledger):
            yield ledger

    def counters(self) -> Counters:
        """Return the MPI library's own `Counters` of this process's messages.

        Raises
        ------
        MonitorUnavailable
            If there are none: on threads, under another MPI than Open MPI, or without
            `--mca pml_monitoring_enable 2`.
        """
        if not hasattr(self._session.transport, "counters"):
            raise MonitorUnavailable("threads of one process have no MPI to count their messages")
        counters: Counters = self._session.transport.counters()
        return counters


def _read(path: Path) -> tuple[str, str]:
    """Return the decisions in a file as JSON, and an error message.

    The message is empty if the file is valid.
    """
    try:
        return Decisions.from_json(path.read_bytes()).to_json(), ""
    except (OSError, ValueError) as error:
        return "", f"cannot load decisions from {path}: {error}"
