"""Runs a job: starts the launcher, causes the faults that come from outside, and ends everything.

What was seen is a `Record`, of which `judging.py` makes verdicts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from collectives.diagnostics import hang_report
from collectives.launch.process_monitor import _environment, _processes
from parallel import checkpoint
from parallel.checkpoint import LoadFailed
from tests.chaos.drawing import OUTLIVED, SIGNALS, Job, Step
from tests.chaos.events import Event, flag, has_written, read
from tests.chaos.workloads import digest, model

ROOT = Path(__file__).parent.parent.parent
MARK = "CHAOS_JOB"  # the environment variable by which processes of a job are found

START_SECONDS = 120.0  # a job has to start, on a busy machine
HANG_SECONDS = 40.0  # a step, or the end of a job, that takes longer hangs
END_SECONDS = 20.0  # the launcher has to end a job after SIGTERM
GONE_SECONDS = 10.0  # processes have to be gone after the launcher has ended
INTERRUPT_SECONDS = 10.0  # a rank has to raise KeyboardInterrupt, or it gets another SIGINT
POLL = 0.01


@dataclass
class Record:
    """What was seen of a job."""

    events: list[list[Event]] = field(default_factory=list)  # of every rank
    status: int | None = None  # of the launcher; None if it had to be killed
    stderr: str = ""
    reached: int = -1  # the last step that all ranks alive have begun
    hung: str = ""  # why the job was ended by the judge, with a hang report
    left: list[str] = field(default_factory=list)  # processes and files that are left
    missing_dumps: dict[int, list[int]] = field(default_factory=dict)  # by step: the ranks
    over: dict[int, float] = field(default_factory=dict)  # by step: when its fault was over
    checkpoints: list[tuple[int, str]] = field(default_factory=list)  # what is wrong, by step


class Hung(Exception):  # noqa: N818
    """Something did not happen in time."""


class Ended(Exception):  # noqa: N818
    """The job has ended, although it should go on."""


class Running:
    """A job that runs."""

    def __init__(
        self, job: Job, folder: Path, python: str, limit: float, hang_seconds: float
    ) -> None:
        """`limit`: the time limit of the launcher."""
        self.job, self.folder, self.hang_seconds = job, folder, hang_seconds
        self.limit = limit
        self.record, self.shared = Record(), set[str]()
        self.flights, self.temporary = folder / "flights", folder / "tmp"
        self.temporary.mkdir(parents=True)
        (folder / "job.json").write_text(job.to_json())
        words = [python, "-m", "collectives.launch", "-n", str(job.size)]
        words += [f"--timeout={limit:g}", f"--flight={self.flights}"]
        words += ["--fault-tolerant"] * job.is_fault_tolerant
        words += ["-m", "tests.chaos.rank_program", str(folder)]
        environment = {
            **os.environ,
            MARK: str(folder),
            "PYTHONPATH": str(ROOT),
            "PYTHONFAULTHANDLER": "1",
            "TMPDIR": str(self.temporary),
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
            self.launcher = subprocess.Popen(
                words,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def run(self) -> Record:
        """Cause all faults, see the job end, and look at what is left."""
        try:
            for number, step in enumerate(self.job.steps):
                seconds = self.hang_seconds if number else START_SECONDS
                self._wait(f"step {number}", partial(self._have_begun, number), seconds)
                self.record.reached = number
                self._note_shared_memory()
                INJECT.get(step.fault, _let_it_pass)(self, number, step)
            self._wait_for_end()
        except Hung as error:
            self.record.hung = f"{error}\n{self._hang_report()}"
        except Ended:
            pass
        finally:
            self._end()
        self.record.events = [read(self.folder, rank) for rank in range(self.job.size)]
        self.record.stderr = (self.folder / "stderr").read_text(errors="replace")
        self.record.checkpoints = list(wrong_checkpoints(self.job, self.folder, self.record.events))
        return self.record

    # Looking at ranks

    def alive(self, number: int) -> list[int]:
        """The ranks that are not dead before step `number`."""
        return [rank for rank in range(self.job.size) if rank not in self.job.dead_before(number)]

    def others(self, number: int) -> list[int]:
        """The ranks that are alive and not at fault in a step."""
        guilty = self.job.steps[number].guilty
        return [rank for rank in self.alive(number) if rank != guilty]

    def pid(self, rank: int) -> int:
        return next(int(event["pid"]) for event in read(self.folder, rank) if "pid" in event)

    def has(self, rank: int, number: int, what: str) -> bool:
        """Whether a rank has written down an event of a step."""
        return has_written(self.folder, rank, number, what)

    def _have_begun(self, number: int) -> bool:
        return all(self.has(rank, number, "begun") for rank in self.alive(number))

    def _wait(self, what: str, is_true: Callable[[], object], seconds: float) -> None:
        """Wait until something is true.  Raises Hung, or Ended if the job has ended before."""
        if not self.comes_true(is_true, seconds):
            raise Ended if self.has_ended() else Hung(f"waited in vain for {what}")

    def comes_true(self, is_true: Callable[[], object], seconds: float) -> bool:
        """Whether something is true within these seconds, or when the job ends before."""
        deadline = time.monotonic() + seconds
        while not is_true():
            if self.has_ended() or time.monotonic() > deadline:
                return bool(is_true())
            time.sleep(POLL)
        return True

    def has_ended(self) -> bool:
        return self.launcher.poll() is not None

    def wait_for(self, what: str, ranks: list[int], number: int) -> None:
        """Wait until all these ranks have written down an event of a step."""
        have_all = lambda: all(self.has(rank, number, what) for rank in ranks)  # noqa: E731
        self._wait(f"{what} of ranks {ranks}", have_all, self.hang_seconds)

    def wait_for_stuck(self, ranks: list[int], number: int) -> None:
        """Wait until all these ranks have timed out, and then once more.

        On a busy machine the first time-out can have another reason than the fault.  In a group of
        PyTorch it is the only one.
        """
        is_once = self.job.steps[number].workload == "pytorch"
        for _ in range(1 if is_once else 2):
            since = 0.0 if is_once else time.time()
            wait_again = partial(self._wait_again, ranks, since)
            self._wait(f"ranks {ranks} to time out", wait_again, self.hang_seconds)

    def _wait_again(self, ranks: list[int], since: float) -> bool:
        """Whether the last event of all these ranks, later than `since`, is a time-out."""
        last = [read(self.folder, rank)[-1] for rank in ranks]
        return all(event["what"] == "waits again" and event["time"] > since for event in last)

    def send(self, rank: int, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError, StopIteration):  # it has ended, or not begun
            os.kill(self.pid(rank), signum)

    def over(self, number: int) -> None:
        """Say that the fault of a step is over."""
        self.record.over[number] = time.time()
        flag(self.folder, number).touch()

    # The end

    def _wait_for_end(self) -> None:
        seconds = self.limit if self.job.is_to_time_out else 0.0
        if not self.comes_true(self.has_ended, seconds + self.hang_seconds):
            raise Hung("waited in vain for the end of the job")

    def _hang_report(self) -> str:
        """Where the ranks are, from dumps that they write on request."""
        if self.has_ended() or not self.flights.exists():
            return ""
        self.launcher.send_signal(signal.SIGUSR1)
        time.sleep(2.0)
        dumps, faults = hang_report.read(hang_report.files(self.flights))
        return "\n".join([*faults, *hang_report.lines(dumps)])

    def _end(self) -> None:
        """End the launcher, and note which processes and files are left then."""
        if not self.has_ended():
            for rank in range(self.job.size):
                self.send(rank, signal.SIGCONT)
            self.launcher.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.launcher.wait(END_SECONDS)
        self.record.status = self.launcher.poll()
        if self.record.status is None:
            self.launcher.kill()
            self.launcher.wait()
        deadline = time.monotonic() + GONE_SECONDS
        while (left := self._processes()) and time.monotonic() < deadline:
            time.sleep(0.1)  # each look goes through all processes of the machine
        self.record.left = [f"process {pid}: {command}" for pid, command in left]
        for pid, _ in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.record.left += [f"file {path}" for path in sorted(self.shared) if os.path.exists(path)]
        self.record.left += [f"file {path}" for path in sorted(self.temporary.iterdir())]

    def _processes(self) -> list[tuple[int, str]]:
        """The processes that have the mark of this job in their environment."""
        mark, found = os.fsencode(f"{MARK}={self.folder}"), []
        for pid in _processes():
            with contextlib.suppress(OSError):
                if mark in _environment(pid):
                    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                    found.append((pid, command.decode(errors="replace")[:200]))
        return found

    def _note_shared_memory(self) -> None:
        """Note the files of shared memory that the ranks have mapped."""
        for rank in range(self.job.size):
            with contextlib.suppress(OSError, StopIteration):
                maps = Path(f"/proc/{self.pid(rank)}/maps").read_text()
                lines = [line.split(maxsplit=5) for line in maps.splitlines()]
                self.shared |= {x[5] for x in lines if len(x) == 6 and x[5].startswith("/dev/shm/")}


# Faults from outside


def _let_it_pass(running: Running, number: int, step: Step) -> None:
    """The ranks cause it themselves."""
    running.over(number)


def _stop(running: Running, number: int, step: Step) -> None:
    time.sleep(step.delay)
    running.send(step.guilty, signal.SIGSTOP)
    time.sleep(step.duration)
    running.send(step.guilty, signal.SIGCONT)
    running.over(number)


def _dump(running: Running, number: int, step: Step) -> None:
    """Many signals: to the launcher, which sends them on, or to one rank."""
    time.sleep(step.delay)
    is_to_all, count = step.choice % 2 == 0, 1 + step.choice // 2 % 20
    for _ in range(count):
        if is_to_all:
            running.launcher.send_signal(signal.SIGUSR1)
        else:
            running.send(step.guilty, signal.SIGUSR1)
        time.sleep(step.duration / count)
    asked, since = running.alive(number) if is_to_all else [step.guilty], time.time()
    if is_to_all:
        running.launcher.send_signal(signal.SIGUSR1)
    else:
        running.send(step.guilty, signal.SIGUSR1)
    have_all = lambda: not _without_dump(running, asked, since)  # noqa: E731
    if not running.comes_true(have_all, running.hang_seconds) and not running.has_ended():
        running.record.missing_dumps[number] = _without_dump(running, asked, since)
    running.over(number)


def _without_dump(running: Running, ranks: list[int], since: float) -> list[int]:
    """The ranks that have not written a dump since then that can be read."""
    if not running.flights.exists():
        return ranks
    dumps, _ = hang_report.read(hang_report.files(running.flights, since))
    return [rank for rank in ranks if rank not in dumps]


def _late(running: Running, number: int, step: Step) -> None:
    running.wait_for_stuck(running.others(number), number)
    running.over(number)


def _stop_past_limit(running: Running, number: int, step: Step) -> None:
    running.wait_for("loops", running.alive(number), number)
    time.sleep(step.delay)
    running.send(step.guilty, signal.SIGSTOP)
    try:
        running.wait_for_stuck(running.others(number), number)
    finally:
        running.over(number)
        running.send(step.guilty, signal.SIGCONT)


def _interrupt(running: Running, number: int, step: Step) -> None:
    """Python can lose a KeyboardInterrupt, in a destructor: then the signal is sent again."""
    running.wait_for("loops", running.alive(number), number)
    time.sleep(step.delay)
    has_raised = partial(running.has, step.guilty, number, "error")
    for _ in range(4):
        running.send(step.guilty, signal.SIGINT)
        if running.comes_true(has_raised, INTERRUPT_SECONDS):
            break
    running.over(number)


def _kill(running: Running, number: int, step: Step) -> None:
    time.sleep(step.delay)
    running.send(step.guilty, signal.SIGKILL)


def _outlived_kill(running: Running, number: int, step: Step) -> None:
    running.wait_for("loops", running.alive(number), number)
    _kill(running, number, step)


def _ctrl_c(running: Running, number: int, step: Step) -> None:
    time.sleep(step.delay)
    running.launcher.send_signal(getattr(signal, SIGNALS[step.choice % len(SIGNALS)]))


def _job_limit(running: Running, number: int, step: Step) -> None:
    """The guilty rank is stopped for good; the launcher ends the job at its limit."""
    running.wait_for("loops", running.alive(number), number)
    time.sleep(step.delay)
    running.send(step.guilty, signal.SIGSTOP)


INJECT: dict[str, Callable[[Running, int, Step], None]] = {
    "stop": _stop,
    "dump": _dump,
    "late": _late,
    "stop past limit": _stop_past_limit,
    "interrupt": _interrupt,
    "kill": _kill,
    "ctrl-c": _ctrl_c,
    "exception": lambda running, number, step: None,
    "job limit": _job_limit,
    **dict.fromkeys(OUTLIVED, _outlived_kill),
}


# Checkpoints


def wrong_checkpoints(
    job: Job, folder: Path, events: list[list[Event]]
) -> Iterator[tuple[int, str]]:
    """Load all checkpoints on one rank, and compare them with what the ranks have saved.

    Yields the step of the job, and what is wrong.
    """
    for root in sorted(folder.glob("checkpoints.*")):
        number, shards = int(root.suffix[1:]), _saved(root, events)
        if shards and checkpoint.latest(root) is None:
            yield number, f"{root.name} has no checkpoint, but ranks have saved one"
        for path in sorted(root.glob("step-*")):
            try:
                values = checkpoint.load_parameters(path, model(job.name_of(number)), None)
            except LoadFailed as error:
                yield number, f"{root.name}: {error}"
                continue
            for unit, start, stop, wanted in shards.get(checkpoint.num_steps_of(path), []):
                if digest(values[unit][start:stop]) != wanted:
                    where = f"{root.name}, {path.name}: {unit}[{start}:{stop}]"
                    yield number, f"{where} is not what was saved"


def _saved(root: Path, events: list[list[Event]]) -> dict[int, list[list[Any]]]:
    """The shards of all ranks that have been saved, by the number of training steps."""
    shards: dict[int, list[list[Any]]] = {}
    for event in (event for rank in events for event in rank if event["what"] == "saved"):
        if event["root"] == root.name:
            shards.setdefault(event["steps"], []).extend(event["shards"])
    return shards
