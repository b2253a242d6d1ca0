"""Add the messages between stages to a schedule."""

from __future__ import annotations

from parallel.pipeline.actions import Action, Computation, Send
from parallel.pipeline.schedule import Schedule, computations
from parallel.pipeline.simulation import simulate


def with_messages(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Return the lists of a `schedule` with what ranks send and receive.

    ``2SEND_F0`` sends the output of stage 2 for micro-batch 0 as soon as it is computed, and
    ``3RECV_F0`` receives it, at the same time if F, I and W take equally long.  Stages on one rank
    send each other nothing.  All messages are in one order, of which each rank has a part: ranks
    that do one action after the other, and wait in each send until it is received, do not wait for
    each other forever.

    A receive comes before what its rank computes while the message is made.  So a rank loses no
    time if it starts to receive in its place in the list, and waits for the message when it
    computes with it, as a `Trainer` does.  A rank that waits in the list would lose time.

    Examples
    --------
    >>> from parallel.pipeline import make
    >>> print(*with_messages(make("1f1b", 2, 1))[0])
    0F0 0SEND_F0 0RECV_B0 0B0
    """
    lists: list[list[Action]] = [[] for _ in range(schedule.num_ranks)]
    spans = simulate(schedule).spans
    ended = [(span.end, i, rank) for rank, row in enumerate(spans) for i, span in enumerate(row)]
    for _, i, rank in sorted(ended):
        action = spans[rank][i].action
        lists[rank].append(action)
        for part in computations((action,)):
            _send(part, rank, schedule, lists)
    return tuple(map(tuple, lists))


def _send(part: Computation, rank: int, schedule: Schedule, lists: list[list[Action]]) -> None:
    """Append the message with the result of a computation, if another rank needs it."""
    stage = part.target(schedule.num_stages)
    if stage is None:
        return
    peer = schedule.rank_of(stage, part.micro_batch)
    if peer != rank:
        send = Send(part.stage, part.micro_batch, part.makes)
        lists[rank].append(send)
        lists[peer].append(send.other_end)
