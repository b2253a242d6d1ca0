"""In training on a device, the host waits for it where the loss is read, and where it must.

Losses are those of the host, to the bit.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from moe.gates import GATES
from parallel.nn import LayerNorm
from tests.fakes.arrays import FAKE, bare, use_as_device, waits
from tests.parallel.run.device_runs import MICRO_BATCHES, RUNS, STEPS, trained

LOSS = {"Scalars.sum_loss": STEPS}
NORM = {"Scalars.sum_norm": STEPS}
EXPERTS = {"Router._seen": STEPS * MICRO_BATCHES}  # the host chooses experts by logits
OTHERS: dict[str, dict[str, int]] = {
    "server-async": {"Trainer.compute": STEPS},  # the loss of a worker
    "clip": LOSS | NORM,
    "float16": LOSS | NORM,
    "zero3, host": LOSS | {"Storage.copy_here": 3 * STEPS},  # the gradients of three units
    **dict.fromkeys([*GATES, "hierarchical", "weights", "cheaper", "capacity"], LOSS | EXPERTS),
    "hash": LOSS,  # which chooses by tokens
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.slow
def test_the_host_waits_where_the_loss_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a pipeline that have no loss, and the server, wait for nothing."""
    wanted = [rank.losses for rank in trained(name)]
    use_as_device(monkeypatch)
    done = trained(name)
    assert [rank.losses for rank in done] == wanted
    found = [dict(rank.waits) for rank in done if rank.waits]
    assert found and all(each == OTHERS.get(name, LOSS) for each in found), found


def test_a_wait_that_is_not_expected_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LayerNorm.forward

    def forward(self: LayerNorm, x: Any, step: Any) -> Any:
        assert float(x[0, 0, 0]) < np.inf
        return right(self, x, step)

    monkeypatch.setattr(LayerNorm, "forward", forward)
    use_as_device(monkeypatch)
    for rank in trained("ddp"):
        others = rank.waits - Counter(LOSS)
        num_norms = 3  # two in the block, and that of the head
        assert others.total() == num_norms * STEPS * MICRO_BATCHES


@pytest.mark.parametrize(("name", "what"), [("pipe", "bubble"), ("zero3", "hidden")])
def test_the_host_takes_no_times_of_a_device(
    name: str, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It only enqueues what the device does later."""
    trained(name, "--steps", "3")
    assert what in capsys.readouterr().out
    use_as_device(monkeypatch)
    trained(name, "--steps", "3")
    assert what not in capsys.readouterr().out


def test_operations_that_wait_for_the_device_are_counted() -> None:
    """Numbers and truth values, contents, and masks; what computes does not."""
    x = FAKE.asarray(np.arange(4.0))
    waits().clear()
    y = FAKE.where(x > 1, x, 0.0 * x)
    y[1:] += x[:-1]
    assert bare(y).tolist() == [0, 0, 3, 5] and not waits()
    reads = [
        lambda: float(x[0]),
        lambda: int(x[0]),
        lambda: bool(x[0] > 1),
        lambda: x.get(),
        lambda: x[x > 1],
        lambda: x.__setitem__(x > 1, 0),
    ]
    for read in reads:
        waits().clear()
        read()
        assert waits() == {"a test": 1}
