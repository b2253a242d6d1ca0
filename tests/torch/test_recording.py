"""What process groups send is recorded by module, bucket and mesh, and is what formulas say."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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
from bench.torch.strategies import STRATEGIES, Strategy
from bench.torch.transformer import Sizes, TrainingStep, transformer
from collectives import Ledger
from collectives.diagnostics import unseen
from collectives.testing import Traffic, assert_traffic
from collectives.torch import Options, communicator, record
from collectives.torch.recording import note_backends
from parallel import Mesh, PredictedCall, Recipe, Sharding, Trainer, gpt

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
    calls = phases(recorded(fully_shard(model, mesh=mesh)))
    assert calls[:2] == [(f"forward/layers.{k}", "all_gather") for k in (0, 1)]
    assert ("backward/layers.0", "all_gather") in calls
    assert {row for row in calls if row[1] == "reduce_scatter"} == {
        (f"backward/layers.{k}", "reduce_scatter") for k in (0, 1)
    }


def test_calls_of_ddp_have_the_number_of_the_bucket(rings: None) -> None:
    model = DistributedDataParallel(Stack(), bucket_cap_mb=0.001)
    calls = phases(recorded(model))
    assert len(calls) > 2
    assert calls == [(f"backward/bucket {k}", "all_reduce") for k in range(len(calls))]


def test_a_hook_of_ddp_has_the_number_of_the_bucket(rings: None) -> None:
    model = DistributedDataParallel(Stack(), bucket_cap_mb=0.001)

    def hook(_, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations as text
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, hook)
    calls = phases(recorded(model))
    assert calls == [(f"backward/bucket {k}", "all_reduce") for k in range(len(calls))]


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
        summary = recorded(fully_shard(Stack(), mesh=mesh)).summary(by=("axis",))
        assert list(summary) == [("" if size == 2 else "shard",)]  # all ranks are the default group


def test_nothing_is_labelled_after_the_recording(rings: None) -> None:
    model = DistributedDataParallel(Stack())
    recorded(model)
    with communicator().record() as ledger:
        step(model)
    assert phases(ledger) == [("", "all_reduce")]
    assert not model.module.layers[0]._forward_hooks


def test_a_recording_inside_another_one_changes_nothing_after_its_end(rings: None) -> None:
    model = DistributedDataParallel(Stack())
    warm_up(model)
    with record(model) as outer:
        with record(model) as inner:
            step(model)
        step(model)
    assert phases(inner) == [("backward/bucket 0", "all_reduce")]
    ((_, total),) = outer.summary().items()
    assert phases(outer) == phases(inner) and total.calls == 2


def test_a_step_of_an_optimizer_that_fails_labels_nothing_after_it(rings: None) -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            dist.all_reduce(torch.ones(1))
            raise ArithmeticError("on purpose")

    with record() as ledger:
        with pytest.raises(ArithmeticError):
            Failing(Stack().parameters(), lr=0.1).step()
        dist.barrier()
    assert phases(ledger) == [("optimizer", "all_reduce"), ("", "barrier")]


def test_a_group_that_is_made_while_a_model_is_recorded_is_not_labelled_later(rings: None) -> None:
    with record(Stack()):
        group = dist.new_group(list(range(dist.get_world_size())))
    model = DistributedDataParallel(Stack(), process_group=group)
    warm_up(model)
    with communicator(group).record() as ledger:
        step(model)
    assert phases(ledger) == [("", "all_reduce")]


def test_a_group_of_another_backend_is_refused(rings: None) -> None:
    other = dist.new_group(backend="gloo")
    with pytest.raises(ValueError, match='does not have the backend "ring"'), record(group=other):
        pass
    dist.destroy_process_group(other)


# Against the formulas of `parallel`


class Unit(nn.Module):
    """As many parameters as a unit of a model of `parallel`."""

    def __init__(self, num_elements: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_elements))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.sum()


def like_gpt() -> nn.Sequential:
    """A module for each unit of the GPT, of its size."""
    units = gpt(num_layers=2, hidden=SIZES.hidden, context=SIZES.context).units.values()
    sizes = [sum(torch.Size(leaf.shape).numel() for leaf in unit.values()) for unit in units]
    return nn.Sequential(*map(Unit, sizes))


def predicted(
    axes: dict[str, int], sharding: Sharding | None, sequence: str | None
) -> list[PredictedCall]:
    """The calls that `parallel` predicts for a step of a GPT of the sizes of `SIZES`."""
    mesh = Mesh(communicator(), **axes)
    model = gpt(
        num_layers=2,
        hidden=SIZES.hidden,
        context=SIZES.context,
        mesh=mesh if "tensor" in axes else None,
        sequence_parallel=sequence,
    )
    more = {} if sharding is None else {"sharding": sharding}
    trainer = Trainer(mesh, model, Recipe(dtype="float32"), **more)
    rows = SIZES.rows * dist.get_world_size() // axes.get("tensor", 1)
    calls = trainer.traffic(1, batch=(rows, SIZES.context))
    mesh.free()
    return calls


def divided(model: nn.Sequential, **how: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in model:
        fully_shard(unit, mesh=mesh, **how)
    return fully_shard(model, mesh=mesh, **how)


WHOLE: dict[str, tuple[Callable[[nn.Sequential], nn.Module], Sharding]] = {
    "DDP": (DistributedDataParallel, Sharding.ddp()),
    "FSDP2": (divided, Sharding.zero(3)),
    "FSDP2, parameters kept": (
        lambda model: divided(model, reshard_after_forward=False),
        Sharding.zero(3, keep_after_forward=True),
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_pytorch_sends_what_parallel_predicts_for_the_same_strategy(name: str, rings: None) -> None:
    divide, sharding = WHOLE[name]
    size, wanted = dist.get_world_size(), Counter[tuple[str, str]]()
    for call in predicted({"data": size}, sharding, None):
        part = call.phase.partition("/")[0]
        if part in ("forward", "backward"):
            wanted[part, call.collective] += call.sent(size).bytes
    ledger = recorded(divide(like_gpt())).gather()
    if ledger is not None:
        sent = Counter[tuple[str, str]]()
        for (phase, collective), row in ledger.summary().items():
            sent[phase.partition("/")[0], collective] += row.bytes
        assert sent == wanted


# Of other strategies only blocks: PyTorch divides the embedding and the head in another way.
BLOCK = re.compile(r"(forward|backward|replicate)/(?:layers\.|block)(\d+)")
AXES = {"data": "dp", "tensor": "tp"}  # the other names of both are equal
SIZES = Sizes(hidden=24, vocabulary=32, context=12, rows=2)
BLOCKS: dict[str, tuple[str, Sharding | None, str | None]] = {
    "FSDP2": ("data", Sharding.zero(3), None),
    "FSDP2, kept": ("data", Sharding.zero(3, keep_after_forward=True), None),
    "HSDP": ("replicate shard", Sharding.hsdp(), None),
    "TP, one input": ("tensor", None, None),
    "TP and SP": ("tensor", None, "keep"),
    "FSDP2 x TP": ("data tensor", Sharding.zero(3), None),
}


def of_blocks(calls: Iterable[tuple[str, str, str, int]]) -> Counter[tuple[str, ...]]:
    """The bytes that calls of blocks send, by pass, number of the block, axis and collective."""
    totals = Counter[tuple[str, ...]]()
    for phase, axis, collective, num_bytes in calls:
        if block := BLOCK.match(phase):
            step = "forward" if block[1] == "forward" else "backward"
            totals[step, block[2], axis, collective] += num_bytes
    return totals


def served() -> Iterator[tuple[Strategy, dict[str, int]]]:
    """The strategies that this number of ranks can run, and their meshes in `parallel`."""
    size = dist.get_world_size()
    for strategy in STRATEGIES:
        names = BLOCKS[strategy.name][0].split() if strategy.name in BLOCKS else []
        divides_heads = "tensor" in names and size == 3
        if (len(names) == 1 and not divides_heads) or (len(names) == 2 and size == 4):
            yield strategy, dict(zip(names, strategy.shape(size), strict=True))


def test_blocks_send_what_parallel_predicts_for_the_same_strategy(rings: None) -> None:
    size, names = dist.get_world_size(), list[str]()
    by_strategy: dict[str, tuple[Counter[tuple[str, ...]], Counter[tuple[str, ...]]]] = {}
    for strategy, axes in served():
        _, sharding, sequence = BLOCKS[strategy.name]
        wanted = of_blocks(
            (
                call.phase,
                AXES.get(call.axis, call.axis) if len(axes) > 1 else "",
                call.collective,
                call.sent(size).bytes,
            )
            for call in predicted(axes, sharding, sequence)
        )
        mesh = init_device_mesh("cpu", strategy.shape(size), mesh_dim_names=strategy.names)
        step = TrainingStep(strategy.divide(transformer(SIZES), mesh), SIZES, seed=0)
        step()
        with record(step.model) as ledger:
            step()
        if (whole := ledger.gather()) is not None:
            summary = whole.summary(("phase", "axis", "collective"))
            by_strategy[strategy.name] = (
                of_blocks((*key, row.bytes) for key, row in summary.items()),
                wanted,
            )
        names.append(strategy.name)
    for name, (sent, wanted) in by_strategy.items():
        assert sent == wanted and len(sent) >= 4, name
    assert len(names) == {2: 4, 3: 2, 4: 6}[size]


def backward_of(model: nn.Module, budget: int) -> None:
    """A step whose backward pass may send so many bytes."""
    sent = {"backward/bucket 0": Traffic(bytes=budget)}
    with record(model), assert_traffic(communicator(), phases=sent):
        step(model)


def test_a_budget_is_kept_or_the_test_fails(rings: None) -> None:
    model = DistributedDataParallel(Stack())
    warm_up(model)
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    budget = 2 * (dist.get_world_size() - 1) * num_bytes
    backward_of(model, budget)
    with pytest.raises(AssertionError, match=f"sent {budget} bytes, expected {budget - 1}"):
        backward_of(model, budget - 1)


def test_other_backends_are_noted_once_and_in_their_order() -> None:
    before = len(unseen())
    note_backends("cpu:one,cuda:ring,xpu:two,hpu:three,mps:four,meta:one")
    noted = [sentence.split()[8].rstrip(",") for sentence in unseen()[before:]]
    assert noted == ["one", "two", "three", "four"]
