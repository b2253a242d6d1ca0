"""Training steps of a small transformer in PyTorch, with gradients or parameters divided."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from bench.torch_cases import DDP, FSDP, HEADS

Model = Any  # a torch.nn.Module

BLOCKS, VOCABULARY = 2, 256
ROWS, CONTEXT = 4, 32  # of a rank
RATE = 0.1
CLOSE = 1e-4  # relatively: sums of more than two ranks depend on the order


def transformer(hidden: int) -> Model:
    """The same model on every rank and in every call."""
    torch.manual_seed(0)
    blocks = [
        nn.TransformerEncoderLayer(hidden, HEADS, 4 * hidden, dropout=0.0, batch_first=True)
        for _ in range(BLOCKS)
    ]
    head = nn.Linear(hidden, VOCABULARY, bias=False)
    return nn.Sequential(nn.Embedding(VOCABULARY, hidden), *blocks, head)


def ddp(model: Model, group: Any) -> Model:
    """Every rank has all parameters, and gradients are averaged."""
    return DistributedDataParallel(model, process_group=group)


def fsdp(model: Model, group: Any) -> Model:
    """Every rank has a part of the parameters, and each block is gathered when it is needed."""
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in model[1:-1]:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


KINDS: dict[str, Callable[[Model, Any], Model]] = {DDP: ddp, FSDP: fsdp}


class TrainingStep:
    """Called, it trains a model by one step, on the same tokens of this rank every time.

    `loss`: of the last step, on this rank.
    """

    def __init__(self, kind: str, hidden: int, group: Any) -> None:
        self.model = KINDS[kind](transformer(hidden), group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        random = torch.Generator().manual_seed(distributed.get_rank())
        shape = 2, ROWS, CONTEXT
        self.inputs, self.targets = torch.randint(VOCABULARY, shape, generator=random)
        self.loss = math.nan

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        logits = self.model(self.inputs)
        loss = cross_entropy(logits.flatten(0, 1), self.targets.flatten())
        loss.backward()
        self.optimizer.step()
        self.loss = loss.item()


def num_wrong(steps: dict[str, TrainingStep]) -> int:
    """How many of them have not the loss of the first, after equally many steps."""
    first, *others = (step.loss for step in steps.values())
    return sum(not math.isclose(first, loss, rel_tol=CLOSE) for loss in others)
