"""Windows of ranks that grow in every round: what an exscan, a census and a tripling share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from collectives.schedule import Block, Copy, CopyReduce, Operation, Recv, RecvReduce, Round, Send

# What a rank knows besides 0, its own vector, into which it combines the whole window.
OTHERS: Block = ("others", 0)  # the combination of the ranks behind, without this one
ARRIVED: Block = ("arrived", 0)
SECOND: Block = ("second", 0)  # what arrived in the same round from another rank


def windows(rank: int, size: int, plan: Sequence[Sequence[bool]], is_ring: bool) -> Iterator[Round]:
    """Yield rounds after which every rank has the combination of a window of ranks.

    The window grows in every round.  The plan has a list for each round, and in it an entry for
    each message that a rank sends:
    whether the message includes the rank's own part, or only the others in its window.  On a ring
    (a census) the result is the window and the own part, on a line (an exscan) the window alone.
    """
    reach = 0  # how many others are in the window
    for number, messages in enumerate(plan):
        later = [is_whole for wholes in plan[number + 1 :] for is_whole in wholes]
        needs_whole, needs_others = is_ring or any(later), not is_ring or not all(later)
        hops = list(_hops(reach, messages, is_two_sided=not needs_others))
        operations = [
            Send((rank + distance) % size, [sent])
            for distance, sent in hops
            if is_ring or _is_on_line(rank, rank + distance, sent, size)
        ]
        arrivals = [
            ((rank - distance) % size, sent)
            for distance, sent in hops
            if is_ring or _is_on_line(rank - distance, rank, sent, size)
        ]
        if arrivals:
            operations += _combined(arrivals, reach == 0, needs_whole, needs_others)
        reach += reach * len(messages) + sum(messages)
        if number == len(plan) - 1 and not is_ring and rank > 0:
            operations.append(Copy([OTHERS], [0]))
        yield tuple(operations)


def _hops(reach: int, messages: Sequence[bool], is_two_sided: bool) -> Iterator[tuple[int, Block]]:
    """Yield how far ahead each message of a round goes, and which value it contains.

    Windows lie behind their ranks, and a rank receives those next to its own: the first message
    fetches the one behind it, the second the one behind that.  Once only whole windows are needed,
    a window may lie on both sides of its rank, and the second message fetches the one ahead.
    """
    distance = reach
    for number, is_whole in enumerate(messages):
        is_back = is_two_sided and number == 1
        yield -(reach + 1) if is_back else distance + is_whole, 0 if is_whole else OTHERS
        distance += reach + is_whole


def _is_on_line(source: int, destination: int, sent: Block, size: int) -> bool:
    """Return whether a message exists on a line.

    Rank 0 knows no others, and no rank follows the last.
    """
    return source >= (1 if sent == OTHERS else 0) and destination < size


def _combined(
    arrivals: Sequence[tuple[int, Block]], is_first: bool, needs_whole: bool, needs_others: bool
) -> list[Operation]:
    """Return the operations that receive windows and combine them with the values that need them.

    Where both values need them, windows that arrive together are first combined with each other.
    """
    if not needs_others or not (needs_whole or is_first):
        into: Block = OTHERS if needs_others else 0
        return [RecvReduce(peer, [sent], into=[into]) for peer, sent in arrivals]
    names = [OTHERS, ARRIVED] if is_first else [ARRIVED, SECOND]
    targets = names[: len(arrivals)]
    receives = [
        Recv(peer, [sent], into=[target])
        for (peer, sent), target in zip(arrivals, targets, strict=True)
    ]
    joined = [CopyReduce([target], targets[:1]) for target in targets[1:]]
    results: list[Block] = [*[0] * needs_whole, *[OTHERS] * (not is_first)]
    return receives + joined + [CopyReduce(targets[:1], [result]) for result in results]
