"""Communication hooks: what they send, what they lose, and that all ranks lose the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import collectives
from collectives import Communicator
from parallel import PredictedCall, RankView, Recipe, TrafficMismatch, TrafficTable, Trainer, text
from parallel.mesh import span
from parallel.nn import (
    Activations,
    Array,
    ArraySpec,
    CrossEntropy,
    Layer,
    Model,
    ParameterSpec,
    Step,
    gpt,
)
from parallel.optim import SGD, Adam, dtype_of
from parallel.run import RankArrays
from parallel.sharding import (
    AllReduce,
    CommHook,
    Completion,
    GeneratorHook,
    HalfPrecision,
    Int8Blocks,
    PowerSGD,
)
from parallel.sharding.power_sgd import orthonormal
from parallel.sharding.quantization import without_own
from tests.parallel.training import ddp

HOOKS: dict[str, Callable[[], CommHook]] = {
    "float16": lambda: HalfPrecision("float16"),
    "bfloat16": lambda: HalfPrecision("bfloat16"),
    "int8": lambda: Int8Blocks(block=100),
    "rank 2": lambda: PowerSGD(2),
}
every_hook = pytest.mark.parametrize("name", HOOKS)

Gradient = Callable[[int, int], Any]  # (rank, step) -> array


class Given(Layer):
    """Its gradients are given.  The logits are zeros, whatever it is shown."""

    def __init__(self, gradients: Mapping[str, Gradient], rank: int) -> None:
        super().__init__()
        self.gradients, self.rank, self.step = gradients, rank, 0

    def specs(self) -> dict[str, ParameterSpec]:
        return {
            name: ParameterSpec(given(self.rank, 0).shape) for name, given in self.gradients.items()
        }

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        return np.zeros((*x.shape[:2], 2), self.dtype), None

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        return dy, None

    def backward_weight(self, rest: Any) -> None:
        for name, given in self.gradients.items():
            self.gradient[name] += given(self.rank, self.step).astype(self.dtype)
        self.step += 1

    @property
    def dtype(self) -> Any:
        return next(iter(self.value.values())).dtype

    def activation_bytes(self, x: ArraySpec) -> Activations:
        return Activations(0, x.of_shape(*x.shape[:2], 2))


class Run(NamedTuple):
    """What one rank has after its steps."""

    sums: list[dict[str, Any]]  # of each step, by full name, in float64
    strategy: Trainer
    table: TrafficTable | None

    def check_traffic(self) -> None:
        """Of rank 0."""
        assert self.table is not None
        self.table.check()


def add(
    make: Callable[[], CommHook | None],
    size: int,
    units: Mapping[str, Mapping[str, Gradient]],
    *,
    steps: int = 1,
    dtype: str = "float32",
    **options: Any,
) -> list[Run]:
    """Sum given gradients over ranks by a hook, in some steps; what each of the ranks has."""

    def rank(comm: Communicator) -> Run:
        layers = {unit: Given(gradients, comm.rank) for unit, gradients in units.items()}
        model = Model(layers | {"loss": CrossEntropy()})
        recipe = Recipe(dtype=dtype, optimizer=SGD)
        strategy = ddp(comm, model, recipe, hook=make(), **options)
        tokens = np.zeros((1, 1), np.int64)
        sums = []
        with comm.record() as ledger:
            strategy.start()
            for _ in range(steps):
                strategy.step(tokens, tokens, comm.size)
                named = model.named(strategy.gradients)
                sums.append({name: x.astype(np.float64) for name, x in named.items()})
        whole = ledger.gather()
        table = None
        if whole is not None:
            calls = strategy.traffic(steps, num_skipped=strategy.updates.num_skipped)
            table = TrafficTable(calls, whole, None, size=comm.size)
        return Run(sums, strategy, table)

    return collectives.run(rank, size=size)


def random(*shape: int, spread: float = 1.0) -> Gradient:
    """Other numbers on every rank and in every step."""
    return lambda rank, step: (
        spread * np.random.default_rng([rank, step, *shape]).standard_normal(shape)
    )


def constant(x: Any) -> Gradient:
    """The same in every step, and on every rank."""
    return lambda rank, step: x


# In buckets of so many elements the last two are together and the others alone.
BUCKET = 425
MIXED = {
    "first": {"weight": random(18, 24), "bias": random(24)},
    "narrow": {"weight": random(300, 2)},
    "tiny": {"bias": random(2)},  # fewer elements than ranks
    "wide": {"weight": random(4, 110)},
    "uneven": {"gain": random(7), "weight": random(13, 29, spread=1e-3), "bias": random(29)},
    "last": {"bias": random(3)},
}


def exact(gradient: Gradient, size: int, step: int = 0) -> Any:
    return sum(gradient(rank, step) for rank in range(size))


# Traffic


@every_hook
@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (1, "float32"),
        (2, "float32"),
        (3, "float32"),
        (4, "float32"),
        (5, "float32"),
        (3, "float64"),
        (3, "bfloat16"),
        (3, "float16"),
    ],
)
@pytest.mark.slow
def test_hooks_send_what_is_predicted(name: str, size: int, dtype: str) -> None:
    """To the byte, whether parameters are alone in their bucket or not."""
    bucket_bytes = BUCKET * dtype_of(dtype).itemsize
    (first, *_) = add(HOOKS[name], size, MIXED, dtype=dtype, bucket_bytes=bucket_bytes)
    assert [len(units) for units in first.strategy.view.buckets.values()] == [2, 1, 1, 1, 1]
    first.check_traffic()


def kept_by(run: Run) -> int:
    """The bytes that the hook keeps from step to step."""
    return run.strategy.sharding.reduction.state_bytes(run.strategy.view)


class Boastful(Int8Blocks):
    """It says that it sends no scales."""

    def traffic(self, view: RankView, bucket: str, phase: str, axes: Any) -> list[PredictedCall]:
        calls = super().traffic(view, bucket, phase, axes)
        size = view.bucket_size(bucket)
        table = without_own((size // 2, size // 2))
        return [replace(calls[0], counts=table), calls[1]]


def test_a_hook_that_says_too_little_is_seen() -> None:
    (first, *_) = add(Boastful, 2, {"a": {"w": random(8, 8)}})
    with pytest.raises(TrafficMismatch, match="all_to_all"):
        first.check_traffic()


def sent(make: Callable[[], CommHook | None], units: Any, size: int) -> int:
    """The bytes of one step's backward, recorded, all ranks together."""
    table = add(make, size, units)[0].table
    assert table is not None
    return sum(row.recorded.bytes for row in table.rows if row.phase.startswith("backward"))


@pytest.mark.parametrize("size", [2, 4])
def test_hooks_save_the_bytes_that_the_table_says(size: int) -> None:
    """As the table in the module's docstring says, for float32 and a matrix of 64 x 128."""
    units = {"a": {"w": random(64, 128)}}
    whole = sent(lambda: None, units, size)
    assert whole == 8 * (size - 1) * 64 * 128
    assert sent(lambda: HalfPrecision("float16"), units, size) * 2 == whole
    assert sent(lambda: HalfPrecision("bfloat16"), units, size) * 2 == whole
    assert sent(Int8Blocks, units, size) == whole * (1 / 4 + 1 / 256)
    assert sent(lambda: PowerSGD(2), units, size) == whole * 2 * (64 + 128) / (64 * 128)


# The same on all ranks


def differ(runs: list[Run]) -> list[str]:
    """The parameters that are not the same bits everywhere."""
    first, *others = ({k: v.tobytes() for k, v in run.strategy.parameters.items()} for run in runs)
    return sorted({unit for other in others for unit in first if other[unit] != first[unit]})


@every_hook
@pytest.mark.parametrize("size", [3, 4])
def test_parameters_stay_equal_to_the_last_bit(name: str, size: int) -> None:
    assert not differ(add(HOOKS[name], size, MIXED, steps=3, bucket_bytes=4 * BUCKET))


class Careless(Int8Blocks):
    """The owner of a part keeps what the others get rounded."""

    def run(self, arrays: RankArrays, bucket: str, flat: Array, axes: Any) -> Iterator[Completion]:
        own = span(flat.shape[0], arrays.view.mesh.size, arrays.view.rank)
        works = super().run(arrays, bucket, flat, axes)
        yield next(works)
        yield next(works)
        before = flat[own].copy()
        assert next(works, None) is None
        flat[own] = before


def test_a_part_that_its_owner_does_not_round_is_seen() -> None:
    assert differ(add(Careless, 2, MIXED)) == sorted(MIXED)


# HalfPrecision


@pytest.mark.parametrize("to", ["float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_two_gradients_are_rounded_and_their_sum_is(to: str, dtype: str) -> None:
    short, given = dtype_of(to), random(100)
    a, b = (given(rank, 0).astype(dtype).astype(short).astype(np.float32) for rank in (0, 1))
    runs = add(lambda: HalfPrecision(to), 2, {"a": {"x": given}}, dtype=dtype)
    for run in runs:
        np.testing.assert_array_equal(run.sums[0]["a.x"], (a + b).astype(short).astype(np.float64))


@pytest.mark.parametrize("to", ["float16", "bfloat16"])
def test_a_model_of_that_dtype_loses_nothing_more(to: str) -> None:
    plain, same = (add(make, 3, MIXED, dtype=to) for make in (AllReduce, lambda: HalfPrecision(to)))
    for name, x in plain[0].sums[0].items():
        np.testing.assert_array_equal(same[0].sums[0][name], x)


def test_dtypes_that_have_not_two_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="dtype is 'float32': it must be float16 or bfloat16"):
        HalfPrecision("float32")


# Infinite numbers


@every_hook
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_what_is_not_finite_on_one_rank_shows_on_all(name: str, bad: float) -> None:
    """Where it is, at least; and a later step is not the worse for it."""

    def spoiled(rank: int, step: int) -> Any:
        x = random(16, 24)(rank, step)
        if rank == 1 and step == 1:
            x[3, 4] = bad
        return x

    for run in add(HOOKS[name], 3, {"a": {"w": spoiled}}, steps=3):
        is_finite = [np.isfinite(sums["a.w"]) for sums in run.sums]
        assert is_finite[0].all() and is_finite[2].all()
        assert not is_finite[1][3, 4]


@pytest.mark.filterwarnings("ignore:overflow encountered")  # NumPy tells of it too
@pytest.mark.parametrize("values", [(1e5, 0.0), (4e4, 4e4)])
def test_float16_overflows_to_infinity(values: tuple[float, float]) -> None:
    """One number that is too large for it, or a sum; bfloat16 holds both."""

    def given(rank: int, step: int) -> Any:
        return np.full(3, values[rank])

    for run in add(lambda: HalfPrecision("float16"), 2, {"a": {"x": given}}):
        assert (run.sums[0]["a.x"] == np.inf).all()
    for run in add(lambda: HalfPrecision("bfloat16"), 2, {"a": {"x": given}}):
        np.testing.assert_allclose(run.sums[0]["a.x"], sum(values), rtol=2**-8)


@pytest.mark.filterwarnings("ignore:overflow encountered")
@every_hook
def test_a_float16_step_that_overflows_is_skipped_on_all_ranks(name: str) -> None:
    def given(rank: int, step: int) -> Any:
        return np.full((16, 24), 60000.0 if step == 1 else 1.0)

    for run in add(HOOKS[name], 2, {"a": {"w": given}}, steps=3, dtype="float16"):
        assert run.strategy.updates.num_skipped == 1 and run.strategy.updates.num_updates == 2


# Eight bits


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_an_element_is_rounded_once_by_each_rank_and_once_by_its_owner(size: int) -> None:
    given, num = random(1000), 1000
    mine = [np.abs(given(rank, 0)).max() / 127 for rank in range(size)]
    whole = exact(given, size)
    error = np.abs(add(Int8Blocks, size, {"a": {"x": given}})[0].sums[0]["a.x"] - whole)
    for owner in range(size):
        own = span(num, size, owner)
        bound = 0.5 * (sum(mine) - mine[owner])
        bound += 0.5 * (np.abs(whole[own]).max() + bound) / 127
        assert error[own].max() <= bound * (1 + 1e-4)


def test_one_scale_for_all_is_worse_than_blocks() -> None:
    """Where some gradients are much smaller than others that have the same owner."""
    spread = np.tile(np.repeat([1.0, 1e-4], 256), 2)

    def given(rank: int, step: int) -> Any:
        return spread * random(1024)(rank, step)

    def relative_error(make: Callable[[], CommHook]) -> float:
        x = add(make, 2, {"a": {"x": given}})[0].sums[0]["a.x"]
        wanted = exact(given, 2)
        return float(np.linalg.norm((x - wanted)[spread < 1]) / np.linalg.norm(wanted[spread < 1]))

    assert relative_error(Int8Blocks) < 0.02
    assert relative_error(lambda: Int8Blocks(block=1024)) > 0.9


def test_a_block_without_elements_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one element, not 0"):
        Int8Blocks(block=0)


# Low rank


def low_rank(rank: int, rows: int = 20, columns: int = 30) -> Any:
    """A sum of outer products, of which each has half the weight of the one before."""
    rng = np.random.default_rng(rank)
    left, right = (np.linalg.qr(rng.standard_normal((n, rank)))[0] for n in (rows, columns))
    return left * 0.5 ** np.arange(rank) @ right.T


@pytest.mark.parametrize(("dtype", "rounding"), [("float64", 1e-14), ("float32", 1e-6)])
@pytest.mark.parametrize("size", [1, 3])
def test_a_matrix_of_that_rank_is_summed_exactly(dtype: str, rounding: float, size: int) -> None:
    """Up to rounding; with one rank less it is not."""
    matrix = low_rank(4)

    def given(rank: int, step: int) -> Any:
        return (1 + rank) * matrix

    def error(rank: int) -> float:
        runs = add(lambda: PowerSGD(rank), size, {"a": {"w": given}}, dtype=dtype)
        return float(np.abs(runs[0].sums[0]["a.w"] - exact(given, size)).max())

    assert error(4) < rounding * size**2
    assert error(3) > 1e-3


@pytest.mark.parametrize("rank", [5, 6, 12])
def test_a_matrix_for_which_it_saves_nothing_is_summed_as_it_is(rank: int) -> None:
    """10 x 10: with rank 5 P and Q have as many elements together, with rank 4 they have 80."""
    units = {"a": {"w": random(10, 10), "b": random(10)}}
    plain, whole, lossy = (
        add(make, 3, units)[0] for make in (AllReduce, lambda: PowerSGD(rank), lambda: PowerSGD(4))
    )
    assert kept_by(whole) == 0 < kept_by(lossy)
    for name, x in plain.sums[0].items():
        np.testing.assert_array_equal(whole.sums[0][name], x)
    assert (plain.sums[0]["a.w"] != lossy.sums[0]["a.w"]).any()


def test_vectors_beside_matrices_are_summed_as_they_are() -> None:
    plain, lossy = (add(make, 3, MIXED)[0] for make in (AllReduce, lambda: PowerSGD(1)))
    for name, x in plain.sums[0].items():
        is_same = np.allclose(lossy.sums[0][name], x, rtol=1e-6)
        assert is_same == ("weight" not in name)


def left_out(make: Callable[[], CommHook], matrix: Any, steps: int) -> list[float]:
    """How far the mean of what was sent so far is from a gradient that stays the same."""
    sums = [run["a.w"] for run in add(make, 2, {"a": {"w": constant(matrix)}}, steps=steps)[0].sums]
    mean = np.cumsum(sums, axis=0) / np.arange(1, steps + 1)[:, None, None]
    return [float(np.linalg.norm(x - 2 * matrix) / np.linalg.norm(2 * matrix)) for x in mean]


def test_error_feedback_sends_everything_in_the_end() -> None:
    """Without it, what is not in the direction that the power method finds is never sent."""
    with_it = left_out(lambda: PowerSGD(1), low_rank(3), 40)
    without = left_out(lambda: PowerSGD(1, error_feedback=False), low_rank(3), 40)
    assert with_it[-1] < 0.05
    assert without[-1] > 0.4


def test_power_sgd_goes_on_from_the_last_step() -> None:
    """So it comes to the best approximation, which is the singular value decomposition's."""
    matrix = low_rank(3)
    (run, *_) = add(
        lambda: PowerSGD(1, error_feedback=False), 2, {"a": {"w": constant(matrix)}}, steps=20
    )
    errors = [np.linalg.norm(sums["a.w"] / 2 - matrix) for sums in run.sums]
    best = np.sqrt(0.5**2 + 0.25**2)  # the other singular values
    assert errors[-1] == pytest.approx(best, rel=1e-5)
    assert errors[0] > 1.01 * best


@pytest.mark.parametrize("error_feedback", [True, False])
def test_a_gradient_that_was_zero_is_not_forgotten(error_feedback: bool) -> None:
    """Nor one that had a lower rank: directions with nothing to send are kept."""
    matrix = low_rank(2)

    def given(rank: int, step: int) -> Any:
        return [np.zeros_like(matrix), low_rank(1), matrix][step]

    make = lambda: PowerSGD(2, error_feedback=error_feedback)  # noqa: E731
    (run, *_) = add(make, 2, {"a": {"w": given}}, steps=3, dtype="float64")
    np.testing.assert_allclose(run.sums[0]["a.w"], 0)
    np.testing.assert_allclose(run.sums[2]["a.w"], 2 * matrix, atol=1e-13)


def test_what_was_left_out_does_not_depend_on_the_loss_scale() -> None:
    """Half the scale in the second step: half the sum, as it was with the scale of the first."""

    def sums(scales: tuple[float, float]) -> Any:
        def rank(comm: Communicator) -> Any:
            gradient = np.random.default_rng(comm.rank).integers(-8, 8, (12, 16))
            layer = Given({"w": lambda rank, step: gradient * scales[step]}, comm.rank)
            recipe = Recipe(dtype="float16", optimizer=SGD)
            strategy = ddp(
                comm, Model({"a": layer, "loss": CrossEntropy()}), recipe, hook=PowerSGD(1)
            )
            tokens, seen = np.zeros((1, 1), np.int64), []
            for scale in scales:
                strategy.loss_scale.value = scale
                strategy.step(tokens, tokens, comm.size)
                seen.append(strategy.gradients["a"].astype(np.float64) / scale)
            return seen

        return collectives.run(rank, size=2)[0]

    np.testing.assert_array_equal(sums((8.0, 4.0)), sums((8.0, 8.0)))


@pytest.mark.parametrize("steps", [0, 3])
def test_all_ranks_begin_with_the_same_directions(steps: int) -> None:
    """In the first step and in all others; each hook's `seed` draws its own."""
    runs = add(lambda: PowerSGD(2), 3, MIXED, steps=steps)
    (other, *_) = add(lambda: PowerSGD(2, seed=1), 1, MIXED, steps=steps)
    first, *others = (bases_of(run) for run in runs)
    assert all(bases == first for bases in others)
    assert bases_of(other) != first


def bases_of(run: Run) -> dict[str, bytes]:
    assert isinstance(run.strategy.sharding.reduction, PowerSGD)
    return {name: basis.tobytes() for name, basis in run.strategy.sharding.reduction.bases.items()}


def test_a_hook_serves_one_strategy_only() -> None:
    hook = PowerSGD(1)
    add(lambda: hook, 1, MIXED)
    with pytest.raises(ValueError, match="make one for each"):
        add(lambda: hook, 1, MIXED)


def test_a_rank_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="is 0: it must be at least 1"):
        PowerSGD(0)


def test_columns_become_orthonormal() -> None:
    x = np.random.default_rng(0).standard_normal((50, 6))
    q = orthonormal(x)
    np.testing.assert_allclose(q.T @ q, np.eye(6), atol=1e-15)
    np.testing.assert_allclose(q @ (q.T @ x), x, atol=1e-13)


def test_columns_that_nearly_agree_become_orthonormal() -> None:
    """What is left of a column is orthogonal to the others all the same, unlike after one pass."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 1)) + 1e-9 * rng.standard_normal((50, 4))
    q = orthonormal(x)
    np.testing.assert_allclose(q.T @ q, np.eye(4), atol=1e-15)
    first = x[:, 0] / np.linalg.norm(x[:, 0])
    second = x[:, 1] - first * (first @ x[:, 1])
    assert abs(first @ second / np.linalg.norm(second)) > 1e-10


def test_a_column_that_adds_nothing_becomes_zero() -> None:
    """Not for what rounding leaves of a column that the others make up."""
    a, b = np.random.default_rng(0).standard_normal((2, 50))
    q = orthonormal(np.stack([a, 3 * a, b, 0 * a, a - 7 * b], axis=1))
    np.testing.assert_allclose(np.diag(q.T @ q), [1, 0, 1, 0, 0], atol=1e-15)
    assert np.isnan(orthonormal(np.full((5, 2), np.nan))).all()


# What is kept


@every_hook
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_state_and_message_buffers_are_predicted_and_counted(name: str, dtype: str) -> None:
    (run, *_) = add(HOOKS[name], 2, MIXED, steps=2, dtype=dtype)
    view, memory = run.strategy.view, run.strategy.memory
    hook = view.sharding.reduction
    kept = hook.state_bytes(view)
    sent = sum(hook.buffer_bytes(view, bucket, ("data",)) for bucket in view.buckets)
    assert memory.now["buffers"] == kept and memory.peak["buffers"] == kept + sent
    assert sent > 0 or name == dtype


def test_power_sgd_keeps_its_matrices_and_its_error() -> None:
    """Of a matrix of 16 x 24 a Q of 24 x 2, and the error unless it is not wanted."""
    units = {"a": {"w": random(16, 24), "b": random(24)}}
    (kept,) = add(lambda: PowerSGD(2), 1, units)
    (less,) = add(lambda: PowerSGD(2, error_feedback=False), 1, units)
    assert kept.strategy.memory.now["buffers"] == 4 * (24 * 2 + 16 * 24)
    assert less.strategy.memory.now["buffers"] == 4 * 24 * 2


def test_a_parameter_that_is_a_number_is_summed_as_it_is() -> None:
    units = {"a": {"w": random(8, 8), "scale": random()}}
    for run in add(lambda: PowerSGD(1), 2, units):
        assert run.sums[0]["a.scale"] == pytest.approx(exact(units["a"]["scale"], 2), rel=1e-6)


# Training

TEXT = np.frombuffer(
    b"""The algorithms for distributed averaging of gradients fall into two classes: those in which
    every rank sends to one, and those in which it sends to its neighbour. In a ring each of p ranks
    sends p - 1 pieces twice, and no link carries more than any other; so it is the bandwidth of one
    link that counts, not the number of ranks.""",
    np.uint8,
)
ROWS, CONTEXT, STEPS = 6, 8, 16

SGD_RECIPE = Recipe(dtype="float32", optimizer=partial(SGD, lr=0.1, momentum=0))
ADAM_RECIPE = Recipe(dtype="float32", optimizer=partial(Adam, lr=3e-3))


class Trained(NamedTuple):
    """What one rank has after its steps."""

    losses: Any
    strategy: Trainer


def train(
    make: Callable[[], CommHook | None],
    size: int = 2,
    recipe: Recipe = SGD_RECIPE,
    *,
    steps: int = STEPS,
    route: Callable[[int], list[str]] | None = None,
    **options: Any,
) -> list[Trained]:
    """Some steps of a small GPT; the traffic is checked."""

    def batch(step: int, rank: int, ranks: int) -> Any:
        shape = {"batch_size": ROWS, "context": CONTEXT}
        return text.batch(TEXT, seed=0, step=step, rank=rank, num_ranks=ranks, **shape)

    def rank(comm: Communicator) -> Trained:
        model = gpt(num_layers=1, hidden=16, num_heads=2, context=CONTEXT)
        if route is not None:
            model.active_layers = partial(route, comm.rank)  # type: ignore[method-assign]
        strategy = ddp(comm, model, recipe, hook=make(), bucket_bytes=8000, **options)
        with comm.record() as ledger:
            strategy.start()
            losses = strategy.train(steps, batch, ROWS * CONTEXT, lambda *_: None)
        whole = ledger.gather()
        if whole is not None:
            calls = strategy.traffic(steps, num_skipped=strategy.updates.num_skipped)
            TrafficTable(calls, whole, None, size=comm.size).check()
        return Trained(np.array(losses), strategy)

    return collectives.run(rank, size=size)


RUNS: dict[str, tuple[Callable[[], CommHook | None], Recipe]] = {
    "plain": (lambda: None, SGD_RECIPE),
    "float16": (lambda: HalfPrecision("float16"), SGD_RECIPE),
    "bfloat16": (lambda: HalfPrecision("bfloat16"), SGD_RECIPE),
    "rank 4": (lambda: PowerSGD(4), SGD_RECIPE),
    "rank 1": (lambda: PowerSGD(1), SGD_RECIPE),
    "rank 4 without feedback": (lambda: PowerSGD(4, error_feedback=False), SGD_RECIPE),
    "plain, Adam": (lambda: None, ADAM_RECIPE),
    "int8": (Int8Blocks, ADAM_RECIPE),
    "int8 with one scale": (lambda: Int8Blocks(block=1 << 40), ADAM_RECIPE),
}


@cache
def losses(run: str) -> Any:
    return train(RUNS[run][0], recipe=RUNS[run][1])[0].losses


def off(run: str) -> float:
    """By how much losses differ at most from those without a hook, in nats."""
    plain = "plain, Adam" if RUNS[run][1] is ADAM_RECIPE else "plain"
    return float(np.abs(losses(run) - losses(plain)).max())


@pytest.mark.parametrize(
    ("run", "bound", "coarser"),
    [
        ("float16", 1e-4, "bfloat16"),
        ("bfloat16", 1e-3, "rank 1"),
        ("int8", 1e-2, "int8 with one scale"),
        ("rank 4", 5e-3, "rank 1"),
        ("rank 4", 5e-3, "rank 4 without feedback"),
    ],
)
def test_training_goes_nearly_as_without(run: str, bound: float, coarser: str) -> None:
    """Losses fall and are off by little; by more where gradients are sent more coarsely."""
    assert losses(run)[0] - losses(run)[-1] > 0.8
    assert off(run) < bound
    assert off(coarser) > 2 * off(run)


class Counting(Int8Blocks):
    """How often it is asked for a sum."""

    num_starts = 0

    def start(self, *args: Any) -> Completion:
        self.num_starts += 1
        return super().start(*args)


def test_micro_batches_are_added_up_and_sent_once() -> None:
    recipe = replace(SGD_RECIPE, num_micro_batches=3)
    for run in train(Counting, recipe=recipe, steps=3):
        hook = run.strategy.sharding.reduction
        assert isinstance(hook, Counting)
        assert hook.num_starts == 3 * len(run.strategy.view.buckets)
        np.testing.assert_allclose(run.losses, losses("plain")[:3], rtol=1e-4)


@every_hook
def test_a_layer_that_some_ranks_do_not_use_is_summed_alike(name: str) -> None:
    """Rank 1 leaves the block out."""

    def route(rank: int) -> list[str]:
        return ["embedding", "head"] if rank == 1 else ["embedding", "block0", "head"]

    runs = train(HOOKS[name], 3, steps=3, route=route, find_unused_parameters=True)
    plain = train(lambda: None, 3, steps=3, route=route, find_unused_parameters=True)
    np.testing.assert_allclose(runs[0].losses, plain[0].losses, rtol=1e-2)
    first, *others = (run.strategy.parameters["block0"].tobytes() for run in runs)
    assert all(other == first for other in others)


# A user's own


class Largest:
    """Of every rank's bucket the `num` largest elements, with their places; the rest is dropped."""

    collectives = ()  # those of its own are not chosen by the run

    def __init__(self, num: int) -> None:
        self.num = num

    def start(self, arrays: RankArrays, bucket: str, flat: Array, axes: Any) -> Completion:
        num = min(self.num, len(flat))
        places = np.argsort(-np.abs(flat))[:num]
        message = np.stack([places.astype(np.float64), flat[places]])
        work = arrays.comm_of(axes).all_gather(message, algorithm="ring", async_op=True)

        def finish() -> None:
            flat[...] = 0
            for places, values in work.wait().reshape(-1, 2, num):
                flat[places.astype(np.int64)] += values

        return finish

    def traffic(self, view: RankView, bucket: str, phase: str, axes: Any) -> list[PredictedCall]:
        num = min(self.num, view.bucket_size(bucket))
        counts = (2 * num,) * view.mesh.size
        return [view.predicted(phase, "all_gather", counts, axes, itemsize=8)]

    def state(self, optimizer: Any) -> Any:
        """No checkpoint contains anything of it."""
        return {}, {}

    def allocate(self, arrays: RankArrays) -> None:
        """Nothing is kept."""

    def state_bytes(self, view: RankView) -> int:
        return 0


def test_a_hook_of_the_user_needs_the_methods_of_the_interface_alone() -> None:
    """It needs to be no more than an object with the methods of the interface."""
    plain, whole, some = (
        add(make, 3, MIXED, dtype="float64")
        for make in (AllReduce, lambda: Largest(10**6), lambda: Largest(50))
    )
    whole[0].check_traffic()
    some[0].check_traffic()
    for name, x in plain[0].sums[0].items():
        np.testing.assert_allclose(whole[0].sums[0][name], x, atol=1e-14)
    sent = [np.count_nonzero(x) for x in some[0].sums[0].values()]
    assert 50 <= sum(sent) <= 3 * 50
    assert not differ(some)


class Twice(GeneratorHook):
    """Two sums, one after the other, of which each bucket notes when they begin."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def run(self, arrays: RankArrays, bucket: str, flat: Array, axes: Any) -> Iterator[Completion]:
        for _ in range(2):
            self.notes.append(bucket)
            yield arrays.start_call(axes, "all_reduce", flat, out=flat)
        flat /= arrays.view.mesh.size

    def traffic(self, view: RankView, bucket: str, phase: str, axes: Any) -> list[PredictedCall]:
        size = view.bucket_size(bucket)
        return [view.predicted(phase, "all_reduce", size, axes, num_calls=2)]


def test_a_hook_that_sends_more_later_lets_other_buckets_go_first() -> None:
    """First one call of every bucket, then the second ones, in the same order on all ranks."""
    runs = add(Twice, 3, MIXED, bucket_bytes=1)
    runs[0].check_traffic()
    for run in runs:
        assert isinstance(run.strategy.sharding.reduction, Twice)
        assert run.strategy.sharding.reduction.notes == 2 * list(run.strategy.view.buckets)
    np.testing.assert_allclose(
        runs[0].sums[0]["first.bias"], exact(MIXED["first"]["bias"], 3), rtol=1e-5
    )
