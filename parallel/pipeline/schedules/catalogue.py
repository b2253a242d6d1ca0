"""All schedules by name, with what they cost.

A schedule added to `SCHEDULES` is proved, drawn and compared like the others.
"""

from __future__ import annotations

from contextlib import suppress

from parallel.pipeline.picture import grid
from parallel.pipeline.schedule import Schedule
from parallel.pipeline.schedules.bidirectional import dualpipe, dualpipe_v
from parallel.pipeline.schedules.formulas import (
    ENOUGH,
    EVEN,
    FLUSH,
    IN_A_V,
    IN_FLIGHT,
    PAIR,
    Formula,
    ScheduleInfo,
    is_even,
    is_pair_exact,
    pair_bubble,
    published_pair_bubble,
    round_size,
    saved,
)
from parallel.pipeline.schedules.one_forward_one_backward import (
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    pipedream,
    zb_h1,
    zb_h2,
)
from parallel.pipeline.schedules.v_shaped import v_half, v_min, zb_v

SCHEDULES: dict[str, ScheduleInfo] = {
    "naive": ScheduleInfo(
        "one micro-batch after the other",
        "model parallelism",
        naive,
        Formula("m (P-1) (F + B)", lambda p, m, v, t: m * (p - 1) * t.all_of_one),
        Formula("1", lambda p, m, v, r: 1),
    ),
    "gpipe": ScheduleInfo(
        "all forward, then all backward",
        "Huang et al. 2019",
        gpipe,
        FLUSH,
        Formula("m", lambda p, m, v, r: m),
    ),
    "1f1b": ScheduleInfo(
        "one forward, one backward", "Narayanan et al. 2021", one_f_one_b, FLUSH, IN_FLIGHT
    ),
    "pipedream": ScheduleInfo(
        "one forward, one backward, and an update after each",
        "Narayanan et al. 2019",
        pipedream,
        FLUSH,
        IN_FLIGHT,
        Formula("0", lambda p, m, v, t: 0, "without an end"),
    ),
    "interleaved": ScheduleInfo(
        "one forward, one backward, with several stages on a rank",
        "Narayanan et al. 2021",
        interleaved,
        FLUSH._replace(condition="m >= P", holds=lambda p, m, v, t: m >= p),
        Formula(
            "min(m v, (v-1) k + 2 (P-1-r) + 1) with k = m / max(1, m // P)",
            lambda p, m, v, r: min(m * v, (v - 1) * round_size(p, m) + 2 * (p - 1 - r) + 1),
        ),
        messages=Formula(
            "2 m (P v - 1), 0 if P = 1", lambda p, m, v, r: 2 * m * (p * v - 1) * (p > 1)
        ),
        needs="m is a multiple of max(1, m // P)",
        num_chunks=2,
    ),
    "zb-h1": ScheduleInfo(
        "W later than I, with the memory of 1F1B",
        "Qi et al. 2023",
        zb_h1,
        Formula(
            "(P-1) (I + max(F - W, 0))",
            lambda p, m, v, t: (p - 1) * (t.backward_input + max(t.forward - t.backward_weight, 0)),
            "m >= P",
            lambda p, m, v, t: m >= p,
        ),
        Formula("min(P, m)", lambda p, m, v, r: min(p, m)),
        Formula("(P-1) (F + I - W)", lambda p, m, v, t: (p - 1) * saved(1, t)),
    ),
    "zb-h2": ScheduleInfo(
        "W later than I, with twice the memory of 1F1B",
        "Qi et al. 2023",
        zb_h2,
        Formula(
            "(P-1) max(F + I - 2W, I - F, 0)",
            lambda p, m, v, t: (p - 1) * max(saved(2, t), t.backward_input - t.forward, 0),
            ENOUGH,
            lambda p, m, v, t: m >= 2 * p - 1,
        ),
        Formula("min(2 P - 1, m)", lambda p, m, v, r: min(2 * p - 1, m)),
        Formula("(P-1) (F + I - 2W)", lambda p, m, v, t: (p - 1) * saved(2, t)),
    ),
    "zb-v": ScheduleInfo(
        "two stages on a rank in a V, with the memory of 1F1B",
        "Qi et al. 2024",
        zb_v,
        Formula(
            "0",
            lambda p, m, v, t: 0,
            f"{EVEN}2 P - 1",
            lambda p, m, v, t: is_even(t) and m >= 2 * p - 1,
        ),
        Formula("2 P", lambda p, m, v, r: 2 * p, ENOUGH, lambda p, m, v, t: m >= 2 * p - 1),
        messages=IN_A_V,
        num_chunks=2,
    ),
    "v-half": ScheduleInfo(
        "a V with half the memory of 1F1B",
        "Qi et al. 2024",
        v_half,
        Formula(
            "(6 ((P-1) // 2) - 1) F, F if P = 2, 0 if P = 1",
            lambda p, m, v, t: max(6 * ((p - 1) // 2) - 1, int(p == 2)) * t.forward,
            f"{EVEN}2 P",
            lambda p, m, v, t: is_even(t) and m >= 2 * p,
        ),
        Formula(
            "2 ((P+2) // 2)",
            lambda p, m, v, r: 2 * ((p + 2) // 2),
            ENOUGH,
            lambda p, m, v, t: m >= 2 * p - 1,
        ),
        Formula("about 3 (P-1) F: half of 1F1B's", lambda p, m, v, t: 3 * (p - 1) * t.forward),
        IN_A_V,
        num_chunks=2,
    ),
    "v-min": ScheduleInfo(
        "a V with a third of the memory of 1F1B",
        "Qi et al. 2024",
        v_min,
        Formula(
            "(4 P - 5) F, 2F less if P is a multiple of 3, 0 if P = 1",
            lambda p, m, v, t: max(4 * p - 5 - 2 * (p % 3 == 0), 0) * t.forward,
            f"{EVEN}2 P",
            lambda p, m, v, t: is_even(t) and m >= 2 * p,
        ),
        Formula(
            "2 ((P+4) // 3) on some ranks, less on others",
            lambda p, m, v, r: 2 * ((p + 4) // 3),
            ENOUGH,
            lambda p, m, v, t: m >= 2 * p - 1,
        ),
        Formula(
            "about 4 (P-1) F: two thirds of 1F1B's", lambda p, m, v, t: 4 * (p - 1) * t.forward
        ),
        IN_A_V,
        num_chunks=2,
    ),
    "dualpipe": ScheduleInfo(
        "micro-batches from both ends, with two copies of the model",
        "DeepSeek-AI 2024",
        dualpipe,
        Formula(
            PAIR[0].format("P/2 - 1"),
            lambda p, m, v, t: pair_bubble(p // 2 - 1, t),
            PAIR[2],
            is_pair_exact,
        ),
        Formula("P + 1", lambda p, m, v, r: p + 1),
        Formula(
            PAIR[1].format("(P/2 - 1)"), lambda p, m, v, t: published_pair_bubble(p // 2 - 1, t)
        ),
        needs="P is even; m is even and at least 2 P",
        num_chunks=2,
    ),
    "dualpipe-v": ScheduleInfo(
        "micro-batches from both ends of a V",
        "DeepSeek-AI 2024",
        dualpipe_v,
        Formula(
            PAIR[0].format("P - 1"),
            lambda p, m, v, t: pair_bubble(p - 1, t),
            PAIR[2],
            is_pair_exact,
        ),
        Formula("2 P + 1", lambda p, m, v, r: 2 * p + 1),
        Formula(PAIR[1].format("(P - 1)"), lambda p, m, v, t: published_pair_bubble(p - 1, t)),
        IN_A_V,
        "m >= 2 P",
        2,
    ),
}


def make(
    name: str, num_ranks: int, num_micro_batches: int, *, num_chunks: int | None = None
) -> Schedule:
    """Return the schedule `name` on `num_ranks` ranks.

    Parameters
    ----------
    name : str
        One of `SCHEDULES`.
    num_ranks, num_micro_batches : int
        At least 1.
    num_chunks : int, optional
        The number of stages on each rank.  For "interleaved" at least 1, by default 2; other
        schedules have only one possible number.

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
    number, is_free = info.num_chunks if num_chunks is None else num_chunks, name == "interleaved"
    if number < 1 or (number != info.num_chunks and not is_free):
        allowed = "at least 1" if is_free else str(info.num_chunks)
        raise ValueError(f"the number of stages on a rank of {name} is {allowed}, not {number}")
    chunks = (number,) if is_free else ()
    try:
        return Schedule.of(name, info.lists(num_ranks, num_micro_batches, *chunks))
    except ValueError as error:
        works = what_works(info, num_ranks, num_micro_batches, *chunks)
        raise ValueError(f"{error}{works}") from None


def what_works(info: ScheduleInfo, num_ranks: int, num_micro_batches: int, *chunks: int) -> str:
    """Return the grid for the next larger number of micro-batches that works, if any."""
    for number in range(num_micro_batches + 1, 4 * num_ranks + 1):
        with suppress(ValueError):
            lists = info.lists(num_ranks, number, *chunks)
            return f"; with {number} it is\n{grid(lists)}"
    return ""
