"""Makes verdicts of what was seen of a job: what did not hold, and in which step."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from collectives.launch import TIMED_OUT
from tests.chaos.drawing import ENDING, Job, Step
from tests.chaos.events import WAITED, Event
from tests.chaos.injecting import Record

# What must not be on the standard error of a job that goes on.
NOISE = re.compile(r"Traceback|Exception (ignored )?in|Error\b|Segmentation|Fatal|Abort")
IN_THREADS = re.compile(r"Exception (ignored )?in .*")  # and of no job at all

PROMISES = {
    "no hang": "everything ends within its limit",
    "reached": "a job gets to its last step before its time limit",
    "values": "no value is wrong",
    "errors": "every survivor raises an error that names a guilty rank",
    "end": "the launcher says how the job ended, and names the rank that died",
    "nothing left": "no process and no file is left",
    "checkpoints": "checkpoints load, and have what was saved",
    "dumps": "a rank that gets SIGUSR1 writes a dump, and goes on",
    "quiet": "nothing is printed that is not asked for",
}


class Verdict(NamedTuple):
    """Something that did not hold.  `promise`: a key of `PROMISES`."""

    step: int
    promise: str
    sentence: str

    def __str__(self) -> str:
        promise = f"{self.promise} ({PROMISES[self.promise]})"
        return f"step {self.step}, {promise}: {self.sentence}"


def judge(job: Job, record: Record) -> list[Verdict]:
    """Everything that did not hold."""
    verdicts: list[Verdict] = []
    last = max(record.reached, 0)
    if record.hung:
        verdicts.append(Verdict(last, "no hang", record.hung))
    cut_short = record.reached if record.hung or was_too_slow(job, record) else None
    for number in range(record.reached + 1):
        verdicts += _of_step(job, number, record, was_cut_short=number == cut_short)
    verdicts += [Verdict(last, "nothing left", each) for each in record.left]
    verdicts += [Verdict(number, "checkpoints", each) for number, each in record.checkpoints]
    if not record.hung:
        verdicts += [Verdict(last, *each) for each in _of_end(job, record)]
    return verdicts


def was_too_slow(job: Job, record: Record) -> bool:
    """Whether a job was ended at its time limit before the step that waits for this limit.

    Then `judge` judges only the steps before the one that it was in.
    """
    was_early = record.reached < len(job.steps) - 1 and not record.hung
    return job.is_to_time_out and was_early and record.status == TIMED_OUT


def _of_step(job: Job, number: int, record: Record, was_cut_short: bool) -> Iterator[Verdict]:
    step = job.steps[number]
    alive = [rank for rank in range(job.size) if rank not in job.dead_before(number)]
    for rank in alive:
        for event in _events(record, rank, number, "wrong"):
            yield Verdict(number, "values", f"rank {rank}: {event['text']}")
        for event in _events(record, rank, number, "loaded"):
            saved = [(e["steps"], e["shards"]) for e in _events(record, rank, number, "saved")]
            if (event["steps"], event["shards"]) not in saved:
                sentence = f"rank {rank} has loaded other values than it has saved"
                yield Verdict(number, "checkpoints", sentence)
    if missing := record.missing_dumps.get(number):
        yield Verdict(number, "dumps", f"ranks {missing} have not written one")
    if was_cut_short:
        return
    if step.fault in EXPECTED:
        for sentence in _wrong_errors(step, number, alive, record):
            yield Verdict(number, "errors", sentence)
    if step.fault == "short limits":
        timed_out = [e for rank in alive for e in _events(record, rank, number, "timed out")]
        if not any(event["times"] for event in timed_out):
            yield Verdict(number, "errors", "no call of any rank has timed out")


def _events(record: Record, rank: int, number: int, what: str) -> list[Event]:
    return [e for e in record.events[rank] if (e["step"], e["what"]) == (number, what)]


# Errors that must have been raised: by the guilty rank and by the others; None: by nobody

EXPECTED: dict[str, tuple[str | None, str | None]] = {
    "stop": (None, None),
    "slow": (None, None),
    "dump": (None, None),
    "short limits": (None, None),
    "late": (None, "CollectiveTimeout"),
    "stop past limit": (None, "CollectiveTimeout"),
    "refused": ("TypeError or ValueError", None),
    "mismatch": ("CollectiveMismatch", "CollectiveMismatch"),
    "not finite": ("NotFinite", "NotFinite"),
    "operator": ("OnPurpose", "CollectiveTimeout"),
    "interrupt": ("KeyboardInterrupt", "CollectiveTimeout"),
    "full disk": ("SaveFailed", "SaveFailed"),
    "outlived kill": (None, "PeerFailed"),
}
WAITED_OUT = ("stop past limit", "late")  # then the guilty rank may time out while it catches up


def _wrong_errors(step: Step, number: int, alive: list[int], record: Record) -> Iterator[str]:
    is_waited_out = step.fault in WAITED_OUT
    raised = {rank: _blocking_error(record, rank, number, is_waited_out) for rank in alive}
    waits = {
        rank: _waits_for(error) for rank, error in raised.items() if error and rank != step.guilty
    }
    for rank, error in raised.items():
        is_guilty = rank == step.guilty
        wanted = EXPECTED[step.fault][not is_guilty]
        if wanted is None:
            if error is not None and not (is_guilty and is_waited_out):
                yield f"rank {rank} raised {error['kinds'][0]}: {error['text'][:300]}"
        elif error is None:
            yield f"rank {rank} raised nothing, and should have raised {wanted}"
        elif not set(wanted.split(" or ")) & set(error["kinds"]):
            yield f"rank {rank} raised {error['kinds'][0]}, not {wanted}: {error['text'][:300]}"
        elif not is_guilty and not _names(step.guilty, rank, error, waits):
            text = error["text"].partition("\n")[0]
            yield f"what rank {rank} raised does not lead to rank {step.guilty}: {text[:300]}"
    if step.fault == "operator" and step.workload == "collectives":
        later = _events(record, step.guilty, number, "error")[1:]
        if not any("is unusable" in error["text"] for error in later):
            yield f"the communicator is not unusable on rank {step.guilty}"


def _blocking_error(record: Record, rank: int, number: int, is_waited_out: bool) -> Event | None:
    """The error that a rank raised because of the fault.

    While a rank is waited for, the others have raised their last one because of it: on a busy
    machine a call can reach its limit before the fault, too.
    """
    errors = _events(record, rank, number, "error")
    before = [error for error in errors if error["time"] <= record.over.get(number, 0.0)]
    if is_waited_out and before:
        return before[-1]
    return errors[0] if errors else None


def _names(guilty: int, rank: int, error: Event, waits: dict[int, set[int]]) -> bool:
    """Whether an error names the guilty rank.

    One of a time limit names those that this rank waits for.  They may themselves wait for others:
    from error to error one must come to the guilty rank.
    """
    if "PeerFailed" in error["kinds"]:
        return bool(error["named"] == [guilty])
    if "CollectiveTimeout" not in error["kinds"]:
        return guilty in _mentioned(error["text"], error["group"])
    seen, new = set[int](), {rank}
    while new:
        seen |= new
        new = {other for each in new for other in waits.get(each, ())} - seen
    return guilty in seen


def _waits_for(error: Event) -> set[int]:
    """The ranks of the job for which a rank waited at its time limit, in any call under way."""
    text = error["text"]
    waiting = WAITED.search(text)
    found = _mentioned(waiting[1], error["group"]) if waiting else set()
    for line in re.findall(r"under way in round \d+ of .*? for (.*)", text):
        found |= _mentioned(line, range(1 << 20))  # by the numbers of the job
    return found


def _mentioned(text: str, group: Sequence[int]) -> set[int]:
    """The ranks that a text names, "rank 1" or "ranks 0, 2", by their numbers in the job."""
    found = re.findall(r"\branks? (\d+(?:, \d+)*)", text)
    return {group[int(rank)] for each in found for rank in each.split(", ")}


# The end of the job


def _of_end(job: Job, record: Record) -> Iterator[tuple[str, str]]:
    """How the launcher ended: its status, and what it said."""
    status, said, step = record.status, record.stderr, job.steps[-1]
    is_slow = was_too_slow(job, record)
    if step.fault not in ENDING or (record.reached < len(job.steps) - 1 and not is_slow):
        yield from _of_good_end(job, record)
        return
    if noise := IN_THREADS.search(said):
        yield "quiet", said[noise.start() :][:3000]
    if is_slow:
        return
    wanted = {
        "kill": {1, 128 + 9, 9},
        "exception": {1},
        "ctrl-c": {128 + signum for signum in (1, 2, 15)},
        "job limit": {TIMED_OUT},
    }[step.fault]
    if status not in wanted:
        yield "end", f"the exit status is {status}, not one of {sorted(wanted)}: {said[-2000:]}"
    sentence = {
        # Another rank may report its failure, which names the dead rank, before that.
        "kill": rf"^Rank {step.guilty} \(process \d+\) died without a word"
        rf"|rank {step.guilty} may have died",
        "exception": f"OnPurpose: in rank {step.guilty}",
        "ctrl-c": "",
        "job limit": rf"^  rank {step.guilty}: no dump",
    }[step.fault]
    if re.search(sentence, said, re.MULTILINE) is None:
        yield "end", f"standard error has no {sentence!r}: {said[-2000:]}"


def _of_good_end(job: Job, record: Record) -> Iterator[tuple[str, str]]:
    """A job that is not to be ended before its time."""
    said, dead = record.stderr, job.dead_before(record.reached + 1)
    if record.status != 0:
        yield "end", f"the exit status is {record.status}: {said[-3000:]}"
        return
    for rank in set(range(job.size)) - dead:
        if not any(event["what"] == "ended" for event in record.events[rank]):
            yield "end", f"the exit status is 0, but rank {rank} has not come to its end"
    for rank in dead:
        sentence, count = re.subn(rf"(?m)^Rank {rank} \(process \d+\) died without.*\n", "", said)
        said = sentence
        if count != 1:
            yield "end", f"rank {rank} is said {count} times to have died: {record.stderr[-2000:]}"
    if NOISE.search(said):
        yield "quiet", said[-3000:]
