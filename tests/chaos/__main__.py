"""Cause faults at random: ``python -m tests.chaos --faults 1000 --seed 1``.

Every job draws workloads and faults by the seed and its number.  The table says how many faults of
each kind were survived; a failure comes with the command that repeats its job.  The exit status is
1 if a fault was not survived, or if jobs do not begin.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import count
from pathlib import Path
from typing import NamedTuple

from collectives.console import Table
from tests.chaos.drawing import FAULTS, Job, draw
from tests.chaos.injecting import HANG_SECONDS, ROOT, Running
from tests.chaos.judging import Verdict, judge, was_too_slow

ASK = """
import json
from importlib.util import find_spec
from collectives.launch.mpirun import find_mpirun
print(json.dumps([find_mpirun().vendor, find_spec("torch") is not None]))
"""
# Time limits of the launcher, in seconds.  A job that is to be ended by it, and was too slow to get
# to that step, gets the next one.
LIMITS, TO_REACH = (300.0,), (8.0, 24.0, 72.0)
NEVER_BEGAN = 3  # jobs in a row that have not begun their first step: no other will
NAMES = {"openmpi": "Open MPI", "mpich": "MPICH"}


class Environment(NamedTuple):
    """A Python, the MPI that it loads, and whether it has PyTorch."""

    python: str
    vendor: str
    has_torch: bool

    @classmethod
    def of(cls, python: str) -> Environment:
        asked = subprocess.run(
            [python, "-c", ASK], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return cls(python, *json.loads(asked.stdout))

    def draw(self, seed: int, number: int) -> Job:
        """The job of this number in this environment."""
        can_outlive = self.vendor == "openmpi"
        return draw(seed, number, can_outlive=can_outlive, has_torch=self.has_torch)


class Outcome(NamedTuple):
    """What became of a job: the faults that were reached, and what did not hold."""

    reached: list[str]
    verdicts: list[Verdict]
    seconds: float

    @property
    def survived(self) -> list[str]:
        """The faults of steps in which everything held."""
        failed = {verdict.step for verdict in self.verdicts}
        return [fault for number, fault in enumerate(self.reached) if number not in failed]


def run(
    job: Job, folder: Path, python: str = sys.executable, hang_seconds: float = HANG_SECONDS
) -> Outcome:
    """Run a job and judge it; run it again if all that is wrong is that it was too slow."""
    began = time.monotonic()
    for number, limit in enumerate(TO_REACH if job.is_to_time_out else LIMITS):
        record = Running(job, folder / f"{number}", python, limit, hang_seconds).run()
        verdicts = judge(job, record)
        if verdicts or not was_too_slow(job, record):
            break
    else:
        sentence = f"did not get to step {len(job.steps) - 1} within {limit:g} s"
        verdicts = [Verdict(max(record.reached, 0), "reached", sentence)]
    reached = [step.fault for step in job.steps[: record.reached + 1]]
    return Outcome(reached, verdicts, time.monotonic() - began)


class Totals:
    """The faults of one environment: how many were reached, and survived."""

    def __init__(self) -> None:
        self.reached, self.survived = Counter[str](), Counter[str]()
        self.is_red = False

    def add(self, outcome: Outcome) -> None:
        self.reached.update(FAULTS[fault].title for fault in outcome.reached)
        self.survived.update(FAULTS[fault].title for fault in outcome.survived)
        self.is_red |= bool(outcome.verdicts)


def command(environment: Environment, seed: int, number: int) -> str:
    """The command that repeats one job."""
    words = [environment.python, "-m", "tests.chaos", "--seed", str(seed), "--job", str(number)]
    return shlex.join(words)


def go_through(environment: Environment, options: argparse.Namespace, home: Path) -> Totals:
    """Run jobs until there were enough faults, or until jobs do not even begin."""
    totals, numbers, never_began = Totals(), options.job or count(), 0
    for number in numbers:
        if not options.job and totals.reached.total() >= options.faults:
            break
        job, folder = environment.draw(options.seed, number), home / f"{number}"
        outcome = run(job, folder, environment.python)
        totals.add(outcome)
        done = f"{NAMES.get(environment.vendor, environment.vendor)}, job {number}"
        survived = f"{len(outcome.survived)} of {len(outcome.reached)} faults survived"
        print(f"{done}: {survived} in {outcome.seconds:.1f} s", flush=True)
        if outcome.verdicts:
            print(f"FAILED: {job}")
            print("".join(f"  {verdict}\n" for verdict in outcome.verdicts), end="")
            print(f"  repeat it: {command(environment, options.seed, number)}")
            print(f"  its files: {folder}", flush=True)
        else:
            shutil.rmtree(folder)
        never_began = 0 if outcome.reached else never_began + 1
        if never_began == NEVER_BEGAN:
            print(f"Stopped: {NEVER_BEGAN} jobs in a row have not begun their first step.")
            totals.is_red = True
            break
    return totals


def show(environments: list[Environment], found: list[Totals]) -> None:
    """Print the table."""
    heads = ["fault"]
    for each in environments:
        name = NAMES.get(each.vendor, each.vendor)
        label = f"{name}{', PyTorch' * each.has_torch}"
        heads += [f"{label}: faults", f"{label}: survived"]
    titles = list(dict.fromkeys(fault.title for fault in FAULTS.values()))
    rows = [
        [title, *(str(n[title]) for t in found for n in (t.reached, t.survived))]
        for title in titles
    ]
    rows.append(["all", *(str(n.total()) for t in found for n in (t.reached, t.survived))])
    table = Table(*heads)
    for row in rows:
        table.add(*row)
    print(*table.lines(), sep="\n")
    for each in environments:
        if not each.has_torch:
            print(f"not run: PyTorch is not installed for {each.python}")


def main(argv: list[str] | None = None) -> int:
    """Run it, and return the exit status."""
    parser = argparse.ArgumentParser("python -m tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=100, help="at least so many, per environment")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--job", type=int, action="append", help="only the job of this number")
    parser.add_argument(
        "--python",
        action="append",
        metavar="PATH",
        help="the Python of an environment; several for one table",
    )
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))  # ends the job
    environments = [Environment.of(python) for python in options.python or [sys.executable]]
    home = Path(tempfile.mkdtemp(prefix="chaos-"))
    found = [
        go_through(environment, options, home / str(index))
        for index, environment in enumerate(environments)
    ]
    show(environments, found)
    is_red = any(totals.is_red for totals in found)
    if not is_red:
        shutil.rmtree(home)
    return int(is_red)


if __name__ == "__main__":
    sys.exit(main())
