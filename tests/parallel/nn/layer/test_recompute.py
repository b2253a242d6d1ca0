"""Layers that run again in backward: what they keep, and that no bit changes."""

from __future__ import annotations

import numpy as np
import pytest

from parallel import Trainer
from parallel.nn import (
    ArraySpec,
    CrossEntropy,
    Embedding,
    Layer,
    Linear,
    Model,
    Recompute,
    Sequential,
)
from parallel.run.memory import peak_memory
from tests.parallel.nn.bound_models import Values

DEEP, ROWS, WIDTH = 24, 2, 4
ARRAY = 64  # the bytes of the input of one linear layer: 2 rows of 4 numbers, in float64


def deep(recompute: tuple[str, ...]) -> Model:
    """24 layers, each of five linear ones of equal width, between an embedding and a loss."""
    layers: dict[str, Layer] = {"embedding": Embedding(WIDTH, 1, WIDTH)}
    layers |= {
        f"layer{i}": Sequential({f"linear{k}": Linear(WIDTH, WIDTH) for k in range(5)})
        for i in range(DEEP)
    }
    return Model(layers | {"loss": CrossEntropy()}, recompute=recompute)


def deep_batch() -> tuple[Values, Values]:
    return np.arange(ROWS)[:, None], np.arange(ROWS)[:, None]


def check_deep(recompute: tuple[str, ...], kept: int, peak: int) -> None:
    """Bytes by formula, and counted from the arrays of a step."""
    model = deep(recompute)
    formula = model.activation_bytes(ArraySpec.tokens(ROWS, 1, width=8))
    assert formula.pop("loss").saved == ARRAY  # its derivative
    assert formula.pop("embedding").saved == 0  # tokens
    assert sum(each.saved for each in formula.values()) == kept
    pairs = {(each.saved, each.extra) for each in formula.values()}
    assert pairs <= {(5 * ARRAY, 0), (ARRAY, 4 * ARRAY)}
    trainer, (inputs, targets) = Trainer(None, model), deep_batch()
    trainer.begin(inputs, targets, ROWS)
    trainer.run(trainer.actions[: DEEP + 2])  # forward
    assert trainer.memory.now["activations"] == kept + ARRAY
    trainer.step(inputs, targets, ROWS)
    assert trainer.memory.peak["activations"] == peak
    assert peak_memory(trainer, ROWS, 1)["activations"] == peak


@pytest.mark.parametrize(
    ("recompute", "kept", "peak"),
    [
        ((), 120 * 64, 121 * 64),  # the most is kept when the loss has run: 7744 bytes
        (("layer*",), 24 * 64, 28 * 64),  # 1536; then the last layer computes four again: 1792
        (("layer1*",), 76 * 64, 77 * 64),  # layers 1 and 10 to 19 keep one, the other 13 keep five
    ],
)
def test_recomputation_keeps_24_of_120_inputs(
    recompute: tuple[str, ...], kept: int, peak: int
) -> None:
    """Chen et al. 2016."""
    check_deep(recompute, kept, peak)


def test_what_recomputation_keeps_all_the_same_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: formulas as with recomputation, but all inputs are kept."""
    for name in ("forward", "backward"):
        kept = lambda self, *args, name=name: getattr(self.layer, name)(*args)  # noqa: E731
        monkeypatch.setattr(Recompute, name, kept)
    with pytest.raises(AssertionError, match=f"{120 * 64 + ARRAY} == "):
        check_deep(("layer*",), 24 * 64, 28 * 64)


def test_recomputation_changes_no_bit() -> None:
    found = []
    for recompute in ((), ("layer*",)):
        trainer = Trainer(None, deep(recompute))
        losses = [trainer.step(*deep_batch(), ROWS) for _ in range(3)]
        assert trainer.micro_batches.num_recomputed == (3 * DEEP if recompute else 0)
        found.append([losses, *(x.tobytes() for x in trainer.parameters.values())])
    assert found[0] == found[1]
