"""What ranks compute while faults happen, one round after the other; every value is checked."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from bench.workloads.expected import expected
from collectives import Communicator
from parallel import Mesh, Recipe, Sharding, Trainer, checkpoint, text
from parallel.nn import gpt
from parallel.strategies import Elastic
from tests.chaos.events import EventFile
from tests.scenarios import jobs as scenarios

Attempt = Callable[[Callable[[], Any]], Any]
"""Makes a call, and returns its result however often it times out."""

ROWS = [0, 1, 7, 100, 3000, 3000, 60_000]
CONTEXT, BATCH, TOLERANCE = 4, 24, 1e-9
DATA = np.frombuffer(bytes(range(256)) * 8, np.uint8)


def random_of(name: str, *words: object) -> Random:
    """Random numbers that depend on the step of a job and on some words."""
    return Random(f"{name} {words}")


class Surroundings:
    """What a workload gets.

    `comms`: the communicators of all ranks that are alive, by kind.  `name`: the seed of what is
    drawn, the same on all ranks.  `limit`: the time limit of the step.  `spoil`: whether the next
    value is made wrong before it is checked.
    """

    def __init__(self, comms: dict[str, Communicator], events: EventFile, folder: Path) -> None:
        self.comms, self.events, self.folder = comms, events, folder
        self.name, self.limit, self.spoil = "", 0.0, False

    def random(self, *words: object) -> Random:
        return random_of(self.name, *words)

    def check(self, got: Any, want: Any, what: object) -> None:
        """Note whether a value is right."""
        if self.spoil and isinstance(got, np.ndarray) and got.size and got.dtype != bool:
            got, self.spoil = got + 1, False
        try:
            scenarios.same(got, want, what)
        except AssertionError as error:
            self.events.write("wrong", text=str(error)[:2000])


class Workload:
    """Calls on `comm`, and maybe on communicators made from it."""

    def __init__(self, around: Surroundings, comm: Communicator) -> None:
        self.around, self.comm, self.num_rounds = around, comm, 0

    def set_limit(self, seconds: float | None) -> None:
        """Set the time limit of all calls."""
        self.comm.timeout = seconds

    def once(self, attempt: Attempt) -> None:
        """Make a round of calls."""
        self.num_rounds += 1

    def draw(self, comm: Communicator, number: int) -> scenarios.Job:
        """A collective call, the same on all ranks of `comm`."""
        random = self.around.random(self.num_rounds, number)
        texts: list[str] = []
        while not texts:
            collective, algorithm = random.choice(scenarios.ALGORITHMS)
            texts = scenarios.variants(collective, algorithm, comm.size)
        op = random.choice(["sum", "prod", "min", "max"])
        rows = scenarios.random_rows(
            collective, comm.size, random.choice(ROWS), random.random() < 0.5
        )
        return scenarios.Job(
            collective,
            random.choice([None, *texts]),
            comm.size,
            rows,
            dtype=random.choice(["float32", "float64", "int64", "int32", "float16"]),
            op=op,
            root=random.randrange(comm.size),
            is_in_place=random.random() < 0.3,
            is_async=random.random() < 0.2,
        )

    def call(self, comm: Communicator, number: int, attempt: Attempt) -> None:
        """Make a drawn call, and check its result."""
        job = self.draw(comm, number)
        inputs = job.inputs()
        got = attempt(lambda: scenarios.call(comm, job, inputs[comm.rank]))
        self.around.check(got, wanted(job, comm.rank), job)

    def close(self) -> None:
        """Free what was made."""


def wanted(job: scenarios.Job, rank: int) -> Any:
    results = expected(job.collective, job.inputs(), op=job.op, root=job.root, counts=job.counts())
    return results[rank]


class Collectives(Workload):
    """Blocking calls of all kinds, with all algorithms."""

    def once(self, attempt: Attempt) -> None:
        super().once(attempt)
        for number in range(3):
            self.call(self.comm, number, attempt)


class SubCommunicators(Workload):
    """The same on communicators of half of the ranks, and of all in another order."""

    def __init__(self, around: Surroundings, comm: Communicator) -> None:
        super().__init__(around, comm)
        halves, turned = comm.split(comm.rank % 2), comm.split(0, key=-comm.rank)
        assert halves is not None and turned is not None
        self.groups = [halves, turned]

    def set_limit(self, seconds: float | None) -> None:
        for comm in (self.comm, *self.groups):
            comm.timeout = seconds

    def once(self, attempt: Attempt) -> None:
        super().once(attempt)
        for number, comm in enumerate((*self.groups, self.comm)):
            self.call(comm, number, attempt)

    def close(self) -> None:
        for group in self.groups:
            group.free()


class Asynchronous(Workload):
    """Several calls under way at once, waited for in another order on every rank."""

    def once(self, attempt: Attempt) -> None:
        super().once(attempt)
        comm, jobs = self.comm, [self.draw(self.comm, number) for number in range(5)]
        works = []
        for job in jobs:
            keywords: dict[str, Any] = {"algorithm": job.algorithm, "async_op": True}
            if job.collective in scenarios.ROOTED:
                keywords["root"] = job.root
            if job.collective in scenarios.REDUCTIONS:
                keywords["op"] = job.op
            if job.collective not in scenarios.WHOLE and job.counts() is not None:
                keywords["counts"] = job.counts()
            x = job.inputs()[comm.rank]
            if job.collective == "scatter" and comm.rank != job.root:
                x = None
            works.append(
                attempt(lambda j=job, x=x, k=keywords: getattr(comm, j.collective)(x, **k))
            )
        order = [*range(len(jobs))]
        self.around.random(self.num_rounds, "order of rank", comm.rank).shuffle(order)
        for each in order:
            got = attempt(works[each].wait)
            self.around.check(got, wanted(jobs[each], comm.rank), jobs[each])


class Plans(Workload):
    """Plans that are made once, and run with other values in every round."""

    NAMES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")

    def __init__(self, around: Surroundings, comm: Communicator) -> None:
        super().__init__(around, comm)
        random = around.random("plans")
        self.rows = comm.size * random.choice([1, 50, 5000])
        self.root = random.randrange(comm.size)
        self.inputs = [np.zeros(self.rows, np.int64) for _ in self.NAMES]
        self.plans = [self._make(*each) for each in zip(self.NAMES, self.inputs, strict=True)]

    def _make(self, name: str, x: np.ndarray) -> Any:
        options = {"root": self.root} if name == "broadcast" else {}
        return getattr(self.comm.plan, name)(x, **options)

    def set_limit(self, seconds: float | None) -> None:
        super().set_limit(seconds)
        for plan in self.plans:
            plan.timeout = seconds

    def values(self, rank: int, number: int) -> np.ndarray:
        return (np.arange(self.rows) * 3 + rank + 7 * self.num_rounds + number) % 11

    def once(self, attempt: Attempt) -> None:
        super().once(attempt)
        rank, size = self.comm.rank, self.comm.size
        for number, (name, x, plan) in enumerate(
            zip(self.NAMES, self.inputs, self.plans, strict=True)
        ):
            inputs = [self.values(each, number) for each in range(size)]
            x[...] = inputs[rank]
            if self.num_rounds % 2:
                got = attempt(plan.run)
            else:
                plan.start()
                got = attempt(plan.wait)
            self.around.check(got, expected(name, inputs, root=self.root)[rank], f"plan of {name}")

    def close(self) -> None:
        for plan in self.plans:
            plan.free()


# Training


def model(name: str) -> Any:
    """The model of a step of a job."""
    hidden = random_of(name, "model").choice([4, 8, 12])
    return gpt(num_layers=1, hidden=hidden, num_heads=2, context=CONTEXT)


def rows(step: int, rank: int, size: int) -> Any:
    where = {"rank": rank, "num_ranks": size}
    return text.batch(DATA, seed=0, step=step, batch_size=BATCH, context=CONTEXT, **where)


class Serial:
    """The losses of one rank, which makes as many steps as somebody asks for."""

    def __init__(self, name: str) -> None:
        self.trainer, self._losses = Trainer(None, model(name), Recipe()), list[float]()
        self.trainer.start()

    def loss(self, step: int) -> float:
        while len(self._losses) <= step:
            batch = rows(len(self._losses), 0, 1)
            self._losses.append(self.trainer.step(*batch, BATCH * CONTEXT))
        return self._losses[step]


class Training(Workload):
    """A training run that saves checkpoints; its losses are those of one rank."""

    def __init__(self, around: Surroundings, comm: Communicator) -> None:
        super().__init__(around, comm)
        stage = around.random("training").choice([0, 1, 2, 3])
        sharding = Sharding.zero(stage) if stage else Sharding.ddp()
        self.serial = Serial(around.name)
        self.trainer = Trainer(Mesh(comm), model(around.name), sharding=sharding)
        self.trainer.start()
        self.num_steps = 0
        self.root = around.folder / f"checkpoints.{around.events.number}"

    def once(self, attempt: Attempt) -> None:
        super().once(attempt)
        self.train()
        if self.num_rounds % 4 == 2:
            self.save()

    def train(self) -> None:
        batch = rows(self.num_steps, self.comm.rank, self.comm.size)
        got, want = self.trainer.step(*batch, BATCH * CONTEXT), self.serial.loss(self.num_steps)
        if not abs(got - want) <= TOLERANCE * abs(want) or self.around.spoil:
            self.around.spoil = False
            self.around.events.write("wrong", text=f"loss {got} of step {self.num_steps}: {want}")
        self.num_steps += 1

    def save(self) -> None:
        checkpoint.save(self.trainer, self.root, self.num_steps, keep=2)
        self.around.events.write(
            "saved", root=self.root.name, steps=self.num_steps, shards=self.digests()
        )

    def load(self) -> None:
        """Go back to the last checkpoint."""
        path = checkpoint.latest(self.root)
        assert path is not None, f"no checkpoint in {self.root}"
        self.num_steps = checkpoint.load(self.trainer, path)
        self.around.events.write("loaded", steps=self.num_steps, shards=self.digests())

    def digests(self) -> list[list[Any]]:
        """For each unit: its name, which elements this rank updates, and their digest."""
        return [
            [unit, part.start, part.stop, digest(self.trainer.masters[unit])]
            for unit in self.trainer.view.unit_sizes
            for part in [self.trainer.view.shard_slice(unit)]
        ]


def digest(x: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(x, np.float64).tobytes()).hexdigest()


class ElasticTraining(Workload):
    """A training run that outlives a rank: one round has many steps."""

    STEPS = 40

    def __init__(self, around: Surroundings, comm: Communicator) -> None:
        super().__init__(around, comm)
        self.serial = Serial(around.name)
        self.trainer = Elastic(comm, model(around.name), Recipe())
        self.trainer.start()

    def once(self, attempt: Attempt) -> None:
        super().once(attempt)
        steps = self.STEPS * self.num_rounds

        def batch(step: int, rank: int, size: int) -> Any:
            time.sleep(0.002)
            return rows(step, rank, size)

        losses = self.trainer.train(steps, batch, BATCH * CONTEXT, lambda step, loss: None)
        for step, got in enumerate(losses):
            want = self.serial.loss(step)
            if not abs(got - want) <= TOLERANCE * abs(want):
                self.around.events.write("wrong", text=f"loss {got} of step {step}: {want}")


@contextmanager
def file_limit(num_bytes: int | None) -> Iterator[None]:
    """A disk that is full after so many bytes of a file; None: it is not full."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if num_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
