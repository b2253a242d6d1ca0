"""Every strategy: the losses of one rank, the same parameters everywhere, and what it costs.

The strategies that round what they send, or let ranks run ahead, have tests of their own beside.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import CollectiveError, Communicator
from parallel import Mesh, MissingGradient, Recipe, Sharding, TrafficMismatch, Trainer
from parallel.nn import Activations, ArraySpec, CrossEntropy, Embedding, Linear, Model, Step, gpt
from parallel.optim import SGD, Adam, AdamW
from parallel.predict import RunSize
from parallel.run.agreement import ModelMismatch
from parallel.sharding import HalfPrecision, Int8Blocks, PowerSGD
from parallel.step import Reduce, Update
from parallel.strategies import AsyncParameterServer, SyncParameterServer
from tests.covering import pairwise
from tests.parallel.training import (
    CONTEXT,
    ROWS,
    Make,
    alone,
    batch,
    ddp,
    hsdp,
    kept_by,
    model,
    nothing,
    of_kind,
    serial,
    train,
    verdict,
    whole,
    zero1,
    zero2,
    zero3,
    zeropp,
)

pytestmark = pytest.mark.slow

EXACT: dict[str, Make] = {
    "server-sync": SyncParameterServer,
    "ddp": ddp,
    "ddp, a bucket a layer": partial(ddp, bucket_bytes=1),
    "zero1": zero1,
    "zero2": zero2,
    "zero3": zero3,
    "zero3, kept": partial(zero3, keep_after_forward=True),
    "hsdp": hsdp,
    "hsdp, groups of one": partial(hsdp, group_size=1),
}
ALL = EXACT | {"zeropp": zeropp, "zeropp, 4 bits": partial(zeropp, gradient_bits=4)}
DIFFER = "shapes or initial values of layers, or options, differ from rank 0's"
RANKS = [1, 2, 3, 4, 5, 8]
LONG = {"float64": (100, 1e-9), "float32": (20, 1e-5)}  # so many steps, and how close

exact = pytest.mark.parametrize("name", EXACT)
every = pytest.mark.parametrize("name", ALL)


# Losses and parameters


@exact
@pytest.mark.parametrize("ranks", RANKS)
def test_losses_are_those_of_one_rank(name: str, ranks: int) -> None:
    recipe = Recipe(num_micro_batches=2, clip=0.5)
    ends, one = train(EXACT[name], ranks, recipe, steps=2), serial(recipe, steps=2)
    for end in ends:
        np.testing.assert_allclose(end.losses, one.losses, rtol=1e-12)
    for unit, x in whole(ends).items():
        np.testing.assert_allclose(x, whole([one])[unit], rtol=0, atol=1e-9)


@exact
@pytest.mark.parametrize("dtype", LONG)
def test_losses_of_many_steps_are_those_of_one_rank(name: str, dtype: str) -> None:
    steps, close = LONG[dtype]
    recipe = Recipe(dtype=dtype)
    ends = train(EXACT[name], 3, recipe, steps=steps, of=small)
    reference = serial(recipe, steps=steps, of=small)
    np.testing.assert_allclose(ends[0].losses, reference.losses, rtol=close)


def small() -> Model:
    return model(layers=1)


def test_a_gradient_that_is_not_summed_would_be_noticed() -> None:
    """The negative control."""

    class Alone(Trainer):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            self.functions[Reduce] = lambda action: self.units.reducing.append(action.part)

    alone = of_kind(Alone, partial(Sharding.zero, 2))
    assert not np.allclose(train(alone, 3)[0].losses, serial().losses, rtol=1e-6)


def test_a_mean_over_uneven_parts_would_be_noticed() -> None:
    """The negative control: ranks that each average over their own rows."""

    class Unweighted(Trainer):
        def step(self, inputs: Any, targets: Any, total: int) -> float:
            return super().step(inputs, targets, inputs.size * self.size)

    assert not np.allclose(train(of_kind(Unweighted), 4)[0].losses, serial().losses, rtol=1e-6)


@every
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_all_ranks_hold_the_same_parameters_to_the_last_bit(name: str, dtype: str) -> None:
    """`whole` compares what several ranks hold."""
    whole(train(ALL[name], 4, Recipe(dtype=dtype, optimizer=AdamW), steps=2))


def test_parameters_that_differ_would_be_noticed() -> None:
    ends = train(zero1, 2)
    ends[1].held["head"][1][0] += 1e-12
    with pytest.raises(AssertionError):
        whole(ends)


@every
def test_a_run_repeats_to_the_last_bit(name: str) -> None:
    first, second = (train(ALL[name], 3)[0].losses for _ in range(2))
    assert first == second


@every
def test_two_bytes_train_nearly_as_four(name: str) -> None:
    for dtype, close in (("float16", 2e-3), ("bfloat16", 2e-2)):
        losses = train(ALL[name], 4, Recipe(dtype=dtype), steps=6)[0].losses
        np.testing.assert_allclose(
            losses, serial(Recipe(dtype="float32"), steps=6).losses, rtol=close
        )


@pytest.mark.parametrize("kind", [alone, ddp, zero1, zero3])
def test_strategies_may_take_turns_with_a_model(kind: Any) -> None:
    """Each works on arrays of its own, to the last bit as if it had the model alone."""

    def fn(comm: Communicator) -> tuple[list[float], list[float]]:
        shared, own = model(), kind(comm, model(), Recipe())
        ours, seed = kind(comm, shared, Recipe()), Recipe(seed=1)
        others = alone(None, shared, seed), zero2(comm, shared, seed)
        losses = []
        for step in range(4):
            losses += ours.train(step + 1, batch, ROWS * CONTEXT, nothing, step)
            for each in others:
                each.train(1, batch, ROWS * CONTEXT, nothing)
        return losses, own.train(4, batch, ROWS * CONTEXT, nothing)

    ((found, wanted),) = collectives.run(fn, size=1)
    assert found == wanted


@exact
def test_layers_may_be_computed_twice_instead_of_kept(name: str) -> None:
    """To the last bit the same, with as many forwards more."""
    kept, again = (
        train(EXACT[name], 2, of=partial(model, recompute=names)) for names in ((), ("block1",))
    )
    assert kept[0].losses == again[0].losses
    numbers = [ends[0].strategy.micro_batches.num_recomputed for ends in (kept, again)]
    assert numbers == [0, 4]
    assert again[0].memory["activations"] < kept[0].memory["activations"]


@exact
def test_more_micro_batches_than_rows_leave_some_empty(name: str) -> None:
    """11 rows for 4 ranks, 2 or 3 each, in 3 micro-batches."""
    recipe = Recipe(num_micro_batches=3)
    np.testing.assert_allclose(train(EXACT[name], 4, recipe)[0].losses, serial().losses, rtol=1e-12)


# What it costs


@pytest.mark.parametrize("name", [*ALL, "server-async"])
def test_traffic_is_known_before_a_run(name: str) -> None:
    def fn(comm: Communicator) -> bool:
        strategy = (ALL | {"server-async": AsyncParameterServer})[name](comm, model())
        before = strategy.traffic(2, batch=(ROWS, CONTEXT))
        strategy.start()
        strategy.train(2, batch, ROWS * CONTEXT, nothing)
        return before == strategy.traffic(2, batch=(ROWS, CONTEXT))

    assert collectives.run(fn, size=4) == [True] * 4


@pytest.mark.parametrize("stage", [1, 2])
def test_an_update_that_was_not_made_is_noticed(stage: int) -> None:
    """Were the number of updates read off the run, the columns would be equal."""

    class Lazy(Trainer):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            self.functions[Update] = self.update

        def update(self, action: Update) -> bool:
            return self.updates.num_updates == 0 and self.updates.update(action)

    with pytest.raises(TrafficMismatch, match="update/block0"):
        verdict(train(of_kind(Lazy, partial(Sharding.zero, stage)), 3))


@every
@pytest.mark.parametrize("mode", ["1", "finite"])
def test_what_checked_mode_sends_is_predicted(
    monkeypatch: pytest.MonkeyPatch, name: str, mode: str
) -> None:
    monkeypatch.setenv("COLLECTIVES_CHECK", mode)
    end, *_ = train(ALL[name], 4, Recipe(clip=0.5), steps=2)
    verdict([end])
    assert any(row.collective == "check" for row in end.table.rows)


def test_what_no_run_can_do_is_not_predicted() -> None:
    def fn(comm: Communicator) -> None:
        with pytest.raises(
            ValueError, match="in float64 no update is skipped, but num_skipped is 1"
        ):
            zero1(comm, model()).traffic(3, num_skipped=1)
        with pytest.raises(ValueError, match=r"pass batch=\(rows, context\)"):
            SyncParameterServer(comm, model()).traffic(3)

    collectives.run(fn, size=2)


SMALL: dict[str, Any] = {"num_layers": 3, "hidden": 6, "num_heads": 2, "context": CONTEXT}
VARIANTS = {
    "plain": (Recipe(), model),
    "micro-batches, clipped": (Recipe(num_micro_batches=3, clip=0.1), model),
    "float32": (Recipe(dtype="float32", optimizer=SGD), model),
    "float16": (Recipe(dtype="float16"), model),
    "bfloat16, recomputed": (Recipe(dtype="bfloat16"), partial(model, recompute=["block*"])),
    "attention recomputed": (Recipe(), partial(model, recompute=["block*.attention.heads"])),
    "all recomputed": (
        Recipe(num_micro_batches=2),
        partial(model, recompute=["embedding", "block0", "block1.mlp", "head"]),
    ),
    "shared": (Recipe(num_micro_batches=2), partial(gpt, **SMALL, is_shared=True)),
    "tied": (Recipe(num_micro_batches=2), partial(model, is_tied=True)),
    "tied neighbors": (Recipe(), partial(model, is_tied=True, layers=1)),
}


@pytest.mark.parametrize(("name", "variant", "ranks"), pairwise(ALL, VARIANTS, RANKS))
def test_predicted_is_recorded_and_memory_is_counted(name: str, variant: str, ranks: int) -> None:
    recipe, of = VARIANTS[variant]
    ends = train(ALL[name], ranks, recipe, of=of, steps=2)
    assert "two columns compared" in verdict(ends)
    for end in ends:
        for category, (formula, counted) in end.memory.items():
            assert formula == counted, category


@every
def test_what_was_lent_is_given_back(name: str) -> None:
    strategy = train(ALL[name], 3)[0].strategy
    assert strategy.memory.now["activations"] == 0
    assert strategy.memory.now["buffers"] == 0
    assert strategy.memory.peak["activations"] > 0


def extra(strategy: Trainer) -> None:
    """A call that nobody predicted."""
    with collectives.phase("loss"):
        assert strategy.comm is not None
        strategy.comm.all_reduce(np.zeros(1), algorithm="ring")


@pytest.mark.parametrize("name", ["ddp", "zero3"])
def test_a_rogue_call_is_noticed(name: str) -> None:
    with pytest.raises(TrafficMismatch, match="loss"):
        verdict(train(ALL[name], 3, after=extra))


def bytes_of(name: str, ranks: int, **recipe: Any) -> float:
    """What a rank sends in a step on average, in units of the parameters; no small messages."""
    strategy = train(ALL[name], ranks, Recipe(**recipe), steps=1)[0].strategy
    calls = [c for c in strategy.step_traffic(RunSize(1, 1)) if c.phase not in ("loss", "norm")]
    whole_model = strategy.model.num_parameters * strategy.view.dtype.itemsize
    return float(sum(call.sent(ranks).bytes for call in calls) / ranks / whole_model)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("k", [1, 3])
def test_strategies_send_what_the_papers_say(ranks: int, k: int) -> None:
    """Psi elements times these, times (N-1)/N: Rajbhandari et al. 2020, with k micro-batches."""
    times = {"ddp": 2, "zero1": 2, "zero2": k + 1, "zero3": 3 * k, "zero3, kept": 2 * k}
    for name, multiple in times.items():
        found = bytes_of(name, ranks, num_micro_batches=k)
        assert found == pytest.approx(multiple * (ranks - 1) / ranks, rel=1e-12), name


@pytest.mark.parametrize("name", ["ddp, a bucket a layer", "zero1", "zero2", "zero3", "hsdp"])
def test_shared_parameters_are_sent_once_for_all_layers(name: str) -> None:
    """What blocks send falls by the number of blocks (Lan et al. 2020), as they run in a row."""

    def bytes_of_blocks(is_shared: bool) -> int:
        of = partial(gpt, **SMALL, is_shared=is_shared)
        strategy = train(ALL[name], 4, steps=1, of=of)[0].strategy
        if name == "ddp, a bucket a layer":
            blocks = [
                b for b, units in strategy.view.buckets.items() if units[0].startswith("block")
            ]
        else:
            blocks = [unit for unit in strategy.model.units if unit.startswith("block")]
        calls = strategy.step_traffic(RunSize(1, 1))
        sent = [call.sent(4).bytes for call in calls if set(call.phase.split("/")) & set(blocks)]
        return sum(sent)

    assert bytes_of_blocks(is_shared=False) == SMALL["num_layers"] * bytes_of_blocks(is_shared=True)


def test_hierarchical_sharding_sends_what_its_formula_says() -> None:
    """3 Psi (g-1)/g within a group and 2 Psi/g (G-1)/G between groups."""
    assert bytes_of("hsdp", 8) == pytest.approx(3 * 3 / 4 + 2 / 4 * 1 / 2, rel=1e-12)


# Gradients summed in another dtype


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3", "hsdp"])
def test_gradients_of_two_bytes_may_be_summed_in_four(name: str) -> None:
    """The messages of gradients are twice as long, as predicted; parameters stay equal."""
    plain, wide = (
        train(ALL[name], 4, Recipe(dtype="bfloat16", reduce_dtype=dtype), steps=2)
        for dtype in (None, "float32")
    )
    verdict(wide)
    whole(wide)
    assert all(formula == counted for end in wide for formula, counted in end.memory.values())
    assert wide[0].memory["buffers"] > plain[0].memory["buffers"]  # of the wide copies
    before, after = (
        sum(
            row.recorded.bytes
            for row in ends[0].table.rows
            if "reduce" in row.collective and row.phase != "loss"
        )
        for ends in (plain, wide)
    )
    assert after == 2 * before > 0
    rounded, exact = (ends[0].strategy.optimizer.states["first"]["head"] for ends in (plain, wide))
    # Sums of two numbers are rounded once anyway.
    assert np.array_equal(rounded, exact) is (name == "hsdp")


def test_gradients_in_four_bits_cost_half_the_bytes_and_little_of_the_loss() -> None:
    """Eight elements and their scale are 8 bytes instead of 12; one scale for all is too coarse."""
    eight, four, one_scale = (
        train(partial(zeropp, gradient_bits=bits, block=block), 4, steps=40)
        for bits, block in ((8, 8), (4, 8), (4, 1 << 40))
    )
    verdict(four)
    sent = [
        sum(row.recorded.bytes for row in ends[0].table.rows if row.collective == "all_to_all")
        for ends in (eight, four)
    ]
    assert sent[1] == pytest.approx(sent[0] * 8 / 12, rel=5e-3)
    one = serial(steps=40).losses
    np.testing.assert_allclose(four[0].losses, one, rtol=1e-3)
    assert not np.allclose(one_scale[0].losses, one, rtol=1e-3)


@pytest.mark.parametrize("name", ["server-sync", "zeropp"])
def test_what_sums_in_a_dtype_of_its_own_takes_no_other(name: str) -> None:
    said = outcome(ALL[name], 4, recipe=lambda _: Recipe(reduce_dtype="float32"))
    assert "reduce_dtype is float32, but" in said[0] and len(set(said)) == 1


# Overflow


@every
def test_a_step_that_overflows_is_skipped_everywhere(name: str) -> None:
    """The scale begins so high that the first steps overflow; it is halved until one does not."""

    def with_high_scale(*given: Any) -> Trainer:
        strategy = ALL[name](*given)
        strategy.loss_scale.value = 2.0**20
        return strategy

    ends = train(with_high_scale, 3, Recipe(dtype="float16"), steps=16)
    verdict(ends)
    skipped = {end.strategy.updates.num_skipped for end in ends}
    assert len(skipped) == 1 and 0 < skipped.pop() < 16
    assert {end.strategy.loss_scale.value for end in ends} == {ends[0].strategy.loss_scale.value}
    assert np.isfinite(ends[0].losses).all() and ends[0].losses[-1] < ends[0].losses[0]


# Misuse


def outcome(
    make: Make, ranks: int, of: Any = lambda rank: model(), recipe: Any = lambda rank: Recipe()
) -> list[str]:
    """What every rank raises."""

    def fn(comm: Communicator) -> str:
        try:
            strategy = make(comm, of(comm.rank), recipe(comm.rank))
            strategy.start()
            strategy.train(1, batch, ROWS * CONTEXT, nothing)
        except ValueError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return list(collectives.run(fn, size=ranks))


@every
def test_models_of_other_shapes_are_refused_on_all_ranks(name: str) -> None:
    """Rank 1's head is of another width."""

    def of(rank: int) -> Model:
        layers = model().layers | {"head": Linear(6, 256 + (rank == 1))}
        return Model(layers)

    said = outcome(ALL[name], 3, of)
    assert said == 3 * [f"ModelMismatch: {DIFFER}: head of rank 1"]


@every
def test_models_of_other_sizes_are_refused_on_all_ranks(name: str) -> None:
    said = outcome(ALL[name], 3, lambda rank: model(layers=1 + (rank == 2)))
    assert said == 3 * ["ModelMismatch: ranks have models of [3, 3, 4] layers"]


def test_initial_values_that_differ_are_refused_where_nobody_sends_them() -> None:
    seeds = {0: 0, 1: 5, 2: 5}
    for kind in (zero1, zero2, zero3, hsdp, zeropp):
        said = outcome(kind, 3, lambda _: model(), lambda rank: Recipe(seed=seeds[rank]))
        assert set(said) == {said[0]}
        assert f"{DIFFER}: embedding of ranks 1, 2, block0 of ranks 1, 2" in said[0]


def test_rank_0_gives_initial_values_where_it_sends_them() -> None:
    for kind in (ddp, SyncParameterServer):
        ends = outcome(kind, 3, lambda _: model(), lambda rank: Recipe(seed=rank))
        assert ends == 3 * [""]


OTHER = {
    "num_micro_batches": Recipe(num_micro_batches=2),
    "clip": Recipe(clip=1.0),
    "dtype": Recipe(dtype="float32"),
    "optimizer": Recipe(optimizer=partial(Adam, lr=0.1)),
}


@every
@pytest.mark.parametrize("option", OTHER)
def test_options_that_differ_are_refused_on_all_ranks(name: str, option: str) -> None:
    """Or the ranks would make different calls, and wait for each other for ever."""
    said = outcome(ALL[name], 3, recipe=lambda rank: OTHER[option] if rank == 2 else Recipe())
    assert set(said) == {said[0]}
    assert said[0].startswith(f"ModelMismatch: {DIFFER}: ")
    assert said[0].endswith(f"option {option} of rank 2")


DIFFERENT = {
    "bucket_bytes": lambda comm, *given: ddp(comm, *given, bucket_bytes=1 + comm.rank),
    "find_unused_parameters": lambda comm, *given: ddp(
        comm, *given, find_unused_parameters=comm.rank > 0
    ),
    "hook": lambda comm, *given: ddp(
        comm, *given, hook=HalfPrecision("bfloat16" if comm.rank else "float16")
    ),
    "keep_after_forward": lambda comm, *given: zero3(
        comm, *given, keep_after_forward=comm.rank > 0
    ),
    "mesh": lambda comm, *given: hsdp(comm, *given, group_size=2 if comm.rank < 2 else 4),
    "gather": lambda comm, *given: zeropp(comm, *given, block=8 + comm.rank),
    "hook, by its bits": lambda comm, *given: zeropp(
        comm, *given, gradient_bits=4 if comm.rank else 8
    ),
    "algorithm": lambda comm, *given: zero1(
        comm, *given, algorithm="direct" if comm.rank else "ring"
    ),
    "staleness_bound": lambda comm, *given: AsyncParameterServer(
        comm, *given, staleness_bound=comm.rank
    ),
    "divided": lambda comm, *given: (zero2 if comm.rank else zero1)(comm, *given),
}


@pytest.mark.parametrize("option", DIFFERENT)
def test_other_options_of_a_strategy_are_refused_on_all_ranks(option: str) -> None:
    said = outcome(DIFFERENT[option], 4)
    name = option.partition(",")[0]
    assert set(said) == {said[0]} and f"option {name} of rank" in said[0]


@pytest.mark.parametrize(
    ("ours", "theirs", "is_alike"),
    [
        ({"betas": [0.9, 0.999]}, {"betas": (0.9, 0.999)}, True),
        ({"betas": [0.9, 0.999]}, {"betas": [0.5, 0.999]}, False),
        ({"lr": 0.1}, {"lr": np.float64(0.1)}, True),
        ({"lr": np.float32(0.1)}, {"lr": np.float32(0.2)}, False),
    ],
)
def test_options_of_an_optimizer_are_compared_however_they_are_written(
    ours: Any, theirs: Any, is_alike: bool
) -> None:
    said = outcome(
        ddp, 2, recipe=lambda rank: Recipe(optimizer=partial(Adam, **(theirs if rank else ours)))
    )
    assert said == 2 * ["" if is_alike else f"ModelMismatch: {DIFFER}: option optimizer of rank 1"]


def test_ties_that_differ_are_refused_on_all_ranks() -> None:
    def of(rank: int) -> Model:
        layers = {name: Linear(3, 3) for name in "abc"}
        return Model(layers, ties={"c.weight": f"{'ab'[rank]}.weight"})

    assert outcome(zero3, 2, of) == 2 * [f"ModelMismatch: {DIFFER}: option layers of rank 1"]


@every
def test_layers_that_compute_otherwise_are_refused_on_all_ranks(name: str) -> None:
    """The number of heads shows in the shapes too."""

    def of(rank: int) -> Model:
        return gpt(num_layers=1, hidden=6, num_heads=3 if rank == 1 else 2, context=CONTEXT)

    wanted = f"ModelMismatch: {DIFFER}: block0 of rank 1, option layers of rank 1"
    assert outcome(ALL[name], 3, of) == 3 * [wanted]


def test_a_resumed_run_is_compared_too() -> None:
    def fn(comm: Communicator) -> None:
        zero2(comm, model(), Recipe(clip=1.0 + comm.rank)).resume()

    with pytest.raises(ModelMismatch, match=r"option clip of ranks 1, 2"):
        collectives.run(fn, size=3)


SHARDINGS: dict[str, Callable[[], Sharding]] = {
    "none": Sharding,
    "ddp": Sharding.ddp,
    "ddp, unused": partial(Sharding.ddp, find_unused_parameters=True),
    "float16": lambda: Sharding.ddp(hook=HalfPrecision("float16")),
    "int8": lambda: Sharding.ddp(hook=Int8Blocks()),
    "powersgd": lambda: Sharding.ddp(hook=PowerSGD(2)),
    "zero1": partial(Sharding.zero, 1),
    "zero2": partial(Sharding.zero, 2),
    "zero3": partial(Sharding.zero, 3),
    "zero3, kept": partial(Sharding.zero, 3, keep_after_forward=True),
    "hsdp": Sharding.hsdp,
    "zeropp": Sharding.zeropp,
    "local updates": partial(Sharding.local_updates, every=2),
}


@pytest.mark.parametrize("name", SHARDINGS)
def test_a_rank_without_a_communicator_does_what_one_alone_in_a_communicator_does(
    name: str,
) -> None:
    """The same losses, and as much memory as is predicted."""

    def losses(comm: Communicator | None) -> list[float]:
        sharding = SHARDINGS[name]()
        mesh = Mesh(comm, **dict.fromkeys(sharding.axes or ("data",), 1))
        trainer = Trainer(mesh, model(), Recipe(clip=1.0), sharding=sharding)
        trainer.start()
        found = trainer.train(4, batch, ROWS * CONTEXT, nothing)
        for predicted, counted in kept_by(trainer).values():
            assert predicted == counted
        return found

    assert losses(None) == collectives.run(losses, size=1)[0]


@pytest.mark.parametrize(("replicate", "shard"), [(1, 3), (3, 1)])
@pytest.mark.parametrize("sharding", [Sharding.hsdp, Sharding.zeropp])
def test_an_axis_may_have_one_rank(
    sharding: Callable[[], Sharding], replicate: int, shard: int
) -> None:
    def losses(comm: Communicator) -> list[float]:
        mesh = Mesh(comm, replicate=replicate, shard=shard)
        trainer = Trainer(mesh, model(), sharding=sharding())
        trainer.start()
        return trainer.train(4, batch, ROWS * CONTEXT, nothing)

    tolerance = 1e-12 if sharding == Sharding.hsdp else 1e-2  # ZeRO++ sends 8-bit numbers
    np.testing.assert_allclose(collectives.run(losses, size=3)[0], serial().losses, rtol=tolerance)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_micro_batches": 0}, "num_micro_batches is 0: it must be at least 1"),
        ({"clip": 0.0}, "clip is 0.0: it must be a finite norm above 0"),
        ({"clip": float("nan")}, "clip is nan"),
        ({"dtype": "int8"}, "not in 'int8'"),
    ],
)
def test_recipes_that_cannot_work_are_refused(options: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Trainer(Mesh(None), model(), Recipe(**options))


def test_a_pattern_that_matches_no_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no layer 'block9' to recompute"):
        model(recompute=["block*", "block9"])


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (partial(ddp, algorithm="one_shot"), "all_reduce.one_shot rounds differently"),
        (partial(ddp, algorithm="bruck"), "bruck"),
        (partial(ddp, bucket_bytes=0), "bucket_bytes is 0: it must be at least 1"),
        (partial(zero3, algorithm="recursive_halving(radix=2)"), "radix"),
        (partial(hsdp, group_size=2, algorithm="swing"), "swing"),
        (partial(SyncParameterServer, algorithm="ring"), "ring"),
    ],
)
def test_arguments_that_cannot_work_are_refused(make: Make, sentence: str) -> None:
    said = outcome(make, 6)
    assert set(said) == {said[0]} and said[0].startswith("ValueError") and sentence in said[0]


@pytest.mark.parametrize("ranks", [5, 8])
@pytest.mark.parametrize("algorithm", ["recursive_doubling", "gather_broadcast"])
def test_algorithms_that_send_some_blocks_more_often_are_predicted_too(
    algorithm: str, ranks: int
) -> None:
    """No closed formula says what they send of a unit that ranks divide unevenly."""
    verdict(train(partial(zeropp, algorithm=algorithm), ranks, steps=2))
    verdict(train(partial(ddp, broadcast_algorithm="scatter_all_gather"), ranks, steps=2))


def test_what_is_refused_has_made_no_groups() -> None:
    def fn(comm: Communicator) -> set[str]:
        with comm.record() as ledger, pytest.raises(ValueError, match="unknown algorithm"):
            hsdp(comm, model(), algorithm="nothing")
        return {row.collective for row in ledger.rows()}

    assert collectives.run(fn, size=4) == [set()] * 4


def test_a_closed_run_has_freed_its_groups_and_nothing_else() -> None:
    def fn(comm: Communicator) -> int:
        trainer = hsdp(comm, model(), group_size=2)
        groups = [trainer.arrays.comm_of((axis,)) for axis in ("shard", "replicate")]
        trainer.close()
        for group in groups:
            with pytest.raises(CollectiveError, match="freed"):
                group.barrier()
        return int(comm.all_reduce(np.ones(1, np.int64))[0])

    assert collectives.run(fn, size=4) == [4] * 4


def test_other_strategies_are_refused_on_all_ranks() -> None:
    def make(comm: Communicator, *given: Any) -> Trainer:
        return (zero1 if comm.rank else zero3)(comm, *given)

    assert outcome(make, 2) == 2 * [f"ModelMismatch: {DIFFER}: option divided of rank 1"]


class Skipping(Model):
    """Leaves out a layer on some rank."""

    def __init__(self, skipped: str) -> None:
        super().__init__(model().layers)
        self.skipped = skipped

    def active_layers(self) -> list[str]:
        return [name for name in self.layers if name != self.skipped]


@every
def test_a_layer_without_gradient_is_refused_on_all_ranks(name: str) -> None:
    said = outcome(ALL[name], 3, lambda rank: Skipping("block1" if rank else ""))
    assert said == 3 * ["MissingGradient: no gradient in this step for block1 (on ranks 1, 2)"]


@every
def test_a_layer_that_one_micro_batch_uses_has_a_gradient(name: str) -> None:
    class Sometimes(Skipping):
        def active_layers(self) -> list[str]:
            self.skipped = "" if self.skipped else "block1"
            return super().active_layers()

    steps = train(ALL[name], 2, Recipe(num_micro_batches=2), of=lambda: Sometimes(""), steps=2)
    assert len(steps[0].losses) == 2


@pytest.mark.parametrize("kind", [hsdp, zeropp])
def test_groups_that_do_not_divide_the_ranks_are_refused(kind: Any) -> None:
    said = outcome(partial(kind, group_size=2), 3, lambda _: model())
    assert said == 3 * ["ValueError: 3 ranks cannot be divided into groups of 2"]


def test_the_errors_are_value_errors() -> None:
    assert issubclass(ModelMismatch, ValueError) and issubclass(MissingGradient, ValueError)


class Penalized(Linear):
    """Adds the mean square of what it returns to the loss, as routers of experts do."""

    def forward(self, x: Any, step: Step) -> tuple[Any, Any]:
        y, saved = super().forward(x, step)
        step.losses.append(float((y * y).sum()) / step.total)
        return y, (saved, 2 * step.loss_scale / step.total * y)

    def backward_input(self, dy: Any, saved: Any) -> tuple[Any, Any]:
        inner, own = saved
        return super().backward_input(dy + own, inner)

    def activation_bytes(self, x: ArraySpec) -> Activations:
        found = super().activation_bytes(x)
        return found._replace(saved=found.saved + found.out.nbytes)


def with_last(linear: type[Linear]) -> Model:
    layers = {"embedding": Embedding(256, CONTEXT, 6), "head": linear(6, 256)}
    return Model(layers | {"loss": CrossEntropy()})


def test_losses_of_layers_are_added_on_any_number_of_ranks() -> None:
    recipe = Recipe("float64", num_micro_batches=2)
    (one,) = train(alone, 1, recipe, of=partial(with_last, Penalized))
    (other,) = train(alone, 1, recipe, of=partial(with_last, Linear))
    assert min(a - b for a, b in zip(one.losses, other.losses, strict=True)) > 1e-3
    for end in train(zero1, 3, recipe, of=partial(with_last, Penalized)):
        np.testing.assert_allclose(end.losses, one.losses, rtol=1e-12)
        assert all(formula == counted for formula, counted in end.memory.values())
