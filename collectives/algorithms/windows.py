"""Windows of ranks that grow in every round: what an exscan, a census and a tripling share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from collectives.schedule import Block, Copy, CopyReduce, Operation, Recv, RecvReduce, Round, Send

# What a rank knows besides 0, its own vector, into which it combines the whole window.
OTHERS: Block = ("others", 0)  # the combination of the ranks behind, without this one
ARRIVED: Block = ("arrived", 0)
SECOND: Block = ("second", 0)  # what arrived in the same round from another rank


def windows(rank: int, size: int, plan: Sequence[Sequence[bool]], is_ring: bool) -> Iterator[Round]:
    """Every rank gets the combination of a growing window of ranks around it.

    The plan has a list for each round, and in it an entry for each message of a rank: whether it
    contains the rank's own part, or the others in its window only.  On a ring (a census) the result
    is the window and the own part, on a line (an exscan) the window alone.
    """
    reach = 0  # how many others the window has
    for number, messages in enumerate(plan):
        later = [is_whole for later in plan[number + 1 :] for is_whole in later]
        needs_whole, needs_others = is_ring or any(later), not is_ring or not all(later)
        operations: list[Operation] = []
        arrivals = []
        for distance, is_whole in _distances(reach, messages, is_two_sided=not needs_others):
            sent: Block = 0 if is_whole else OTHERS
            ahead, behind, first = rank + distance, rank - distance, 0 if is_whole else 1
            if is_ring or (ahead < size and rank >= first):
                operations.append(Send(ahead % size, [sent]))
            if is_ring or behind >= first:
                arrivals.append((behind % size, sent))
        if arrivals:
            operations += _combined(arrivals, reach == 0, needs_whole, needs_others)
        reach += reach * len(messages) + sum(messages)
        if number == len(plan) - 1 and not is_ring and rank > 0:
            operations.append(Copy([OTHERS], [0]))
        yield tuple(operations)


def _distances(
    reach: int, messages: Sequence[bool], is_two_sided: bool
) -> Iterator[tuple[int, bool]]:
    """How far ahead each message of a round goes, and whether it contains the own part.

    Windows lie behind their ranks, each next to the one before.  When only whole windows are needed
    from now on, these may reach ahead as well, and the second message goes back instead.
    """
    covered = reach
    for number, is_whole in enumerate(messages):
        is_back = is_two_sided and number == 1
        yield -(reach + 1) if is_back else covered + is_whole, is_whole
        covered += reach + is_whole


def _combined(
    arrivals: Sequence[tuple[int, Block]], is_first: bool, needs_whole: bool, needs_others: bool
) -> list[Operation]:
    """Receive windows, and combine them with the values that need them."""
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
