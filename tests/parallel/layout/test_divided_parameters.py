"""A layer that divides its parameters along an axis of the mesh trains beside any sharding.

The layer is the simplest one there is: its columns are divided, its output is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import collectives
from collectives import Communicator, even_counts
from parallel import (
    Int8Blocks,
    Mesh,
    ModelMismatch,
    PowerSGD,
    PredictedCall,
    RankView,
    Recipe,
    Sharding,
    TrafficMismatch,
    TrafficTable,
    Trainer,
    checkpoint,
)
from parallel.commands.rank_report import RankReport, differences
from parallel.nn import (
    Activations,
    Array,
    ArraySpec,
    CrossEntropy,
    Embedding,
    Gelu,
    Layer,
    LayerTraffic,
    Linear,
    Model,
    ParameterSpec,
    Recompute,
    Step,
)
from tests.parallel.training import CONTEXT, ROWS, batch, kept_by, nothing

HIDDEN, WIDTH, STEPS = 6, 7, 3
SHARDINGS: dict[str, Callable[[], Sharding]] = {
    "ddp": Sharding.ddp,
    "ddp, a bucket a layer": partial(Sharding.ddp, bucket_bytes=1),
    "zero1": partial(Sharding.zero, 1),
    "zero2": partial(Sharding.zero, 2),
    "zero3": partial(Sharding.zero, 3),
    "hsdp": Sharding.hsdp,
}
every = pytest.mark.parametrize("name", SHARDINGS)


class ColumnLinear(Layer):
    """x @ weight, of which each rank along an axis has some columns; the output is gathered."""

    def __init__(self, in_features: int, out_features: int, mesh: Mesh, axis: str) -> None:
        super().__init__()
        self.shape, self.mesh, self.axis = (in_features, out_features), mesh, axis

    @property
    def counts(self) -> tuple[int, ...]:
        return even_counts(self.shape[1], self.mesh.size_of(self.axis))

    @property
    def comm(self) -> Communicator:
        comm = self.mesh[self.axis]
        assert comm is not None
        return comm

    def specs(self) -> dict[str, ParameterSpec]:
        std = 1 / math.sqrt(self.shape[0])
        return {"weight": ParameterSpec(self.shape, std, splits=((1, self.axis),))}

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        rows = x.reshape(-1, self.shape[0])
        columns = np.ascontiguousarray((rows @ self.value["weight"]).T)
        gathered = self.comm.all_gather(columns, counts=self.counts, algorithm="ring")
        return gathered.T.reshape(*x.shape[:-1], self.shape[1]), x

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        me = self.mesh.index(self.axis)
        first = sum(self.counts[:me])
        mine = dy.reshape(-1, self.shape[1])[:, first : first + self.counts[me]]
        dx = self.comm.all_reduce(mine @ self.value["weight"].T, algorithm="ring")
        return dx.reshape(saved.shape), (saved, mine)

    def backward_weight(self, rest: Any) -> None:
        x, dy = rest
        self.gradient["weight"] += x.reshape(-1, self.shape[0]).T @ dy

    def activation_bytes(self, x: ArraySpec) -> Activations:
        return Activations(x.nbytes, x.of_shape(*x.shape[:-1], self.shape[1]))

    def traffic(self, x: ArraySpec) -> LayerTraffic:
        rows = math.prod(x.shape[:-1])
        call = partial(PredictedCall, phase="", algorithm="ring", itemsize=x.width, axis=self.axis)
        gather = call(collective="all_gather", counts=tuple(rows * n for n in self.counts))
        return LayerTraffic(
            (gather,), (call(collective="all_reduce", counts=rows * self.shape[0]),)
        )


def model(mesh: Mesh | None, axis: str = "tensor") -> Model:
    """On a mesh without the axis, the layer is a plain one with the same initial values."""
    has_axis = mesh is not None and axis in mesh.axes
    up = ColumnLinear(HIDDEN, WIDTH, mesh, axis) if mesh is not None and has_axis else Plain()
    layers = {
        "embedding": Embedding(256, CONTEXT, HIDDEN),
        "up": up,
        "gelu": Gelu(),
        "head": Linear(WIDTH, 256),
        "loss": CrossEntropy(),
    }
    return Model(layers, mesh=mesh if has_axis else None)


class Plain(Linear):
    """What `ColumnLinear` computes, on one rank."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, WIDTH)

    def specs(self) -> dict[str, ParameterSpec]:
        return {"weight": super().specs()["weight"]}

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        return x @ self.value["weight"], x

    def backward_weight(self, rest: Any) -> None:
        x, dys = rest
        self.gradient["weight"] += x.reshape(-1, HIDDEN).T @ dys


class End(NamedTuple):
    """Of one rank; `table` on rank 0 only."""

    losses: list[float]
    memory: dict[str, tuple[int, int]]
    report: RankReport
    table: TrafficTable | None


def axes_of(name: str, size: int, tensor: int) -> dict[str, int]:
    data = size // tensor
    if name == "hsdp":
        return {"replicate": 2, "shard": data // 2, "tensor": tensor}
    return {"data": data, "tensor": tensor}


def run(
    name: str,
    size: int,
    tensor: int,
    recipe: Recipe | None = None,
    of: Callable[[Mesh], Model] = model,
    make_sharding: Callable[[], Sharding] | None = None,
) -> list[End]:
    """Train by a sharding of this name, or by another one on the same mesh."""

    def fn(comm: Communicator) -> End:
        mesh = Mesh(comm, **axes_of(name, size, tensor))
        trainer = Trainer(mesh, of(mesh), recipe, sharding=(make_sharding or SHARDINGS[name])())
        with comm.record() as ledger:
            trainer.start()
            losses = trainer.train(STEPS, batch, ROWS * CONTEXT, nothing)
        whole, skipped = ledger.gather(), trainer.updates.num_skipped
        table = None
        if whole is not None:
            calls = trainer.traffic(STEPS, batch=(ROWS, CONTEXT), num_skipped=skipped)
            table = TrafficTable(calls, whole, None, size=comm.size)
        rows = len(batch(0, *trainer.batch_part)[0])
        report = RankReport.of(trainer, STEPS - skipped, rows, CONTEXT)
        return End(losses, kept_by(trainer), report, table)

    ends: list[End] = collectives.run(fn, size=size)
    return ends


def serial(recipe: Recipe | None = None) -> list[float]:
    trainer = Trainer(None, model(None), recipe)
    trainer.start()
    return trainer.train(STEPS, batch, ROWS * CONTEXT, nothing)


@every
@pytest.mark.parametrize(("size", "tensor"), [(4, 2), (6, 3), (8, 2)])
@pytest.mark.slow
def test_losses_traffic_and_memory_are_as_predicted(name: str, size: int, tensor: int) -> None:
    recipe = Recipe(num_micro_batches=2, clip=0.1)  # smaller than the gradient: the norm counts
    ends, of_one_rank = run(name, size, tensor, recipe), serial(recipe)
    for end in ends:
        np.testing.assert_allclose(end.losses, of_one_rank, rtol=1e-12)
        assert all(formula == counted for formula, counted in end.memory.values())
    assert ends[0].table is not None and ends[0].table.check()
    assert set(ends[0].table.axes) >= {"tensor"}
    assert differences([end.report for end in ends]) == []


@every
def test_half_precision_skips_the_same_updates_everywhere(name: str) -> None:
    ends = run(name, 4, 2, Recipe("float16", num_micro_batches=2))
    assert len({tuple(end.losses) for end in ends}) == 1
    assert ends[0].table is not None and ends[0].table.check()


def test_a_layer_that_runs_again_sends_again() -> None:
    """What it sends forward is sent in backward, too."""

    def again(mesh: Mesh) -> Model:
        whole = model(mesh)
        layers = whole.layers | {"up": Recompute(whole.layers["up"])}
        return Model(layers, mesh=mesh)

    plain, twice = (run("zero2", 4, 2, of=of)[0].table for of in (model, again))
    assert plain is not None and twice is not None and twice.check()
    gathers = [row for row in twice.rows if row.phase == "backward/up"]
    assert {row.collective for row in gathers} == {"all_gather", "all_reduce"}
    assert twice.matrix.sum() > plain.matrix.sum()


def test_what_a_layer_does_not_say_is_noticed() -> None:
    """The negative control: it sends one element more than it says."""

    class Modest(ColumnLinear):
        def traffic(self, x: ArraySpec) -> LayerTraffic:
            forward, (total,) = super().traffic(x)
            return LayerTraffic(forward, (PredictedCall(**vars(total) | {"counts": 1}),))

    def of(mesh: Mesh) -> Model:
        layers = model(mesh).layers
        return Model(layers | {"up": Modest(HIDDEN, WIDTH, mesh, "tensor")}, mesh=mesh)

    table = run("ddp", 4, 2, of=of)[0].table
    assert table is not None
    with pytest.raises(TrafficMismatch, match="axis tensor: the matrix predicted is not the one"):
        table.check()


def test_a_norm_that_counts_copies_twice_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankView, "is_first_copy", lambda *_: True)
    recipe = Recipe(clip=0.1)
    assert not np.allclose(run("ddp", 4, 2, recipe)[0].losses, serial(recipe), rtol=1e-9)


def test_the_traffic_of_layers_needs_the_shape_of_the_batch() -> None:
    def refused(comm: Communicator) -> str:
        mesh = Mesh(comm, data=1, tensor=2)
        trainer = Trainer(mesh, model(mesh), sharding=Sharding.zero(1))
        with pytest.raises(ValueError, match="pass batch=") as info:
            trainer.traffic(1)
        return str(info.value)

    assert len(set(collectives.run(refused, size=2))) == 1


def test_a_model_of_another_mesh_is_refused() -> None:
    def refused(comm: Communicator) -> None:
        with pytest.raises(ValueError, match="made for another mesh"):
            Trainer(Mesh(comm, data=1, tensor=2), model(Mesh(comm, data=1, tensor=2)))

    collectives.run(refused, size=2)


def test_what_both_divide_is_refused() -> None:
    def refused(comm: Communicator) -> None:
        mesh = Mesh(comm, data=2)
        with pytest.raises(ValueError, match="both the model and the sharding divide along 'data'"):
            Trainer(mesh, model(mesh, axis="data"), sharding=Sharding.zero(1))

    collectives.run(refused, size=2)


@pytest.mark.parametrize("sharding", [Sharding.ddp, Sharding])
def test_an_axis_that_nothing_uses_is_refused(sharding: Callable[[], Sharding]) -> None:
    def refused(comm: Communicator) -> None:
        mesh = Mesh(comm, data=1, tensor=2)
        with pytest.raises(ValueError, match="neither the model nor the sharding uses"):
            Trainer(mesh, model(None), sharding=sharding())

    collectives.run(refused, size=2)


@pytest.mark.parametrize(
    "make", [lambda: Sharding.ddp(hook=PowerSGD(1)), lambda: Sharding.local_updates(every=2)]
)
def test_hooks_that_keep_arrays_are_refused(make: Callable[[], Sharding]) -> None:
    def refused(comm: Communicator) -> None:
        mesh = Mesh(comm, data=1, tensor=2)
        with pytest.raises(ValueError, match="does not work beside a divided model"):
            Trainer(mesh, model(mesh), sharding=make())

    collectives.run(refused, size=2)


def test_ranks_that_begin_with_other_values_are_noticed() -> None:
    def refused(comm: Communicator) -> None:
        mesh = Mesh(comm, data=2, tensor=2)
        recipe = Recipe(seed=mesh.coordinates["tensor"])
        trainer = Trainer(mesh, model(mesh), recipe, sharding=Sharding.ddp())
        with pytest.raises(ModelMismatch, match="embedding of ranks 1, 3"):
            trainer.start()

    collectives.run(refused, size=4)


def test_copies_along_the_axis_stay_equal_when_sums_are_rounded() -> None:
    """Blocks of eight bits lie equally in the buckets of all ranks."""
    ends = run("ddp", 4, 2, make_sharding=lambda: Sharding.ddp(hook=Int8Blocks()))
    assert len({tuple(end.losses) for end in ends}) == 1
    assert differences([end.report for end in ends]) == []


def test_what_a_layer_sends_along_the_data_is_sent_once() -> None:
    class Sums(Gelu):
        """Sends a number along all the data, forward, and forgets it."""

        def __init__(self, mesh: Mesh) -> None:
            super().__init__()
            self.comm: Any = mesh["data", "tensor"]

        def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
            self.comm.all_reduce(np.ones(1), algorithm="ring")
            return super().forward(x, step)

        def traffic(self, x: ArraySpec) -> LayerTraffic:
            options = {"counts": 1, "itemsize": 8, "axis": "data,tensor"}
            return LayerTraffic((PredictedCall("", "all_reduce", "ring", **options),))

    def of(mesh: Mesh) -> Model:
        layers = model(mesh).layers
        return Model(layers | {"gelu": Sums(mesh)}, mesh=mesh)

    table = run("ddp", 4, 2, of=of)[0].table
    assert table is not None and table.check()


# Checkpoints


LAYOUTS = [("ddp", 1, 1), ("zero3", 4, 2), ("zero2", 3, 3), ("hsdp", 8, 2), ("zero1", 5, 1)]


def layout(comm: Communicator, name: str, size: int, tensor: int) -> Trainer:
    mesh = Mesh(comm, **axes_of(name, size, tensor))
    return Trainer(mesh, model(mesh), sharding=SHARDINGS[name]())


def boxes(trainer: Trainer, root: Path) -> dict[str, bytes]:
    """What a checkpoint of one rank contains of the same state."""
    checkpoint.save(trainer, root, STEPS)
    (file,) = (root / f"step-{STEPS:08d}").glob("*.safetensors")
    return {file.name: file.read_bytes()}


@pytest.mark.parametrize("saved", LAYOUTS)
@pytest.mark.parametrize("loaded", LAYOUTS)
@pytest.mark.slow
def test_a_checkpoint_of_any_layout_is_loaded_with_any_other(
    saved: tuple[str, int, int], loaded: tuple[str, int, int], tmp_path: Path
) -> None:
    """From one layout to another and then to one rank: to the bit what the first one had."""

    def save(comm: Communicator) -> None:
        trainer = layout(comm, *saved)
        trainer.start()
        trainer.train(STEPS, batch, ROWS * CONTEXT, nothing)
        checkpoint.save(trainer, tmp_path / "first", STEPS)

    def load_and_save(comm: Communicator) -> None:
        trainer = layout(comm, *loaded)
        trainer.resume()
        assert checkpoint.load(trainer, tmp_path / "first" / f"step-{STEPS:08d}") == STEPS
        checkpoint.save(trainer, tmp_path / "second", STEPS)

    def alone(root: str) -> dict[str, bytes]:
        trainer = Trainer(Mesh(None), model(None))
        checkpoint.load(trainer, tmp_path / root / f"step-{STEPS:08d}")
        return boxes(trainer, tmp_path / f"{root}-alone")

    collectives.run(save, size=saved[1])
    collectives.run(load_and_save, size=loaded[1])
    assert alone("first") == alone("second")
