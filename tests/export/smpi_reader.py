"""Replays a trace of SMPI: what each rank sends and receives, without blocking, and waits for."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable

Ends = tuple[int, int, int]  # source, destination and tag of a message


class Rank:
    """The actions of a rank that are left, and the messages that it has not waited for."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.actions: deque[list[str]] = deque()
        self.open: list[Ends] = []


class Replay:
    """All ranks.  A message is complete when its send and its receive have been posted."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.ranks: dict[int, Rank] = {}
        self.posted: dict[tuple[str, Ends], int] = {}
        for line in lines:
            number, *action = line.split()
            self.ranks.setdefault(int(number), Rank(int(number))).actions.append(action)

    def run(self) -> dict[tuple[int, int], list[int]]:
        """The sizes of the messages from rank to rank; fails if ranks wait forever."""
        while any(map(self.advance, self.ranks.values())):
            pass
        stuck = {
            rank.rank: " ".join(rank.actions[0]) for rank in self.ranks.values() if rank.actions
        }
        assert not stuck, f"wait forever: {stuck}"
        sizes: dict[tuple[int, int], list[int]] = defaultdict(list)
        for (verb, ends), size in self.posted.items():
            assert self.is_complete(ends), f"{verb} of {ends} has no other end"
            if verb == "isend":
                sizes[ends[:2]].append(size)
        return sizes

    def advance(self, rank: Rank) -> bool:
        """Do the next action, if it need not wait."""
        if not rank.actions:
            return False
        verb, *numbers = rank.actions[0]
        if verb in ("isend", "irecv"):
            self.post(rank, verb, *map(int, numbers))
        elif verb == "wait":
            source, destination, tag = map(int, numbers)
            if not self.end(rank, [(source, destination, tag)]):
                return False
        elif verb == "waitall":
            if not self.end(rank, rank.open):
                return False
        else:
            assert verb in ("init", "finalize") or (verb == "compute" and int(numbers[0]) >= 0)
            assert verb != "finalize" or (not rank.open and len(rank.actions) == 1)
        rank.actions.popleft()
        return True

    def post(self, rank: Rank, verb: str, peer: int, tag: int, size: int) -> None:
        ends = (rank.rank, peer, tag) if verb == "isend" else (peer, rank.rank, tag)
        assert (verb, ends) not in self.posted, f"two messages {ends}"
        self.posted[verb, ends] = size
        rank.open.append(ends)

    def end(self, rank: Rank, messages: Iterable[Ends]) -> bool:
        """Whether the messages are complete; then the rank does not wait for them any more."""
        messages = list(messages)
        assert set(messages) <= set(rank.open), f"{rank.rank} waits for {messages}"
        if not all(map(self.is_complete, messages)):
            return False
        rank.open = [ends for ends in rank.open if ends not in messages]
        return True

    def is_complete(self, ends: Ends) -> bool:
        sizes = [self.posted.get((verb, ends)) for verb in ("isend", "irecv")]
        assert None in sizes or sizes[0] == sizes[1], f"{ends} is sent and received as {sizes}"
        return None not in sizes
