"""Run by test_deadlines.py: ranks that are stopped, interrupted, late or killed.

The arguments are programs, such as `stopped_plan`.  A job runs one after the other, each on a
communicator of its own.  What a rank says begins with the name of the program.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import collectives
from collectives import CollectiveError, CollectiveTimeout, Communicator, PeerFailed
from collectives.engines import mpi
from collectives.engines.mpi import MpiTransport

SMALL, LARGE = np.ones(3), np.ones(3_000_000)
Run = Callable[[], Any]
program = ""  # that runs now


def runs(comm: Communicator) -> dict[str, Run]:
    """Ways to wait for an all-reduce, all without a time limit, and for a message."""
    assert isinstance(comm._session.transport, MpiTransport)
    of_mpi = comm._session.transport.comm
    plan, threaded = comm.plan.all_reduce(SMALL), collectives.wrap(of_mpi, progress="thread")
    return {
        "call": lambda: comm.all_reduce(SMALL),
        "plan": plan.run,
        "large": lambda: comm.all_reduce(LARGE),
        "async_op": lambda: comm.all_reduce(SMALL, async_op=True).wait(),
        "timed": lambda: comm.all_reduce(SMALL, timeout=30),
        "among_others": lambda: carrying(comm),
        "thread": lambda: threaded.all_reduce(LARGE),
        "recv": lambda: comm.recv(np.empty(1), (comm.rank + 1) % comm.size),
        "split": lambda: comm.split(0),
        "subgroup": lambda: comm.subgroup([*range(comm.size)]),
        "wrap": lambda: collectives.wrap(of_mpi),
        "hosts": lambda: collectives.wrap(of_mpi),
    }


def carrying(comm: Communicator) -> None:
    """Wait for the last of many calls, carrying the others along."""
    works = [comm.all_reduce(SMALL, async_op=True) for _ in range(1000)]
    works[-1].wait()


def say(comm: Communicator, text: str) -> None:
    print(f"{program}: rank {comm.rank}: {text}", flush=True)


def seconds_until(error: type[BaseException], run: Run) -> tuple[float, BaseException]:
    began = time.monotonic()
    try:
        run()
    except error as raised:
        return time.monotonic() - began, raised
    raise AssertionError(f"no {error.__name__}")


def leave() -> None:
    """End a rank that gave up something: MPI might wait for it, or for a dead rank, at its end."""
    sys.stdout.flush()
    time.sleep(1.0)  # for the others to say what they have to say
    os._exit(0)


def stopped(comm: Communicator, what: str) -> None:
    x, plan = LARGE if what == "default" else SMALL, comm.plan.all_reduce(SMALL)
    ways: dict[str, Callable[[float | None], Any]] = {
        "call": lambda limit: comm.all_reduce(x, timeout=limit),
        "default": lambda _: comm.all_reduce(x),
        "plan": plan.run,
        "async_op": lambda limit: comm.all_reduce(x, async_op=True).wait(limit),
    }
    pids = comm.all_gather(np.array([os.getpid()]))
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
        assert ways[what](None)[0] == comm.size
        return
    if what == "default":
        comm.timeout = 1.0
    seconds, error = seconds_until(CollectiveTimeout, lambda: ways[what](1.0))
    say(comm, f"{seconds:.2f} s: {error}")
    time.sleep(0.5)  # until both have seen it
    os.kill(int(pids[2]), signal.SIGCONT)
    assert isinstance(error, CollectiveTimeout)
    assert error.work.wait(30)[0] == comm.size  # nothing was lost


def interrupted(comm: Communicator, what: str) -> None:
    run = runs(comm)[what]
    comm.barrier()
    if comm.rank == 0:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        seconds, _ = seconds_until(KeyboardInterrupt, run)
        say(comm, f"KeyboardInterrupt after {seconds:.2f} s")


def dumped(comm: Communicator, _: str) -> None:
    def load_batch() -> None:
        time.sleep(1.0)  # until the others wait
        for pid in pids:
            os.kill(int(pid), signal.SIGUSR1)
        time.sleep(1.5)

    pids = comm.all_gather(np.array([os.getpid()]))
    comm.all_reduce(SMALL)
    if comm.rank == 2:
        load_batch()
    comm.all_reduce(SMALL)


def signalled(comm: Communicator, _: str) -> None:
    """Every rank gets 100 signals while it makes calls; then one, after which a dump must come."""
    num_sent, dump = [0], Path(os.environ["COLLECTIVES_FLIGHT"]) / f"flight.{comm.rank}.json"

    def send() -> None:
        while num_sent[0] < 100:
            os.kill(os.getpid(), signal.SIGUSR1)
            num_sent[0] += 1
            time.sleep(0.01)

    threading.Thread(target=send).start()
    while comm.all_reduce(np.array(num_sent), "min")[0] < 100:
        for length in (3, 3000, 100_000):
            assert comm.all_reduce(np.ones(length))[0] == comm.size
    asked_at = time.time()
    os.kill(os.getpid(), signal.SIGUSR1)
    deadline = time.monotonic() + 10
    while not (is_new := dumped_at(dump) >= asked_at) and time.monotonic() < deadline:
        time.sleep(0.01)
    say(comm, f"dumped: {is_new}")


def dumped_at(dump: Path) -> float:
    """When a dump was written, which is replaced as a whole; minus infinity if there is none."""
    try:
        return float(json.loads(dump.read_text())["time"])
    except FileNotFoundError:
        return -math.inf


def killed(comm: Communicator, what: str) -> None:
    """Rank 2 dies before the call; or, in one that makes a communicator, when MPI makes it.

    Open MPI makes no communicator after an Idup that failed, not even by shrink.
    """
    run, hosts = runs(comm)[what], list(mpi._hosts_of_world)
    if what == "hosts":
        mpi._hosts_of_world.clear()  # so that they are found anew
    comm.barrier()
    if comm.rank == 2 and what in ("split", "subgroup"):
        setattr(comm._session.transport, what, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    elif comm.rank == 2 and what == "hosts":
        mpi._lowest_ranks = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    elif comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    seconds, error = seconds_until(PeerFailed, run)
    assert isinstance(error, PeerFailed) and error.ranks == (2,)
    say(comm, f"{seconds:.3f} s: {error}")
    if what == "wrap":
        return
    survivors = comm.shrink(timeout=20)
    total = int(survivors.all_reduce(np.array([1]))[0])
    ranks = ", ".join(map(str, survivors.all_gather(np.array([comm.rank]))))
    say(survivors, f"the survivors sum to {total} and are ranks {ranks}")
    mpi._hosts_of_world[:] = hosts


def outsider(comm: Communicator, _: str) -> None:
    """Rank 2 is dead when the others make a communicator, to which rank 1 comes late."""
    comm.barrier()
    if comm.rank == 2:
        time.sleep(0.5)  # until the others are through the barrier
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank == 1:
        make = comm._session.transport.subgroup  # when all have come to it
        comm._session.transport.subgroup = lambda *given: time.sleep(1.5) or make(*given)
    others = comm.subgroup([0, 1, 3], timeout=20)
    say(comm, f"the others sum to {others.all_reduce(np.array([1]))[0]}")


def made(comm: Communicator, what: str) -> None:
    """Rank 1 comes when the others, who have sent it what they had to, do not wait any more."""
    makers: dict[str, Run] = {
        "split": lambda: comm.split(0, timeout=0.5),
        "subgroup": lambda: comm.subgroup([0, 1, 2], timeout=0.5),
    }
    comm.barrier()
    if comm.rank == 1:
        time.sleep(1.5)
    seconds, _ = seconds_until(CollectiveTimeout, makers[what])
    _, error = seconds_until(CollectiveError, lambda: comm.all_reduce(SMALL))
    say(comm, f"CollectiveTimeout after {seconds:.2f} s, and then: {error}")


def shrink_late(comm: Communicator, _: str) -> None:
    comm.barrier()
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    seconds_until(PeerFailed, lambda: comm.all_reduce(SMALL))
    if comm.rank == 0:
        _, error = seconds_until(CollectiveTimeout, lambda: comm.shrink(timeout=1.0))
        say(comm, f"CollectiveTimeout: {error}")
    else:
        time.sleep(3.0)


def shrink_patient(comm: Communicator, _: str) -> None:
    """Rank 1 receives a message when rank 0 is already waiting in shrink."""
    if comm.rank == 0:
        comm.send(SMALL, 1)
    if comm.rank == 1:
        time.sleep(0.5)
        comm.recv(np.empty_like(SMALL), 0)
    say(comm, f"{comm.shrink(interrupt=False).size} ranks")


def shrink_refused(comm: Communicator, _: str) -> None:
    _, error = seconds_until(CollectiveError, comm.shrink)
    say(comm, f"CollectiveError: {error}")


Programs = Iterator[tuple[str, Communicator]]


def one_after_the_other(world: Communicator, names: Sequence[str]) -> Programs:
    """All ranks run every program; a single one has the world itself."""
    is_single, everybody = len(names) == 1, range(world.size)
    comms = [world] if is_single else [world.subgroup(everybody) for _ in names]
    for name, comm in zip(names, comms, strict=True):
        yield name, comm
        if name != "shrink_late":  # in which a rank dies
            world.barrier()


def each_with_a_victim(world: Communicator, names: Sequence[str]) -> Programs:
    """Ranks 0, 1 and 2 run every program, as ranks 0, 1 and 3, with another rank 2, which dies.

    That one is in no other program, and waits for its turn.
    """
    groups = [[0, 1, 3 + number, 2] for number in range(len(names))]
    mine = [(name, group) for name, group in zip(names, groups, strict=True) if world.rank in group]
    comms = [world.subgroup(group) for _, group in mine]
    for (name, _), comm in zip(mine, comms, strict=True):
        turn = np.zeros(1)
        if comm.rank == 0:
            comm.send(turn, 2)
        if comm.rank == 2:
            work = comm.recv(turn, 0, async_op=True)
            while not work.test():
                time.sleep(0.01)
        yield name, comm


FUNCTIONS = {
    each.__name__: each
    for each in (
        stopped,
        interrupted,
        dumped,
        signalled,
        made,
        killed,
        outsider,
        shrink_late,
        shrink_patient,
        shrink_refused,
    )
}
# After these MPI can end.
HARMLESS = {"stopped", "dumped", "signalled", "shrink_patient", "shrink_refused"}


def main(names: list[str]) -> None:
    global program
    kinds = [name if name in FUNCTIONS else name.partition("_")[0] for name in names]
    does_kill = {"killed", "outsider"} & {*kinds}
    programs = each_with_a_victim if does_kill else one_after_the_other
    for program, comm in programs(collectives.world(), names):
        kind = kinds[names.index(program)]
        FUNCTIONS[kind](comm, program.removeprefix(f"{kind}_"))
    if not {*kinds} <= HARMLESS:
        leave()


main(sys.argv[1:])
