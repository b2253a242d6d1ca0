"""Data parallelism: buckets that travel while backward runs, and layers that some do not use.

What it has in common with the other strategies is tested in `test_strategies.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator
from parallel import PredictedCall, Recipe, TrafficMismatch, Trainer
from parallel.accounts import Tally
from parallel.layout import Stages
from parallel.nn import Array, Model
from parallel.optim import AdamW
from parallel.pipeline import make
from parallel.sharding import AllReduce, CommHook, Completion, HalfPrecision, PowerSGD
from parallel.step import LayerBackward, Reduce, Update, WaitForCalls
from parallel.strategies.elastic import BlockingAllReduce
from tests.parallel.training import (
    CONTEXT,
    ROWS,
    End,
    batch,
    ddp,
    model,
    nothing,
    of_kind,
    serial,
    train,
    verdict,
    whole,
)

TOTAL = ROWS * CONTEXT
A_BUCKET_A_LAYER = 1  # byte


def backward_order(of: Model) -> list[str]:
    """Units in the order in which backward completes their gradients."""
    stages = Stages(of, make("1f1b", 1, 1))
    return [unit for layer in reversed(of.layers) for unit in stages.completed_units(layer)]


# Buckets

EMBEDDING, BLOCK, HEAD = (
    model().unit_sizes["embedding"],
    model().unit_sizes["block0"],
    model().unit_sizes["head"],
)
LIMITS = {  # bytes, and the buckets that they make
    "a byte": (A_BUCKET_A_LAYER, [["head"], ["block1"], ["block0"], ["embedding"]]),
    "two blocks": (8 * 2 * BLOCK, [["head"], ["block1", "block0"], ["embedding"]]),
    "a byte less": (8 * 2 * BLOCK - 1, [["head"], ["block1"], ["block0"], ["embedding"]]),
    "embedding and block": (8 * (EMBEDDING + BLOCK), [["head", "block1"], ["block0", "embedding"]]),
    "all": (10**9, [["head", "block1", "block0", "embedding"]]),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_buckets_are_filled_in_the_order_of_backward(limit: str) -> None:
    """Up to the limit, and beyond it only by a single unit."""
    bucket_bytes, wanted = LIMITS[limit]
    (end,) = train(partial(ddp, bucket_bytes=bucket_bytes), 1, steps=0)
    trainer = end.strategy
    assert list(trainer.view.buckets.values()) == wanted
    for bucket, units in trainer.view.buckets.items():
        assert 8 * trainer.view.bucket_size(bucket) == trainer.arrays.flats[bucket].nbytes
        assert 8 * trainer.view.bucket_size(bucket) <= bucket_bytes or len(units) == 1


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("bucket_bytes", [A_BUCKET_A_LAYER, 8 * 2 * BLOCK, 10**9])
def test_gradients_are_views_of_the_buckets_and_fill_them(bucket_bytes: int, is_tied: bool) -> None:
    """Every unit once; of a tied model, too, where the embedding is complete after the head."""
    of = partial(model, is_tied=is_tied)
    (end,) = train(partial(ddp, bucket_bytes=bucket_bytes), 1, steps=0, of=of)
    trainer = end.strategy
    units = [unit for units in trainer.view.buckets.values() for unit in units]
    assert units == backward_order(of()) and sorted(units) == sorted(of().units)
    for bucket, units in trainer.view.buckets.items():
        trainer.arrays.flats[bucket][...] = np.arange(trainer.arrays.flats[bucket].size)
        seen = np.concatenate([trainer.gradients[unit] for unit in units])
        np.testing.assert_array_equal(seen, trainer.arrays.flats[bucket])
    assert {unit: x.size for unit, x in trainer.gradients.items()} == of().unit_sizes


@pytest.mark.parametrize("bucket_bytes", [A_BUCKET_A_LAYER, 8 * 2 * BLOCK])
def test_buckets_make_no_difference(bucket_bytes: int) -> None:
    """To the last bit, on two ranks, where a sum has one order."""
    few, many = (train(partial(ddp, bucket_bytes=n), 2)[0].losses for n in (10**9, bucket_bytes))
    assert few == many


# While backward runs


class Observing(AllReduce):
    """Notes when a bucket's sum begins and ends, and which gradients there are when it begins."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.complete: list[set[str]] = []

    def start(self, strategy: Trainer, bucket: str, flat: Array, axes: Any) -> Completion:
        self.events.append(f"start {bucket}")
        self.complete.append({unit for unit, x in strategy.gradients.items() if x.any()})
        finish = super().start(strategy, bucket, flat, axes)

        def noted() -> object:
            self.events.append(f"finish {bucket}")
            return finish()

        return noted


def noting_backward(of: Model, note: Callable[[str], object]) -> Model:
    """The model, each layer of which calls `note` with its name before its backward."""
    for name, layer in of.layers.items():

        def backward(*given: Any, name: str = name, really: Any = layer.backward) -> Any:
            note(name)
            return really(*given)

        layer.backward = backward
    return of


def test_a_sum_begins_before_the_backward_of_earlier_layers() -> None:
    """As soon as its gradients are complete, and no others are; it ends after backward."""

    def fn(comm: Communicator) -> tuple[list[str], list[set[str]]]:
        hook = Observing()
        of = noting_backward(model(), lambda layer: hook.events.append(f"backward {layer}"))
        trainer = ddp(comm, of, hook=hook, bucket_bytes=8 * 2 * BLOCK)
        trainer.start()
        trainer.step(*batch(0, *trainer.batch_part), TOTAL)
        return hook.events, hook.complete

    for events, complete in collectives.run(fn, size=3):
        assert events == [
            "backward loss",
            "backward head",
            "start bucket0",
            "backward block1",
            "backward block0",
            "start bucket1",
            "backward embedding",
            "start bucket2",
            "finish bucket0",
            "finish bucket1",
            "finish bucket2",
        ]
        late = {"block1", "block0"}
        assert complete == [{"head"}, {"head"} | late, {"head", "embedding"} | late]


def gets_through(hook: type[CommHook], seconds: float) -> bool:
    """Whether rank 0 begins the last layer's backward before rank 1 has begun the first one's."""
    is_there, is_through = threading.Event(), []

    def fn(comm: Communicator) -> None:
        def note(layer: str) -> None:
            if (layer, comm.rank) == ("embedding", 0):
                is_there.set()
            if (layer, comm.rank) == ("head", 1):
                is_through.append(is_there.wait(seconds))

        trainer = ddp(comm, noting_backward(model(), note), hook=hook(), bucket_bytes=1)
        trainer.start()
        trainer.step(*batch(0, *trainer.batch_part), TOTAL)

    collectives.run(fn, size=2)
    return is_through[0]


def test_backward_waits_for_no_other_rank() -> None:
    assert gets_through(AllReduce, 30)


def test_a_backward_that_waits_would_be_noticed() -> None:
    """The negative control: a hook that ends each sum before the next begins."""
    assert not gets_through(BlockingAllReduce, 0.1)


# Micro-batches


def test_what_is_only_computed_sends_nothing_and_adds_up() -> None:
    """Each rank computes what it has, twice; then a step sums over the ranks."""

    def fn(comm: Communicator) -> tuple[Any, Any, int]:
        trainer = ddp(comm, model(), two)
        trainer.start()
        mine = batch(0, *trainer.batch_part)
        twice = [np.concatenate([each, each]) for each in mine]
        with comm.record() as ledger:
            trainer.compute(*mine, TOTAL)
        num_messages, local = len(ledger.rows()), copied(trainer.gradients)
        trainer.update = lambda action: False
        trainer.step(*twice, TOTAL)
        return local, copied(trainer.gradients), num_messages

    two = Recipe(num_micro_batches=2)
    ends = collectives.run(fn, size=3)
    for _, summed, num_messages in ends:
        assert num_messages == 0
        for unit in model().units:
            wanted = 2 * sum(local[unit] for local, *_ in ends)
            np.testing.assert_allclose(summed[unit], wanted, rtol=1e-12, atol=1e-15)
    assert not np.array_equal(ends[0][0]["head"], ends[1][0]["head"])


def copied(arrays: dict[str, Any]) -> dict[str, Any]:
    return {unit: x.copy() for unit, x in arrays.items()}


def test_micro_batches_send_as_much_as_one() -> None:
    one, four = (train(ddp, 3, Recipe(num_micro_batches=k)) for k in (1, 4))
    verdict(four)
    assert one[0].table is not None and four[0].table is not None
    assert one[0].table.rows == four[0].table.rows
    np.testing.assert_allclose(one[0].losses, four[0].losses, rtol=1e-12)


def test_a_micro_batch_that_synchronises_would_be_noticed() -> None:
    """The negative control."""

    class Eager(Trainer):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            self.functions[LayerBackward] = self.backward

        def backward(self, action: LayerBackward) -> None:
            self.micro_batches.backward(action)
            if (action.micro_batch, action.layer) == (0, "embedding"):
                for each in self.actions:
                    if isinstance(each, Reduce | WaitForCalls):
                        self.do(each)

    with pytest.raises(TrafficMismatch, match="backward/bucket0"):
        verdict(train(of_kind(Eager), 3, Recipe(num_micro_batches=2), steps=1))


# Traffic

SERVED = [
    (ranks, name)
    for ranks in (1, 2, 3, 4, 5)
    for name in collectives.algorithms.names("all_reduce")
    if collectives.algorithms.info("all_reduce", name).serves(ranks)
]
IS_BITWISE = {
    name: collectives.algorithms.info("all_reduce", name).is_bitwise for _, name in SERVED
}


@pytest.mark.parametrize(
    ("ranks", "algorithm"), [(ranks, name) for ranks, name in SERVED if IS_BITWISE[name]]
)
@pytest.mark.slow
def test_predicted_is_recorded_by_every_algorithm(ranks: int, algorithm: str) -> None:
    ends = train(partial(ddp, algorithm=algorithm, bucket_bytes=9000), ranks, steps=2)
    assert "two columns compared" in verdict(ends)
    np.testing.assert_allclose(ends[0].losses, serial().losses[:2], rtol=1e-12)
    whole(ends)


@pytest.mark.parametrize("hook", [None, HalfPrecision("bfloat16"), PowerSGD(1)])
@pytest.mark.parametrize("algorithm", [name for name in IS_BITWISE if not IS_BITWISE[name]])
def test_algorithms_by_which_parameters_would_differ_are_refused(
    algorithm: str, hook: CommHook | None
) -> None:
    with pytest.raises(
        ValueError, match=f"all_reduce.{algorithm} rounds differently on different ranks"
    ):
        train(partial(ddp, algorithm=algorithm, hook=hook), 2, steps=0)


@pytest.mark.parametrize("algorithm", ["linear", "scatter_all_gather"])
def test_initial_values_may_be_sent_by_another_algorithm(algorithm: str) -> None:
    verdict(train(partial(ddp, broadcast_algorithm=algorithm), 3, steps=1))


def test_the_rows_of_traffic_are_those_of_the_docstrings() -> None:
    """Those of `ddp`, and of `Trainer`, of which it is one."""
    p, q, steps, of = 4, 2, 3, model()  # q is log2 p
    make = partial(ddp, bucket_bytes=8 * 2 * BLOCK, find_unused_parameters=True)
    end = train(make, p, steps=steps)[0]
    assert end.table is not None
    u, o, psi = len(of.units), len(end.strategy.options()), of.num_parameters
    checks = (16 + 32 * (u + o)) * p * (p - 1)
    wanted = {
        ("start/check", "all_gather"): Tally(2, 2 * p * (p - 1), checks),
        ("start/broadcast", "broadcast"): Tally(u, u * (p - 1), (p - 1) * 8 * psi),
        ("unused", "all_reduce"): Tally(steps, steps * p * q, steps * u * p * q),
        ("loss", "all_reduce"): Tally(steps, steps * p * q, steps * 16 * p * q),
    }
    for number, n in enumerate([HEAD, 2 * BLOCK, EMBEDDING]):
        sums = Tally(steps, steps * 2 * p * (p - 1), steps * 2 * (p - 1) * 8 * n)
        wanted[f"backward/bucket{number}", "all_reduce"] = sums
    assert {(row.phase, row.collective): row.recorded for row in end.table.rows} == wanted
    assert end.table.matrix.sum() == sum(tally.bytes for tally in wanted.values())


def test_the_default_hook_is_an_all_reduce_a_bucket() -> None:
    end, _ = train(partial(ddp, algorithm="swing", bucket_bytes=1), 2, steps=0)
    trainer, hook = end.strategy, end.strategy.sharding.reduction
    assert type(hook) is AllReduce and hook.state_bytes(trainer) == 0
    (call,) = hook.traffic(trainer.view, "bucket1", "backward/bucket1", ("data",))
    assert call == PredictedCall(
        "backward/bucket1",
        "all_reduce",
        "swing",
        BLOCK,
        8,
        groups=((0, 1),),
        axis="data",
        in_place=True,
    )


def one_message(comm: Communicator, nbytes: int) -> None:
    """Rank 0 to rank 1."""
    if comm.rank == 0:
        comm.send(np.zeros(nbytes, np.uint8), 1)
    if comm.rank == 1:
        comm.recv(np.zeros(nbytes, np.uint8), 0)


def outside(trainer: Trainer) -> None:
    one_message(trainer.comm, 1)


def in_a_phase(trainer: Trainer) -> None:
    with collectives.phase("backward/bucket0"):
        one_message(trainer.comm, 8)


def without_bytes(trainer: Trainer) -> None:
    with collectives.phase("loss"):
        one_message(trainer.comm, 0)


def an_extra_call(trainer: Trainer) -> None:
    with collectives.phase("loss"):
        trainer.comm.all_reduce(np.zeros(2), algorithm="recursive_doubling")


ROGUES = {
    outside: "outside every phase",
    in_a_phase: "backward/bucket0/send: predicted 0 calls, 0 messages, 0 bytes",
    without_bytes: "loss/send: predicted 0 calls, 0 messages, 0 bytes; recorded 1 messages",
    an_extra_call: "loss/all_reduce: predicted 1 calls, .* recorded 2 calls",
}


@pytest.mark.parametrize("rogue", ROGUES)
def test_a_rogue_message_is_noticed(rogue: Any) -> None:
    with pytest.raises(TrafficMismatch, match=ROGUES[rogue]):
        verdict(train(ddp, 3, steps=1, after=rogue))


# Initial values


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_all_begin_with_the_values_of_rank_0(dtype: str) -> None:
    """Whatever the others drew; their master copies too."""

    def make(comm: Communicator, *_: Any) -> Trainer:
        return ddp(comm, model(), Recipe(dtype=dtype, seed=7 + comm.rank))

    ends = train(make, 4, steps=0)
    for unit in model().units:
        drawn = model().draw(unit, 7).astype(dtype)
        for end in ends:
            assert end.strategy.parameters[unit].tobytes() == drawn.tobytes()
            np.testing.assert_array_equal(end.strategy.masters[unit], drawn)


# Layers that take no part


class Routed(Model):
    """Leaves out one layer, or none, as `skipped` says."""

    def __init__(self, ties: Any = None) -> None:
        super().__init__(model().layers, ties)
        self.skipped = ""

    def active_layers(self) -> list[str]:
        return [name for name in self.layers if name != self.skipped]


def routed(*by_step: Any, ranks: int, dtype: str = "float64", **options: Any) -> list[End]:
    """Steps in each of which some ranks leave a layer out: {rank: layer}, others leave out none."""

    def make(comm: Communicator, *_: Any) -> Trainer:
        of = Routed()
        trainer = ddp(
            comm, of, Recipe(dtype=dtype, optimizer=AdamW), find_unused_parameters=True, **options
        )
        really, steps = trainer.step, iter(by_step)

        def step(*given: Any) -> float:
            of.skipped = next(steps).get(comm.rank, "")
            return really(*given)

        trainer.step = step
        return trainer

    return train(make, ranks, steps=len(by_step))


def by_hand(*by_step: dict[int, str], ranks: int) -> tuple[list[float], dict[str, Any]]:
    """What `routed` should find: one rank adds up what each of them contributes."""
    of = Routed()
    reference, losses = Trainer(None, of, Recipe(optimizer=AdamW)), []
    for number, skipped in enumerate(by_step):
        sums = {unit: np.zeros_like(x) for unit, x in reference.gradients.items()}
        losses.append(0.0)
        for rank in range(ranks):
            of.skipped = skipped.get(rank, "")
            losses[-1] += reference.compute(*batch(number, rank, ranks), TOTAL)
            for unit, x in reference.gradients.items():
                sums[unit] += x
        for unit, x in reference.gradients.items():
            x[...] = sums[unit]
        reference.run([Update()])
    return losses, reference.parameters


@pytest.mark.parametrize("bucket_bytes", [A_BUCKET_A_LAYER, 10**9])
def test_a_layer_that_some_ranks_do_not_use_counts_as_zero_there(bucket_bytes: int) -> None:
    by_step = [{0: "block0"}, {}, {1: "block1", 2: "block0"}, {0: "block1", 2: "block1"}]
    ends = routed(*by_step, ranks=3, bucket_bytes=bucket_bytes)
    losses, parameters = by_hand(*by_step, ranks=3)
    np.testing.assert_allclose(ends[0].losses, losses, rtol=1e-12)
    for unit, x in whole(ends).items():
        np.testing.assert_allclose(x, parameters[unit], rtol=0, atol=1e-9)
    assert "two columns compared" in verdict(ends)


def bits(end: End, unit: str) -> list[bytes]:
    """A unit's parameters, master copy and states."""
    trainer = end.strategy
    arrays = [trainer.parameters[unit], trainer.masters[unit]]
    return [
        x.tobytes() for x in (*arrays, *(flat[unit] for flat in trainer.optimizer.states.values()))
    ]


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_a_layer_that_no_rank_used_is_left_as_it_is(dtype: str) -> None:
    """Not even its weights decay, and its averages are not forgotten; the others go on."""
    nobody = dict.fromkeys(range(3), "block1")
    once, twice = routed({}, ranks=3, dtype=dtype), routed({}, nobody, ranks=3, dtype=dtype)
    assert any(once[0].strategy.optimizer.states["first"]["block1"])
    for before, after in zip(once, twice, strict=True):
        assert bits(before, "block1") == bits(after, "block1")
        for unit in ("embedding", "block0", "head"):
            assert all(x != y for x, y in zip(bits(before, unit), bits(after, unit), strict=True))
    assert "two columns compared" in verdict(twice)
    row = next(row for row in twice[0].table.rows if row.phase == "unused")
    assert row.recorded.calls == 2


def test_an_update_of_what_nobody_used_would_be_noticed() -> None:
    """The negative control: it is used by one of three, and so changed on all."""
    once = routed({}, ranks=3)
    twice = routed({}, {1: "block1", 2: "block1"}, ranks=3)
    for before, after in zip(once, twice, strict=True):
        assert bits(before, "block1") != bits(after, "block1")


def test_a_layer_that_was_unused_once_may_be_used_again() -> None:
    nobody = dict.fromkeys(range(2), "block1")
    ends, before = routed({}, nobody, {}, ranks=2), routed({}, nobody, ranks=2)
    assert bits(ends[0], "block1") != bits(before[0], "block1")
    assert not ends[0].strategy.scalars.unused_units


def test_what_another_layer_uses_is_not_unused() -> None:
    """No rank used block0, but block1 did, which has its weights from there."""

    def fn(comm: Communicator) -> Any:
        of = Routed({"block1.mlp.up.weight": "block0.mlp.up.weight"})
        of.skipped = "block0"
        trainer = ddp(comm, of, find_unused_parameters=True)
        trainer.start()
        before = trainer.parameters["block0"].copy()
        trainer.step(*batch(0, *trainer.batch_part), TOTAL)
        return trainer.scalars.unused_units, np.array_equal(trainer.parameters["block0"], before)

    assert collectives.run(fn, size=2) == [(set(), False)] * 2


@pytest.mark.parametrize("find_unused_parameters", [False, True])
def test_to_be_used_by_one_micro_batch_is_enough(find_unused_parameters: bool) -> None:
    """The last one leaves the block out, but not the first one."""

    class Once(Model):
        def active_layers(self) -> list[str]:
            return next(routes)

    def fn(comm: Communicator) -> Any:
        trainer = ddp(
            comm, Once(model().layers), two, find_unused_parameters=find_unused_parameters
        )
        before = trainer.parameters["block1"].copy()
        trainer.start()
        trainer.train(1, batch, TOTAL, nothing)
        return trainer.scalars.unused_units, np.array_equal(trainer.parameters["block1"], before)

    two, every = Recipe(num_micro_batches=2), list(model().layers)
    routes: Iterator[list[str]] = iter([every, [x for x in every if x != "block1"]])
    assert collectives.run(fn, size=1) == [(set(), False)]
