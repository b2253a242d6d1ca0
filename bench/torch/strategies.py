"""PyTorch's training strategies for the small transformer, and the calls that each makes in a step.

A strategy divides a model over a mesh, and predicts, from the sizes of the model alone, every call
of a step.  Numbers are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from parallel import PredictedCall

ALGORITHM, ITEMSIZE = "ring", 4
COLUMNS = "attention.query", "attention.key", "attention.value", "mlp.up"
LAST = {"attention": "attention.out", "mlp": "mlp.down"}  # of each part, the layer divided by rows
BUCKET = 0.05  # MiB
Groups = tuple[tuple[int, ...], ...]


class Axis(NamedTuple):
    """A dimension of the mesh: its name, and its groups of ranks."""

    name: str
    groups: Groups

    @property
    def size(self) -> int:
        """The number of ranks of a group."""
        return len(self.groups[0])

    def call(self, phase: str, collective: str, num_elements: int) -> PredictedCall:
        """Return a call on whole tensors of so many elements."""
        counts: Any = num_elements
        if collective != "all_reduce":
            counts = (num_elements // self.size,) * self.size
        return PredictedCall(
            phase, collective, ALGORITHM, counts, ITEMSIZE, groups=self.groups, axis=self.name
        )


def axes_of(shape: Sequence[int], names: Sequence[str]) -> dict[str, Axis]:
    """Return the dimensions of a mesh of all ranks; one dimension alone is the default group."""
    ranks = np.arange(np.prod(shape)).reshape(shape)
    axes = {}
    for place, name in enumerate(names):
        rows = np.moveaxis(ranks, place, -1).reshape(-1, shape[place]).tolist()
        axes[name] = Axis(name if len(names) > 1 else "", tuple(map(tuple, rows)))
    return axes


Axes = dict[str, Axis]
Calls = Iterator[PredictedCall]


class Strategy(NamedTuple):
    """A strategy; of two dimensions of its mesh, with these `names`, the first has two ranks."""

    name: str
    names: tuple[str, ...]
    divide: Callable[[Any, Any], Any]
    calls: Callable[[Any, Axes], Calls]

    def shape(self, size: int) -> tuple[int, ...]:
        """Return the shape of its mesh of so many ranks."""
        return (size,) if len(self.names) == 1 else (2, size // 2)

    def predicted(self, model: Any, size: int) -> list[PredictedCall]:
        """Return the calls of a step, with the name of the strategy as the outermost phase."""
        axes = axes_of(self.shape(size), self.names)
        calls = self.calls(model, axes)
        return [replace(call, phase=f"{self.name}/{call.phase}") for call in calls]


def ddp(model: Any, mesh: Any, **how: Any) -> Any:
    """Give every rank all parameters; average gradients in buckets."""
    return DistributedDataParallel(model, process_group=mesh.get_group(), **how)


def ddp_calls(model: Any, axes: Axes) -> Calls:
    """Yield an all-reduce for each bucket, filled from the last parameter to the first."""
    sizes, full = [0], BUCKET * 2**20
    for parameter in reversed(list(model.parameters())):
        if sizes[-1] * ITEMSIZE >= full:
            sizes.append(0)
        sizes[-1] += parameter.numel()
    for number, size in enumerate(sizes):
        yield axes["dp"].call(f"backward/bucket {number}", "all_reduce", size)


def fsdp(model: Any, mesh: Any, **how: Any) -> Any:
    """Give every rank a part of each parameter; gather each block when it is needed."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **how)
    return fully_shard(model, mesh=mesh, **how)


def units_of(model: Any) -> dict[str, int]:
    """Return the elements of what FSDP gathers at once: each block, and the rest of the model."""
    layers = {f"/layers.{k}": num_elements(layer) for k, layer in enumerate(model.layers)}
    return {"": num_elements(model) - sum(layers.values()), **layers}


def num_elements(module: Any) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def sharded(units: dict[str, int], axis: Axis, *, keeps: bool = False) -> Calls:
    """Yield the calls for units of these sizes; the root is kept after its forward pass."""
    for unit, size in units.items():
        yield axis.call(f"forward{unit}", "all_gather", size)
        if unit and not keeps:
            yield axis.call(f"backward{unit}", "all_gather", size)
        yield axis.call(f"backward{unit}", "reduce_scatter", size)


def fsdp_calls(model: Any, axes: Axes, *, keeps: bool = False) -> Calls:
    """Yield two all-gathers and a reduce-scatter for each block; one if it `keeps` parameters."""
    return sharded(units_of(model), axes["dp"], keeps=keeps)


def hsdp_calls(model: Any, axes: Axes) -> Calls:
    """Yield the calls of a group that shares the parameters, and all-reduces of each part."""
    units, shard = units_of(model), axes["shard"]
    yield from sharded(units, shard)
    for unit, size in units.items():
        yield axes["replicate"].call(f"backward{unit}", "all_reduce", size // shard.size)


def tensor(model: Any, mesh: Any) -> Any:
    """Divide linear layers by columns and then by rows, as in Megatron."""
    plan = {name: ColwiseParallel() for name in COLUMNS}
    plan |= {name: RowwiseParallel() for name in LAST.values()}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    return model


def tensor_sharing(model: Any, mesh: Any) -> Any:
    """Do the same, with one distributed tensor as the input of query, key and value."""
    one = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    for layer in tensor(model, mesh).layers:
        parallelize_module(layer, mesh, dict.fromkeys(LAST, one))
    return model


def tensor_calls(model: Any, axes: Axes, inputs: Sequence[str] = COLUMNS) -> Calls:
    """Yield all-reduces of activations and of gradients.

    Of activations behind each layer that is divided by rows, and of the gradient of each input of a
    layer that is divided by columns.
    """
    outputs = [f"forward/layers.{{}}.{name}" for name in LAST.values()]
    for phase in [*outputs, *(f"backward/layers.{{}}.{name}" for name in inputs)]:
        for k in range(len(model.layers)):
            yield axes["tp"].call(phase.format(k), "all_reduce", num_activations(model))


def tensor_sharing_calls(model: Any, axes: Axes) -> Calls:
    """Return two all-reduces for each block in each direction, as the papers count."""
    return tensor_calls(model, axes, inputs=tuple(LAST))


def num_activations(model: Any) -> int:
    """Return the elements that a rank has between two layers."""
    sizes = model.sizes
    return int(sizes.rows * sizes.context * sizes.hidden)


def sequence(model: Any, mesh: Any) -> Any:
    """Give ranks parts of the sequence where linear layers are not divided, as in Megatron."""
    tokens, whole = Shard(1), Replicate()
    gathered = PrepareModuleInput(input_layouts=tokens, desired_input_layouts=whole)
    plan: dict[str, Any] = {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    plan |= {**dict.fromkeys(LAST, gathered), **{name: ColwiseParallel() for name in COLUMNS}}
    plan |= {name: RowwiseParallel(output_layouts=tokens) for name in LAST.values()}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    ends = {
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=tokens),
        "head": ColwiseParallel(input_layouts=tokens, output_layouts=whole),
    }
    return parallelize_module(model, mesh, ends)


def sequence_calls(model: Any, axes: Axes) -> Calls:
    """Yield a gather before each divided part and a reduce-scatter after it.

    In the backward pass it is the reverse; the optimizer sums the gradients of the norms.
    """
    call, activations = axes["tp"].call, num_activations(model)
    yield call("forward/embedding", "reduce_scatter", activations)
    yield call("backward/embedding", "all_gather", activations)
    for k, layer in enumerate(model.layers):
        for part, last in LAST.items():
            yield call(f"forward/layers.{k}.{part}", "all_gather", activations)
            yield call(f"forward/layers.{k}.{last}", "reduce_scatter", activations)
            yield call(f"backward/layers.{k}.{last}", "all_gather", activations)
            yield call(f"backward/layers.{k}.{part}", "reduce_scatter", activations)
        for parameter in (*layer.norm1.parameters(), *layer.norm2.parameters()):
            yield call("optimizer", "all_reduce", parameter.numel())
    sizes = model.sizes
    yield call("forward/head", "all_gather", activations)
    yield call("forward/head", "all_gather", sizes.rows * sizes.context * sizes.vocabulary)
    yield call("backward/head", "reduce_scatter", activations)


def fsdp_tensor(model: Any, mesh: Any) -> Any:
    """Divide each block among the ranks of a row of the mesh, and its parts among columns."""
    return fsdp(tensor_sharing(model, mesh["tp"]), mesh["dp"])


def fsdp_tensor_calls(model: Any, axes: Axes) -> Calls:
    """Yield FSDP's calls for a rank's part of each block, and those of tensor parallelism."""
    units = units_of(model)
    for k, layer in enumerate(model.layers):
        units[f"/layers.{k}"] = part_of(layer, axes["tp"].size)
    yield from sharded(units, axes["dp"])
    yield from tensor_sharing_calls(model, axes)


def part_of(layer: Any, size: int) -> int:
    """Return the elements of a block on one of `size` ranks; norms and biases are not divided."""
    whole = ("norm1", "norm2", *(f"{name}.bias" for name in LAST.values()))
    parameters = layer.named_parameters()
    return sum(p.numel() // (1 if name.startswith(whole) else size) for name, p in parameters)


STRATEGIES = (
    Strategy("DDP", ("dp",), partial(ddp, bucket_cap_mb=BUCKET), ddp_calls),
    Strategy("FSDP2", ("dp",), fsdp, fsdp_calls),
    Strategy(
        "FSDP2, kept",
        ("dp",),
        partial(fsdp, reshard_after_forward=False),
        partial(fsdp_calls, keeps=True),
    ),
    Strategy("HSDP", ("replicate", "shard"), fsdp, hsdp_calls),
    Strategy("TP", ("tp",), tensor, tensor_calls),
    Strategy("TP, one input", ("tp",), tensor_sharing, tensor_sharing_calls),
    Strategy("TP and SP", ("tp",), sequence, sequence_calls),
    Strategy("FSDP2 x TP", ("dp", "tp"), fsdp_tensor, fsdp_tensor_calls),
)
