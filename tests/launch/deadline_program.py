"""Run by test_deadlines.py: ranks that are stopped, interrupted, late or killed."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

import collectives
from collectives import CollectiveError, CollectiveTimeout, Communicator, PeerFailed

SMALL, LARGE = np.ones(3), np.ones(3_000_000)
Run = Callable[[], Any]


def runs(comm: Communicator) -> dict[str, Run]:
    """Ways to wait for an all-reduce, all without a time limit, and for a message."""
    plan = comm.plan.all_reduce(SMALL)
    return {
        "call": lambda: comm.all_reduce(SMALL),
        "plan": plan.run,
        "large": lambda: comm.all_reduce(LARGE),
        "async_op": lambda: comm.all_reduce(SMALL, async_op=True).wait(),
        "timed": lambda: comm.all_reduce(SMALL, timeout=30),
        "recv": lambda: comm.recv(np.empty(1), (comm.rank + 1) % comm.size),
    }


def say(comm: Communicator, text: str) -> None:
    print(f"rank {comm.rank}: {text}", flush=True)


def seconds_until(error: type[BaseException], run: Run) -> tuple[float, BaseException]:
    began = time.monotonic()
    try:
        run()
    except error as raised:
        return time.monotonic() - began, raised
    raise AssertionError(f"no {error.__name__}")


def leave(comm: Communicator) -> None:
    """End a job whose ranks cannot all come to an end."""
    time.sleep(1.0)  # for the others to say what they have to say
    if comm.rank == 0:
        MPI.COMM_WORLD.Abort(0)
    time.sleep(60)


def stopped(comm: Communicator, what: str) -> None:
    limited: dict[str, Run] = {
        "call": lambda: comm.all_reduce(SMALL, timeout=1.0),
        "async_op": lambda: comm.all_reduce(SMALL, async_op=True).wait(1.0),
        "default": lambda: comm.all_reduce(LARGE),
    }
    if what == "plan":
        plan = comm.plan.all_reduce(SMALL)
        limited["plan"] = lambda: plan.run(1.0)
    comm.barrier()
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "default":
        comm.timeout = 1.0
    seconds, error = seconds_until(CollectiveTimeout, limited[what])
    say(comm, f"{seconds:.2f} s: {error}")
    leave(comm)


def interrupted(comm: Communicator, what: str) -> None:
    run = runs(comm)[what]
    comm.barrier()
    if comm.rank == 0:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        seconds, _ = seconds_until(KeyboardInterrupt, run)
        say(comm, f"KeyboardInterrupt after {seconds:.2f} s")
        leave(comm)
    time.sleep(60)


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


def killed(comm: Communicator, what: str) -> None:
    run = runs(comm)[what]
    comm.barrier()
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    seconds, error = seconds_until(PeerFailed, run)
    assert isinstance(error, PeerFailed) and error.ranks == (2,)
    say(comm, f"{seconds:.3f} s: {error}")
    survivors = comm.shrink(timeout=20)
    total = int(survivors.all_reduce(np.array([1]))[0])
    ranks = ", ".join(map(str, survivors.all_gather(np.array([comm.rank]))))
    say(survivors, f"the survivors sum to {total} and are ranks {ranks}")
    leave(survivors)


def shrink_late(comm: Communicator, _: str) -> None:
    comm.barrier()
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    seconds_until(PeerFailed, lambda: comm.all_reduce(SMALL))
    if comm.rank == 0:
        _, error = seconds_until(CollectiveTimeout, lambda: comm.shrink(timeout=1.0))
        say(comm, f"CollectiveTimeout: {error}")
        leave(comm)
    time.sleep(60)


def shrink_refused(comm: Communicator, _: str) -> None:
    _, error = seconds_until(CollectiveError, comm.shrink)
    say(comm, f"CollectiveError: {error}")


kind, _, how = sys.argv[1].partition("_")
if kind == "shrink":
    {"late": shrink_late, "refused": shrink_refused}[how](collectives.world(), "")
else:
    {"stopped": stopped, "interrupted": interrupted, "dumped": dumped, "killed": killed}[kind](
        collectives.world(), how
    )
