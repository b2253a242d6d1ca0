"""One rank's end of a communicator: its tags, its ledgers, and how its plans are made.

Tags keep messages apart.  A third of them is the user's (point to point), a third numbers the
collective calls, so that the messages of two calls never meet, and a third is for what the library
sends ahead of a call of that number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives import arguments, header, select
from collectives.arrays import HOST, Array, Backend
from collectives.header import Header
from collectives.ledger import Call, Entry, Ledger
from collectives.plan import Buffers, Plan
from collectives.program import Counts, Message, Program, Region, Step, compile_program
from collectives.reduction import Operator
from collectives.transport import Transport

# Ledgers that record a communicator, and its ranks in their numbering (None: the same).
Ancestry = list[tuple[list[Ledger], Sequence[int] | None]]


class Arrays(NamedTuple):
    """The checked arrays of a call: where it reads and where it writes, if this rank does."""

    backend: Backend
    source: Array | None
    target: Array | None


class Session:
    """What a communicator and its planner share."""

    def __init__(
        self,
        transport: Transport,
        timeout: float | None = None,
        name: str = "",
        ancestry: Ancestry | None = None,
    ) -> None:
        self.transport, self.timeout, self.name = transport, timeout, name
        self.ledgers: list[Ledger] = []
        self.ancestry: Ancestry = [(self.ledgers, None), *(ancestry or [])]
        self._num_calls = 0
        self._num_messages = 0
        self._num_children: defaultdict[tuple[int, ...], int] = defaultdict(int)

    def child(self, transport: Transport, members: Sequence[int]) -> Session:
        """The session of a communicator of some of our ranks, recorded by whoever records us."""
        self._num_children[tuple(members)] += 1
        times = self._num_children[tuple(members)]
        name = f"{self.name}[{','.join(map(str, members))}{f' #{times}' if times > 1 else ''}]"
        ancestry: Ancestry = [
            (ledgers, members if ranks is None else [ranks[member] for member in members])
            for ledgers, ranks in self.ancestry
        ]
        return Session(transport, self.timeout, name, ancestry)

    # Tags.  A call that is refused takes none, so that it can be made again.

    def _tag(self, third: int, number: int) -> int:
        num_each = self.transport.num_tags // 3
        return third * num_each + number % num_each

    def next_tag(self) -> int:
        """The tag of a new call."""
        self._num_calls += 1
        return self._tag(1, self._num_calls)

    def ahead_tag(self) -> int:
        """The tag for what is sent ahead of the next call."""
        return self._tag(2, self._num_calls + 1)

    def users_tag(self, tag: object) -> int:
        """A tag that the user names."""
        number, largest = arguments.integer(tag, "tag"), self.transport.num_tags // 3 - 1
        if not 0 <= number <= largest:
            raise ValueError(f"tag must be from 0 to {largest}, got {number}")
        return number

    # Plans

    def collective(
        self,
        collective: str,
        arrays: Arrays,
        counts: Counts,
        *,
        root: int = 0,
        op: Operator | None = None,
        algorithm: str | None = None,
        is_kept: bool = False,
        label: str | None = None,
        tag: int | None = None,
    ) -> Plan:
        """The plan of a collective.  `label`: what the ledger calls it if not by its name."""
        like = arrays.target if arrays.source is None else arrays.source
        dtype = np.dtype(np.uint8) if like is None else like.dtype
        num_bytes = _total(counts) * dtype.itemsize
        chosen = select.choose(collective, algorithm, self.transport.size, num_bytes, op)
        buffers = _flat(arrays, dtype)
        program = compile_program(
            collective,
            chosen.algorithm.name,
            self.transport.rank,
            self.transport.size,
            root,
            counts,
            tuple(chosen.options.items()),
            arguments.aliasing(*arrays),
        )
        tag = self.next_tag() if tag is None else tag
        names = label or collective, chosen.label, f"{self.name}{self._num_calls}"
        return self._plan(names, program, buffers, arrays.target, tag, op, is_kept)

    def point_to_point(
        self,
        name: str,
        arrays: Arrays,
        tag: int,
        dest: int | None,
        source: int | None,
        is_kept: bool,
    ) -> Plan:
        """The plan of a send, a receive, or both at once."""
        step, like = Step(), arrays.source
        if arrays.source is not None and dest is not None:
            whole = Region("input", 0, int(arrays.source.size))
            step = step._replace(sends=(Message(dest, whole),))
        if arrays.target is not None and source is not None:
            whole = Region("output", 0, int(arrays.target.size))
            step, like = step._replace(receives=(Message(source, whole),)), arrays.target
        assert like is not None
        self._num_messages += 1
        names = name, "point_to_point", f"{self.name}p{self._num_messages}"
        buffers = _flat(arrays, like.dtype)
        return self._plan(names, Program((step,)), buffers, arrays.target, tag, None, is_kept)

    def _plan(
        self,
        names: tuple[str, str, str],
        program: Program,
        buffers: Buffers,
        result: Array | None,
        tag: int,
        op: Operator | None,
        is_kept: bool,
    ) -> Plan:
        dtype = buffers.input.dtype
        if program.num_scratch:
            scratch = buffers.backend.empty((program.num_scratch,), dtype)
            buffers = buffers._replace(scratch=scratch)
        return Plan(
            "{} ({}), call {}".format(*names),
            program,
            buffers,
            self.transport,
            tag=tag,
            result=result,
            timeout=self.timeout,
            operator=op,
            is_kept=is_kept,
            on_start=self._recorder(names, program, dtype.itemsize),
        )

    def _recorder(
        self, names: tuple[str, str, str], program: Program, itemsize: int
    ) -> Callable[[], list[Entry]]:
        """What a plan does at every start: enter the call into all open ledgers."""
        collective, algorithm, number = names
        num_runs, everybodys = 0, [ledgers for ledgers, _ in self.ancestry]

        def is_recorded() -> bool:
            for ledgers in everybodys:  # noqa: SIM110 - any() costs more than all the rest
                if ledgers:
                    return True
            return False

        def enter() -> list[Entry]:
            nonlocal num_runs
            num_runs += 1
            if not is_recorded():
                return []
            run = number if num_runs == 1 else f"{number}.{num_runs}"
            sent = tuple((k, peer, count * itemsize) for k, peer, count in program.sent())
            call, rank = Call(collective, algorithm, run, sent), self.transport.rank
            return [
                ledger.add(call, rank if ranks is None else ranks[rank], ranks)
                for ledgers, ranks in self.ancestry
                for ledger in ledgers
            ]

        return enter

    # What the library sends for itself, under labels of its own

    def announce(
        self, head: Header | None, root: int, num_counts: int, timeout: float | None
    ) -> Header:
        """The root's header, on every rank, ahead of the next call."""
        message: NDArray[np.uint8] = np.empty(header.num_bytes(num_counts), np.uint8)
        if head is not None:
            message = header.encode(head)
        arrays = Arrays(HOST, None if head is None else message, message)
        self.collective(
            "broadcast",
            arrays,
            message.size,
            root=root,
            algorithm="binomial",
            label="header",
            tag=self.ahead_tag(),
        ).run(timeout)
        return header.decode(message)

    def all_integers(
        self, numbers: Sequence[int], label: str, tag: int, timeout: float | None = None
    ) -> NDArray[np.int64]:
        """A few integers of every rank on every rank, one row each."""
        mine, size = np.array(numbers, np.int64), self.transport.size
        table = np.empty((size, mine.size), np.int64)
        counts = (int(mine.size),) * size
        arrays = Arrays(HOST, mine, table)
        self.collective("all_gather", arrays, counts, label=label, tag=tag).run(timeout)
        return table

    def collect(self, data: bytes) -> list[bytes] | None:
        """Every rank's bytes, on rank 0; None on the others."""
        lengths = self.all_integers([len(data)], "ledger", self.next_tag())[:, 0]
        is_root = self.transport.rank == 0
        whole = np.empty(int(lengths.sum()), np.uint8) if is_root else None
        arrays = Arrays(HOST, np.frombuffer(data, np.uint8), whole)
        self.collective("gather", arrays, tuple(lengths.tolist()), label="ledger").run()
        if whole is None:
            return None
        return [part.tobytes() for part in np.split(whole, np.cumsum(lengths)[:-1])]


def _flat(arrays: Arrays, dtype: np.dtype[Any]) -> Buffers:
    """One-dimensional views of in- and output; empty ones where there is none."""
    nothing = arrays.backend.empty((0,), dtype)
    source, target = (nothing if x is None else x.reshape(-1) for x in arrays[1:])
    return Buffers(arrays.backend, source, target, nothing)


def _total(counts: Counts) -> int:
    """The elements of the vector, of all blocks together, or of an average rank's all-to-all."""
    if isinstance(counts, int):
        return counts
    numbers = [count if isinstance(count, int) else sum(count) for count in counts]
    return sum(numbers) // (1 if isinstance(counts[0], int) else len(counts))
