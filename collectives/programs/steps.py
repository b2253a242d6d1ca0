"""The steps of one rank: messages, copies and combinations on regions of its buffers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from collectives.schedule import Region

Aliasing = int | Literal["none", "odd"]
Counts = int | tuple[int, ...] | tuple[tuple[int, ...], ...]


class Message(NamedTuple):
    """A message: the peer, and the region that is sent or filled."""

    peer: int
    region: Region


class Move(NamedTuple):
    """A copy within this rank."""

    src: Region
    dst: Region


class Combine(NamedTuple):
    """A combination within this rank: into = left (+) right."""

    left: Region
    right: Region
    into: Region


class Step(NamedTuple):
    """One round: pack, exchange the messages, then finish, in the order given."""

    packing: tuple[Move, ...] = ()
    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    finishing: tuple[Move | Combine, ...] = ()


@dataclass(frozen=True)
class Lane:
    """The steps of one rank, then the `closing` moves.

    `staying`: moves from input to output, which are made during the first round.  `num_scratch`:
    elements of scratch.  `copies_input`: whether it needs a copy of the input, because the output
    would overwrite it.
    """

    steps: tuple[Step, ...]
    staying: tuple[Move, ...] = ()
    closing: tuple[Move, ...] = ()
    num_scratch: int = 0
    copies_input: bool = False


def joined(regions: Iterable[Region]) -> Region | None:
    """The regions as one, if they are adjacent and in order; None if not.  Skip empty ones."""
    joined: Region | None = None
    for region in regions:
        buffer, start, stop = region
        if joined is None:
            joined = region if start < stop else None
        elif (buffer, start) == (joined.buffer, joined.stop):
            joined = Region(buffer, joined.start, stop)
        elif start < stop:
            return None
    return Region("scratch", 0, 0) if joined is None else joined


Action = TypeVar("Action", Move, Combine)


def merged(actions: Iterable[Action]) -> tuple[Action, ...]:
    """The actions, with consecutive actions on adjacent regions merged, and empty ones dropped."""
    merged: list[Action] = []
    for action in actions:
        if action[0].start == action[0].stop:
            continue
        both = list(zip(merged[-1], action, strict=True)) if merged else []
        if both and all(a.buffer == b.buffer and a.stop == b.start for a, b in both):
            merged[-1] = type(action)(*(a._replace(stop=b.stop) for a, b in both))
        else:
            merged.append(action)
    return tuple(merged)
