"""The workload of a PyTorch program, on the backend `ring`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import collectives.torch  # noqa: F401 - registers the backend
from collectives import Communicator
from tests.chaos.workloads import Attempt, Surroundings, Workload

OPS = {
    dist.ReduceOp.SUM: np.add.reduce,
    dist.ReduceOp.MAX: np.maximum.reduce,
    dist.ReduceOp.PRODUCT: np.multiply.reduce,
}


class PyTorch(Workload):
    """Calls of torch.distributed, and steps of DistributedDataParallel."""

    def __init__(self, around: Surroundings, comm: Communicator) -> None:
        super().__init__(around, comm)
        if not dist.is_initialized():
            dist.init_process_group("ring")
        has_limit = {"timeout": timedelta(seconds=around.limit)} if around.limit else {}
        self.group = dist.new_group([*range(comm.size)], **has_limit)
        torch.manual_seed(0)
        self.single = torch.nn.Linear(8, 4, dtype=torch.float64)
        copy = torch.nn.Linear(8, 4, dtype=torch.float64)
        copy.load_state_dict(self.single.state_dict())
        self.ours = DistributedDataParallel(copy, process_group=self.group)

    def once(self, attempt: Attempt) -> None:
        super().once(attempt)
        calls: list[Callable[[], None]] = [partial(self.all_gather, attempt), self.step]
        calls += [partial(self.all_reduce, number, attempt) for number in range(3)]
        self.around.random(self.num_rounds, "order").shuffle(calls)
        for call in calls:
            call()

    def inputs(self, number: int) -> list[torch.Tensor]:
        random = self.around.random(self.num_rounds, number)
        length, first = random.choice([1, 5, 4000, 100_000]), random.randrange(3)
        return [(torch.arange(length) + rank + first) % 3 for rank in range(self.comm.size)]

    def all_reduce(self, number: int, attempt: Attempt) -> None:
        inputs, random = self.inputs(number), self.around.random(self.num_rounds, number, "op")
        op, is_async = random.choice([*OPS]), random.random() < 0.5
        x = inputs[self.comm.rank].clone()
        if is_async:
            attempt(dist.all_reduce(x, op, group=self.group, async_op=True).wait)
        else:
            attempt(lambda: dist.all_reduce(x, op, group=self.group))
        want = OPS[op](np.stack([each.numpy() for each in inputs]))
        self.around.check(x.numpy(), want, f"dist.all_reduce {op} of {len(want)}")

    def all_gather(self, attempt: Attempt) -> None:
        inputs = self.inputs(100)
        found = [torch.empty_like(each) for each in inputs]
        attempt(lambda: dist.all_gather(found, inputs[self.comm.rank], group=self.group))
        for got, want in zip(found, inputs, strict=True):
            self.around.check(got.numpy(), want.numpy(), f"dist.all_gather of {len(want)}")

    def step(self) -> None:
        """A step of the same model on all rows and on those of each rank."""
        size, rank = self.comm.size, self.comm.rank
        rows = torch.linspace(0, 1, 16 * size, dtype=torch.float64).reshape(2 * size, 8)
        rows = rows + self.num_rounds
        grads: list[Any] = []
        for module, mine in ((self.single, rows), (self.ours, rows[2 * rank : 2 * rank + 2])):
            module.zero_grad()
            module(mine).square().mean().backward()
            grads.append([each.grad.numpy() for each in module.parameters()])
        for want, got in zip(*grads, strict=True):
            if not np.allclose(got, want, rtol=1e-12, atol=0):
                self.around.events.write("wrong", text=f"gradient {got}: {want}"[:2000])

    def close(self) -> None:
        dist.destroy_process_group(self.group)
