"""Schedules on circulant graphs, in which rank r talks to r + s for a few distances s.

Traff, "Optimal broadcast schedules in logarithmic time", 2023 and 2024.  With the distances
s[0] = 1 <= ... <= s[q] = p, each half of the next, rounded up, N pieces reach p ranks from rank 0
in N - 1 + q rounds, the minimum, and no piece reaches a rank twice.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


def skips(p: int) -> list[int]:
    """Return 1, ..., p: every distance is half of the next, rounded up."""
    distances = [p]
    while distances[-1] > 1:
        distances.append((distances[-1] + 1) // 2)
    return distances[::-1]


class Transfer(NamedTuple):
    """A `piece` that is received from rank r - distance, or sent to rank r + distance."""

    distance: int
    piece: int


Rounds = list[Transfer | None]


@lru_cache(maxsize=4096)
def transfers(r: int, p: int, num_pieces: int) -> tuple[Rounds, Rounds]:
    """Return what rank `r` receives, and what it sends, in each of the N - 1 + q rounds.

    Rank 0 is the root.  The schedule repeats every q rounds with the pieces numbered q higher; it
    begins in the middle of a period so that it ends with one.
    """
    distances = skips(p)
    q = len(distances) - 1
    incoming = receive_schedule(p, r)
    outgoing = [receive_schedule(p, (r + distances[k]) % p)[k] for k in range(q)]
    missing = -(num_pieces - 1) % q if q else 0
    receives: Rounds = []
    sends: Rounds = []
    for i in range(missing, missing + (num_pieces - 1 + q) * (q > 0)):
        period, k = divmod(i, q)
        first, distance = period * q - missing, distances[k]
        come, go = incoming[k] + first, outgoing[k] + first
        comes, goes = r != 0 and come >= 0, (r + distance) % p != 0 and go >= 0
        receives.append(Transfer(distance, min(come, num_pieces - 1)) if comes else None)
        sends.append(Transfer(distance, min(go, num_pieces - 1)) if goes else None)
    return receives, sends


@lru_cache(maxsize=4096)
def receive_schedule(p: int, r: int) -> tuple[int, ...]:
    """Return the piece that rank `r` receives in round k = 0..q-1 of a period.

    A negative piece is one of the period before.  Rank 0 sends piece k in round k.  A piece reaches
    r along distances that add up to p + r.  In every round r takes the piece whose last hop is the
    longest way found that is still in time, and every way found is shorter than the one before.
    One depth-first search finds them all.
    """
    s = skips(p)
    q = len(s) - 1
    own, shortest = first_piece(p, r), 2 * p + 1
    hops: list[int] = []

    def search(way: int, below: int) -> None:
        """Extend `way` by distances of index less than `below`, until q hops are found."""
        nonlocal shortest
        for e in reversed(range(below)):
            longer = way + s[e]
            if e == own or e in hops or len(hops) == q:
                continue
            if longer > p + r - s[len(hops)] or longer >= shortest:
                continue
            if longer <= p + r - s[len(hops) + 1]:
                search(longer, e)
            if len(hops) == q or way > p + r - s[len(hops) + 1]:
                return
            shortest = longer
            hops.append(e)

    search(0, q + 1)
    return tuple(own if e == q else e - q for e in hops)


def first_piece(p: int, r: int) -> int:
    """Return the first piece that reaches `r`.

    It is the last distance if r is made of distances, longest first.  For rank 0, which has all
    pieces, it is the index of p itself.
    """
    s = skips(p)
    index, rest = len(s) - 1, r
    while rest:
        index = max(e for e, distance in enumerate(s) if distance <= rest)
        rest -= s[index]
    return index
