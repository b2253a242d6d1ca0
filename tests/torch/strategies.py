"""PyTorch's own parallel strategies on a small model: each returns what it has computed.

Each function is called by all ranks of a default process group, of any backend.  Models are on
PyTorch's default device, and begin with the same numbers on every device.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.distributed.tensor.parallel as tp
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import pipelining
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recomputed

from collectives.torch.versions import VERSION

Tensor: TypeAlias = torch.Tensor
Results: TypeAlias = list[Tensor]

WIDTH, HIDDEN, OUTPUTS = 12, 24, 6  # which 2, 3 and 4 ranks divide


class Block(nn.Module):
    """Two linear layers beside a connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Some blocks, the same on all ranks.  `left_out`: the block that is not used here, if any."""

    def __init__(self, num_blocks: int = 2, left_out: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        with torch.device("cpu"):
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, OUTPUTS)
            self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.left_out = left_out
        self.to(device())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            if i != self.left_out:
                x = block(x)
        return self.last(x)


def device() -> torch.device:
    return torch.get_default_device()


def batch(seed: int, rows: int = 12, width: int = WIDTH) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(rows, width, generator=generator, device="cpu").to(device())


def own_batch(step: int) -> Tensor:
    """The rows of this rank."""
    return batch(100 * step + dist.get_rank())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Plain descent: Adam would turn the last bits of a gradient near zero into whole steps."""
    return torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)


def whole(tensor: Tensor) -> Tensor:
    """A copy of a tensor, gathered if ranks have parts of it."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    draw: Callable[[int], Tensor] = own_batch,
) -> Results:
    """The losses of two steps, and the parameters and buffers afterwards."""
    optimizer, losses = optimizer or sgd(model), []
    for step in range(2):
        loss = model(draw(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return [*losses, *map(whole, model.parameters()), *map(whole, model.buffers())]


def world_mesh(name: str = "all") -> DeviceMesh:
    return init_device_mesh(device().type, (dist.get_world_size(),), mesh_dim_names=(name,))


# Data parallelism


def data_parallel(model: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    """A model whose gradients are summed in several buckets."""
    return DistributedDataParallel(model or Net(), bucket_cap_mb=0.002, **options)


def ddp() -> Results:
    return trained(data_parallel())


def ddp_with_unused_parameters() -> Results:
    """Every rank but the first leaves a block out."""
    left_out = None if dist.get_rank() == 0 else 1
    return trained(data_parallel(Net(left_out=left_out), find_unused_parameters=True))


def ddp_with_accumulation() -> Results:
    model = data_parallel()
    with model.no_sync():
        model(own_batch(7)).square().mean().backward()
    return trained(model)


def ddp_with_views_of_buckets() -> Results:
    return trained(data_parallel(gradient_as_bucket_view=True))


def ddp_with_activation_checkpointing() -> Results:
    """Blocks are computed once more for their gradients, which needs a graph that stays."""
    model = Net()
    for block in model.blocks:
        block.forward = partial(recomputed, block.forward, use_reentrant=True)
    return trained(data_parallel(model, static_graph=True))


def ddp_with_a_hook() -> Results:
    model = data_parallel()
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    return trained(model)


def ddp_in_half_precision(hook: Any) -> Results:
    """Only the gradients of two ranks are not zero: the sum of two numbers is rounded once.

    A sum of three depends on their order, by far more than the tolerance.
    """
    model = data_parallel()
    model.register_forward_hook(lambda *call: call[-1] * (dist.get_rank() < 2))
    model.register_comm_hook(None, hook)
    return trained(model)


def ddp_in_float16() -> Results:
    return ddp_in_half_precision(default_hooks.fp16_compress_hook)


def ddp_in_bfloat16() -> Results:
    return ddp_in_half_precision(default_hooks.bf16_compress_hook)


def post_local_sgd() -> Results:
    """Gradients are averaged in two groups, and parameters among all ranks in every second step."""
    ranks, model = list(range(dist.get_world_size())), data_parallel()
    group, _ = dist.new_subgroups_by_enumeration([ranks[::2], ranks[1::2]])
    model.register_comm_hook(PostLocalSGDState(None, group, 0), post_localSGD_hook)
    return trained(model, PostLocalSGDOptimizer(sgd(model), PeriodicModelAverager(period=2)))


def model_averaging() -> Results:
    """Parameters are averaged after the second step."""
    model = Net()
    averager = PeriodicModelAverager(period=2, warmup_steps=1)
    return trained(model, PostLocalSGDOptimizer(sgd(model), averager))


def ddp_with_uneven_batches() -> Results:
    """Rank r has r + 1 batches."""
    model = data_parallel()
    optimizer = sgd(model)
    with Join([model]):
        for step in range(1 + dist.get_rank()):
            model(own_batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [whole(parameter) for parameter in model.parameters()]


def ddp_with_buffers() -> Results:
    """The first rank's statistics are those of all."""
    torch.manual_seed(0)
    return trained(data_parallel(nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8))))


def zero_redundancy() -> Results:
    model = data_parallel()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    return trained(model, optimizer)


# Sharded parameters


def sharded(model: Net | None = None, mesh: DeviceMesh | None = None, **options: Any) -> Net:
    """A model whose blocks are gathered one after the other."""
    model, mesh = model or Net(), mesh or world_mesh()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def fsdp() -> Results:
    return trained(sharded())


def fsdp_that_keeps_parameters() -> Results:
    return trained(sharded(reshard_after_forward=False))


def fsdp_in_bfloat16() -> Results:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return trained(sharded(mp_policy=policy))


def fsdp_of_flat_parameters() -> Results:
    """The first version of FSDP."""
    policy = ModuleWrapPolicy({Block})
    return trained(
        FullyShardedDataParallel(Net(), auto_wrap_policy=policy, device_id=torch.device("cpu"))
    )


def hybrid_fsdp() -> Results:
    """Two replicas of sharded parameters; one where the number of ranks is odd."""
    p = dist.get_world_size()
    num_replicas = 2 if p % 2 == 0 else 1
    names = ("replica", "shard")
    mesh = init_device_mesh(device().type, (num_replicas, p // num_replicas), mesh_dim_names=names)
    return trained(sharded(mesh=mesh))


def fsdp_checkpoint() -> Results:
    """What is loaded into a new model, by the ranks that saved it."""
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = trained(model, optimizer)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, 0)
    names = ("model", "optimizer")
    saved = dict(zip(names, get_state_dict(model, optimizer), strict=True))
    checkpoint.save(saved, checkpoint_id=folder[0])
    other = sharded(Net().apply(zeroed))
    its_optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    states = dict(zip(names, get_state_dict(other, its_optimizer), strict=True))
    checkpoint.load(states, checkpoint_id=folder[0])
    set_state_dict(
        other, its_optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
    )
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    assert all(map(torch.equal, map(whole, other.parameters()), map(whole, model.parameters())))
    return [*before, *trained(other, its_optimizer)]


def zeroed(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.zeros_(parameter)


# Tensor and sequence parallelism


def tensor_parallel() -> Results:
    model, mesh = Net(), world_mesh("tp")
    for block in model.blocks:
        split(block, mesh)
    return trained(model, draw=batch)


def split(block: nn.Module, mesh: DeviceMesh) -> None:
    tp.parallelize_module(block, mesh, {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()})


def sequence_parallel() -> Results:
    """Between the linear layers each rank has some rows."""
    rows, model = Shard(0), Net()
    plan: dict[str, Any] = {
        "first": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=rows),
        "last": tp.ColwiseParallel(input_layouts=rows, output_layouts=Replicate()),
    }
    for i in range(len(model.blocks)):
        plan |= {
            f"blocks.{i}.norm": tp.SequenceParallel(sequence_dim=0),
            f"blocks.{i}.up": tp.ColwiseParallel(input_layouts=rows),
            f"blocks.{i}.down": tp.RowwiseParallel(output_layouts=rows),
        }
    return trained(tp.parallelize_module(model, world_mesh("tp"), plan), draw=batch)


def fsdp_of_tensor_parallel() -> Results:
    """Blocks are split among pairs of ranks, and what a rank has is sharded among the others."""
    p, model = dist.get_world_size(), Net()
    if p % 2:
        return []
    # PyTorch 2.11 takes a mesh of these ranks and another name for an equal one of another test,
    # whose groups have ended.
    names = ("data", "tensor")
    mesh = init_device_mesh(device().type, (p // 2, 2), mesh_dim_names=names)
    for block in model.blocks:
        split(block, mesh["tensor"])
    return trained(sharded(model, mesh["data"]), draw=batch)


def redistribution() -> Results:
    """From every placement of a tensor to every other."""
    mesh, tensors = world_mesh(), list[Tensor]()
    x = torch.arange(7 * 13.0).reshape(7, 13)  # no number of ranks divides it
    partial = DTensor.from_local(x + dist.get_rank(), mesh, [Partial()])
    placements = (Shard(0), Shard(1), Replicate())
    sources = [distribute_tensor(x, mesh, [placement]) for placement in placements]
    for source in (*sources, partial):
        for placement in placements:
            placed = source.redistribute(mesh, [placement])
            tensors += [placed.to_local().clone(), placed.full_tensor()]
    return tensors


# Pipelines


def parts_of(model: Net, num_stages: int) -> list[nn.Sequential]:
    """The stages of a model that has a block for each."""
    stages = [[block] for block in model.blocks]
    assert len(stages) == num_stages
    return [
        nn.Sequential(*[model.first][: i == 0], *stage, *[model.last][: i == num_stages - 1])
        for i, stage in enumerate(stages)
    ]


def pipeline(schedule: Any, numbers: Sequence[int], num_stages: int) -> Results:
    """The losses and gradients of one step; `numbers`: the stages of this rank."""
    p = dist.get_world_size()
    parts, count = parts_of(Net(num_stages), num_stages), 2 * p
    stages = [pipelining.PipelineStage(parts[i], i, num_stages, device()) for i in numbers]
    is_multiple = issubclass(schedule, pipelining.schedules.PipelineScheduleMulti)
    made = schedule(stages if is_multiple else stages[0], count, loss_fn=squared)
    inputs = [batch(3, 2 * count)] if 0 in numbers else []
    losses = list[Tensor]()
    if num_stages - 1 in numbers:
        made.step(*inputs, target=batch(4, 2 * count, OUTPUTS), losses=losses)
    else:
        made.step(*inputs)
    gradients = [q.grad for i in numbers for q in parts[i].parameters()]
    return [*(loss.detach() for loss in losses), *gradients]


def squared(predicted: Tensor, target: Tensor) -> Tensor:
    return (predicted - target).square().mean()


def one_stage_per_rank(schedule: Any) -> Results:
    return pipeline(schedule, [dist.get_rank()], dist.get_world_size())


def stages_in_turn(schedule: Any) -> Results:
    rank, p = dist.get_rank(), dist.get_world_size()
    return pipeline(schedule, [rank, rank + p], 2 * p)


def gpipe() -> Results:
    return one_stage_per_rank(pipelining.ScheduleGPipe)


def one_f_one_b() -> Results:
    return one_stage_per_rank(pipelining.Schedule1F1B)


def interleaved() -> Results:
    return stages_in_turn(pipelining.ScheduleInterleaved1F1B)


def interleaved_zero_bubble() -> Results:
    return stages_in_turn(pipelining.ScheduleInterleavedZeroBubble)


def zbv() -> Results:
    """Stages go to the last rank and back."""
    rank, p = dist.get_rank(), dist.get_world_size()
    return pipeline(pipelining.ScheduleZBVZeroBubble, [rank, 2 * p - 1 - rank], 2 * p)


# Compiled modules


class Communicating(nn.Module):
    """A layer followed by the three collectives of functional form."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        group = dist.group.WORLD
        summed = functional.all_reduce(self.linear(x), "sum", group)
        gathered = functional.all_gather_tensor(summed, 0, group)
        return summed + functional.reduce_scatter_tensor(gathered, "sum", 0, group)


def compiled() -> Results:
    torch.compiler.reset()  # a graph has the name of the group that it was made for
    model = torch.compile(Communicating(), fullgraph=True, backend="aot_eager")
    return [model(own_batch(0)).detach()]


def compiled_ddp() -> Results:
    """The buckets are those of PyTorch, which compiles no smaller ones."""
    torch.compiler.reset()
    return trained(torch.compile(DistributedDataParallel(Net()), backend="aot_eager"))


@torch.compile(backend="aot_eager")
def calls(x: Tensor) -> Results:
    """Collectives that are compiled, and after them those for which PyTorch leaves the graph."""
    whole = torch.cat([x] * dist.get_world_size())
    dist.all_reduce(x)
    dist.all_gather_into_tensor(whole, x + dist.get_rank())
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    parts, first = list(torch.zeros_like(whole).chunk(dist.get_world_size())), x + dist.get_rank()
    dist.all_gather(parts, first)
    dist.broadcast(first, 0)
    return [x, whole, first, *parts]


def compiled_calls() -> Results:
    torch.compiler.reset()
    return calls(own_batch(0))


# Context parallelism


def context_parallel() -> Results:
    """Attention to a sequence that the ranks divide."""
    from torch.distributed.tensor.experimental import context_parallel as divided

    p = dist.get_world_size()
    q, k, v = (batch(seed, 2 * 8 * p, 8).reshape(1, 2, 8 * p, 8) for seed in range(3))
    with divided(world_mesh(), buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
        return [F.scaled_dot_product_attention(q, k, v, is_causal=True).clone()]


STRATEGIES: dict[str, Callable[[], Results]] = {
    strategy.__name__: strategy
    for strategy in (
        ddp,
        ddp_with_unused_parameters,
        ddp_with_accumulation,
        ddp_with_a_hook,
        ddp_with_views_of_buckets,
        ddp_with_activation_checkpointing,
        ddp_in_float16,
        ddp_in_bfloat16,
        post_local_sgd,
        model_averaging,
        ddp_with_uneven_batches,
        ddp_with_buffers,
        zero_redundancy,
        fsdp,
        fsdp_that_keeps_parameters,
        fsdp_in_bfloat16,
        hybrid_fsdp,
        fsdp_checkpoint,
        fsdp_of_flat_parameters,
        tensor_parallel,
        sequence_parallel,
        fsdp_of_tensor_parallel,
        redistribution,
        gpipe,
        one_f_one_b,
        interleaved,
        interleaved_zero_bubble,
        zbv,
        compiled,
        compiled_ddp,
        compiled_calls,
    )
}
# These add nothing up between ranks, or whole numbers only, so that every bit must be the same.
ONLY_MOVED = {"redistribution", "gpipe", "one_f_one_b", "interleaved"}
ONLY_MOVED |= {"interleaved_zero_bubble", "zbv"}


def names() -> list[str]:
    """The strategies that this version of PyTorch runs under Gloo."""
    return [name for name in STRATEGIES if name != "zbv" or VERSION >= (2, 13)]  # before, it hangs
