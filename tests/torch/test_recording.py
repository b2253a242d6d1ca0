"""What process groups send is recorded by module, bucket and mesh, and is what formulas say."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import collectives
from collectives import Ledger
from collectives.testing import Traffic, assert_traffic
from collectives.torch import Options, communicator, record
from parallel import Mesh, Recipe, Sharding, Trainer, gpt

pytestmark = pytest.mark.mpi

RINGS = Options(algorithms=dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter"), "ring"))
WIDTH = 12  # which 2, 3 and 4 ranks divide


@pytest.fixture
def rings() -> Any:
    """A default group whose algorithms send as few bytes as possible."""
    dist.init_process_group("ring", pg_options=RINGS)
    yield
    dist.destroy_process_group()


class Pair(nn.Module):
    """A wide and a narrow linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(self.wide(x).relu())


class Stack(nn.Module):
    """Two pairs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([Pair(), Pair()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def step(model: nn.Module, optimizer: Any = None) -> None:
    model(torch.ones(2, WIDTH)).sum().backward()
    if optimizer is not None:
        optimizer.step()


def warm_up(model: nn.Module, optimizer: Any = None) -> None:
    """Two steps: after the first, DDP orders its buckets anew, which the second tells all ranks."""
    step(model, optimizer)
    step(model, optimizer)


def recorded(model: nn.Module, optimizer: Any = None) -> Ledger:
    """The ledger of a step after those in which PyTorch makes its buckets and groups."""
    warm_up(model, optimizer)
    with record(model) as ledger:
        step(model, optimizer)
    return ledger


def phases(ledger: Ledger) -> list[tuple[str, str]]:
    """The phases and collectives, in the order in which they began."""
    return list(ledger.summary(by=("phase", "collective")))


def test_calls_of_fsdp_have_the_name_of_the_module_that_is_gathered(rings: None) -> None:
    model, mesh = Stack(), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    found = phases(recorded(fully_shard(model, mesh=mesh)))
    assert found[:2] == [(f"forward/layers.{k}", "all_gather") for k in (0, 1)]
    assert ("backward/layers.0", "all_gather") in found
    assert {row for row in found if row[1] == "reduce_scatter"} == {
        (f"backward/layers.{k}", "reduce_scatter") for k in (0, 1)
    }


def test_calls_of_ddp_have_the_number_of_the_bucket(rings: None) -> None:
    model = DistributedDataParallel(Stack(), bucket_cap_mb=0.001)
    found = phases(recorded(model))
    assert len(found) > 2
    assert found == [(f"backward/bucket {k}", "all_reduce") for k in range(len(found))]


def test_a_hook_of_ddp_has_the_number_of_the_bucket(rings: None) -> None:
    model = DistributedDataParallel(Stack(), bucket_cap_mb=0.001)

    def hook(_, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations as text
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, hook)
    found = phases(recorded(model))
    assert found == [(f"backward/bucket {k}", "all_reduce") for k in range(len(found))]


def test_calls_of_tensor_parallelism_have_the_name_of_the_layer(rings: None) -> None:
    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), Stack()
    for layer in model.layers:
        parallelize_module(layer, mesh, {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
    # The input of the first layer needs no gradient, so only that of the second is summed.
    assert phases(recorded(model)) == [
        ("forward/layers.0.narrow", "all_reduce"),
        ("forward/layers.1.narrow", "all_reduce"),
        ("backward/layers.1.wide", "all_reduce"),
    ]


def test_a_step_of_an_optimizer_has_a_phase(rings: None) -> None:
    model = DistributedDataParallel(Stack())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    assert ("optimizer", "broadcast") in phases(recorded(model, optimizer))


def test_a_phase_of_the_user_is_outside_also_in_threads_of_autograd(rings: None) -> None:
    model = DistributedDataParallel(Stack())
    warm_up(model)
    with record(model) as ledger, collectives.phase("mine"):
        loss = model(torch.ones(2, WIDTH)).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert phases(ledger) == [("mine/backward/bucket 0", "all_reduce")]


def test_the_dimension_of_the_mesh_is_the_axis(rings: None) -> None:
    size = dist.get_world_size()
    ranks = list(range(size if size == 2 else size - 1))
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("shard",))
    if dist.get_rank() in ranks:
        found = recorded(fully_shard(Stack(), mesh=mesh)).summary(by=("axis",))
        assert list(found) == [("" if size == 2 else "shard",)]  # all ranks are the default group


def test_nothing_is_labelled_after_the_recording(rings: None) -> None:
    model = DistributedDataParallel(Stack())
    recorded(model)
    with communicator().record() as ledger:
        step(model)
    assert phases(ledger) == [("", "all_reduce")]
    assert not model.module.layers[0]._forward_hooks


def test_a_group_of_another_backend_is_refused(rings: None) -> None:
    other = dist.new_group(backend="gloo")
    with pytest.raises(ValueError, match='does not have the backend "ring"'), record(group=other):
        pass
    dist.destroy_process_group(other)


# Against formulas


class Unit(nn.Module):
    """As many parameters as a unit of a model of `parallel`."""

    def __init__(self, num_elements: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_elements))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.sum()


def like_gpt() -> nn.Sequential:
    """A module for each unit of the GPT, of its size."""
    units = gpt(num_layers=2, hidden=24).units.values()
    sizes = [sum(torch.Size(each.shape).numel() for each in unit.values()) for unit in units]
    return nn.Sequential(*map(Unit, sizes))


def fsdp(model: nn.Sequential, **how: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in model:
        fully_shard(unit, mesh=mesh, **how)
    return fully_shard(model, mesh=mesh, **how)


SAME: dict[str, tuple[Callable[[nn.Sequential], nn.Module], Sharding]] = {
    "DDP": (DistributedDataParallel, Sharding.ddp()),
    "FSDP2": (fsdp, Sharding.zero(3)),
    "FSDP2, parameters kept": (
        lambda model: fsdp(model, reshard_after_forward=False),
        Sharding.zero(3, keep_after_forward=True),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_pytorch_sends_what_parallel_predicts_for_the_same_strategy(name: str, rings: None) -> None:
    divide, sharding = SAME[name]
    predicted = Counter[tuple[str, str]]()
    mesh, recipe = Mesh(communicator()), Recipe(dtype="float32")
    trainer = Trainer(mesh, gpt(num_layers=2, hidden=24), recipe, sharding=sharding)
    for call in trainer.traffic(1, batch=(dist.get_world_size(), 8)):
        part = call.phase.partition("/")[0]
        if part in ("forward", "backward"):
            predicted[part, call.collective] += call.sent(dist.get_world_size()).bytes
    mesh.free()
    ledger = recorded(divide(like_gpt())).gather()
    if ledger is not None:
        sent = Counter[tuple[str, str]]()
        for (phase, collective), found in ledger.summary().items():
            sent[phase.partition("/")[0], collective] += found.bytes
        assert sent == predicted


def backward_of(model: nn.Module, budget: int) -> None:
    """A step whose backward pass may send so many bytes."""
    sent = {"backward/bucket 0": Traffic(bytes=budget)}
    with record(model), assert_traffic(communicator(), phases=sent):
        step(model)


def test_a_budget_is_kept_or_the_test_fails(rings: None) -> None:
    model = DistributedDataParallel(Stack())
    warm_up(model)
    num_bytes = sum(each.numel() * each.element_size() for each in model.parameters())
    budget = 2 * (dist.get_world_size() - 1) * num_bytes
    backward_of(model, budget)
    with pytest.raises(AssertionError, match=f"sent {budget} bytes, expected {budget - 1}"):
        backward_of(model, budget - 1)
