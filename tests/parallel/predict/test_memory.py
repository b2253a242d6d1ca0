"""What a rank keeps: predicted by formula, and counted from the arrays that are alive."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterable
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import collectives
from collectives import Communicator
from parallel import (
    SGD,
    Adam,
    AllReduce,
    HalfPrecision,
    Int8Blocks,
    PowerSGD,
    Recipe,
    Sharding,
    Trainer,
    gpt,
    text,
)
from parallel.accounts import CATEGORIES
from parallel.memory import COMMAND
from parallel.mesh import length, span
from parallel.nn import Model
from parallel.optim import dtype_of
from parallel.optim.formulas import offloaded_bytes, state_bytes
from parallel.run.memory import peak_memory, step_memory
from parallel.sharding.sharding import DIVIDED
from parallel.step import LayerBackward, LayerForward, Reshard, Update, WaitForCalls
from parallel.strategies import SyncParameterServer
from tests.inside import forget_programs, session_of
from tests.parallel.training import ddp, hsdp, of_kind, zero1, zero2, zero3, zeropp

ROOT = Path(__file__).parents[3]
CONTEXT, ROWS = 3, 7  # rows of the whole batch: an uneven one for 2, 3, 4 and 5 ranks
TEXT = np.arange(256, dtype=np.uint8)

Make = Callable[[Any, Model, Recipe], Trainer]


def serial(comm: Communicator | None, model: Model, recipe: Recipe) -> Trainer:
    return Trainer(None, model, recipe)


# Each with the numbers of ranks on which it is tried.
STRATEGIES: dict[str, tuple[Make, tuple[int, ...]]] = {
    "ddp": (ddp, (1, 2, 3, 4, 5)),
    "zero1": (zero1, (1, 2, 3, 4, 5)),
    "zero2": (zero2, (1, 2, 3, 4, 5)),
    "zero3": (zero3, (1, 2, 3, 4, 5)),
    "zero3-keep": (partial(zero3, keep_after_forward=True), (1, 2, 3, 4, 5)),
    "hsdp": (hsdp, (4,)),
    "zeropp": (zeropp, (4,)),
    "server": (SyncParameterServer, (3,)),
}


class Case(NamedTuple):
    """What memory depends on beside the strategy."""

    dtype: str
    recompute: tuple[str, ...]
    is_tied: bool
    num_micro_batches: int
    hidden: int = 6

    def model(self) -> Model:
        return gpt(
            num_layers=2,
            hidden=self.hidden,
            num_heads=2,
            context=CONTEXT,
            is_tied=self.is_tied,
            recompute=self.recompute,
        )

    def recipe(self, **more: Any) -> Recipe:
        more |= {"num_micro_batches": self.num_micro_batches}
        return Recipe(self.dtype, **more)


DTYPES = "float64", "float32", "float16"
RECOMPUTE = (), ("block0",), ("embedding", "block0", "block1", "head")
CASES = [
    Case(DTYPES[i], RECOMPUTE[j], (i + j) % 2 == 1, 1 if (i - j) % 3 == 1 else 3)
    for i in range(3)
    for j in range(3)
]
MIXED = Case("float16", ("block1",), is_tied=True, num_micro_batches=3)


def batch(step: int, rank: int, ranks: int) -> tuple[text.Tokens, text.Tokens]:
    return text.batch(
        TEXT, seed=0, step=step, batch_size=ROWS, context=CONTEXT, rank=rank, num_ranks=ranks
    )


def trained(make: Make, comm: Communicator | None, case: Case, **more: Any) -> Trainer:
    """A strategy that has done one step."""
    strategy = make(comm, case.model(), case.recipe(**more))
    strategy.start()
    strategy.train(1, batch, ROWS * CONTEXT, lambda *done: None)
    return strategy


def counted(strategy: Trainer) -> dict[str, int]:
    return {category: strategy.memory.peak[category] for category in CATEGORIES}


def formula(strategy: Trainer, more_rows: int = 0) -> dict[str, int]:
    rows = len(batch(0, *strategy.batch_part)[0])
    return peak_memory(strategy, rows + more_rows, CONTEXT)


# Every strategy


def check(make: Make, size: int, cases: list[Case]) -> None:
    """Predicted is counted, category by category, on every rank."""

    def both(comm: Communicator) -> list[tuple[Case, dict[str, int], dict[str, int]]]:
        done = [trained(make, comm, case) for case in cases]
        return [(case, formula(s), counted(s)) for case, s in zip(cases, done, strict=True)]

    for rank, found in enumerate(collectives.run(both, size=size)):
        for case, ours, theirs in found:
            assert ours == theirs, f"rank {rank} of {size}, {case}"


def test_the_cases_have_every_pair_of_choices() -> None:
    choices = DTYPES, RECOMPUTE, (False, True), (1, 3)
    for i, j in combinations(range(4), 2):
        assert {(case[i], case[j]) for case in CASES} == set(product(choices[i], choices[j]))


def test_every_category_of_one_rank_is_what_the_formula_says() -> None:
    check(serial, 1, CASES)


@pytest.mark.parametrize(
    ("name", "size"), [(name, size) for name, (_, sizes) in STRATEGIES.items() for size in sizes]
)
@pytest.mark.slow
def test_every_category_is_what_the_formula_says(name: str, size: int) -> None:
    """Two cases for each number of ranks, others for each strategy; together all of them."""
    first = 2 * size + list(STRATEGIES).index(name)
    check(STRATEGIES[name][0], size, [CASES[(first + k) % len(CASES)] for k in range(2)])


@pytest.mark.parametrize("make", [ddp, zero1, zero2, zero3])
def test_the_optimizer_says_how_many_states_there_are(make: Make) -> None:
    def optimizer_bytes(comm: Communicator, optimizer: Any) -> int:
        strategy = trained(make, comm, MIXED, optimizer=optimizer)
        assert formula(strategy) == counted(strategy)
        return counted(strategy)["optimizer"]

    adam, sgd = (
        collectives.run(partial(optimizer_bytes, optimizer=x), size=3) for x in (Adam, SGD)
    )
    assert adam == [2 * n for n in sgd]


# It would be noticed


class HoardsGradients(Trainer):
    """Does not free what has been reduced."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.functions[WaitForCalls], self.hoard = self.wait, []

    def wait(self, action: WaitForCalls) -> None:
        self.hoard += map(self.arrays.full_gradients.get, self.units.reducing)
        self.units.wait(action)


class HoardsParameters(Trainer):
    """Does not free what has been used."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.functions[Reshard], self.hoard = self.reshard, []

    def reshard(self, action: Reshard) -> None:
        self.hoard += self.arrays.full_parameters.values()
        self.units.reshard(action)


class HoardsActivations(Trainer):
    """Does not free what backward has used."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.functions[LayerBackward], self.hoard = self.backward, []

    def backward(self, action: LayerBackward) -> None:
        self.hoard += self.micro_batches.saved.values()
        self.micro_batches.backward(action)


class HoardsScratch(Trainer):
    """Counts the scratch memory of a call longer than until the call is complete."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._right, self.arrays.start_call = self.arrays.start_call, self.start_call  # type: ignore[method-assign]

    def start_call(self, *args: Any, **options: Any) -> Any:
        self.memory.add("scratch", 1)
        return self._right(*args, **options)


class CopiesMasters(Trainer):
    """Keeps copies that it does not need."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.hoard = [self.arrays.new_buffer("master", 1)]


@pytest.mark.parametrize(
    ("make", "category"),
    [
        (of_kind(HoardsGradients, partial(Sharding.zero, 2)), "buffers"),
        (of_kind(HoardsParameters, partial(Sharding.zero, 3)), "buffers"),
        (of_kind(HoardsActivations, Sharding), "activations"),
        (of_kind(CopiesMasters, Sharding), "master"),
    ],
)
def test_what_is_kept_for_too_long_is_noticed(make: Make, category: str) -> None:
    def differing(comm: Communicator) -> set[str]:
        strategy = trained(make, comm, MIXED)
        ours, theirs = formula(strategy), counted(strategy)
        assert theirs[category] > ours[category]
        return {name for name in CATEGORIES if ours[name] != theirs[name]}

    assert collectives.run(differing, size=1) == [{category}]


def test_scratch_memory_that_is_counted_for_too_long_is_noticed() -> None:
    make = of_kind(HoardsScratch, partial(Sharding.zero, 2))

    def both(comm: Communicator) -> tuple[int, int]:
        strategy = trained(make, comm, MIXED)
        return formula(strategy)["scratch"], counted(strategy)["scratch"]

    assert all(0 < ours < theirs for ours, theirs in collectives.run(both, size=2))


@pytest.mark.parametrize("algorithm", ["ring", "recursive_doubling", "rabenseifner"])
def test_the_scratch_memory_of_every_algorithm_is_counted(algorithm: str) -> None:
    """Also of the hooks that make several calls one after the other."""
    for hook in (AllReduce, partial(HalfPrecision, "bfloat16"), partial(PowerSGD, 1), Int8Blocks):

        def make(*args: Any, hook: Any = hook) -> Trainer:
            return ddp(*args, bucket_bytes=1, hook=hook(), algorithm=algorithm)

        check(make, 4, [MIXED])


def test_a_wrong_formula_is_noticed() -> None:
    """Every argument of it matters, on a rank whose shards are smaller than another's."""

    def wrong_ones(comm: Communicator) -> list[str]:
        strategy = trained(zero2, comm, MIXED)
        counts, whole = counted(strategy), strategy.model.num_parameters
        right: dict[str, Any] = {
            "num_elements": whole,
            "num_shard_elements": step_memory(strategy).num_updated,
            "dtype": strategy.view.dtype,
            "sharded": DIVIDED[2],
            "num_states": 2,
            "is_offloaded": False,
        }
        wrong = {
            "num_elements": whole + 1,
            "num_shard_elements": shard_size(strategy.model.unit_sizes.values(), 4, 0),
            "dtype": dtype_of("float32"),
            "sharded": DIVIDED[1],
            "num_states": 1,
            "is_offloaded": True,
        }
        assert state_bytes(**right).items() <= counts.items()
        assert formula(strategy, more_rows=3)["activations"] > counts["activations"]
        return [x for x in right if state_bytes(**right | {x: wrong[x]}).items() <= counts.items()]

    assert collectives.run(wrong_ones, size=4)[3] == []


# Of a model that nobody has in memory


def shard_size(unit_sizes: Iterable[int], num_ranks: int, rank: int) -> int:
    """The elements that belong to a rank if each unit is divided among so many ranks."""
    return sum(length(span(size, num_ranks, rank)) for size in unit_sizes)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 64])
def test_shares_are_as_even_as_units_allow_and_make_up_the_whole(ranks: int) -> None:
    sizes = [1, 5, 64, 1000]
    shares = [shard_size(sizes, ranks, rank) for rank in range(ranks)]
    assert sum(shares) == sum(sizes)
    assert shares == sorted(shares, reverse=True)
    assert max(shares) - min(shares) <= len(sizes)


def test_what_a_rank_owns_is_its_share() -> None:
    """Of all ranks, of its group of them, or everything."""

    def check(comm: Communicator) -> None:
        model, (rank, size) = MIXED.model(), (comm.rank, comm.size)
        sizes = model.unit_sizes.values()
        assert step_memory(zero1(comm, model)).num_updated == shard_size(sizes, size, rank)
        hybrid = hsdp(comm, model, group_size=2)
        assert step_memory(hybrid).num_updated == shard_size(sizes, 2, rank % 2)
        assert step_memory(ddp(comm, model)).num_updated == shard_size(sizes, 1, 0) == sum(sizes)

    collectives.run(check, size=4)


def in_all(params: float, ranks: int, stage: int, dtype: str = "float16") -> int:
    own = shard_size([int(params)], ranks, 0)
    return sum(state_bytes(int(params), own, dtype_of(dtype), sharded=DIVIDED[stage]).values())


def test_the_states_are_those_of_the_zero_paper() -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5e9 parameters on 64 ranks; bytes, exactly."""
    found = [in_all(7.5e9, 64, stage) for stage in range(4)]
    assert found == [120_000_000_000, 31_406_250_000, 16_640_625_000, 1_875_000_000]


def test_the_states_of_gpt_2_and_gpt_3_are_as_known() -> None:
    gpt2 = state_bytes(int(1.5e9), int(1.5e9), dtype_of("float16"))
    assert (gpt2["parameters"], sum(gpt2.values())) == (3e9, 24e9)
    gpt3 = state_bytes(int(175e9), int(175e9), dtype_of("float32"))
    assert gpt3 == {"parameters": 700e9, "gradients": 700e9, "optimizer": 1400e9, "master": 0}


def test_what_is_offloaded_is_what_the_device_no_longer_keeps() -> None:
    psi, part = 7_500_000_001, shard_size([7_500_000_001], 64, 0)
    for dtype in map(dtype_of, ("bfloat16", "float16", "float32", "float64")):
        here = state_bytes(psi, part, dtype, sharded=DIVIDED[2])
        left = state_bytes(psi, part, dtype, sharded=DIVIDED[2], is_offloaded=True)
        there = offloaded_bytes(part, dtype)
        assert there["master"] == part * max(4, dtype.itemsize)  # there they are always copies
        assert here == left | {"optimizer": there["optimizer"], "master": here["master"]}
        assert here["master"] in (0, there["master"])


# What the system's allocator knows


def numpys() -> int:
    """The bytes of all NumPy arrays that are alive, by tracemalloc."""
    of_numpy = tracemalloc.DomainFilter(inclusive=True, domain=np.lib.tracemalloc_domain)
    return sum(x.size for x in tracemalloc.take_snapshot().filter_traces([of_numpy]).traces)


@pytest.fixture
def traced() -> Any:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("make", [serial, ddp, zero1, zero2, zero3])
def test_nothing_is_alive_after_a_step_but_what_is_counted(make: Make) -> None:
    """To the byte, without the tables of the programs that the library keeps for later calls."""
    large = MIXED._replace(dtype="float32", hidden=32, is_tied=False)

    def uncounted(comm: Communicator) -> int:
        comm = comm.split(0, name="data")  # what the communicator of the mesh would be
        before = numpys()
        strategy = trained(make, comm, large)
        assert min(map(strategy.view.unit_nbytes, strategy.model.units)) > 16 * 1024
        session_of(comm).forget_calls()
        forget_programs()
        return numpys() - before - sum(strategy.memory.now.values())

    assert collectives.run(uncounted, size=1) == [0]


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("case", [*CASES[::4], MIXED], ids=str)
def test_nothing_is_alive_between_forward_and_backward_but_what_is_counted(case: Case) -> None:
    """And the logits, with which backward begins."""
    seen: list[tuple[int, int]] = []

    class Watched(Trainer):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            self.functions[LayerForward] = self.forward

        def forward(self, action: LayerForward) -> None:
            if action.layer == "embedding":
                self.before = numpys()
            self.micro_batches.forward(action)
            if action.layer == "loss":
                seen.append((numpys() - self.before, self.memory.now["activations"]))

    trained(of_kind(Watched), None, case)
    assert len(seen) == case.num_micro_batches
    assert all(alive == count for alive, count in seen)


@pytest.mark.usefixtures("traced")
def test_an_array_that_nobody_counts_is_noticed() -> None:
    class Secretive(Trainer):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            self.functions[Update] = self.update

        def update(self, action: Update) -> bool:
            self.secret = np.zeros(3)
            return self.updates.update(action)

    before = numpys()
    strategy = trained(of_kind(Secretive), None, MIXED)
    assert numpys() - before - sum(strategy.memory.now.values()) == 3 * 8


# The command line


def tables(capsys: Any, *arguments: str) -> list[dict[str, dict[str, str]]]:
    """Both tables that are printed, by row and column."""
    assert COMMAND.main([*arguments, "--wide"]) == 0
    printed = []
    for part in capsys.readouterr().out.split(":\n")[1:]:
        lines = [line for line in part.splitlines() if line.startswith("| ")]
        head, *body = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
        printed.append({name: dict(zip(head[1:], row, strict=True)) for name, *row in body})
    return printed


def test_the_table_has_the_papers_numbers(capsys: Any) -> None:
    kept, offloaded = tables(capsys, "--params", "7.5e9", "--ranks", "64")
    want = {"data parallel": "120.00", "ZeRO-1": "31.41", "ZeRO-2": "16.64", "ZeRO-3": "1.88"}
    assert {name: kept[name]["total"] for name in want} == want
    row, psi = offloaded["ZeRO-2"], 7.5  # two bytes of an N-th of the parameters cross each way
    assert row["to host"] == row["to device"] == f"{2 * psi / 64:.2f}" == "0.23"
    assert row["on host"] == f"{12 * psi / 64:.2f}"
    assert not {"master", "optimizer"} & set(row)  # on the device there is none


def test_the_table_has_two_well_known_models(capsys: Any) -> None:
    gpt2 = tables(capsys, "--params", "1500000000")[0]["data parallel"]
    assert (gpt2["parameters"], gpt2["total"]) == ("3.00", "24.00")
    gpt3 = tables(capsys, "--params", "175e9", "--dtype", "float32")[0]["data parallel"]
    assert list(gpt3.values()) == ["0.70", "0.70", "1.40", "2.80"]
    sgd = tables(capsys, "--params", "175e9", "--dtype", "float32", "--optimizer", "sgd")
    assert sgd[0]["data parallel"]["total"] == "2100.00"


def test_small_models_are_in_a_smaller_unit(capsys: Any) -> None:
    assert COMMAND.main(["--params", "1000"]) == 0
    assert "| in kB " in capsys.readouterr().out


def test_json_has_the_numbers_of_both_tables(capsys: Any) -> None:
    assert COMMAND.main(["--params", "7.5e9", "--ranks", "64", "--json", "-"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["updates on the device"][3]["in GB"] == "ZeRO-3"
    assert written["updates on the device"][3]["total"] == 1.875


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--ranks", "64"], "required: --params"),
        (["--params", "many"], "--params: 'many' is not a number"),
        (["--params", "1.5"], "--params: 1.5 is not a whole number from 1 to 1e+18"),
        (["--params", "nan"], "--params: nan is not a whole number"),
        (["--params", "1e999999999"], "--params: 1e999999999 is not a whole number"),
        (["--params", "9", "--ranks", "0"], "--ranks: 0 is not a whole number from 1"),
        (["--params", "9", "--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
        (["--params", "9", "--optimizer", "lion"], "--optimizer: invalid choice: 'lion'"),
    ],
)
def test_bad_arguments_are_refused(capsys: Any, arguments: list[str], sentence: str) -> None:
    with pytest.raises(SystemExit) as refusal:
        COMMAND.main(arguments)
    assert refusal.value.code == 2
    assert sentence in capsys.readouterr().err


def run_python(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_module_runs_and_warns_of_nothing() -> None:
    said = run_python("-m", "parallel.memory", "--params", "7.5e9", "--ranks", "64")
    assert "31.4" in said
