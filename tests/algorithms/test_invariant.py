"""Invariant reductions: one tree over all contributions, whatever ranks, sizes and algorithms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import collectives
from collectives import CollectiveMismatch, Communicator, Operator, ScheduleError, algorithms
from collectives.algorithms import register
from collectives.programs.lanes import compile_lanes, num_lanes
from collectives.schedule import Copy, CopyReduce, Recv, RecvReduce, Round, Send, even_counts
from collectives.schedule.contracts import Case
from collectives.schedule.verify import verify_schedules
from tests.algorithms.catalogue import EVERY
from tests.fakes.device import on_device, on_host
from tests.scenarios.sessions import (
    along_the_tree,
    random_shards,
    shards_have_the_same_bits_on_any_ranks,
)

INVARIANT = [algorithm for algorithm in EVERY if algorithms.info(*algorithm).is_invariant]
SHARDED = [algorithm for algorithm in INVARIANT if "shards" in algorithms.info(*algorithm).options]
NAMES = [name for collective, name in INVARIANT if collective == "all_reduce"]


# The proof


def test_invariant_algorithms_promise_the_fixed_tree() -> None:
    assert INVARIANT == [
        ("all_reduce", "reduce_broadcast"),
        ("all_reduce", "invariant"),
        ("all_reduce", "invariant_one_shot"),
        ("reduce_scatter", "invariant"),
    ]
    assert INVARIANT[1:] == SHARDED


@pytest.mark.parametrize(
    "entry",
    [e for e in EVERY if e[0] in ("all_reduce", "reduce_scatter") and e not in INVARIANT],
    ids=".".join,
)
def test_no_other_algorithm_combines_along_the_fixed_tree(entry: tuple[str, str]) -> None:
    claims = replace(algorithms.info(*entry), is_invariant=True)

    def prove() -> None:
        for size in filter(claims.serves, range(2, 17)):
            claims.verify(size)

    with pytest.raises(ScheduleError, match="in another way than along the fixed tree"):
        prove()


def on_two_ranks(*merges: tuple[int, int]) -> list[list[Round]]:
    """Five shards: 0, 1 and 2 on rank 0, of which it combines 0 and 1; 3 and 4 on rank 1.

    Rank 1 makes the other combinations: `merges` are (shard, shard that it is combined into).
    """
    first = (CopyReduce([(1, 0)], [(0, 0)], side="right"),)
    combined = (CopyReduce([(a, 0)], [(b, 0)], side="right") for a, b in merges)
    both = [(0, 0), (2, 0)]
    return [
        [first, (Send(1, both),), (Recv(1, [0]),)],
        [(), (Recv(0, both), *combined, Copy([(0, 0)], [0])), (Send(0, [0]),)],
    ]


def test_the_proof_knows_the_tree_over_shards_of_uneven_ranks() -> None:
    case = Case(2, num_shards=5)
    verify_schedules("all_reduce", case, on_two_ranks((3, 2), (2, 0), (4, 0)), is_invariant=True)
    for wrong in ([(2, 0), (3, 0), (4, 0)], [(4, 3), (2, 0), (3, 0)]):  # in order, all of them
        verify_schedules("all_reduce", case, on_two_ranks(*wrong))
        with pytest.raises(ScheduleError, match="in another way than along the fixed tree"):
            verify_schedules("all_reduce", case, on_two_ranks(*wrong), is_invariant=True)
    with pytest.raises(ScheduleError, match=r"ends as .*, not \(\(0, 0\), .*\(4, 0\)\)"):
        verify_schedules("all_reduce", case, on_two_ranks((3, 2), (2, 0)), is_invariant=True)


def test_a_left_fold_is_refused_from_four_contributions_on() -> None:
    def chain(rank: int, size: int) -> Iterator[Round]:
        for k in range(1, size):
            receives = (RecvReduce(k - 1, [0], "left"),) if rank == k else ()
            yield (Send(k, [0]),) if rank == k - 1 else receives
        for k in range(size - 1, 0, -1):
            received = (Recv(k, [0]),) if rank == k - 1 else ()
            yield (Send(k - 1, [0]),) if rank == k else received

    def prove(size: int) -> None:
        schedules = [list(chain(rank, size)) for rank in range(size)]
        verify_schedules("all_reduce", Case(size), schedules, is_invariant=True)

    for size in (1, 2, 3):
        prove(size)
    for refuse in (partial(prove, 4), partial(register("all_reduce", is_invariant=True), chain)):
        with pytest.raises(ScheduleError, match="in another way than along the fixed tree"):
            refuse()


def test_users_cannot_register_shards() -> None:
    with pytest.raises(ValueError, match="there is no option 'shards'"):
        register("all_reduce", options={"shards": 0})
    with pytest.raises(ValueError, match="ranks must be one of"):
        register("all_reduce", ranks="at most shards")


# The program, element by element


def bracketed(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Combines texts so that the result shows the tree."""
    pairs = zip(left, right, strict=True)
    return np.array([number(f"({word(a)} {word(b)})") for a, b in pairs], np.int64)


WORDS: list[str] = []


def word(index: int) -> str:
    return WORDS[index]


def number(text: str) -> int:
    WORDS.append(text)
    return len(WORDS) - 1


def text_of_tree(shards: Sequence[str]) -> str:
    """The fixed tree, written independently of the library: powers of two on the left."""
    if len(shards) == 1:
        return shards[0]
    half = max(2**k for k in range(20) if 2**k < len(shards))
    return f"({text_of_tree(shards[:half])} {text_of_tree(shards[half:])})"


@pytest.mark.parametrize(("collective", "name"), SHARDED)
def test_every_element_of_a_program_is_the_tree(collective: str, name: str) -> None:
    op = Operator.from_function(bracketed, name="bracketed")

    def body(comm: Communicator, num_shards: int, length: int) -> list[str]:
        first = sum(even_counts(num_shards, comm.size)[: comm.rank])
        own = even_counts(num_shards, comm.size)[comm.rank]
        texts = [[f"{first + s}.{i}" for i in range(length)] for s in range(own)]
        x = np.array([[number(text) for text in row] for row in texts], np.int64)
        got = getattr(comm, collective)(x, op, shards=num_shards, algorithm=name)
        return [word(index) for index in got]

    for size, num_shards in product(range(1, 8), (1, 2, 5, 7, 8, 13)):
        if size > num_shards:
            continue
        got = collectives.run(lambda comm, n=num_shards: body(comm, n, 3), size, timeout=60)
        want = [text_of_tree([f"{s}.{i}" for s in range(num_shards)]) for i in range(3)]
        parts = even_counts(3, size)
        starts = [sum(parts[:rank]) for rank in range(size)]
        for rank, words in enumerate(got):
            whole = (
                slice(None)
                if collective == "all_reduce"
                else slice(starts[rank], starts[rank] + parts[rank])
            )
            assert words == want[whole]


# The bits


DTYPES = ["float16", ml_dtypes.bfloat16, "float32", "float64", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shards_have_the_same_bits_on_one_to_eight_ranks(dtype: Any) -> None:
    for size in range(1, 9) if dtype == "float32" else (1, 3, 8):
        check = partial(shards_have_the_same_bits_on_any_ranks, dtype=dtype)
        collectives.run(check, size, timeout=60, check=size % 2 == 0)


def test_training_gives_the_same_weights_on_one_to_eight_ranks() -> None:
    random = np.random.default_rng(0)
    inputs, targets = random.standard_normal((2, 8, 16, 4)).astype(np.float32)  # 8 shards

    def train(comm: Communicator) -> bytes:
        weights = np.zeros((4, 4), np.float32)
        mine = np.array_split(np.arange(8), comm.size)[comm.rank]
        for _ in range(5):
            errors = [inputs[shard] @ weights - targets[shard] for shard in mine]
            gradients = [inputs[s].T @ error for s, error in zip(mine, errors, strict=True)]
            weights -= 0.1 * comm.all_reduce(np.stack(gradients), "avg", shards=8)
        return weights.tobytes()

    all_weights = {weights for size in range(1, 9) for weights in collectives.run(train, size)}
    assert len(all_weights) == 1


def test_device_arrays_have_the_same_bits() -> None:
    def body(comm: Communicator) -> None:
        shards_have_the_same_bits_on_any_ranks(comm, "float32", on_device, on_host)

    for size in (1, 3):
        collectives.run(body, size, timeout=60)


def test_other_sums_of_the_same_shards_have_other_bits() -> None:
    shards = random_shards(8, 1000, "float32")

    def body(comm: Communicator) -> bytes:
        own = np.array_split(shards, comm.size)[comm.rank].sum(axis=0)
        return bytes(comm.all_reduce(own, algorithm="ring"))

    sums = {size: collectives.run(body, size)[0] for size in (1, 2, 3, 4)}
    assert len(set(sums.values())) > 2


@pytest.mark.parametrize("name", NAMES)
def test_without_shards_bits_do_not_depend_on_sizes_and_segments(name: str) -> None:
    length = 2**20 + 3
    inputs = random_shards(4, length, "float32")
    want = along_the_tree(list(inputs))
    entry = algorithms.info("all_reduce", name)
    assert num_lanes(entry, 4, inputs[0].nbytes) > 1

    def body(comm: Communicator) -> None:
        for part in (slice(None), slice(5, 6), slice(0, 0), slice(70_000)):
            got = comm.all_reduce(inputs[comm.rank, part], algorithm=name)
            assert got.tobytes() == want[part].tobytes()
        rows = comm.reduce_scatter(inputs[comm.rank], algorithm="invariant")
        assert rows.tobytes() == np.array_split(want, comm.size)[comm.rank].tobytes()

    collectives.run(body, 4, timeout=60)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_large_shards_are_cut_into_segments_and_have_the_same_bits(size: int) -> None:
    shards = random_shards(5, 2**19 + 3, "float32")
    want = along_the_tree(list(shards))

    def body(comm: Communicator) -> None:
        x = np.array_split(shards, comm.size)[comm.rank].copy()
        for collective, name in SHARDED:
            work = getattr(comm, collective)(x, shards=5, algorithm=name, async_op=True)
            got = np.array_split(want, comm.size)[comm.rank] if "_s" in collective else want
            assert work.wait().tobytes() == got.tobytes()
        in_place = comm.all_reduce(x, shards=5, out=x[0])
        assert in_place.tobytes() == want.tobytes()

    collectives.run(body, size, timeout=60)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_large_shards_need_at_most_20_mib_of_scratch(size: int) -> None:
    entry, options = algorithms.info("all_reduce", "invariant"), (("shards", 8),)
    num_elements = 2**26  # 256 MiB in each shard
    number = num_lanes(entry, size, 4 * num_elements, options)
    program = compile_lanes(entry, 0, size, 0, num_elements, options, "none", number)
    assert 4 * program.num_scratch * program.num_slots <= 20 * 2**20


# The call


def shards_of(comm: Communicator, num_shards: int = 5) -> np.ndarray:
    own = even_counts(num_shards, comm.size)[comm.rank]
    return np.ones((own, 6)) * (comm.rank + 1)


def test_an_average_divides_by_the_number_of_shards() -> None:
    def body(comm: Communicator) -> None:
        assert comm.all_reduce(np.ones(3), "avg", algorithm="invariant").tolist() == [1.0] * 3
        for call in (comm.all_reduce, comm.reduce_scatter):
            for _ in range(3):  # the first call, and calls from the cache
                got = call(shards_of(comm), "avg", shards=5)
                assert set(got.tolist()) == {(3 * 1 + 2 * 2) / 5}

    collectives.run(body, 2, timeout=20)


def test_shards_serve_every_way_to_call() -> None:
    def body(comm: Communicator) -> None:
        x = shards_of(comm)
        want = [7.0] * 6
        assert comm.all_reduce(x, shards=5, async_op=True).wait().tolist() == want
        assert comm.plan.all_reduce(x, shards=5).run().tolist() == want
        assert comm.all_reduce(x.copy(), shards=5, out=np.empty(6)).tolist() == want
        mine = comm.reduce_scatter(x.reshape(-1, 3, 2), shards=5, counts=[1, 2])
        assert mine.tolist() == [[7.0, 7.0]] * (comm.rank + 1)
        in_place = x.copy()
        assert comm.all_reduce(in_place, shards=5, out=in_place[0]).tolist() == want
        with collectives.using(all_reduce="invariant_one_shot"), comm.record() as ledger:
            assert comm.all_reduce(x, shards=5).tolist() == want
        assert {row.algorithm for row in ledger.rows()} == {"invariant_one_shot(shards=5)"}

    collectives.run(body, 2, timeout=20)


def test_what_is_sent_is_predicted() -> None:
    for (collective, name), num_shards in product(SHARDED, (3, 4, 8, 13)):
        counts: Any = 12 if collective == "all_reduce" else (5, 4, 3)
        label = f"{name}(shards={num_shards})"
        due = collectives.predict(collective, 3, counts, itemsize=4, algorithm=label)

        def body(
            comm: Communicator, c: str = collective, n: str = name, k: int = num_shards
        ) -> Any:
            x = np.ones((even_counts(k, 3)[comm.rank], 12), np.float32)
            more = {} if c == "all_reduce" else {"counts": (5, 4, 3)}
            with comm.record() as ledger:
                getattr(comm, c)(x, shards=k, algorithm=n, **more)
            return sum(row.bytes for row in ledger.rows())

        assert collectives.run(body, 3) == due.bytes.sum(axis=1).tolist()


REFUSED: dict[str, tuple[type[Exception], str, Callable[[Communicator], Any]]] = {
    "more ranks than shards": (
        ValueError,
        "a number of ranks up to that of the shards only, not 3",
        lambda comm: comm.all_reduce(np.ones((1, 2)), shards=2),
    ),
    "another number of rows": (
        ValueError,
        r"rank \d has \d of 5 shards, x has 3",
        lambda comm: comm.all_reduce(np.ones((3, 2)), shards=5),
    ),
    "a number": (
        ValueError,
        r"rank \d has 1 of 3 shards, x is 0-d",
        lambda comm: comm.all_reduce(np.ones(()), shards=3),
    ),
    "no shards": (ValueError, "at least 1", lambda comm: comm.all_reduce(np.ones(1), shards=0)),
    "a float": (TypeError, "shards", lambda comm: comm.all_reduce(np.ones(1), shards=3.0)),
    "another algorithm": (
        ValueError,
        "by ring takes no shards; those that do: invariant, invariant_one_shot",
        lambda comm: comm.all_reduce(np.ones((1, 2)), shards=3, algorithm="ring"),
    ),
    "only the algorithm": (
        ValueError,
        r"by invariant\(shards=3\) needs shards=3",
        lambda comm: comm.all_reduce(np.ones((1, 2)), algorithm="invariant(shards=3)"),
    ),
    "two numbers": (
        ValueError,
        "shards must be 4, got 3",
        lambda comm: comm.all_reduce(np.ones((1, 2)), shards=3, algorithm="invariant(shards=4)"),
    ),
    "an out of all shards": (
        ValueError,
        "out has shape",
        lambda comm: comm.all_reduce(np.ones((1, 2)), shards=3, out=np.empty((1, 2))),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_shards_are_refused_before_anything_is_sent(what: str) -> None:
    error, sentence, call = REFUSED[what]

    def body(comm: Communicator) -> None:
        with comm.record() as ledger, pytest.raises(error, match=sentence):
            call(comm)
        assert ledger.rows() == []

    collectives.run(body, 3, timeout=20)


def test_checked_mode_notices_another_number_of_shards() -> None:
    def body(comm: Communicator) -> None:
        num_shards = 6 if comm.rank == 0 else 5  # both give rank 0 three shards
        with pytest.raises(CollectiveMismatch, match=r"shards=5\)\), rank 0 .*shards=6"):
            comm.all_reduce(shards_of(comm, 5), shards=num_shards)

    collectives.run(body, 2, timeout=20, check=True)
