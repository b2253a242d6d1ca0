"""What programs do beyond single collectives; each runs on threads and under MPI."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator, SentReceived
from collectives.arrays.backends import HOST, Arrays
from collectives.programs import compile_call
from collectives.runtime import header
from collectives.runtime.header import Header
from collectives.runtime.preparing import prepare_call
from collectives.selection import choose, sends_counts_ahead
from tests.inside import session_of
from tests.scenarios.jobs import unchanged
from tests.scenarios.operators import failing


def point_to_point_both_ways(comm: Communicator) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x = np.arange(5.0) + comm.rank
    assert np.array_equal(comm.send_recv(x, right, left), np.arange(5.0) + left)
    if comm.size > 1:
        work = comm.send(x, right, tag=3, async_op=True)
        assert np.array_equal(comm.recv(np.empty(5), left, tag=3), np.arange(5.0) + left)
        work.wait()


def a_probe_finds_messages_from_any_rank(comm: Communicator) -> None:
    assert comm.probe(tag=4) is None
    if comm.rank > 0:
        comm.send(np.array([comm.rank]), 0, tag=5)
    else:
        senders = []
        while len(senders) < comm.size - 1:
            if (source := comm.probe(tag=5)) is not None:
                assert comm.recv(np.empty(1, int), source, tag=5) == source
                senders.append(source)
        assert sorted(senders) == list(range(1, comm.size))
    assert comm.probe(tag=5) is None


def a_communicator_can_be_renamed(comm: Communicator) -> None:
    part = comm.split(0)
    assert part is not None
    for name in ("data", "tensor"):
        part.name = name
        with comm.record() as ledger:
            part.all_reduce(np.ones(2))
        assert list(ledger.summary(by=("axis",))) == ([(name,)] if comm.size > 1 else [])
    part.free()


def tags_keep_messages_apart(comm: Communicator) -> None:
    if comm.size == 1:
        return
    peer = comm.rank ^ 1
    if peer >= comm.size:
        return
    works = [comm.send(np.array([tag]), peer, tag=tag, async_op=True) for tag in (1, 2, 3)]
    for tag in (3, 1, 2):
        assert comm.recv(np.empty(1, int), peer, tag=tag)[0] == tag
    for work in works:
        work.wait()


def messages_to_oneself_keep_their_order_and_tags(comm: Communicator) -> None:
    own, large = comm.rank, np.arange(100_000.0)
    received = [np.zeros(1), np.zeros(1), np.zeros(1), np.zeros_like(large)]
    with comm.record() as ledger:
        works = [comm.send(np.array([1.0]), own, tag=6, async_op=True)]  # before any receive
        receives = [(received[0], 6), (received[1], 7), (received[2], 6), (received[3], 6)]
        works += [comm.recv(x, own, tag=tag, async_op=True) for x, tag in receives]
        sends = [(np.array([2.0]), 6), (large, 6), (np.array([3.0]), 7)]
        works += [comm.send(x, own, tag=tag, async_op=True) for x, tag in sends]
        for work in works:
            work.wait()
    assert [x[0] for x in received[:3]] == [1.0, 3.0, 2.0]
    assert np.array_equal(received[3], large)
    assert {(row.src, row.dst) for row in ledger.rows()} == {(own, own)}  # as of `send_recv`


def receives_take_messages_in_the_order_posted(comm: Communicator) -> None:
    """Whichever of them is asked first."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if right == comm.rank:
        return
    first, second = np.zeros(1), np.zeros(1)
    works = [comm.recv(x, left, async_op=True) for x in (first, second)]
    for value in (1.0, 2.0):
        comm.send(np.array([value]), right)
    while not all(work.test() for work in reversed(works)):
        pass
    assert (first[0], second[0]) == (1, 2)


def split_makes_working_groups(comm: Communicator) -> None:
    group = comm.split(comm.rank % 3, key=-comm.rank)
    members = [r for r in range(comm.size) if r % 3 == comm.rank % 3][::-1]
    assert group is not None
    assert (group.rank, group.size) == (members.index(comm.rank), len(members))
    assert group.all_gather(np.array([comm.rank])).tolist() == members
    assert comm.all_reduce(np.array([1]))[0] == comm.size
    nested = group.split(0)
    assert nested is not None and nested.all_reduce(np.array([1]))[0] == group.size
    nested.free()
    group.free()


def split_leaves_out_ranks_without_color(comm: Communicator) -> None:
    group = comm.split(None if comm.rank == 0 else 5)
    if comm.rank == 0:
        assert group is None
    else:
        assert group is not None and group.size == comm.size - 1
        group.barrier()
        group.free()


def subgroups_may_overlap_in_time(comm: Communicator) -> None:
    pair = (
        comm.subgroup([comm.rank ^ 1, comm.rank][:: 1 if comm.rank % 2 else -1])
        if comm.rank ^ 1 < comm.size
        else comm.subgroup([comm.rank])
    )
    everyone = comm.subgroup(range(comm.size))
    works = [g.all_reduce(np.array([1.0]), async_op=True) for g in (everyone, pair, comm)]
    assert [w.wait()[0] for w in reversed(works)] == [comm.size, pair.size, comm.size]
    everyone.free()
    pair.free()


def works_complete_in_any_order(comm: Communicator) -> None:
    # Ranks wait in different orders: each wait must carry the other collectives along.
    works = [comm.all_reduce(np.full(100, i), async_op=True, algorithm="ring") for i in range(6)]
    order = list(np.random.default_rng(comm.rank).permutation(6))
    for i in order:
        assert works[i].wait()[0] == i * comm.size
    assert all(work.test() for work in works)


def works_may_be_tested_in_any_order(comm: Communicator) -> None:
    # As with `wait`: each test must carry the others along.
    x, deadline = np.ones(100), time.monotonic() + 10
    works = [comm.all_reduce(x, async_op=True, algorithm="ring") for _ in range(2)]
    plans = [comm.plan.all_reduce(x, algorithm="ring") for _ in range(2)]
    for plan in plans:
        plan.start()
    calls = [*works, *plans]
    for call in calls if comm.rank % 2 else reversed(calls):
        while not call.test():
            assert time.monotonic() < deadline
        assert call.wait()[0] == comm.size
    for plan in plans:
        plan.free()


def work_can_be_tested_until_done(comm: Communicator) -> None:
    work = comm.all_gather(np.array([comm.rank]), async_op=True)
    while not work.test():
        time.sleep(0)
    assert work.wait().tolist() == list(range(comm.size))


def plans_run_many_times(comm: Communicator) -> None:
    x, y = np.zeros(50), np.empty(50)
    plan = comm.plan.all_reduce(x, out=y)
    for step in range(5):
        x[...] = step + comm.rank
        assert plan.run() is y
        assert y[0] == step * comm.size + sum(range(comm.size))
    if comm.rank != 0:
        comm.recv(np.empty(1), 0)
    plan.start()
    if comm.rank == 0 and comm.size > 1:  # it cannot be over before the others have begun
        with pytest.raises(RuntimeError, match="already running"):
            plan.start()
        for peer in range(1, comm.size):
            comm.send(np.ones(1), peer)
    plan.wait()
    plan.free()


def plans_of_every_collective(comm: Communicator) -> None:
    p, rank = comm.size, comm.rank
    x, big = np.full(p, rank), np.empty(p * p, int)
    plans = {
        "all_to_all": comm.plan.all_to_all(x),
        "all_gather": comm.plan.all_gather(x, out=big),
        "reduce_scatter": comm.plan.reduce_scatter(x),
        "reduce": comm.plan.reduce(x, root=p - 1),
        "scan": comm.plan.scan(x),
        "exscan": comm.plan.exscan(x),
        "gather": comm.plan.gather(x),
        "scatter": comm.plan.scatter(x, out=np.empty(1, int)),
        "broadcast": comm.plan.broadcast(x.copy(), out=np.empty(p, int)),
        "barrier": comm.plan.barrier(),
    }
    for _ in range(2):
        got = {name: plan.run() for name, plan in plans.items()}
        assert got["all_to_all"].tolist() == list(range(p))
        assert np.array_equal(got["all_gather"], np.repeat(np.arange(p), p))
        assert got["reduce_scatter"].tolist() == [sum(range(p))]
        assert (got["reduce"] is None) == (rank != p - 1)
        assert got["scan"].tolist() == [sum(range(rank + 1))] * p
        assert got["exscan"] is None if rank == 0 else got["exscan"][0] == sum(range(rank))
        assert (got["gather"] is None) == (rank != 0)
        assert got["scatter"].tolist() == [0]
        assert got["broadcast"].tolist() == [0] * p
    for plan in plans.values():
        plan.free()


def a_barrier_waits_for_the_last(comm: Communicator) -> None:
    comm.barrier()
    if comm.rank == comm.size - 1:
        time.sleep(0.2)
    begin = time.perf_counter()
    comm.barrier()
    assert comm.rank == comm.size - 1 or time.perf_counter() - begin > 0.1


def a_timeout_names_whom_it_waited_for(comm: Communicator) -> None:
    if comm.size == 1:
        return
    comm.barrier()
    if comm.rank == 0:
        with pytest.raises(collectives.CollectiveTimeout) as error:
            comm.recv(np.empty(1), 1, timeout=0.05)
        assert "recv (point_to_point)" in str(error.value)
        assert "a message from rank 1" in str(error.value)
    comm.barrier()
    if comm.rank == 1:
        comm.send(np.ones(1), 0)
    if comm.rank == 0:
        error.value.work.wait(timeout=30)
    comm.barrier()


def a_collective_that_timed_out_can_still_complete(comm: Communicator) -> None:
    comm.barrier()
    if comm.rank == comm.size - 1:
        time.sleep(0.3)
    work = comm.all_reduce(np.array([1]), async_op=True)
    if comm.rank == 0 and comm.size > 1:
        with pytest.raises(collectives.CollectiveTimeout, match=r"all_reduce .* in round \d of \d"):
            work.wait(timeout=0.02)
    assert work.wait()[0] == comm.size


def a_time_limit_is_heeded_wherever_it_is_given(comm: Communicator) -> None:
    if comm.size == 1:
        return
    comm.barrier()
    if comm.rank == 0:
        limited = comm.recv(np.empty(1), 1, tag=1, async_op=True, timeout=0.05)
        with pytest.raises(collectives.CollectiveTimeout):
            limited.wait()
        comm.timeout = 0.05
        plan = comm.plan.recv(np.empty(1), 1, tag=2)
        with pytest.raises(collectives.CollectiveTimeout):
            plan.run()
        comm.timeout = None
    comm.barrier()
    if comm.rank == 1:
        comm.send(np.ones(1), 0, tag=1)
        comm.send(np.ones(1), 0, tag=2)
    if comm.rank == 0:
        assert limited.wait(timeout=30)[0] == 1
        assert plan.wait(timeout=30)[0] == 1
        plan.free()


def a_blocking_call_that_timed_out_is_not_lost(comm: Communicator) -> None:
    if comm.size == 1:
        return
    x = np.zeros(1)
    comm.barrier()
    if comm.rank == 0:
        with pytest.raises(collectives.CollectiveTimeout) as error:
            comm.recv(x, 1, timeout=0.05)
    comm.barrier()
    if comm.rank == 1:
        comm.send(np.ones(1), 0)
    if comm.rank == 0:
        assert error.value.work.wait(timeout=30) is x
        assert x[0] == 1


def calls_with_something_ahead(comm: Communicator) -> dict[str, Callable[[float | None], Any]]:
    """Calls of which the other ranks learn more than they know, from rank 0 or from each other."""
    whole = np.arange(float(comm.size)) if comm.rank == 0 else None
    counts = [1] * comm.size
    blocks = np.arange(float(comm.size)) + 10 * comm.rank
    return {
        "broadcast": lambda limit: comm.broadcast(whole, timeout=limit),
        "scatter": lambda limit: comm.scatter(whole, timeout=limit),
        "all_to_all": lambda limit: comm.all_to_all(blocks, counts=counts, timeout=limit),
        "bruck": lambda limit: comm.all_to_all(
            blocks, counts=counts, algorithm="bruck", timeout=limit
        ),
        "started": lambda limit: comm.broadcast(whole, async_op=True, timeout=limit).wait(),
    }


def what_timed_out_ahead_of_a_call_goes_on_and_nothing_is_mixed_up(comm: Communicator) -> None:
    if comm.size == 1:
        return
    rows = np.arange(float(comm.size))
    due = {
        "broadcast": rows,
        "scatter": rows[comm.rank : comm.rank + 1],
        "all_to_all": 10 * rows + comm.rank,
        "bruck": 10 * rows + comm.rank,
        "started": rows,
    }
    for name in due:
        for is_waited_for in (True, False):
            call, came = calls_with_something_ahead(comm)[name], None
            if comm.rank == 1:
                with pytest.raises(collectives.CollectiveTimeout) as error:
                    call(0.02)
                assert not error.value.work.test()
                comm.send(np.ones(1), 0)
                came = error.value.work.wait(30) if is_waited_for else None
            else:
                if comm.rank == 0:
                    comm.recv(np.empty(1), 1)
                came = call(None)
            assert comm.all_reduce(np.ones(1))[0] == comm.size
            assert comm.all_reduce(np.ones(1), async_op=True).wait()[0] == comm.size
            if came is None:
                came = error.value.work.wait(30)
            assert np.array_equal(came, due[name])


def a_call_that_timed_out_can_be_the_last(comm: Communicator) -> None:
    group = comm.split(0)
    assert group is not None
    if comm.rank == 0 and comm.size > 1:
        with pytest.raises(collectives.CollectiveTimeout) as error:
            group.all_reduce(np.ones(2), timeout=0.02)
        with pytest.raises(RuntimeError, match="already running"):
            group.free()
    comm.barrier()
    if comm.rank == 0 and comm.size > 1:
        assert error.value.work.wait(timeout=30)[0] == comm.size
    else:
        group.all_reduce(np.ones(2))
    group.free()


def refused_calls_do_not_count(comm: Communicator) -> None:
    # Every rank makes another number of mistakes; the next call of all meets all the same.
    mistakes = [
        lambda: comm.reduce(np.ones(1), root=99),
        lambda: comm.all_reduce([1]),
        lambda: comm.reduce_scatter(np.ones(2), counts=[1]),
        lambda: comm.broadcast(np.ones(1), algorithm="none"),
        lambda: comm.exscan(np.ones(1), "avg"),
    ]
    for mistake in mistakes[: comm.rank % 6]:
        with pytest.raises((TypeError, ValueError)):
            mistake()
    assert comm.all_reduce(np.array([1]))[0] == comm.size


def a_freed_plan_cannot_run(comm: Communicator) -> None:
    plan = comm.plan.all_reduce(np.ones(1))
    plan.run()
    plan.free()
    with pytest.raises(RuntimeError, match="was freed"):
        plan.run()


def a_freed_communicator_says_so(comm: Communicator) -> None:
    group = comm.split(0)
    assert group is not None
    for _ in range(2):
        group.all_reduce(np.ones(1))  # and remember it
    group.free()
    calls = [
        lambda: group.all_reduce(np.ones(1)),
        lambda: group.broadcast(np.ones(1), async_op=True),
        lambda: group.send_recv(np.ones(1), 0, 0),
        lambda: group.plan.barrier(),
        lambda: group.split(0),
        lambda: group.subgroup(range(group.size)),
    ]
    for call in calls:
        with pytest.raises(collectives.CollectiveError, match="this communicator was freed"):
            call()


def a_plan_of_strided_input_is_refused(comm: Communicator) -> None:
    with pytest.raises(ValueError, match="must be C-contiguous"):
        comm.plan.all_reduce(np.ones(8)[::2])
    with pytest.raises(ValueError, match="must be C-contiguous"):
        comm.plan.all_gather(np.asfortranarray(np.ones((2, 3))))


def a_failure_belongs_to_the_call_that_failed(comm: Communicator) -> None:
    if comm.size not in (2, 4, 8):  # there every rank fails in the first round and none waits on
        return
    good = comm.all_reduce(np.array([1]), async_op=True)
    op = failing(FloatingPointError("on purpose"))
    bad = comm.all_reduce(np.array([1.0]), op, async_op=True, algorithm="recursive_doubling")
    assert good.wait()[0] == comm.size
    for _ in range(2):
        with pytest.raises(FloatingPointError):
            bad.wait()
        with pytest.raises(FloatingPointError):
            bad.test()
    assert comm.all_reduce(np.array([1]))[0] == comm.size


def arrays_of_different_kinds_travel_as_bytes(comm: Communicator) -> None:
    """What MPI calls alltoallw: every block may have a dtype of its own."""
    kinds = [np.float64, np.int16, np.complex64, np.uint8]

    def block(source: int, destination: int) -> np.ndarray:
        kind = kinds[(source + 2 * destination) % 4]
        return np.arange(source + destination, dtype=np.float32).astype(kind) + source

    table = [[block(s, d).nbytes for d in range(comm.size)] for s in range(comm.size)]
    x = np.concatenate([block(comm.rank, d).view(np.uint8) for d in range(comm.size)])
    for algorithm in ("linear", "pairwise", "bruck(radix=3)"):
        came = comm.all_to_all(x, counts=table, algorithm=algorithm)
        ends = np.cumsum([row[comm.rank] for row in table])
        for source, part in enumerate(np.split(came, ends[:-1])):
            wanted = block(source, comm.rank)
            assert np.array_equal(part.view(wanted.dtype), wanted)


def own_counts_are_enough(
    comm: Communicator,
    to_device: Callable[[np.ndarray], Any] = unchanged,
    to_host: Callable[[Any], Any] = unchanged,
) -> None:
    """Every call with a rank's own counts gives, and sends, what it does with a whole table."""
    p, rank = comm.size, comm.rank
    table = np.array([[(1 + s + 2 * d) % 3 for d in range(p)] for s in range(p)])
    own = SentReceived(table[rank].tolist(), table[:, rank].tolist())
    rows = np.arange(2.0 * sum(own.sent)).reshape(-1, 2) + 100 * rank
    x, out = to_device(rows), to_device(np.empty((sum(own.received), 2)))
    for algorithm in (
        "linear",
        "linear_sync",
        "linear_sync(outstanding=2)",
        "pairwise",
        None,
        "one_factor",
    ):
        with comm.record() as ledger:
            wanted = to_host(comm.all_to_all(x, counts=table, algorithm=algorithm or "linear"))
        messages = sent_by(ledger)
        for call in (
            lambda **how: comm.all_to_all(x, **how),
            lambda **how: comm.all_to_all(x, out=out, **how),
            lambda **how: comm.all_to_all(x, async_op=True, **how).wait(),
            lambda **how: comm.plan.all_to_all(x, out=out, **how).run(),
        ):
            for counts in (own, own, SentReceived(table[rank], table[:, rank])):
                with comm.record() as ledger:
                    got = call(counts=counts, algorithm=algorithm)
                assert np.array_equal(to_host(got), wanted)
                assert sent_by(ledger) == messages
                kinds = {row.collective for row in ledger.rows()}
                assert comm.check or kinds <= {"all_to_all"}


def counts_travel_ahead_of_blocks_that_are_sent_on(
    comm: Communicator,
    to_device: Callable[[np.ndarray], Any] = unchanged,
    to_host: Callable[[Any], Any] = unchanged,
) -> None:
    """A call with own counts sends what one with a table does, and 8 bytes for each block ahead."""
    p, rank = comm.size, comm.rank
    table = np.array([[(1 + s + 2 * d) % 3 for d in range(p)] for s in range(p)])
    own = SentReceived(table[rank].tolist(), table[:, rank].tolist())
    x = to_device(np.arange(2.0 * sum(own.sent)).reshape(-1, 2) + 100 * rank)
    out = to_device(np.empty((sum(own.received), 2)))
    wanted = to_host(comm.all_to_all(x, counts=table, algorithm="linear"))
    on_hosts = "fast(per_host=2)", "hierarchical(per_host=2)"
    for algorithm in ("bruck(radix=4)", *on_hosts, *algorithms_that_send_blocks_on(p)):
        with comm.record() as ledger:
            comm.all_to_all(x, counts=table, algorithm=algorithm)
        messages = sent_by(ledger)
        choice = choose("all_to_all", algorithm, p, 0, topology=comm.topology)
        num_pieces = choice.algorithm.case(p, None, **choice.options).num_pieces
        one_each = np.full((p, p), num_pieces).tolist()
        ones = collectives.predict(
            "all_to_all", p, one_each, itemsize=8, algorithm=algorithm, topology=comm.topology
        )
        for call, counts in product(
            (
                lambda **how: comm.all_to_all(x, **how),
                lambda **how: comm.all_to_all(x, out=out, async_op=True, **how).wait(),
                lambda **how: comm.plan.all_to_all(x, out=out, **how).run(),
            ),
            (own.sent, own),
        ):
            with comm.record() as ledger:
                got = call(counts=counts, algorithm=algorithm)
            assert np.array_equal(to_host(got), wanted)
            assert sent_by(ledger) == messages
            if counts is own and comm.check:  # it compares a whole table
                continue
            ahead = np.zeros((2, p), np.int64)
            for row in ledger.rows():
                if row.collective == "counts":
                    assert row.algorithm == algorithm
                    ahead[:, row.dst] += row.segments, row.bytes
            assert np.array_equal(ahead, [ones.messages[rank], ones.bytes[rank]])


def algorithms_that_send_blocks_on(size: int) -> list[str]:
    """All of an all-to-all that send blocks on and serve this number of ranks."""
    names = collectives.algorithms.names("all_to_all")
    serving = [n for n in names if collectives.algorithms.info("all_to_all", n).serves(size)]
    return [name for name in serving if sends_counts_ahead("all_to_all", name)]


def sent_by(ledger: collectives.Ledger) -> list[tuple[Any, ...]]:
    """What an all-to-all has sent, without the number of the call."""
    rows = [row for row in ledger.rows() if row.collective == "all_to_all"]
    return [(row.algorithm, row.round, row.dst, row.bytes, row.segments) for row in rows]


def random_shards(num_shards: int, length: int, dtype: Any) -> np.ndarray:
    """The same random numbers on every rank, of many sizes."""
    random = np.random.default_rng(num_shards)
    values = random.standard_normal((num_shards, length)) * 2.0 ** random.integers(-8, 3, length)
    return np.asarray(values.astype(dtype))


def along_the_tree(shards: list[np.ndarray]) -> np.ndarray:
    """Their sum along the tree on whose left the greatest power of two of them is."""
    if len(shards) == 1:
        return shards[0]
    half = max(2**k for k in range(20) if 2**k < len(shards))
    return along_the_tree(shards[:half]) + along_the_tree(shards[half:])


def shards_have_the_same_bits_on_any_ranks(
    comm: Communicator,
    dtype: Any = "float32",
    to_device: Callable[[np.ndarray], Any] = unchanged,
    to_host: Callable[[Any], Any] = unchanged,
) -> None:
    for num_shards, length in ((8, 3), (13, 1000)):
        shards = random_shards(num_shards, length, dtype)
        want = along_the_tree(list(shards))
        x = to_device(np.array_split(shards, comm.size)[comm.rank].copy())
        for algorithm in ("invariant", "invariant_one_shot", None):
            total = comm.all_reduce(x, shards=num_shards, algorithm=algorithm)
            assert to_host(total).tobytes() == want.tobytes()
        mine = to_host(comm.reduce_scatter(x, shards=num_shards))
        assert mine.tobytes() == np.array_split(want, comm.size)[comm.rank].tobytes()


def header_and_data_never_meet(comm: Communicator) -> None:
    # The root announces, the others expect nothing of the kind: 256 bytes all the same.
    x = np.arange(32.0)
    if comm.check and comm.size > 1:
        with pytest.raises(collectives.CollectiveMismatch, match="out=not given"):
            comm.broadcast(x, out=None if comm.rank == 0 else np.empty(32))
        return
    got = comm.broadcast(x, out=None if comm.rank == 0 else np.empty(32))
    assert np.array_equal(got, x)
    if comm.rank > 0:
        assert header_left_over(comm).shape == x.shape


def header_left_over(comm: Communicator) -> Header:
    """What rank 0 announced ahead of the last call, which did not take it."""
    session, message = session_of(comm), np.empty(header.NUM_BYTES, np.uint8)
    arrays = Arrays(HOST, None, message)
    spec = session.spec("broadcast", arrays, message.size, algorithm="binomial")
    program = compile_call(spec, comm.rank, comm.size)
    tag = session.numbering.header_tag(session.numbering.num_calls)
    prepared = prepare_call(session, spec, program, "ahead", arrays, tag, 0)
    prepared.begin(phase="", site="")
    while not prepared.execution.advance(0.01):
        pass
    prepared.complete()
    return header.decode(message)


def recording_sees_every_rank(comm: Communicator) -> None:
    with comm.record() as ledger, collectives.phase("here"):
        comm.all_reduce(np.zeros(1003, np.uint8), algorithm="ring")
    whole = ledger.gather()
    assert (whole is None) == (comm.rank != 0)
    if whole is not None and comm.size > 1:
        assert whole.summary()[("here", "all_reduce")].bytes == 2 * (comm.size - 1) * 1003


def mixed_calls_in_any_sizes(comm: Communicator) -> None:
    """Small and large, remembered and not, blocking and under way, all meet the right partners."""
    draw, p = np.random.default_rng(7), comm.size  # the same on every rank
    works: list[tuple[collectives.Work, float]] = []
    for _ in range(120):
        length, value = int(draw.choice([0, 1, 5, 64, 20_000])), float(draw.integers(100))
        x, kind = np.full(length * p, value + comm.rank), draw.integers(6)
        total = p * value + p * (p - 1) / 2
        if kind == 0:
            assert np.all(comm.all_reduce(x) == total)
        elif kind == 1:
            assert np.all(comm.reduce_scatter(x, out=np.empty(length)) == total)
        elif kind == 2:
            assert np.all(comm.broadcast(x, root=p - 1) == value + p - 1)
        elif kind == 3:
            comm.barrier()
        elif kind == 4:
            works.append((comm.all_reduce(x, async_op=True), total))
        elif works:
            work, wanted = works.pop(int(draw.integers(len(works))))
            assert np.all(work.wait() == wanted)
    for work, wanted in works:
        assert np.all(work.wait() == wanted)


SCENARIOS = [
    mixed_calls_in_any_sizes,
    point_to_point_both_ways,
    a_probe_finds_messages_from_any_rank,
    a_communicator_can_be_renamed,
    tags_keep_messages_apart,
    messages_to_oneself_keep_their_order_and_tags,
    receives_take_messages_in_the_order_posted,
    split_makes_working_groups,
    split_leaves_out_ranks_without_color,
    subgroups_may_overlap_in_time,
    works_complete_in_any_order,
    works_may_be_tested_in_any_order,
    work_can_be_tested_until_done,
    plans_run_many_times,
    plans_of_every_collective,
    a_barrier_waits_for_the_last,
    a_timeout_names_whom_it_waited_for,
    a_collective_that_timed_out_can_still_complete,
    a_time_limit_is_heeded_wherever_it_is_given,
    a_blocking_call_that_timed_out_is_not_lost,
    what_timed_out_ahead_of_a_call_goes_on_and_nothing_is_mixed_up,
    a_call_that_timed_out_can_be_the_last,
    refused_calls_do_not_count,
    a_freed_plan_cannot_run,
    a_freed_communicator_says_so,
    a_plan_of_strided_input_is_refused,
    a_failure_belongs_to_the_call_that_failed,
    arrays_of_different_kinds_travel_as_bytes,
    own_counts_are_enough,
    counts_travel_ahead_of_blocks_that_are_sent_on,
    shards_have_the_same_bits_on_any_ranks,
    header_and_data_never_meet,
    recording_sees_every_rank,
]
