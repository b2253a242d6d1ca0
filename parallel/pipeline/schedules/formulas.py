"""What schedules cost, as formulas: text that people read, and functions that tests confirm."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from parallel.pipeline.actions import Action
from parallel.pipeline.times import Time, Times


class Formula(NamedTuple):
    """A formula as text and as a function.

    Attributes
    ----------
    text : str
        For P ranks, m micro-batches, v stages on a rank, and rank r.  F, I and W are the times of a
        stage and micro-batch, B = I + W, and F&B is the time of an F and a B that overlap.
    of : function
        The value for (P, m, v, times) if it is a time; for (P, m, v, r) if a rank keeps it.
    condition : str
        When the formula is exact; "" for always.
    holds : function
        Whether `condition` is met by (P, m, v, times).
    """

    text: str
    of: Callable[..., Time]
    condition: str = ""
    holds: Callable[[int, int, int, Times], bool] = lambda p, m, v, t: True


class ScheduleInfo(NamedTuple):
    """A kind of schedule, and what it costs by formulas.

    Attributes
    ----------
    title, source : str
        A few words on the schedule, and the paper that describes it.
    lists : function
        Returns the lists for (P, m), or for (P, m, v).
    bubble : Formula
        The longest time for which a rank waits between its first and its last action, as simulated.
    kept : Formula
        The most activations of one stage and micro-batch that rank r keeps at a time.
    published : Formula, optional
        The bubble according to the paper, if it differs.
    messages : Formula
        How many messages all ranks send, for (P, m, v, r).
    needs : str
        What P and m must be.
    num_chunks : int
        The number of stages on a rank; for "interleaved", the default.
    """

    title: str
    source: str
    lists: Callable[..., list[list[Action]]]
    bubble: Formula
    kept: Formula
    published: Formula | None = None
    messages: Formula = Formula("2 m (P - 1)", lambda p, m, v, r: 2 * m * (p - 1))
    needs: str = "m >= 1"
    num_chunks: int = 1


IN_A_V = Formula("4 m (P - 1)", lambda p, m, v, r: 4 * m * (p - 1))
EVEN = "F = I = W, m >= "
ENOUGH = "m >= 2 P - 1"


def is_even(t: Times) -> bool:
    """Return whether F, I and W take equally long."""
    return t.forward == t.backward_input == t.backward_weight


def saved(number: int, t: Times) -> Time:
    """Return F + I less the W with which a rank fills its bubble."""
    return t.forward + t.backward_input - number * t.backward_weight


def pair_bubble(ahead: int, t: Times) -> Time:
    """Return the bubble of DualPipe with `ahead` ranks, h, between an end and the middle.

    It is the published bubble + h (F - I) - (h - 1) (F + B - F&B).  Each pair but one saves time
    twice, on the way to the middle and on the way back; the published formula counts it once.
    """
    if ahead == 0:
        return 0
    halves = (ahead - 1) * t.backward_input + (3 * ahead - 1) * t.backward_weight
    return (2 * ahead - 1) * t.pair + t.forward - halves


def published_pair_bubble(ahead: int, t: Times) -> Time:
    """Return the bubble of DualPipe as DeepSeek published it."""
    return ahead * (t.pair + t.backward - 3 * t.backward_weight)


def is_pair_exact(p: int, m: int, v: int, t: Times) -> bool:
    """Return whether `pair_bubble` is exact."""
    return t.backward_weight <= t.backward_input <= t.forward


def round_size(p: int, m: int) -> int:
    """Return how many micro-batches pass a rank of "interleaved" in one round."""
    return m // max(1, m // p)


FLUSH = Formula("(P-1) (F + B)", lambda p, m, v, t: (p - 1) * t.all_of_one)
IN_FLIGHT = Formula("min(P - r, m)", lambda p, m, v, r: min(p - r, m))
PAIR = (
    "(2h-1) F&B + F - (h-1) I - (3h-1) W with h = {}; 0 if h = 0",
    "{} (F&B + B - 3W)",
    "W <= I <= F",
)
