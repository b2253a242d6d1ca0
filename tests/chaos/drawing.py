"""What is drawn: from a seed and a number, the description of a job and of the faults in it.

Nothing here starts or reads anything: the same seed, number and environment give the same job.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from random import Random
from typing import Any


@dataclass(frozen=True)
class Fault:
    """A kind of fault.  `title`: its row in the table.  `workloads`: those in which it is drawn."""

    title: str
    workloads: tuple[str, ...]


CALLS = ("collectives", "plans", "asynchronous", "sub-communicators", "checked")
ALL = (*CALLS, "training", "pytorch")

# The job goes on after these: several of them are in one job, because to start one takes seconds.
SURVIVED = {
    "stop": Fault("SIGSTOP and CONT", ALL),
    "slow": Fault("a slow rank", ALL),
    "dump": Fault("SIGUSR1", ALL),
    "late": Fault("a time limit: a rank is late", (*CALLS, "pytorch")),
    "stop past limit": Fault("a time limit: a rank is stopped", (*CALLS, "pytorch")),
    "short limits": Fault("time limits by the hundred", ("asynchronous",)),
    "refused": Fault("an exception: refused arguments", (*CALLS, "pytorch")),
    "mismatch": Fault("an exception: another call", ("checked",)),
    "not finite": Fault("an exception: a NaN", ("checked",)),
    "operator": Fault("an exception: in an operator", ("collectives", "plans", "asynchronous")),
    "interrupt": Fault("Ctrl-C in one rank", ("collectives",)),
    "full disk": Fault("a full disk under a checkpoint", ("training",)),
}
# One of these is the last fault of a job, unless the job is fault-tolerant.
ENDING = {
    "kill": Fault("kill -9", ALL),
    "ctrl-c": Fault("Ctrl-C", ALL),
    "exception": Fault("an exception: uncaught", ALL),
    "job limit": Fault("the time limit of the job", ALL),
}
OUTLIVED = {
    "outlived kill": Fault("kill -9, the others go on", (*CALLS[:3], "checked", "training"))
}
FAULTS = SURVIVED | ENDING | OUTLIVED

SIGNALS = ("SIGINT", "SIGINT", "SIGTERM", "SIGHUP")  # to the launcher


@dataclass(frozen=True)
class Step:
    """A workload and the fault in it.

    `guilty`: the rank at fault, by its number in the job.  `delay`: seconds until the fault.
    `duration`: how long it lasts.  `limit`: the time limit of the calls of the other ranks.
    `choice`: a number that decides on what the fault leaves open.  `sabotage`: what is done wrong
    on purpose, to see that it is noticed.
    """

    workload: str
    fault: str
    guilty: int
    delay: float = 0.0
    duration: float = 0.0
    limit: float = 0.0
    choice: int = 0
    sabotage: str = ""


@dataclass(frozen=True)
class Job:
    """One start of the launcher: on `size` ranks, one step after the other."""

    seed: str
    size: int
    steps: tuple[Step, ...]
    is_fault_tolerant: bool = False

    @property
    def is_to_time_out(self) -> bool:
        """Whether the launcher is to end it at its time limit."""
        return self.steps[-1].fault == "job limit"

    def name_of(self, number: int) -> str:
        """The seed of what step `number` draws while it runs."""
        return f"{self.seed} {number}"

    def dead_before(self, number: int) -> set[int]:
        """The ranks that have died when step `number` begins."""
        return {step.guilty for step in self.steps[:number] if step.fault in OUTLIVED}

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Job:
        fields: dict[str, Any] = json.loads(text)
        return Job(**{**fields, "steps": tuple(Step(**step) for step in fields["steps"])})

    def __str__(self) -> str:
        kind = ", fault-tolerant" * self.is_fault_tolerant
        lines = [f"seed {self.seed!r}, {self.size} ranks{kind}"]
        for number, step in enumerate(self.steps):
            what = f"{step.workload}, {FAULTS[step.fault].title}, rank {step.guilty}"
            lines.append(
                f"  step {number}: {what}, after {step.delay:.3f} s, for {step.duration:.3f} s,"
                f" limit {step.limit:.3f} s, choice {step.choice}"
            )
        return "\n".join(lines)


def draw(seed: int, number: int, *, can_outlive: bool, has_torch: bool) -> Job:
    """The job of this number.

    `can_outlive`: whether this MPI lets the others go on when a rank has died.  `has_torch`:
    whether PyTorch is installed.
    """
    name = f"{seed}/{number}"
    random = Random(f"chaos {name} {can_outlive} {has_torch}")
    size = random.choice([2, 3, 3, 4, 4, 4, 5, 8 if random.random() < 0.4 else 4])
    num_steps = random.randint(3, 9)
    if can_outlive and random.random() < 0.3:
        return Job(name, max(size, 4), _outlived(random, max(size, 4), num_steps), True)
    if has_torch and random.random() < 0.2:
        workloads: tuple[str, ...] = ("pytorch",)
    else:
        workloads = ALL[:-1]
    ending = random.choice([*ENDING, *["kill", "ctrl-c", "exception"] * 2])
    if ending == "job limit":  # it must be reached within the limit
        num_steps = random.randint(0, 2)
    steps = [_step(random, SURVIVED, workloads, [*range(size)]) for _ in range(num_steps)]
    steps.append(_step(random, {ending: ENDING[ending]}, workloads, [*range(size)]))
    return Job(name, size, tuple(steps))


def _outlived(random: Random, size: int, num_steps: int) -> tuple[Step, ...]:
    """Steps of a job in which ranks die, until two are left."""
    alive, steps = [*range(size)], []
    for _ in range(num_steps):
        is_death = len(alive) > 2 and random.random() < 0.5
        step = _step(random, OUTLIVED if is_death else SURVIVED, ALL[:-1], alive)
        if is_death:
            alive.remove(step.guilty)
        steps.append(step)
    return tuple(steps)


def _step(
    random: Random, faults: dict[str, Fault], workloads: tuple[str, ...], ranks: list[int]
) -> Step:
    """A step with one of these faults in one of these workloads; a rank of `ranks` is guilty."""
    fits = {
        name: [workload for workload in fault.workloads if workload in workloads]
        for name, fault in faults.items()
    }
    fault = random.choice([name for name, found in fits.items() if found])
    return Step(
        random.choice(fits[fault]),
        fault,
        random.choice(ranks),
        delay=random.choice([0.0, random.uniform(0, 0.02), random.uniform(0, 0.2)]),
        duration=random.choice([random.uniform(0, 0.02), random.uniform(0, 0.3)]),
        limit=random.uniform(0.1, 0.3),
        choice=random.randrange(1 << 20),
    )
