"""The ledger: a record of what was sent.

The messages of a program are known before it runs, so recording a call only appends one entry when
it starts; the rows are made when they are needed.  Bytes are payload bytes of point-to-point
messages.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from collectives.schedule import Topology

Collect = Callable[[bytes], "list[bytes] | None"]

_phase: ContextVar[str] = ContextVar("phase", default="")
current_phase = _phase.get


def phase(label: str) -> AbstractContextManager[None]:
    """Label everything that is sent inside a `with` block; labels nest as "outer/inner".

    Parameters
    ----------
    label : str
        Any text.  It belongs to the thread (or task) that sets it.

    Returns
    -------
    context manager

    Raises
    ------
    TypeError
        If `label` is not a text.

    Examples
    --------
    >>> import collectives
    >>> import numpy as np
    >>> def step(comm):
    ...     with comm.record() as ledger, collectives.phase("backward"):
    ...         comm.all_reduce(np.ones(4, np.float32), algorithm="ring")
    ...     return ledger.summary()
    >>> collectives.run(step, size=2)[0]
    {('backward', 'all_reduce'): Summary(calls=1, messages=2, bytes=16)}
    """
    if not isinstance(label, str):
        raise TypeError(f"the label of a phase must be a text, not {label!r}")
    return _labelled(label)


@contextmanager
def _labelled(label: str) -> Iterator[None]:
    outer = _phase.get()
    token = _phase.set(f"{outer}/{label}" if outer else label)
    try:
        yield
    finally:
        _phase.reset(token)


class Row(NamedTuple):
    """One message of a schedule, which was sent as `segments` messages of MPI.

    Attributes
    ----------
    phase, collective, algorithm : str
    call : str
        The number of the call on its communicator, such as "7"; its header or counts have "7a".
    round : int
    src, dst : int
        Ranks of the communicator that records.
    bytes, segments : int
    axis : str
        The name of the communicator that sent it (see `Communicator.split`), "" if it has none.
    off_host : bool
        Whether the two ranks are on different hosts.
    link : str
        "host": it was sent from an array in host memory.  "peer", "thread": a device of another
        process or thread has read it from the memory of a device.  "direct": MPI has sent it from
        the memory of a device.  "staged": it was copied from a device to host memory, and sent from
        there.  "": the call was not complete.
    """

    phase: str
    collective: str
    algorithm: str
    call: str
    round: int
    src: int
    dst: int
    bytes: int
    segments: int
    axis: str = ""
    off_host: bool = False
    link: str = ""


class Summary(NamedTuple):
    """Totals of a group of rows.

    A call of several ranks counts once; every segment counts as a message.
    """

    calls: int
    messages: int
    bytes: int


class Difference(NamedTuple):
    """The totals of one group of rows in two ledgers; all are 0 where a ledger has no such rows."""

    here: Summary
    there: Summary


Sent = tuple[tuple[int, int, int, int], ...]


class Call(NamedTuple):
    """The data that all runs of a program share.

    Attributes
    ----------
    collective, algorithm : str
    sent : tuple
        (round, destination, bytes, segments) of the messages of rank `src`.
    src : int
    ranks : sequence of int or None
        The ranks in the recording communicator of a sub-communicator's ranks; None: the same.
    numbered : function
        Returns the number of a run as text.
    axis : str
        The name of the communicator.
    """

    collective: str
    algorithm: str
    sent: Sent
    src: int
    ranks: Sequence[int] | None
    numbered: Callable[[int], str]
    axis: str


class Entry(NamedTuple):
    """A recorded call: its phase, and the times of its start and end in seconds.

    It is stored as a list, which is faster to make.  While the call is in progress, `finished` is 0
    and `links` is empty.  A call on devices is complete when the device has done it, and that is
    known after `Communicator.synchronize`.

    Attributes
    ----------
    links : list of str
        The link of each message.
    """

    call: Call
    number: int
    phase: str
    started: float
    finished: float
    links: list[str]

    def rows(self, host_of: Sequence[int]) -> Iterator[Row]:
        """Yield one row per message.

        `host_of` has the host of each rank of the recording communicator.
        """
        call, ranks = self.call, self.call.ranks
        name = call.numbered(self.number)
        links = self.links or [""] * len(call.sent)
        for (number, dst, num_bytes, segments), link in zip(call.sent, links, strict=True):
            dst = dst if ranks is None else ranks[dst]
            yield Row(
                self.phase,
                call.collective,
                call.algorithm,
                name,
                number,
                call.src,
                dst,
                num_bytes,
                segments,
                call.axis,
                host_of[call.src] != host_of[dst],
                link,
            )

    def to_json(self) -> list[Any]:
        """Return the entry as JSON values for another rank, which `_from_json` reads."""
        call, ranks = self.call, self.call.ranks
        sent = call.sent
        if ranks is not None:
            sent = tuple((k, ranks[dst], n, segments) for k, dst, n, segments in sent)
        what = [call.collective, call.algorithm, sent, call.src, call.axis]
        return [what, call.numbered(self.number), *self[1:]]


def _from_json(what: list[Any], number_in_words: str, *run: Any) -> list[Any]:
    """Return an entry of another rank, from its JSON values."""
    collective, algorithm, sent, src, axis = what
    messages = tuple(tuple(message) for message in sent)
    return [Call(collective, algorithm, messages, src, None, lambda _: number_in_words, axis), *run]


_CALL, _FINISHED, _LINKS = map(Entry._fields.index, ("call", "finished", "links"))


def finish(entered: list[Entered], finished: float) -> None:
    """Note when a run was complete."""
    for _, entry in entered:
        entry[_FINISHED] = finished


class Ledger:
    """A record of what one rank sends while it is open.  `Communicator.record` makes one.

    Attributes
    ----------
    rank, size : int
        This rank in the recording communicator, and the number of its ranks.
    topology : Topology
        The hosts of the recording communicator.
    """

    def __init__(self, rank: int, topology: Topology, collect: Collect | None = None) -> None:
        self.rank, self.size, self.topology = rank, topology.size, topology
        self._collect = collect
        self.entered: list[list[Any]] = []

    def enter(self, entry: list[Any], site: str) -> None:
        """Record a call, an `Entry` as a list; its `site`, a line of the program, is not kept."""
        self.entered.append(entry)

    def replace(self, entry: list[Any], call: Call, site: str) -> None:
        """Replace what an `entry` says is sent by a `call`: the run turned out to be staged.

        Its `site`, a line of the program, is not kept.
        """
        entry[_CALL] = call

    @property
    def entries(self) -> list[Entry]:
        """The recorded calls in the order of entry; if gathered, rank by rank."""
        return [Entry(*entry) for entry in self.entered]

    def rows(self) -> list[Row]:
        """Return one `Row` for each message sent, in the order of the calls."""
        host_of = self.topology.host_of
        return [row for entry in self.entries for row in entry.rows(host_of)]

    def summary(
        self, by: Sequence[str] = ("phase", "collective")
    ) -> dict[tuple[Any, ...], Summary]:
        """Return numbers of calls, messages and bytes, grouped by columns of the rows.

        Parameters
        ----------
        by : sequence of str
            The names of the columns.

        Returns
        -------
        dict of tuple to Summary
            By the values of the columns, in the order in which the values first appear.

        Raises
        ------
        ValueError
            If there is no such column.

        Examples
        --------
        >>> import collectives
        >>> import numpy as np
        >>> def step(comm):
        ...     with comm.record() as ledger:
        ...         comm.all_gather(np.ones(4, np.float32), algorithm="ring")
        ...     return ledger.summary(by=("src", "dst"))  # or "off_host": within and between hosts
        >>> collectives.run(step, size=3)[0]
        {(0, 2): Summary(calls=1, messages=2, bytes=32)}
        """
        if isinstance(by, str) or not set(by) <= set(Row._fields):
            raise ValueError(f"by must be a sequence of columns from {Row._fields}, not {by!r}")
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for row in self.rows():
            groups.setdefault(tuple(getattr(row, column) for column in by), []).append(row)
        return {
            key: Summary(
                len({(r.phase, r.collective, r.algorithm, r.call) for r in rows}),
                sum(r.segments for r in rows),
                sum(r.bytes for r in rows),
            )
            for key, rows in groups.items()
        }

    def diff(
        self, other: Ledger, by: Sequence[str] = ("phase", "collective")
    ) -> dict[tuple[Any, ...], Difference]:
        """Return the groups of rows of which this ledger and another have different totals.

        Parameters
        ----------
        other : Ledger
        by : sequence of str
            The names of the columns that define a group, as in `summary`.

        Returns
        -------
        dict of tuple to Difference
            By the values of the columns, first those of this ledger, then those that only the other
            has.  It is empty if the same was sent.

        Raises
        ------
        ValueError
            If there is no such column.
        """
        here, there = self.summary(by), other.summary(by)
        nothing = Summary(0, 0, 0)
        differences = {
            key: Difference(here.get(key, nothing), there.get(key, nothing))
            for key in (*here, *there)
        }
        return {key: pair for key, pair in differences.items() if pair.here != pair.there}

    def matrix(self) -> NDArray[np.int64]:
        """Return the bytes sent from each rank (row) to each rank (column), an int64 array.

        Its shape is (size, size).  Before `gather` only this rank's row is filled.
        """
        matrix = np.zeros((self.size, self.size), np.int64)
        for row in self.rows():
            matrix[row.src, row.dst] += row.bytes
        return matrix

    def host_matrix(self) -> NDArray[np.int64]:
        """Return the bytes sent from each host (row) to each host (column), an int64 array.

        The hosts are those of `topology`, in its order; on the diagonal is what stays on a host.
        Before `gather` only the row of this rank's host is filled, with what this rank sent.
        """
        host, num_hosts = np.array(self.topology.host_of), self.topology.num_hosts
        matrix = np.zeros((num_hosts, num_hosts), np.int64)
        np.add.at(matrix, (host[:, None], host[None, :]), self.matrix())
        return matrix

    def gather(self) -> Ledger | None:
        """Join the ledgers of all ranks.  All ranks call it.

        Ledgers that are still open show the messages of this call under "ledger".

        Returns
        -------
        Ledger or None
            A ledger of every rank's calls on rank 0, None on the others.

        Raises
        ------
        ValueError
            For a ledger that was gathered, or that was not made by `record`.

        Examples
        --------
        >>> import collectives
        >>> import numpy as np
        >>> def step(comm):
        ...     with comm.record() as ledger:
        ...         comm.all_reduce(np.ones(4, np.float32), algorithm="ring")
        ...     return ledger.gather()
        >>> collectives.run(step, size=2)[0].matrix()
        array([[ 0, 16],
               [16,  0]])
        """
        if self._collect is None:
            raise ValueError("only a ledger made by `record` can be gathered, and only once")
        parts = self._collect(json.dumps([entry.to_json() for entry in self.entries]).encode())
        if parts is None:
            return None
        whole = Ledger(self.rank, self.topology)
        whole.entered = [_from_json(*entry) for part in parts for entry in json.loads(part)]
        return whole

    def to_csv(self, path: str | Path) -> None:
        """Write the rows to the file `path`: CSV with a header, in UTF-8.

        A lone surrogate in a phase, which UTF-8 cannot encode, is written as an escape sequence.
        """
        table = io.StringIO(newline="")
        writer = csv.writer(table)
        writer.writerow(Row._fields)
        writer.writerows(self.rows())
        _write(path, table.getvalue())

    def to_json(self, path: str | Path) -> None:
        """Write the rows to the file `path`: a JSON list of objects."""
        _write(path, json.dumps([row._asdict() for row in self.rows()], indent=0))

    def to_chrome_trace(self, path: str | Path) -> None:
        """Write the calls to the file `path`: a timeline for chrome://tracing or Perfetto.

        It has one process per rank, and one bar per call, from its start until it was found to be
        complete, with its messages and bytes, and of these the bytes to other hosts.  Times of
        ranks on the same host are comparable.  A call on devices ends when the device has done it;
        its bar has no length if that is not known yet: call `Communicator.synchronize` before.
        """
        events = [
            {
                "name": f"{entry.call.collective} ({entry.call.algorithm})",
                "cat": entry.phase,
                "ph": "X",
                "pid": entry.call.src,
                "tid": 0,
                "ts": entry.started * 1e6,
                "dur": max(entry.finished - entry.started, 0.0) * 1e6,
                "args": {
                    "phase": entry.phase,
                    "call": entry.call.numbered(entry.number),
                    "messages": sum(segments for *_, segments in entry.call.sent),
                    "bytes": sum(num_bytes for _, _, num_bytes, _ in entry.call.sent),
                    "off_host_bytes": sum(
                        row.bytes for row in entry.rows(self.topology.host_of) if row.off_host
                    ),
                },
            }
            for entry in self.entries
        ]
        _write(path, json.dumps({"traceEvents": events}))


def _write(path: str | Path, text: str) -> None:
    """Write a file completely or not at all.  A link or a device is written in place."""
    file, data = Path(path), text.encode("utf-8", "backslashreplace")
    if file.is_symlink() or (file.exists() and not file.is_file()):
        file.write_bytes(data)
        return
    unfinished = file.with_name(f"{file.name}.part")
    try:
        unfinished.write_bytes(data)
        unfinished.replace(file)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


class Recording(Protocol):
    """What calls are recorded in: a `Ledger`, or what only adds them up."""

    def enter(self, entry: list[Any], site: str) -> None:
        """Record a call: an `Entry` as a list; `site` is as in `Recorder.record`."""

    def replace(self, entry: list[Any], call: Call, site: str) -> None:
        """Set the call of an entry that was recorded, because another program runs."""


Entered = tuple[Recording, "list[Any]"]
"""An entry, and where it was recorded."""

# What records a communicator, with its ranks as numbered by the recording one (None: the same).
Ancestry = list[tuple[list[Recording], Sequence[int] | None]]


class Recorder:
    """Records the runs of a program of `rank` in the ledgers that are open.

    Parameters
    ----------
    names : tuple of str
        The collective and the algorithm.
    numbered : function
        See `Call`.
    sent : tuple
        The messages of every run.
    ancestry : Ancestry
    rank : int
    axis : str
        The name of the communicator.
    """

    def __init__(
        self,
        names: tuple[str, str],
        numbered: Callable[[int], str],
        sent: Sent,
        ancestry: Ancestry,
        rank: int,
        axis: str = "",
    ) -> None:
        self.names, self._numbered, self._sent = names, numbered, sent
        self._ancestry, self._rank, self._axis = ancestry, rank, axis
        self._calls: list[tuple[list[Recording], Call]] = []

    def renumbered(self, numbered: Callable[[int], str]) -> Recorder:
        """Return a recorder of the same program, whose runs have other numbers."""
        return Recorder(self.names, numbered, self._sent, self._ancestry, self._rank, self._axis)

    def number(self, number: int) -> str:
        """Return the number of a run as text."""
        return self._numbered(number)

    def record(self, number: int, phase: str, site: str, started: float) -> list[Entered]:
        """Record a run in the open ledgers, as quickly as possible; return the new entries.

        `site` is the line of the program that made the call, which only `Totals` show; "" if no
        line is recorded.
        """
        if not any(ledgers for ledgers, _ in self._ancestry):
            return []
        entered = []
        for ledgers, call in self._calls or self._made_calls():
            for ledger in tuple(ledgers):  # another thread may close one meanwhile
                entry = [call, number, phase, started, 0.0, []]
                ledger.enter(entry, site)
                entered.append((ledger, entry))
        return entered

    def replace(self, entered: list[Entered], site: str) -> None:
        """Let the entries of another recorder show that this program runs instead."""
        collective, algorithm = self.names
        for ledger, entry in entered:
            changes = {"collective": collective, "algorithm": algorithm, "sent": self._sent}
            ledger.replace(entry, entry[_CALL]._replace(**changes), site)

    def note_links(self, entered: list[Entered], link: Callable[[int], str]) -> None:
        """Note the link of each message of a run, which `link` returns for a rank."""
        links = [link(dst) for _, dst, _, _ in self._sent]
        for _, entry in entered:
            entry[_LINKS] = links

    def describe(self, number: int) -> dict[str, Any]:
        """Return the description of a run for the flight recorder."""
        collective, algorithm = self.names
        return {
            "call": self.number(number),
            "collective": collective,
            "algorithm": algorithm,
            "bytes": sum(num_bytes for _, _, num_bytes, _ in self._sent),
        }

    def _made_calls(self) -> list[tuple[list[Recording], Call]]:
        for ledgers, ranks in self._ancestry:
            src = self._rank if ranks is None else ranks[self._rank]
            call = Call(*self.names, self._sent, src, ranks, self._numbered, self._axis)
            self._calls.append((ledgers, call))
        return self._calls
