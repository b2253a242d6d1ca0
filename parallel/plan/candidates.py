"""Jobs, machines, and the ways to divide a job among the ranks of a machine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from parallel.pipeline import SCHEDULES

SCHEDULES_TRIED = ("1f1b", "interleaved", "zb-h1")  # whose formulas are exact for F = I = W
RECOMPUTE = {"none": (), "attention": ("block*.attention.heads",), "all": ("block*",)}


@dataclass(frozen=True)
class Job:
    """A GPT, and the batch of a step.

    Attributes
    ----------
    num_layers, hidden, num_heads, context, vocab_size : int
        As in `gpt`.
    batch : int
        The rows of all ranks.
    width : int
        The bytes of a number of the model, of a gradient and of a message.
    """

    num_layers: int
    hidden: int
    num_heads: int
    context: int = 2048
    vocab_size: int = 51200
    batch: int = 1536
    width: int = 2

    @property
    def num_parameters(self) -> int:
        """The number of parameters of the untied model."""
        h = self.hidden
        return (
            self.num_layers * (12 * h * h + 13 * h) + (2 * self.vocab_size + self.context + 2) * h
        )

    @property
    def flops(self) -> float:
        """The operations of a step without recomputation.

        Narayanan et al. 2021: 72 B s l h^2 (1 + s / 6h + V / 12lh), which counts all scores of
        attention, and not only the scores of earlier positions.
        """
        b, s, n, h = self.batch, self.context, self.num_layers, self.hidden
        return 72 * b * s * n * h * h * (1 + s / (6 * h) + self.vocab_size / (12 * n * h))


@dataclass(frozen=True)
class Machine:
    """Hosts with GPUs.

    Attributes
    ----------
    num_hosts, ranks_per_host : int
    memory : float
        The bytes of memory of a GPU.
    flops : float
        The operations a second that a GPU reaches in large products.
    within, between : float
        The bytes a second that a rank sends within its host, and to other hosts.
    """

    num_hosts: int
    ranks_per_host: int
    memory: float = 80e9
    flops: float = 150e12
    within: float = 250e9
    between: float = 25e9

    @property
    def num_ranks(self) -> int:
        """The number of GPUs."""
        return self.num_hosts * self.ranks_per_host


class Candidate(NamedTuple):
    """A way to train a job on the ranks of a machine.

    Attributes
    ----------
    pipe, data, tensor : int
        The numbers of ranks along these axes.
    zero : int
        The stage of ZeRO along ``data``.
    micro_batch : int
        The rows of a micro-batch.
    recompute : str
        What is computed again in backward: ``"none"``, ``"attention"`` or ``"all"``.
    schedule : str
        The schedule of the pipeline.
    """

    pipe: int
    data: int
    tensor: int
    zero: int
    micro_batch: int
    recompute: str = "none"
    schedule: str = "1f1b"

    def num_micro_batches(self, job: Job) -> int:
        """Return how many micro-batches of a `job` a rank computes in a step."""
        return job.batch // (self.data * self.micro_batch)


def candidates_for(job: Job, machine: Machine) -> Iterator[Candidate]:
    """Yield the layouts of a `job` that use all ranks of a `machine`, even if they do not fit.

    The ranks along ``tensor`` are in one host.  With a pipeline, only optimizer states are divided
    along ``data``: further stages of ZeRO would send for every micro-batch.
    """
    n = machine.num_ranks
    for tensor in divisors(machine.ranks_per_host):
        for pipe in divisors(n // tensor) if job.num_heads % tensor == 0 else ():
            if pipe > job.num_layers:
                continue
            data = n // (tensor * pipe)
            for micro_batch in (1, 2, 4, 8):
                yield from _with(job, pipe, data, tensor, micro_batch)


def _with(job: Job, pipe: int, data: int, tensor: int, micro_batch: int) -> Iterator[Candidate]:
    if job.batch % (data * micro_batch):
        return
    m = job.batch // (data * micro_batch)
    for recompute in RECOMPUTE:
        if pipe == 1:
            for zero in (1, 2, 3):
                yield Candidate(pipe, data, tensor, zero, micro_batch, recompute)
            continue
        for schedule in SCHEDULES_TRIED:
            chunks = SCHEDULES[schedule].num_chunks
            if m >= pipe and job.num_layers >= pipe * chunks and m % max(1, m // pipe) == 0:
                yield Candidate(pipe, data, tensor, 1, micro_batch, recompute, schedule)


def divisors(n: int) -> list[int]:
    """Return the divisors of a number, in ascending order."""
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return small + [n // i for i in reversed(small) if i * i != n]
