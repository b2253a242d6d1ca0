"""Training steps of a model in PyTorch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from bench.torch.models import Sizes

RATE = 0.1
CLOSE = 1e-4  # relatively: sums of more than two ranks depend on the order


class TrainingStep:
    """Called, it trains a model by one step, on the same tokens every time.

    `model`: may be divided among ranks.  `seed`: of the tokens of this rank.  `device`: of both.
    `loss`: of the last step, on this rank.
    """

    def __init__(self, model: Any, sizes: Sizes, seed: int, device: str = "cpu") -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        random = torch.Generator().manual_seed(seed)
        shape = 2, sizes.rows, sizes.context
        tokens = torch.randint(sizes.vocabulary, shape, generator=random)
        self.inputs, self.targets = tokens.to(device)
        self.loss = math.nan

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        logits = self.model(self.inputs).flatten(0, 1)
        loss = cross_entropy(logits, self.targets.flatten())
        loss.backward()
        self.optimizer.step()
        self.loss = loss.item()


def num_wrong(steps: dict[str, TrainingStep]) -> int:
    """How many of them have not the loss of the first, after equally many steps."""
    first, *others = (step.loss for step in steps.values())
    return sum(not math.isclose(first, loss, rel_tol=CLOSE) for loss in others)
