"""Everything that can be wrong with a job gets its verdict.  No job is started."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from collectives.launch import TIMED_OUT
from tests.chaos import __main__ as chaos
from tests.chaos.drawing import ENDING, Job, Step
from tests.chaos.events import Event
from tests.chaos.injecting import Record
from tests.chaos.judging import PROMISES, judge

LATE, OPERATOR, FULL_DISK, SHORT_LIMITS, DUMP = range(5)
JOB = Job(
    "judged",
    2,
    (
        Step("collectives", "late", 1),
        Step("collectives", "operator", 1),
        Step("training", "full disk", 1),
        Step("asynchronous", "short limits", 1),
        Step("collectives", "dump", 1),
    ),
)
WAITED = "all_reduce (ring) waited 0.2 s in round 1 of 2 of ring for rank 1\nand so on"
SHARDS = [["weights", 0, 4, "digest"]]


def event(step: int, what: str, **fields: Any) -> Event:
    return {"step": step, "what": what, "time": 0.0, **fields}


def error(step: int, kind: str, text: str, named: tuple[int, ...] = ()) -> Event:
    return event(step, "error", kinds=[kind], text=text, group=[0, 1], named=[*named])


def good() -> Record:
    """What is seen of JOB if everything holds."""
    both = [
        error(FULL_DISK, "SaveFailed", "rank 1: no space is left"),
        event(FULL_DISK, "saved", steps=1, shards=SHARDS),
        event(FULL_DISK, "loaded", steps=1, shards=SHARDS),
        event(DUMP, "ended"),
    ]
    first = [
        error(LATE, "CollectiveTimeout", WAITED),
        error(OPERATOR, "CollectiveTimeout", WAITED),
        event(SHORT_LIMITS, "timed out", times=0),
    ]
    second = [
        error(OPERATOR, "OnPurpose", "in an operator"),
        error(OPERATOR, "CollectiveError", "the communicator is unusable"),
        event(SHORT_LIMITS, "timed out", times=3),
    ]
    return Record([[*first, *both], [*second, *both]], status=0, reached=DUMP)


def test_a_record_in_which_everything_holds_has_no_verdict() -> None:
    assert judge(JOB, good()) == []


def test_another_call_under_way_may_name_the_guilty_rank() -> None:
    record = good()
    line = "  2 all_gather (ring), 8 bytes sent, begun 1 s ago, under way in round 0 of 1 for rank"
    text = WAITED.replace("rank 1", "rank 0")
    other(0, LATE, "error", text=f"{text}\n{line} 1")(record)
    assert judge(JOB, record) == []
    other(0, LATE, "error", text=f"{text}\n{line} 0")(record)
    assert [verdict[:2] for verdict in judge(JOB, record)] == [(LATE, "errors")]


def add(rank: int, new: Event) -> Callable[[Record], None]:
    return lambda record: record.events[rank].append(new)


def without(rank: int, step: int, what: str) -> Callable[[Record], None]:
    """The last such event of a rank is not there."""

    def remove(record: Record) -> None:
        events = record.events[rank]
        found = [n for n, each in enumerate(events) if (each["step"], each["what"]) == (step, what)]
        del events[found[-1]]

    return remove


def other(rank: int, step: int, what: str, **fields: Any) -> Callable[[Record], None]:
    """The last such event of a rank has other fields."""

    def change(record: Record) -> None:
        events = record.events[rank]
        (*_, old) = [each for each in events if (each["step"], each["what"]) == (step, what)]
        without(rank, step, what)(record)
        events.append({**old, **fields})

    return change


def seen(**fields: Any) -> Callable[[Record], None]:
    return lambda record: record.__dict__.update(fields)


WRONG: dict[str, tuple[int, str, Callable[[Record], None]]] = {
    "a hang": (DUMP, "no hang", seen(hung="waited in vain", status=143)),
    "a wrong value": (LATE, "values", add(0, event(LATE, "wrong", text="got 3, wanted 4"))),
    "an error that is swallowed": (LATE, "errors", without(0, LATE, "error")),
    "an error of another kind": (LATE, "errors", other(0, LATE, "error", kinds=["Exception"])),
    "a time-out that does not name the guilty rank": (
        LATE,
        "errors",
        other(0, LATE, "error", text=WAITED.replace("rank 1", "rank 0")),
    ),
    "an error that does not name the guilty rank": (
        FULL_DISK,
        "errors",
        other(0, FULL_DISK, "error", text="rank 0: no space is left"),
    ),
    "an error without a reason": (DUMP, "errors", add(0, error(DUMP, "ValueError", "why?"))),
    "a communicator that is not unusable": (OPERATOR, "errors", without(1, OPERATOR, "error")),
    "limits that nothing exceeds": (
        SHORT_LIMITS,
        "errors",
        other(1, SHORT_LIMITS, "timed out", times=0),
    ),
    "a process that is left": (DUMP, "nothing left", seen(left=["process 7: python"])),
    "a corrupted checkpoint": (
        FULL_DISK,
        "checkpoints",
        seen(checkpoints=[(FULL_DISK, "the digest is another one")]),
    ),
    "other values than were saved": (
        FULL_DISK,
        "checkpoints",
        other(0, FULL_DISK, "loaded", shards=[["weights", 0, 4, "x"]]),
    ),
    "values of another training step": (
        FULL_DISK,
        "checkpoints",
        other(1, FULL_DISK, "loaded", steps=2),
    ),
    "a dump that is missing": (DUMP, "dumps", seen(missing_dumps={DUMP: [1]})),
    "a traceback": (DUMP, "quiet", seen(stderr="Traceback (most recent call last):\n")),
    "a status that is not 0": (DUMP, "end", seen(status=1)),
    "a rank that does not come to its end": (DUMP, "end", without(1, DUMP, "ended")),
}


@pytest.mark.parametrize("what", WRONG)
def test_everything_that_is_wrong_gets_one_verdict(what: str) -> None:
    step, promise, spoil = WRONG[what]
    record = good()
    spoil(record)
    assert [verdict[:2] for verdict in judge(JOB, record)] == [(step, promise)]


def test_every_promise_has_a_record_that_breaks_it() -> None:
    # Whether the last step was reached is judged by `run`, below.
    assert {promise for _, promise, _ in WRONG.values()} == PROMISES.keys() - {"reached"}


# How jobs end

ENDS = {
    "kill": (137, "Rank 1 (process 7) died without a word\n"),
    "ctrl-c": (130, ""),
    "exception": (1, "OnPurpose: in rank 1\n"),
    "job limit": (TIMED_OUT, "  rank 1: no dump: it is stopped\n"),
}


@pytest.mark.parametrize("fault", ENDING)
def test_the_end_of_a_job_is_judged_by_its_status_and_what_is_said(fault: str) -> None:
    job, (status, said) = Job("end", 2, (Step("plans", fault, 1),)), ENDS[fault]

    def promises(status: int | None, said: str) -> list[str]:
        record = Record([[], []], status=status, stderr=said, reached=0)
        return [verdict.promise for verdict in judge(job, record)]

    assert promises(status, said) == []
    assert promises(0, said) == promises(None, said) == ["end"]
    if said:
        assert promises(status, said.replace("1", "0")) == ["end"]
    assert promises(status, f"{said}Exception in thread 5\n") == ["quiet"]
    if fault == "kill":
        assert promises(status, "the message failed; rank 1 may have died\n") == []
        assert promises(status, "the message failed; rank 0 may have died\n") == ["end"]


def test_a_death_that_is_outlived_is_said_and_named_by_the_others() -> None:
    job = Job("outlived", 3, (Step("plans", "outlived kill", 1),), is_fault_tolerant=True)

    def promises(named: int, said: str) -> list[str]:
        events = [error(0, "PeerFailed", "", (named,)), event(0, "ended")]
        record = Record([events, [], events], status=0, stderr=said, reached=0)
        return [verdict.promise for verdict in judge(job, record)]

    said = "Rank 1 (process 7) died without a word\n"
    assert promises(1, said) == []
    assert promises(2, said) == ["errors", "errors"]
    assert promises(1, "") == ["end"]


# Which jobs are run again

TO_TIME_OUT = Job("slow", 2, (Step("plans", "refused", 1), Step("plans", "job limit", 1)))


def at_limit(reached: int, *events: Event, **fields: Any) -> Record:
    """A job that was ended at its limit in this step, before its fault was over."""
    is_last = reached == 1
    refused = [error(0, "ValueError", "there is no such operator")] * is_last
    fields = {"status": TIMED_OUT, "stderr": ENDS["job limit"][1] * is_last, **fields}
    return Record([[*events], refused], reached=reached, **fields)


RUNS: dict[str, tuple[list[Record], list[str]]] = {
    "reached at once": ([at_limit(1)], []),
    "too slow, then reached": ([at_limit(-1), at_limit(0), at_limit(1)], []),
    "too slow each time": ([at_limit(-1), at_limit(0), at_limit(0)], ["reached"]),
    "a wrong value": ([at_limit(0, event(0, "wrong", text="3"))], ["values"]),
    "a process is left": ([at_limit(0, left=["process 7"])], ["nothing left"]),
    "a thread that failed": ([at_limit(0, stderr="Exception in thread 5\n")], ["quiet"]),
    "another status": ([at_limit(0, status=1)], ["errors", "end"]),
    "a hang": ([at_limit(0, hung="waited in vain")], ["no hang"]),
}


@pytest.mark.parametrize("what", RUNS)
def test_only_a_job_that_was_too_slow_is_run_again(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, promises = RUNS[what]
    seen = iter(records)
    monkeypatch.setattr(chaos, "Running", lambda *_: Namespace(run=lambda: next(seen)))
    outcome = chaos.run(TO_TIME_OUT, tmp_path)
    assert [verdict.promise for verdict in outcome.verdicts] == promises
    assert next(seen, None) is None
    assert len(outcome.reached) == records[-1].reached + 1


def test_jobs_that_do_not_begin_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = chaos.Environment("python", "mpich", has_torch=False)
    never, once = chaos.Outcome([], [], 0.0), chaos.Outcome(["stop"], [], 0.0)
    jobs = [never, never, once, never, never, never]
    outcomes = iter(jobs)

    def run(job: Job, folder: Path, python: str) -> chaos.Outcome:
        folder.mkdir()
        return next(outcomes)

    monkeypatch.setattr(chaos, "run", run)
    totals = chaos.go_through(here, Namespace(job=None, faults=100, seed=1), tmp_path)
    assert totals.is_red and next(outcomes, None) is None
    assert "3 jobs in a row have not begun their first step" in capsys.readouterr().out
