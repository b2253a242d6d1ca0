"""Training runs of a small GPT with experts, which differ in how loads are balanced."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from moe import GATES, Gate, Routing, RoutingLog, mixtures, moe_gpt
from parallel import Adam, Model, Recipe, Trainer, text

HEADS = 4
DTYPE = "float32"
EVALUATED = 16  # batches that were not trained on
POINTS = 60  # of the curve of imbalance that is kept
FAR = 1 << 20  # the first of their numbers: training has fewer steps

MakeGate = Callable[[int], Gate]


class Scheme(NamedTuple):
    """A way to balance the loads of experts, of a gate with k experts for each token."""

    name: str
    k: int
    make: MakeGate


def baseline(k: int) -> str:
    """Return the name of the scheme that others with this k are compared with: no balancing."""
    return f"none, k={k}"


SCHEMES = (
    Scheme(baseline(1), 1, partial(Gate, k=1)),
    Scheme("switch", 1, GATES["switch"]),
    Scheme("hash, k=1", 1, GATES["hash"]),
    Scheme(baseline(2), 2, partial(Gate, k=2)),
    Scheme("gshard", 2, GATES["gshard"]),
    Scheme("expert-choice", 2, GATES["expert-choice"]),  # two on average
    Scheme("v-moe", 2, GATES["v-moe"]),
    Scheme("stable", 2, GATES["stable"]),
    Scheme("bias", 2, GATES["bias"]),
    Scheme("sigmoid", 2, GATES["sigmoid"]),
    Scheme("hash, k=2", 2, partial(GATES["hash"], k=2)),
)


class Settings(NamedTuple):
    """What all runs have in common; `last` are the steps at the end that are reported."""

    steps: int = 600
    last: int = 100
    num_experts: int = 8
    num_layers: int = 2
    hidden: int = 64
    rows: int = 16
    context: int = 64
    lr: float = 2e-3

    def check(self, data: text.Bytes) -> None:
        """Raise ValueError if there is no such model, or not enough text."""
        self.batch(data, 0, 0)
        self.model(partial(Gate, k=2))

    def model(self, gate: MakeGate, log: RoutingLog | None = None) -> Model:
        """Return the model, with experts in all blocks."""
        return moe_gpt(
            gate=gate,
            num_experts=self.num_experts,
            every=1,
            num_layers=self.num_layers,
            hidden=self.hidden,
            num_heads=HEADS,
            context=self.context,
            log=log,
        )

    def batch(self, data: text.Bytes, seed: int, step: int) -> tuple[text.Tokens, text.Tokens]:
        """Return the inputs and targets of a step."""
        return text.batch(data, seed=seed, step=step, batch_size=self.rows, context=self.context)


class Measures(NamedTuple):
    """The measures of a run, in its last steps; see `bench.experts.balance`."""

    imbalance: float
    computed: float
    least: float
    dropped: float
    loss: float


class Course(NamedTuple):
    """What happened in a run."""

    scheme: Scheme
    seed: int
    # How often each expert was chosen, and what it computed: int64 (steps, blocks, experts).
    choices: np.ndarray[Any, np.dtype[np.int64]]
    load: np.ndarray[Any, np.dtype[np.int64]]
    loss: float  # of the model alone, at the end, on batches that it was not trained on

    @property
    def imbalance(self) -> list[float]:
        """The largest number of choices over the mean, of each step, the mean of all blocks."""
        ratios: list[float] = largest(self.choices).tolist()
        return ratios

    def run(self, steps: int) -> Run:
        """Return what is kept of it: measures are on average over so many steps at the end."""
        choices, load = self.choices[-steps:], self.load[-steps:]
        least = (choices.min(axis=-1) / choices.mean(axis=-1)).mean()
        measures = Measures(
            float(largest(choices).mean()),
            float(largest(load).mean()),
            float(least),
            float(1 - load.sum() / choices.sum()),
            self.loss,
        )
        parts = np.array_split(self.imbalance, min(POINTS, len(self.imbalance)))
        return Run(
            self.scheme.name,
            self.scheme.k,
            self.seed,
            measures,
            [round(float(part.mean()), 4) for part in parts],
            choices.sum(axis=0).tolist(),
            load.sum(axis=0).tolist(),
        )


class Run(NamedTuple):
    """What is kept of a run."""

    scheme: str
    k: int
    seed: int
    measures: Measures  # of its last steps
    imbalance: list[float]  # of consecutive parts of all steps, each the mean of its steps
    # How often each expert of each block was chosen in the last steps, and what it computed.
    choices: list[list[int]]
    load: list[list[int]]

    def as_dict(self) -> dict[str, Any]:
        """Return the run for JSON."""
        return self._asdict() | {"measures": self.measures._asdict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Run:
        """Return the run that `as_dict` has written."""
        return cls(**values | {"measures": Measures(**values["measures"])})


def largest(counts: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the largest count over the mean, of each step, the mean of all blocks.

    `counts` are int64 (steps, blocks, experts).
    """
    ratios: np.ndarray[Any, np.dtype[np.float64]]
    ratios = (counts.max(axis=-1) / counts.mean(axis=-1)).mean(axis=-1)
    return ratios


def train(scheme: Scheme, seed: int, settings: Settings, data: text.Bytes) -> Course:
    """Train by a scheme; return what happened."""
    log = RoutingLog()
    model = settings.model(scheme.make, log)
    trainer = trainer_of(model, seed, settings)
    rows = partial(settings.batch, data, seed)
    tokens = settings.rows * settings.context
    trainer.train(settings.steps, lambda step, *_: rows(step), tokens, lambda *_: None)
    names = [layer.name for layer in mixtures(model)]
    routings = [[log.whole(step, name) for name in names] for step in range(settings.steps)]
    loss = held_out(trainer, scheme, seed, settings, data)
    return Course(scheme, seed, counted(routings, "choices"), counted(routings, "load"), loss)


def counted(routings: list[list[Routing]], what: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return what all routings say of each expert, int64 (steps, blocks, experts)."""
    return np.array([[getattr(routing, what) for routing in row] for row in routings], np.int64)


def trainer_of(model: Model, seed: int, settings: Settings) -> Trainer:
    """Return a trainer of one rank, ready to train."""
    recipe = Recipe(dtype=DTYPE, optimizer=partial(Adam, lr=settings.lr), seed=seed)
    trainer = Trainer(None, model, recipe)
    trainer.start()
    return trainer


def held_out(
    trained: Trainer, scheme: Scheme, seed: int, settings: Settings, data: text.Bytes
) -> float:
    """Return the mean loss of the model alone, without that of its gates, on other batches."""
    plain = settings.model(lambda n: replace(scheme.make(n), losses=(), noise=0.0))
    trainer = trainer_of(plain, seed, settings)
    for unit, values in trained.parameters.items():
        trainer.parameters[unit][...] = values
    for layer, other in zip(mixtures(plain), mixtures(trained.model), strict=True):
        layer.load_state(other.state())
    tokens = settings.rows * settings.context
    return statistics.mean(
        trainer.compute(*settings.batch(data, seed, FAR + i), tokens) for i in range(EVALUATED)
    )
