"""How the ranks of a host agree, before a call, whether and how all of them use their devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import starmap
from typing import Any

import numpy as np

from collectives.devices.call import DeviceCall
from collectives.devices.check import Check, until
from collectives.devices.exposed import Exposed
from collectives.devices.links import Links, Proposal
from collectives.devices.loop import Loop
from collectives.devices.meeting import Meeting, Wait, Waits
from collectives.engines import CallKey
from collectives.errors import CollectiveError, CollectiveMismatch


class Agreement:
    """One rank's part in the agreement on a call.

    Attributes
    ----------
    meeting : Meeting
        The meeting for the call.
    records : dict of int to record
        The records of all ranks, once all have come to the meeting.
    """

    def __init__(
        self,
        links: Links,
        call: DeviceCall,
        key: CallKey,
        exposed: Exposed,
        check: Check | None,
        *,
        is_strict: bool,
    ) -> None:
        self._links, self._call, self._is_strict = links, call, is_strict
        self._exposed, self._check = exposed, check
        self.meeting = Meeting(links.board, key)
        self.records: dict[int, Any] = {}
        self._proposal = Proposal(links, key) if links.staged is None else None

    def come(self, loop: Loop, make_room: Callable[[], None]) -> None:
        """Publish the records of this rank, unless too many calls are under way.

        The start of the run has been noted in `loop`.  `make_room` gives slots back.
        """
        self._loop = loop
        self._publish()
        if not self.meeting.is_published:
            make_room()
            self._publish()
        if not self.meeting.is_published and not self._call.plan:
            self._links.board.note_host_call(self.meeting.key.call)

    def _publish(self) -> None:
        """Publish the records, if there is room.

        The proposal comes first: a rank whose record is there proposes nothing any more.
        """
        proposal = self._proposal
        number = 0 if self._check is None else self._check.number
        if proposal is None or proposal.is_published or proposal.publish(number):
            fields = self._exposed.fields(self._loop, is_plan=bool(self._call.plan))
            if self._check is not None:
                fields["compared"] = np.void(self._check.digest)
            self.meeting.publish({"check": number, **fields})

    def meet(self) -> Waits:
        """Wait for the other ranks of the host; return why all stage, "" if they do not.

        Raises CollectiveMismatch if the ranks make different calls, and CollectiveError on all
        ranks if one cannot make it.
        """
        board, meeting, proposal = self._links.board, self.meeting, self._proposal
        while self._call.plan and not meeting.is_published:
            yield Wait(lambda: board.has_room, list, is_at_work=True)
            self._publish()
        if proposal is not None and proposal.is_published:
            yield from proposal.agree(meeting, self._check)
        if meeting.is_published:
            yield from until(meeting.for_all(), self._check)
        if not meeting.is_published or meeting.absent():
            if self._check is not None and not self._is_strict:
                yield from self._check.compare_once()
            return _why_absent(meeting.absent())
        self.records = {rank: meeting.record(rank).copy() for rank in meeting.ranks}
        yield from self._refuse_differences()
        for rank, record in self.records.items():
            if record["why_refused"]:
                error = CollectiveError(f"rank {rank}: {_text(record['why_refused'])}")
                raise self._links.board.on_this_host(error)
        return next(filter(None, starmap(self._why_staged, self.records.items())), "")

    @property
    def is_complete(self) -> bool:
        """Whether it is known of all ranks that they come to the meeting, as this one does."""
        return self.meeting.is_published and not self.meeting.absent()

    def leave(self, when_unused: Callable[[Callable[[], object]], object]) -> None:
        """Let all ranks use the memory of their records for other calls.

        `when_unused` calls a function when the device does not use the memory of this call.
        """
        if self._check is None or not self._check.has_refused:
            when_unused(self.meeting.leave)
            if self._proposal is not None:
                self._proposal.leave()
        self.end_check()

    def end_check(self) -> None:
        """Forget the comparison, which refers to arrays."""
        self._check = None

    def _why_staged(self, rank: int, record: Any) -> str:
        """Return why a rank cannot use its device; "" if it can."""
        if record["why_staged"]:
            return f"rank {rank}: {_text(record['why_staged'])}"
        is_same = self._links.uuids[rank] == record["uuid"].tobytes()
        return "" if is_same else f"rank {rank} uses another device than before"

    def _refuse_differences(self) -> Waits:
        """Raise CollectiveMismatch if the ranks make different calls."""
        first, *others = self.records
        if self._check is not None and not all(self._are_equal(first, rank) for rank in others):
            yield from self._check.compare_once()  # which can tell what is different
        for rank in others:
            if self.records[rank]["digest"] != self.records[first]["digest"]:
                error = CollectiveMismatch(self._difference(first, rank))
                raise self._links.board.on_this_host(error)

    def _are_equal(self, *ranks: int) -> bool:
        """Return whether the digests of two ranks are equal."""
        one, other = (self.records[rank] for rank in ranks)
        return bool(one["digest"] == other["digest"] and one["compared"] == other["compared"])

    def _difference(self, *ranks: int) -> str:
        texts = {rank: _text(self.records[rank]["what"]) for rank in ranks}
        said = "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())
        return f"the ranks make different calls (call {self.meeting.key.call}): {said}"


def _text(field: Any) -> str:
    return bytes(field).decode(errors="replace")


def _why_absent(ranks: Sequence[int]) -> str:
    if not ranks:
        return "too many calls are under way"
    return f"rank {ranks[0]} makes the call on arrays of the host"
