"""The steps of one rank: messages, copies and combinations on regions of its buffers."""

from __future__ import annotations

from typing import Literal, NamedTuple

from collectives.schedule import Block, Region

Aliasing = int | Literal["none", "odd"]


class OwnCounts(NamedTuple):
    """What one rank knows of an all-to-all: the elements to each rank, and from each rank.

    Attributes
    ----------
    passing : tuple
        The blocks of other ranks that pass through this rank, and their elements.
    """

    rank: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    passing: tuple[tuple[Block, int], ...] = ()


class CountOfEachBlock(NamedTuple):
    """An all-to-all of the counts of blocks, `num_elements` for each block.

    A rank keeps not only what is for it, but also what passes through it: its output has the blocks
    from each rank, then those of `passing_blocks`.
    """

    num_elements: int = 1


Counts = int | tuple[int, ...] | tuple[tuple[int, ...], ...] | OwnCounts | CountOfEachBlock


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


class Lane(NamedTuple):
    """The steps of one rank, then the `closing` moves.

    Attributes
    ----------
    staying : tuple of Move
        Moves from input to output, which are made during the first round.
    num_scratch : int
        The elements of scratch.
    copies_input : bool
        Whether it needs a copy of the input, because the output would overwrite it.
    """

    steps: tuple[Step, ...]
    staying: tuple[Move, ...] = ()
    closing: tuple[Move, ...] = ()
    num_scratch: int = 0
    copies_input: bool = False
