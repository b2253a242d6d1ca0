"""What every rank of a job runs: ``python -m tests.chaos.rank_program FOLDER``.

The folder has the description of the job.  Each rank goes through its steps, and writes down what
it sees; the judge reads that (`judging.py`), and causes the faults that come from outside
(`injecting.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import collectives
from collectives import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    Communicator,
    NotFinite,
    Operator,
    PeerFailed,
)
from parallel import checkpoint
from parallel.checkpoint import SaveFailed
from tests.chaos.drawing import Job, Step
from tests.chaos.events import WAITED, EventFile, flag, has_written
from tests.chaos.workloads import (
    Asynchronous,
    Attempt,
    Collectives,
    ElasticTraining,
    Plans,
    SubCommunicators,
    Surroundings,
    Training,
    Workload,
    file_limit,
)

T = TypeVar("T")

LIMITED = ("late", "stop past limit")  # faults in which the calls of a workload have a time limit
COMMS = {"asynchronous": "threaded", "checked": "checked"}  # others are on "plain"


class OnPurpose(Exception):  # noqa: N818
    """Raised by a rank that is to raise something."""


class Rank:
    """A rank of the job, which goes through the steps."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job, self.folder = job, folder
        comms = {
            "plain": collectives.world(),
            "threaded": collectives.world(progress="thread"),
            "checked": collectives.world(check=True),
            "finite": collectives.world(check="finite"),
        }
        self.me = comms["plain"].rank
        self.events = EventFile(folder, self.me)
        self.around = Surroundings(comms, self.events, folder)
        if any(step.workload == "pytorch" for step in job.steps):
            from tests.chaos.pytorch import PyTorch  # where it is installed

            PyTorch(self.around, comms["plain"]).once(directly)  # the first time takes seconds
        self.events.write("started", pid=os.getpid())

    def perform(self, number: int, step: Step) -> None:
        """Go through one step."""
        self.number, self.step, self.events.number = number, step, number
        around = self.around
        around.name, around.limit = self.job.name_of(number), 0.0
        if step.fault in LIMITED and step.workload == "pytorch":
            around.limit = step.limit
        if self.is_guilty and step.sabotage == "wrong value":
            around.spoil = True
        self.events.write("begun")
        self.workload = self.make()
        FAULTS[step.fault](self)

    @property
    def is_guilty(self) -> bool:
        return self.step.guilty == self.me

    @property
    def comm(self) -> Communicator:
        """The communicator of the workload."""
        comms = self.around.comms
        can_choose = self.step.workload == "plans" and self.step.choice % 2
        return comms["threaded" if can_choose else COMMS.get(self.step.workload, "plain")]

    def make(self) -> Workload:
        """The workload of this step."""
        if self.step.workload == "pytorch":
            from tests.chaos.pytorch import PyTorch

            return PyTorch(self.around, self.comm)
        if self.step.workload == "training" and self.step.fault == "outlived kill":
            return ElasticTraining(self.around, self.comm)
        kinds: dict[str, type[Workload]] = {
            "collectives": Collectives,
            "plans": Plans,
            "asynchronous": Asynchronous,
            "sub-communicators": SubCommunicators,
            "checked": Collectives,
            "training": Training,
        }
        return kinds[self.step.workload](self.around, self.comm)

    # Calls, and what they raise

    def error(self, error: BaseException, comm: Communicator | None = None) -> None:
        """Write down an error, and the ranks of the job in the communicator that raised it."""
        if self.step.sabotage == "swallowed error" and not self.is_guilty:
            return
        work = getattr(error, "work", None)
        session = work.owner if work is not None else (comm or self.workload.comm)._session
        group = list(session.transport.identity[0])
        named = [group[rank] for rank in getattr(error, "ranks", ())]
        kinds = [kind.__name__ for kind in type(error).__mro__]
        self.events.write("error", kinds=kinds, text=str(error), group=group, named=named)

    def patiently(self, call: Callable[[], T]) -> T:
        """Make a call; after each time-out go on waiting for it, up to the same limit."""
        has_timed_out = False
        while True:
            try:
                result = call()
            except CollectiveTimeout as error:
                self.error(error)
                self.events.write("waits again")
                has_timed_out, call = True, partial(error.work.wait, self.step.limit)
            else:
                if has_timed_out:
                    self.events.write("has waited")  # the last event no longer is "waits again"
                return result

    def is_over(self, attempt: Attempt) -> bool:
        """Whether the fault is over on all ranks, which agree on it by a call of the workload's."""
        seen = np.array([flag(self.folder, self.number).exists()], int)
        return bool(attempt(lambda: self.workload.comm.all_reduce(seen, "min"))[0])

    def go_on(self, attempt: Attempt) -> None:
        """Make rounds of calls until the fault is over."""
        self.events.write("loops")
        has_ended = False
        while not has_ended:
            if self.is_guilty and self.step.sabotage == "hang":
                time.sleep(1e6)
            self.workload.once(attempt)
            has_ended = self.is_over(attempt)

    def wait_for_flag(self) -> None:
        """Wait, without making any call, until the judge says that the fault is over."""
        while not flag(self.folder, self.number).exists():
            time.sleep(0.002)


def directly(call: Callable[[], T]) -> T:
    """Make a call that is not expected to time out."""
    return call()


# Faults that come from outside, and are waited out


def undisturbed(rank: Rank) -> None:
    """Calls without a time limit: whatever happens, all are right in the end."""
    rank.go_on(directly)
    rank.workload.close()
    if rank.is_guilty and rank.step.sabotage == "left process":
        subprocess.Popen(
            ["sleep", "60"],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def slow(rank: Rank) -> None:
    for number in range(6):
        if rank.is_guilty and number == 3:
            time.sleep(rank.step.duration)
        rank.workload.once(directly)
    undisturbed(rank)


def stopped_past_limit(rank: Rank) -> None:
    if rank.step.workload == "pytorch":
        until_given_up(rank)
        return
    rank.workload.set_limit(rank.step.limit)
    rank.go_on(rank.patiently)
    rank.workload.set_limit(None)
    rank.workload.close()


def until_given_up(rank: Rank) -> None:
    """In a group of PyTorch all ranks give up at its limit; then they make another group."""
    rank.events.write("loops")
    if rank.step.fault == "late" and rank.is_guilty:
        rank.wait_for_flag()
    try:
        while True:
            rank.workload.once(directly)
    except RuntimeError as error:
        timeout = _timeout_of(error)
        if timeout is None:
            raise
        rank.error(timeout)
        rank.events.write("waits again")
    rank.wait_for_flag()
    rank.workload.close()
    rank.around.limit = 0.0
    rank.workload = rank.make()
    undisturbed(rank)


def _timeout_of(error: RuntimeError) -> CollectiveTimeout | None:
    """The time-out that PyTorch reports by an error.

    DistributedDataParallel waits in C++, which keeps only the text of an error.
    """
    if isinstance(error.__cause__, CollectiveTimeout):
        return error.__cause__
    text = str(error).partition("DistBackendError: ")[2]
    return CollectiveTimeout(text) if WAITED.search(text) else None


def late(rank: Rank) -> None:
    if rank.step.workload == "pytorch":
        until_given_up(rank)
        return
    rank.workload.once(directly)
    rank.events.write("loops")
    if rank.is_guilty:
        rank.wait_for_flag()
    else:
        rank.workload.set_limit(rank.step.limit)
    rank.go_on(rank.patiently)
    rank.workload.set_limit(None)
    rank.workload.close()


def short_limits(rank: Rank) -> None:
    """Every call times out again and again; the thread advances the calls meanwhile."""
    random = rank.around.random("limits of rank", rank.me)
    comm, num_timeouts = rank.workload.comm, 0
    for number in range(20):
        if rank.is_guilty:
            time.sleep(5e-3)  # then the others time out, also where nothing else is done
        x = np.full(3000, rank.comm.rank + number)
        works = [comm.all_reduce(x + each, async_op=True) for each in range(20)]
        for each, work in enumerate(works):
            try:
                got = work.wait(timeout=random.choice([0, random.uniform(0, 0.02)]))
            except CollectiveTimeout:
                num_timeouts += 1
                got = work.wait()
            want = np.full(3000, sum(r + number + each for r in range(comm.size)))
            rank.around.check(got, want, "an all-reduce that has timed out")
    rank.events.write("timed out", times=num_timeouts)
    undisturbed(rank)


# Exceptions in one rank


def refused(rank: Rank) -> None:
    """One rank passes wrong arguments, is told so, and makes the right call."""
    for number in range(3):
        if rank.is_guilty and number == 1:
            try:
                wrong_call(rank)
            except (TypeError, ValueError) as error:
                rank.error(error)
        rank.workload.once(directly)
    undisturbed(rank)


def wrong_call(rank: Rank) -> object:
    """A call that is refused before anything is sent."""
    comm, x = rank.workload.comm, np.ones(3)
    if rank.step.workload == "pytorch":
        import torch
        import torch.distributed as dist

        bad = torch.ones(3, dtype=torch.float8_e4m3fn)
        return dist.all_reduce(bad, group=rank.workload.group)  # type: ignore[attr-defined]
    calls: list[Callable[[], object]] = [
        lambda: comm.all_reduce(x, "SUM"),
        lambda: comm.all_reduce(x, algorithm="none"),
        lambda: comm.all_gather("three"),
        lambda: comm.reduce(x, root=comm.size),
        lambda: comm.all_to_all(x, counts=[-1] * comm.size),
        lambda: comm.all_reduce(x, out=np.ones(4)),
        lambda: comm.all_reduce(x, timeout=-1),
        lambda: comm.plan.all_reduce(x, "bitwise"),
    ]
    return calls[rank.step.choice % len(calls)]()


def mismatch(rank: Rank) -> None:
    """One rank makes another call: all are told which, and can go on."""
    comm, x = rank.around.comms["checked"], np.arange(6.0)
    rank.workload.once(directly)
    calls: list[Callable[[], object]] = [
        lambda: comm.all_reduce(x, "prod"),
        lambda: comm.all_reduce(x.astype(np.float32)),
        lambda: comm.all_reduce(x[:5]),
        lambda: comm.all_gather(x),
        lambda: comm.all_reduce(x, async_op=True).wait(),
        lambda: comm.broadcast(x, root=0),
        comm.barrier,
    ]
    other = calls[rank.step.choice % len(calls)]
    try:
        other() if rank.is_guilty else comm.all_reduce(x)
    except CollectiveMismatch as error:
        rank.error(error, comm)
    undisturbed(rank)


def not_finite(rank: Rank) -> None:
    comm, x = rank.around.comms["finite"], np.arange(6.0)
    if rank.is_guilty:
        x[rank.step.choice % 6] = np.nan
    try:
        comm.all_reduce(x)
    except NotFinite as error:
        rank.error(error, comm)
    total = comm.all_reduce(np.full(6, 2.0))
    rank.around.check(total, np.full(6, 2.0 * comm.size), "the sum after a NaN")
    undisturbed(rank)


def operator(rank: Rank) -> None:
    """An operator of one rank raises half-way.  The others wait for it up to their limit.

    A blocking call is made on a communicator of its own, which is unusable after that.
    """
    comm, is_blocking = rank.workload.comm, rank.step.workload == "collectives"
    group = comm.split(0) if is_blocking else comm
    assert group is not None
    # The first piece is a rehearsal; of two ranks each has only one more.
    pieces = iter(range(1 if comm.size == 2 else 1 + rank.step.choice % 2))

    def add(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        if rank.is_guilty and next(pieces, None) is None:
            raise OnPurpose("in an operator")
        return left + right

    op, x = Operator.from_function(add, commutative=True), np.ones(600)
    limit = None if rank.is_guilty else rank.step.limit
    ways: dict[str, Callable[[], object]] = {
        "collectives": lambda: group.all_reduce(x, op, algorithm="ring", timeout=limit),
        "plans": lambda: group.plan.all_reduce(x, op, algorithm="ring").run(limit),
        "asynchronous": lambda: group.all_reduce(x, op, algorithm="ring", async_op=True).wait(
            limit
        ),
    }
    try:
        ways[rank.step.workload]()
    except OnPurpose as error:
        rank.error(error, group)
    except CollectiveTimeout as error:
        rank.error(time_out_of_the_fault(rank, error), group)
    if is_blocking and rank.is_guilty:
        try:
            group.all_reduce(x)
        except CollectiveError as error:
            rank.error(error, group)
    undisturbed(rank)


def time_out_of_the_fault(rank: Rank, error: CollectiveTimeout) -> CollectiveTimeout:
    """The error of a wait that began when the guilty rank had raised its own.

    The first time-out may have another reason: not all ranks are equally quick to begin.
    """
    while not has_written(rank.folder, rank.step.guilty, rank.number, "error"):
        time.sleep(0.01)
    try:
        error.work.wait(rank.step.limit)
    except CollectiveTimeout as later:
        return later
    return error


def interrupt(rank: Rank) -> None:
    """Ctrl-C in one rank, which then makes no more calls on that communicator."""
    group = rank.workload.comm.split(0)
    assert group is not None
    mine = Collectives(rank.around, group)

    def until_it_is_over(call: Callable[[], Any]) -> Any:
        """Wait for a call until it must be given up."""
        try:
            return call()
        except CollectiveTimeout as error:
            while not flag(rank.folder, rank.number).exists():
                try:
                    return error.work.wait()
                except CollectiveTimeout:
                    pass
            rank.error(error)
            raise

    if not rank.is_guilty:
        mine.set_limit(rank.step.limit)
    try:
        rank.events.write("loops")  # from now on it may get the signal
        while True:
            mine.once(directly if rank.is_guilty else until_it_is_over)
    except KeyboardInterrupt as error:
        rank.error(error, group)
    except CollectiveTimeout:
        pass
    undisturbed(rank)


# Checkpoints


def full_disk(rank: Rank) -> None:
    """The disk of one rank is full while all save; the checkpoint before is as it was."""
    training = rank.workload
    assert isinstance(training, Training)
    training.train()
    training.save()
    training.train()
    try:
        with file_limit(rank.step.choice % 2000 if rank.is_guilty else None):
            checkpoint.save(training.trainer, training.root, training.num_steps)
    except SaveFailed as error:
        rank.error(error)
    training.load()
    training.train()
    training.save()
    undisturbed(rank)
    if rank.is_guilty and rank.step.sabotage == "corrupted checkpoint":
        path = checkpoint.latest(training.root)
        assert path is not None
        part = path / f"rank-{rank.me}-of-{rank.comm.size}.safetensors"
        content = bytearray(part.read_bytes())
        content[-3] ^= 1
        part.write_bytes(content)


# The end of a rank, or of all


def outlived(rank: Rank) -> None:
    """A rank is killed: the others learn who, and go on without it."""
    rank.events.write("loops")
    try:
        while True:
            rank.workload.once(directly)
            rank.is_over(directly)
    except PeerFailed as error:
        rank.error(error)
    comms = rank.around.comms
    for kind, comm in comms.items():
        comms[kind] = comm.shrink()
        left = rank.job.size - len(rank.job.dead_before(rank.number + 1))
        rank.around.check(np.array(comms[kind].size), np.array(left), f"the ranks of {kind}")


def to_the_end(rank: Rank) -> None:
    rank.go_on(directly)


def uncaught(rank: Rank) -> None:
    """The guilty rank raises what nobody catches, after some time."""
    rank.events.write("loops")
    until = time.monotonic() + rank.step.delay
    while not rank.is_guilty or time.monotonic() < until:
        rank.workload.once(directly)
    raise OnPurpose(f"in rank {rank.me}")


FAULTS: dict[str, Callable[[Rank], None]] = {
    "stop": undisturbed,
    "slow": slow,
    "dump": undisturbed,
    "late": late,
    "stop past limit": stopped_past_limit,
    "short limits": short_limits,
    "refused": refused,
    "mismatch": mismatch,
    "not finite": not_finite,
    "operator": operator,
    "interrupt": interrupt,
    "full disk": full_disk,
    "kill": to_the_end,
    "ctrl-c": to_the_end,
    "exception": uncaught,
    "job limit": to_the_end,
    "outlived kill": outlived,
}


def main(folder: Path) -> None:
    job = Job.from_json((folder / "job.json").read_text())
    rank = Rank(job, folder)
    for number, step in enumerate(job.steps):
        rank.perform(number, step)
    rank.events.write("ended")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
