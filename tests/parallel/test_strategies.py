"""Every strategy: the losses of one rank, the same parameters everywhere, and what it costs.

The strategies that round what they send, or let ranks run ahead, have tests of their own beside.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import CollectiveError, Communicator
from parallel.agreement import ModelMismatch
from parallel.comm_hooks import HalfPrecision
from parallel.data_parallel import DataParallel
from parallel.gpt import gpt
from parallel.hsdp import HSDP, Mesh
from parallel.nn import Linear, Model
from parallel.optim import SGD, Adam, AdamW
from parallel.parameter_server import AsyncParameterServer, SyncParameterServer
from parallel.strategy import MissingGradient, Recipe, RunSize, Strategy
from parallel.traffic import TrafficMismatch
from parallel.zero import Zero1, Zero2, Zero3
from parallel.zero_plus_plus import ZeroPlusPlus
from tests.parallel.training import (
    CONTEXT,
    ROWS,
    Make,
    batch,
    model,
    nothing,
    serial,
    train,
    verdict,
    whole,
)

EXACT: dict[str, Make] = {
    "server-sync": SyncParameterServer,
    "ddp": DataParallel,
    "ddp, a bucket a layer": partial(DataParallel, bucket_bytes=1),
    "zero1": Zero1,
    "zero2": Zero2,
    "zero3": Zero3,
    "zero3, kept": partial(Zero3, keep_after_forward=True),
    "hsdp": HSDP,
    "hsdp, groups of one": partial(HSDP, group_size=1),
}
ALL = EXACT | {"zeropp": ZeroPlusPlus}
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
    ends = train(EXACT[name], ranks, recipe)
    for end in ends:
        np.testing.assert_allclose(end.losses, serial(recipe).losses, rtol=1e-12)
    for unit, x in whole(ends).items():
        np.testing.assert_allclose(x, whole([serial(recipe)])[unit], rtol=0, atol=1e-9)


@exact
@pytest.mark.parametrize("dtype", LONG)
def test_they_stay_those_of_one_rank(name: str, dtype: str) -> None:
    steps, close = LONG[dtype]
    recipe = Recipe(dtype=dtype)
    ends = train(EXACT[name], 3, recipe, steps=steps, of=small)
    reference = serial(recipe, steps=steps, of=small)
    np.testing.assert_allclose(ends[0].losses, reference.losses, rtol=close)


def small() -> Model:
    return model(layers=1)


def test_a_gradient_that_is_not_summed_would_be_noticed() -> None:
    """The negative control."""

    class Alone(Zero2):
        def reduce_scatter(self, unit: str, whole: Any) -> Any:
            return whole[self.shard_slice(unit)]

    assert not np.allclose(train(Alone, 3)[0].losses, serial().losses, rtol=1e-6)


def test_a_mean_over_uneven_parts_would_be_noticed() -> None:
    """The negative control: ranks that each average over their own rows."""

    class Unweighted(DataParallel):
        def step(self, inputs: Any, targets: Any, total: int) -> float:
            return super().step(inputs, targets, inputs.size * self.size)

    assert not np.allclose(train(Unweighted, 4)[0].losses, serial().losses, rtol=1e-6)


@every
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_all_ranks_hold_the_same_parameters_to_the_last_bit(name: str, dtype: str) -> None:
    """`whole` compares what several ranks hold."""
    whole(train(ALL[name], 4, Recipe(dtype=dtype, optimizer=AdamW)))


def test_parameters_that_differ_would_be_noticed() -> None:
    ends = train(Zero1, 2)
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


@pytest.mark.parametrize("kind", [Strategy, DataParallel, Zero1, Zero3])
def test_strategies_may_take_turns_with_a_model(kind: Any) -> None:
    """Each works on arrays of its own, to the last bit as if it had the model alone."""

    def fn(comm: Communicator) -> tuple[list[float], list[float]]:
        shared, alone = model(), kind(comm, model())
        ours, seed = kind(comm, shared), Recipe(seed=1)
        others = Strategy(None, shared, seed), Zero2(comm, shared, seed)
        losses = []
        for step in range(4):
            losses += ours.train(step + 1, batch, ROWS * CONTEXT, nothing, step)
            for each in others:
                each.train(1, batch, ROWS * CONTEXT, nothing)
        return losses, alone.train(4, batch, ROWS * CONTEXT, nothing)

    ((found, wanted),) = collectives.run(fn, size=1)
    assert found == wanted


@exact
def test_layers_may_be_computed_twice_instead_of_kept(name: str) -> None:
    """To the last bit the same, with as many forwards more."""
    kept, again = (train(EXACT[name], 2, Recipe(recompute=names)) for names in ((), ("block1",)))
    assert kept[0].losses == again[0].losses
    assert (kept[0].strategy.num_recomputed, again[0].strategy.num_recomputed) == (0, 4)
    assert again[0].memory["activations"] < kept[0].memory["activations"]


@exact
def test_more_micro_batches_than_rows_leave_some_empty(name: str) -> None:
    """11 rows for 4 ranks, 2 or 3 each, in 3 micro-batches."""
    recipe = Recipe(num_micro_batches=3)
    np.testing.assert_allclose(train(EXACT[name], 4, recipe)[0].losses, serial().losses, rtol=1e-12)


# What it costs


@every
@pytest.mark.parametrize("ranks", RANKS)
def test_predicted_is_recorded(name: str, ranks: int) -> None:
    assert "two columns compared" in verdict(train(ALL[name], ranks, steps=2))


@pytest.mark.parametrize("name", [*ALL, "server-async"])
def test_traffic_is_known_before_a_run(name: str) -> None:
    def fn(comm: Communicator) -> bool:
        strategy = (ALL | {"server-async": AsyncParameterServer})[name](comm, model())
        before = strategy.traffic(2, batch=(ROWS, CONTEXT))
        strategy.start()
        strategy.train(2, batch, ROWS * CONTEXT, nothing)
        return before == strategy.traffic(2, batch=(ROWS, CONTEXT))

    assert collectives.run(fn, size=4) == [True] * 4


@pytest.mark.parametrize("make", [Zero1, Zero2, SyncParameterServer])
def test_an_update_that_was_not_made_is_noticed(make: Any) -> None:
    """Were the number of updates read off the run, the columns would be equal."""

    class Lazy(make):  # type: ignore[misc]
        def update(self) -> None:
            if self.num_updates == 0:
                super().update()

    with pytest.raises(TrafficMismatch, match="update/block0"):
        verdict(train(Lazy, 3))


def test_what_no_run_can_do_is_not_predicted() -> None:
    def fn(comm: Communicator) -> None:
        with pytest.raises(
            ValueError, match="in float64 no update is skipped, but num_skipped is 1"
        ):
            Zero1(comm, model()).traffic(3, num_skipped=1)
        with pytest.raises(ValueError, match=r"pass batch=\(rows, context\)"):
            SyncParameterServer(comm, model()).traffic(3)

    collectives.run(fn, size=2)


VARIANTS = {
    "micro-batches, clipped": (Recipe(num_micro_batches=3, clip=0.1), model),
    "float32": (Recipe(dtype="float32", optimizer=SGD), model),
    "float16": (Recipe(dtype="float16"), model),
    "bfloat16, recomputed": (Recipe(dtype="bfloat16", recompute=("block0", "block1")), model),
    "tied": (Recipe(num_micro_batches=2), partial(model, is_tied=True)),
    "tied neighbors": (Recipe(), partial(model, is_tied=True, layers=1)),
}


@every
@pytest.mark.parametrize("variant", VARIANTS)
def test_predicted_is_recorded_and_memory_is_counted(name: str, variant: str) -> None:
    recipe, of = VARIANTS[variant]
    ends = train(ALL[name], 4, recipe, of=of, steps=2)
    verdict(ends)
    for end in ends:
        for category, (formula, counted) in end.memory.items():
            assert formula == counted, category


@every
def test_what_was_lent_is_given_back(name: str) -> None:
    strategy = train(ALL[name], 3)[0].strategy
    assert strategy.memory.now["activations"] == 0
    assert strategy.memory.now["buffers"] == 0
    assert strategy.memory.peak["activations"] > 0


def extra(strategy: Strategy) -> None:
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
    calls = strategy.step_traffic(RunSize(1, 1, (ROWS, CONTEXT)))
    whole_model = strategy.model.num_parameters * strategy.dtype.itemsize
    return float(sum(call.sent(ranks).bytes for call in calls) / ranks / whole_model)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("k", [1, 3])
def test_the_formulas_of_the_papers(ranks: int, k: int) -> None:
    """Psi elements times these, times (N-1)/N: Rajbhandari et al. 2020, with k micro-batches."""
    times = {"ddp": 2, "zero1": 2, "zero2": k + 1, "zero3": 3 * k, "zero3, kept": 2 * k}
    for name, multiple in times.items():
        found = bytes_of(name, ranks, num_micro_batches=k)
        assert found == pytest.approx(multiple * (ranks - 1) / ranks, rel=1e-12), name


def test_the_formula_of_hierarchical_sharding() -> None:
    """3 Psi (g-1)/g within a group and 2 Psi/g (G-1)/G between groups."""
    assert bytes_of("hsdp", 8) == pytest.approx(3 * 3 / 4 + 2 / 4 * 1 / 2, rel=1e-12)


# Overflow


@every
def test_a_step_that_overflows_is_skipped_everywhere(name: str) -> None:
    """The scale begins so high that the first steps overflow; it is halved until one does not."""

    def with_high_scale(*given: Any) -> Strategy:
        strategy = ALL[name](*given)
        strategy.loss_scale.value = 2.0**40
        return strategy

    ends = train(with_high_scale, 3, Recipe(dtype="float16"), steps=40)
    verdict(ends)
    skipped = {end.strategy.num_skipped for end in ends}
    assert len(skipped) == 1 and 0 < skipped.pop() < 40
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
    for kind in (Zero1, Zero2, Zero3, HSDP, ZeroPlusPlus):
        said = outcome(kind, 3, lambda _: model(), lambda rank: Recipe(seed=seeds[rank]))
        assert set(said) == {said[0]}
        assert f"{DIFFER}: embedding of ranks 1, 2, block0 of ranks 1, 2" in said[0]


def test_rank_0_gives_initial_values_where_it_sends_them() -> None:
    for kind in (DataParallel, SyncParameterServer):
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
    "bucket_bytes": lambda comm, *given: DataParallel(comm, *given, bucket_bytes=1 + comm.rank),
    "find_unused_parameters": lambda comm, *given: DataParallel(
        comm, *given, find_unused_parameters=comm.rank > 0
    ),
    "hook": lambda comm, *given: DataParallel(
        comm, *given, hook=HalfPrecision("bfloat16" if comm.rank else "float16")
    ),
    "keep_after_forward": lambda comm, *given: Zero3(
        comm, *given, keep_after_forward=comm.rank > 0
    ),
    "group_size": lambda comm, *given: HSDP(comm, *given, group_size=2 if comm.rank < 2 else 4),
    "block": lambda comm, *given: ZeroPlusPlus(comm, *given, block=8 + comm.rank),
    "algorithm": lambda comm, *given: Zero1(
        comm, *given, algorithm="direct" if comm.rank else "ring"
    ),
    "staleness_bound": lambda comm, *given: AsyncParameterServer(
        comm, *given, staleness_bound=comm.rank
    ),
    "strategy": lambda comm, *given: (Zero2 if comm.rank else Zero1)(comm, *given),
}


@pytest.mark.parametrize("option", DIFFERENT)
def test_other_options_of_a_strategy_are_refused_on_all_ranks(option: str) -> None:
    said = outcome(DIFFERENT[option], 4)
    assert set(said) == {said[0]} and f"option {option} of rank" in said[0]


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
        DataParallel, 2,
        recipe=lambda rank: Recipe(optimizer=partial(Adam, **(theirs if rank else ours))),
    )  # fmt: skip
    assert said == 2 * ["" if is_alike else f"ModelMismatch: {DIFFER}: option optimizer of rank 1"]


def test_ties_that_differ_are_refused_on_all_ranks() -> None:
    def of(rank: int) -> Model:
        layers = {name: Linear(3, 3) for name in "abc"}
        return Model(layers, ties={"c.weight": f"{'ab'[rank]}.weight"})

    assert outcome(Zero3, 2, of) == 2 * [f"ModelMismatch: {DIFFER}: option layers of rank 1"]


@every
def test_layers_that_compute_otherwise_are_refused_on_all_ranks(name: str) -> None:
    """The heads of attention show in no shape."""

    def of(rank: int) -> Model:
        return gpt(num_layers=1, hidden=6, num_heads=3 if rank == 1 else 2, context=CONTEXT)

    assert outcome(ALL[name], 3, of) == 3 * [f"ModelMismatch: {DIFFER}: option layers of rank 1"]


def test_a_resumed_run_is_compared_too() -> None:
    def fn(comm: Communicator) -> None:
        Zero2(comm, model(), Recipe(clip=1.0 + comm.rank)).resume()

    with pytest.raises(ModelMismatch, match=r"option clip of ranks 1, 2"):
        collectives.run(fn, size=3)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_micro_batches": 0}, "num_micro_batches is 0: it must be at least 1"),
        ({"clip": 0.0}, "clip is 0.0: it must be a finite norm above 0"),
        ({"clip": float("nan")}, "clip is nan"),
        ({"recompute": "block1"}, r"a collection of names: \['block1'\]"),
        ({"recompute": ["block9"]}, "there is no layer 'block9' to recompute"),
        ({"dtype": "int8"}, "not in 'int8'"),
    ],
)
def test_recipes_that_cannot_work_are_refused(options: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Strategy(None, model(), Recipe(**options))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (partial(DataParallel, algorithm="one_shot"), "all_reduce.one_shot rounds differently"),
        (partial(DataParallel, algorithm="bruck"), "bruck"),
        (partial(DataParallel, bucket_bytes=0), "bucket_bytes is 0: it must be at least 1"),
        (partial(Zero3, algorithm="recursive_halving(radix=2)"), "radix"),
        (partial(HSDP, group_size=2, algorithm="swing"), "swing"),
        (partial(SyncParameterServer, algorithm="ring"), "ring"),
        (partial(ZeroPlusPlus, keep_after_forward=True), "it has no keep_after_forward"),
    ],
)
def test_arguments_that_cannot_work_are_refused(make: Make, sentence: str) -> None:
    said = outcome(make, 6)
    assert set(said) == {said[0]} and said[0].startswith("ValueError") and sentence in said[0]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (partial(ZeroPlusPlus, algorithm="recursive_doubling"), "all_gather.recursive_doubling"),
        (
            partial(AsyncParameterServer, algorithm="scatter_all_gather"),
            "broadcast.scatter_all_gather",
        ),
    ],
)
def test_algorithms_without_a_formula_for_uneven_parts_are_refused(make: Make, name: str) -> None:
    assert set(outcome(make, 5)) == {
        f"ValueError: {name} sends some blocks more often than others: no formula says what"
        " 5 ranks send of head, which they cannot divide equally; choose another algorithm"
    }


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_algorithms_that_need_equal_parts_serve_units_that_have_them(ranks: int) -> None:
    def even() -> Model:
        return gpt(num_layers=1, hidden=8, num_heads=2, context=CONTEXT)

    verdict(train(partial(ZeroPlusPlus, algorithm="gather_broadcast"), ranks, of=even))


def test_algorithms_that_need_equal_parts_would_miss_the_formula_otherwise() -> None:
    """Were they not refused."""

    class Unchecked(ZeroPlusPlus):
        def collective_sizes(self) -> dict[str, Any]:
            return {}

    with pytest.raises(TrafficMismatch, match="forward/block0/all_gather: predicted"):
        verdict(train(partial(Unchecked, algorithm="gather_broadcast"), 8))


def test_what_is_refused_has_made_no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr("parallel.hsdp.Mesh", lambda *given: made.append(given) or Mesh(*given))
    assert "layer 'x'" in outcome(HSDP, 2, recipe=lambda rank: Recipe(recompute=["x"]))[0]
    assert not made
    assert outcome(HSDP, 2) == ["", ""] and len(made) == 2


def test_a_closed_strategy_has_freed_its_groups_and_nothing_else() -> None:
    def fn(comm: Communicator) -> int:
        strategy = HSDP(comm, model(), group_size=2)
        strategy.close()
        for group in (strategy.mesh.inner, strategy.mesh.outer):
            with pytest.raises(CollectiveError, match="freed"):
                group.barrier()
        return int(comm.all_reduce(np.ones(1, np.int64))[0])

    assert collectives.run(fn, size=4) == [4] * 4


def test_other_strategies_are_refused_on_all_ranks() -> None:
    def make(comm: Communicator, *given: Any) -> Strategy:
        return (Zero1 if comm.rank else Zero3)(comm, *given)

    assert outcome(make, 2) == 2 * [
        "ModelMismatch: ranks train by different strategies, with different options"
    ]


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


@pytest.mark.parametrize("kind", [HSDP, ZeroPlusPlus])
def test_groups_that_do_not_divide_the_ranks_are_refused(kind: Any) -> None:
    said = outcome(partial(kind, group_size=2), 3, lambda _: model())
    assert said == 3 * ["ValueError: 3 ranks cannot be divided into groups of 2"]


def test_the_errors_are_value_errors() -> None:
    assert issubclass(ModelMismatch, ValueError) and issubclass(MissingGradient, ValueError)
