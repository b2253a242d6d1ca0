"""All schedules by name, with what the papers say of them.

A schedule added to `SCHEDULES` is proved, drawn and compared like the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from parallel.actions import Action
from parallel.pipeline.both_ends import dualpipe, dualpipe_v
from parallel.pipeline.one_forward_one_backward import (
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    pipedream,
    zb_h1,
    zb_h2,
)
from parallel.pipeline.schedule import Schedule
from parallel.pipeline.simulation import Time, Times
from parallel.pipeline.v_shaped import v_half, v_min, zb_v

Bubble: TypeAlias = Callable[[int, int, int, Times], Time]
Live: TypeAlias = Callable[[int, int, int], int]


class ScheduleInfo(NamedTuple):
    """A kind of schedule, with formulas of P ranks, m micro-batches, v stages on a rank, and times.

    Attributes
    ----------
    title, source : str
    lists : function
        Returns the lists for (P, m), or for (P, m, v).
    bubble : function
        The bubble for (P, m, v, times), where `condition` holds.
    live : function
        The most activations of one stage that a rank keeps, for (P, m, v), of enough micro-batches.
    condition : str
        When the bubble is that of the formula; F, I and W are the times.
    is_exact : function
        Whether `condition` holds for (P, m, times).
    num_chunks : int
        The number of stages on a rank; of "interleaved" the default.
    """

    title: str
    source: str
    lists: Callable[..., list[list[Action]]]
    bubble: Bubble
    live: Live
    condition: str = "m >= P"
    is_exact: Callable[[int, int, Times], bool] = lambda p, m, t: m >= p
    num_chunks: int = 1


def filling(p: int, m: int, v: int, t: Times) -> Time:
    """Return the time to fill the pipeline and to drain it."""
    return (p - 1) * t.all_of_one


def is_even(t: Times) -> bool:
    """Return whether F, I and W take equally long."""
    return t.forward == t.backward_input == t.backward_weight


def pair_bubble(ahead: int, t: Times) -> Time:
    """Return the bubble of DualPipe with so many ranks between an end and the middle."""
    return ahead * (t.pair + t.backward - 3 * t.backward_weight)


def is_pair_exact(p: int, m: int, t: Times) -> bool:
    """Return whether `pair_bubble` is exact."""
    is_sum = t.pair == t.all_of_one
    return is_sum and t.forward == t.backward_input >= t.backward_weight


PAIR = "F = I >= W, and F&B takes as long as F and B"
EVEN = "F = I = W"

SCHEDULES: dict[str, ScheduleInfo] = {
    "naive": ScheduleInfo(
        "one micro-batch after the other", "model parallelism", naive,
        lambda p, m, v, t: m * filling(p, m, v, t), lambda p, m, v: 1,
    ),
    "gpipe": ScheduleInfo(
        "all forward, then all backward", "Huang et al. 2019", gpipe,
        filling, lambda p, m, v: m,
    ),
    "1f1b": ScheduleInfo(
        "one forward, one backward", "Narayanan et al. 2021", one_f_one_b,
        filling, lambda p, m, v: min(p, m),
    ),
    "pipedream": ScheduleInfo(
        "one forward, one backward, and an update after each", "Narayanan et al. 2019", pipedream,
        filling, lambda p, m, v: min(p, m),
    ),
    "interleaved": ScheduleInfo(
        "one forward, one backward, with several stages on a rank", "Narayanan et al. 2021",
        interleaved, filling, lambda p, m, v: (v - 1) * (m // max(1, m // p)) + 2 * (p - 1) + 1,
        num_chunks=2,
    ),
    "zb-h1": ScheduleInfo(
        "W later than I, with the memory of 1F1B", "Qi et al. 2023", zb_h1,
        lambda p, m, v, t: (p - 1) * (t.forward + t.backward_input - t.backward_weight),
        lambda p, m, v: min(p, m),
        "W <= F, m >= P", lambda p, m, t: t.backward_weight <= t.forward and m >= p,
    ),
    "zb-h2": ScheduleInfo(
        "W later than I, with twice the memory of 1F1B", "Qi et al. 2023", zb_h2,
        lambda p, m, v, t: (p - 1) * (t.forward + t.backward_input - 2 * t.backward_weight),
        lambda p, m, v: min(2 * p - 1, m),
        "W <= F, 2 W <= F + I, m >= 2 P - 1",
        lambda p, m, t: t.backward_weight <= t.forward and m >= 2 * p - 1
        and 2 * t.backward_weight <= t.forward + t.backward_input,
    ),
    "zb-v": ScheduleInfo(
        "two stages on a rank in a V, with the memory of 1F1B", "Qi et al. 2024", zb_v,
        lambda p, m, v, t: 0, lambda p, m, v: 2 * p,
        f"{EVEN}, m >= 2 P - 1", lambda p, m, t: is_even(t) and m >= 2 * p - 1, 2,
    ),
    "v-half": ScheduleInfo(
        "a V with half the memory of 1F1B", "Qi et al. 2024", v_half,
        lambda p, m, v, t: (7 * p - (7 if p % 2 else 4)) // 2 * t.forward,
        lambda p, m, v: 2 * ((p + 2) // 2),
        f"{EVEN}, m >= P", lambda p, m, t: is_even(t) and m >= p, 2,
    ),
    "v-min": ScheduleInfo(
        "a V with a third of the memory of 1F1B", "Qi et al. 2024", v_min,
        lambda p, m, v, t: (max(4 * p - 5, 0) + 2 * (p % 3 == 0)) * t.forward,
        lambda p, m, v: 2 * ((p + 4) // 3),
        f"{EVEN}, m >= P", lambda p, m, t: is_even(t) and m >= p, 2,
    ),
    "dualpipe": ScheduleInfo(
        "micro-batches from both ends, with two copies of the model", "DeepSeek-AI 2024", dualpipe,
        lambda p, m, v, t: pair_bubble(p // 2 - 1, t), lambda p, m, v: p + 1, PAIR, is_pair_exact,
    ),
    "dualpipe-v": ScheduleInfo(
        "micro-batches from both ends of a V", "DeepSeek-AI 2024", dualpipe_v,
        lambda p, m, v, t: pair_bubble(p - 1, t), lambda p, m, v: 2 * p + 1, PAIR, is_pair_exact, 2,
    ),
}  # fmt: skip


def make(
    name: str, num_ranks: int, num_micro_batches: int, *, num_chunks: int | None = None
) -> Schedule:
    """Return the schedule of a name on `num_ranks` ranks.

    Parameters
    ----------
    name : str
        One of `SCHEDULES`.
    num_ranks, num_micro_batches : int
        At least 1.
    num_chunks : int, optional
        The number of stages on each rank, at least 1; of "interleaved" only, by default 2.

    Raises
    ------
    ValueError
        For an unknown name, and for numbers that the schedule does not take.

    Examples
    --------
    >>> from parallel.pipeline import make
    >>> make("zb-v", 2, 4).stages_of(0)
    (0, 3)
    """
    if name not in SCHEDULES:
        raise ValueError(f"there is no schedule {name!r}; choose from {', '.join(SCHEDULES)}")
    if min(num_ranks, num_micro_batches) < 1:
        raise ValueError(
            f"a schedule for {num_ranks} ranks and {num_micro_batches} micro-batches: both must be"
            " at least 1"
        )
    info = SCHEDULES[name]
    if num_chunks is not None and (name != "interleaved" or num_chunks < 1):
        raise ValueError(f"{name} on {num_chunks} stages a rank: interleaved takes at least 1")
    chunks = (num_chunks or info.num_chunks,) if name == "interleaved" else ()
    return Schedule.of(name, info.lists(num_ranks, num_micro_batches, *chunks))
