"""PyTorch's own strategies compute with this backend what they compute with Gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from collectives.torch.backend import RingBackend
from tests.torch import strategies
from tests.torch.groups import default_group
from tests.torch.strategies import STRATEGIES, Results

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore::UserWarning:torch")]

CLOSE = 1e-6  # of sums in another order


def results(backend: str, strategy: Callable[[], Results]) -> Results:
    with default_group(backend):
        assert dist.get_backend() == backend
        return strategy()


def compare(actual: Results, expected: Results, *, is_exact: bool) -> None:
    close = 0.0 if is_exact else CLOSE
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=close, atol=close)


@pytest.mark.parametrize("name", strategies.names())
def test_a_strategy_computes_what_it_does_with_gloo(mpi_world: Any, name: str) -> None:
    of_gloo = results("gloo", STRATEGIES[name])
    of_ring = results("ring", STRATEGIES[name])
    assert of_gloo or name == "fsdp_of_tensor_parallel"  # which needs an even number of ranks
    compare(of_ring, of_gloo, is_exact=mpi_world.size == 2 or name in strategies.ONLY_MOVED)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "tensor_parallel"])
def test_a_message_that_is_left_out_is_noticed(
    mpi_world: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Negative control: a backend that leaves the results of one kind of call as they were."""
    right = results("ring", STRATEGIES[name])
    method = {"ddp": "allreduce", "tensor_parallel": "allreduce", "fsdp": "_reduce_scatter"}[name]
    made, is_first = getattr(RingBackend, method), [True]

    def wrong_once(self: RingBackend, tensors: Any, *args: Any) -> Any:
        """The call, whose first tensor is then as if nothing had come."""
        work = made(self, tensors, *args)
        tensor = tensors if isinstance(tensors, torch.Tensor) else tensors[0]
        if is_first[0] and tensor.is_floating_point() and tensor.numel() > 1:
            is_first[0] = False
            if work is not None:
                work.wait()
            tensor.detach().zero_()
        return work

    monkeypatch.setattr(RingBackend, method, wrong_once)
    wrong = results("ring", STRATEGIES[name])
    assert not is_first[0]
    with pytest.raises(AssertionError, match="not close"):
        compare(wrong, right, is_exact=False)


def test_context_parallelism_cannot_run_on_the_cpu_with_any_backend(mpi_world: Any) -> None:
    """PyTorch's attention for the CPU cannot be divided; where it can, compare it, too."""
    for backend in ("gloo", "ring"):
        with pytest.raises(NotImplementedError, match="does not have a sharding strategy"):
            results(backend, strategies.context_parallel)
