"""The drop-in for mpi4py: what a program written for mpi4py's communicators finds in ours."""

from __future__ import annotations

import gc
import inspect
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives import CollectiveMismatch
from collectives.engines import poll_until
from collectives.mpi4py_compat import requests
from collectives.mpi4py_compat.intracomm import Cartcomm, Distgraphcomm, Graphcomm
from tests.mpi4py_compat.drop_in_program import collective_names

pytestmark = pytest.mark.mpi

COUNTS = [3, 0, 1, 5, 2, 4, 0, 7]
IN_PLACE = MPI.IN_PLACE
SENT = ["self", "sendbuf", "recvbuf", "op"]


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what checked mode would tell before it happens: `comm` does not check, come what may."""
    monkeypatch.setenv("COLLECTIVES_CHECK", "0")


@pytest.fixture
def comm(mpi_world: MPI.Intracomm) -> Iterator[collectives.Intracomm]:
    comm = collectives.Intracomm(mpi_world)
    yield comm
    comm.free()


def numbers(count: int, rank: int, dtype: Any = np.float64) -> np.ndarray:
    """Small whole numbers, other ones on every rank."""
    return ((np.arange(count) * 7 + rank * 3) % 5 + 1).astype(dtype)


# An existing script, of which one line changes


def script(comm: MPI.Intracomm) -> list[Any]:
    """What a program of mpi4py's makes of its communicator."""
    size, rank = comm.Get_size(), comm.Get_rank()
    results: list[Any] = []
    for wish in (numbers(6, rank), numbers(1, rank, "f4"), numbers(300, rank, "i8")):
        total = np.zeros_like(wish)
        comm.Allreduce(wish, total, op=MPI.SUM)
        rows = np.zeros((size, wish.size), wish.dtype)
        comm.Allgather(wish, rows)
        prefix = np.zeros_like(wish)
        comm.Scan([wish, wish.size], [prefix, MPI._typedict[wish.dtype.char]], MPI.MAX)
        results += [total, rows, prefix]
    counts = COUNTS[:size]
    everything = np.zeros(sum(counts)) if rank == size - 1 else None
    comm.Gatherv(numbers(counts[rank], rank), [everything, counts], root=size - 1)
    own = np.zeros(counts[rank])
    comm.Scatterv([everything, (counts, None), MPI.DOUBLE], own, root=size - 1)
    turned = np.zeros(size, "i")
    request = comm.Ialltoall(np.arange(size, dtype="i") + 10 * rank, turned)
    request.Wait()
    words = comm.bcast({"root": 0, "words": ["a", "b"]} if rank == 0 else None)
    results += [everything, own, turned, words, comm.allreduce(rank), comm.scan((rank,))]
    results += [comm.exscan(rank, MPI.MAX), comm.reduce([rank]), comm.gather(rank, size - 1)]
    results += [comm.scatter(range(size) if rank == 0 else None), comm.alltoall([rank] * size)]
    return results


def are_equal(mine: list[Any], theirs: list[Any]) -> bool:
    return len(mine) == len(theirs) and all(
        np.array_equal(a, b) if isinstance(b, np.ndarray) else a == b
        for a, b in zip(mine, theirs, strict=True)
    )


def test_an_existing_script_changes_one_line(
    mpi_world: MPI.Intracomm, comm: collectives.Intracomm
) -> None:
    with comm.record() as ledger:
        results = script(comm)
    assert are_equal(results, script(mpi_world))
    assert ledger.rows() or comm.size == 1
    assert not are_equal([np.zeros(2)], [np.ones(2)])


def test_every_collective_of_mpi4py_is_ours() -> None:
    names = collective_names()
    assert len(names) == 17 * 3 + 10  # and the lower-case ones
    for name in names:
        method = getattr(collectives.Intracomm, name)
        assert method.__module__.startswith("collectives.mpi4py_compat"), name
        assert method.__name__ == name


def test_the_ledger_shows_what_is_sent(comm: collectives.Intracomm) -> None:
    x = np.ones(1000)
    with comm.record() as ledger:
        comm.Allreduce(IN_PLACE, x, algorithm="ring")
        comm.Iallgather(x[:5], np.empty(5 * comm.size), algorithm="bruck").Wait()
        comm.bcast("word", algorithm="linear")
    rows = ledger.rows()
    if comm.size > 1:
        assert {(row.collective, row.algorithm) for row in rows} >= {
            ("all_reduce", "ring"),
            ("all_gather", "bruck"),
        }
        p = comm.size
        assert (
            sum(r.bytes for r in rows if r.collective == "all_reduce")
            >= 2 * 8000 * (p - 1) // p - 16
        )


# Communicators


def test_communicators_made_from_ours_are_ours(comm: collectives.Intracomm) -> None:
    size, rank = comm.size, comm.rank
    made = [
        comm.Dup(),
        comm.Clone(),
        comm.Split(rank % 2, -rank),
        comm.Split_type(MPI.COMM_TYPE_SHARED),
        comm.Create_group(comm.group),
        comm.Create(comm.group),
        comm.Create_cart([size], [True]),
        comm.Create_graph(
            [1] * 0 + list(range(1, size + 1)), [(r + 1) % size for r in range(size)]
        ),
        comm.Create_dist_graph_adjacent([(rank - 1) % size], [(rank + 1) % size]),
    ]
    kinds = [collectives.Intracomm] * 6 + [Cartcomm, Graphcomm, Distgraphcomm]
    assert [type(other) for other in made] == kinds
    for other in made:
        assert isinstance(other, collectives.Intracomm)
        with other.record() as ledger:
            assert other.allgather(other.rank) == list(range(other.size))
        assert ledger.rows() or other.size == 1
    part = made[6].Sub([True])
    assert type(part) is Cartcomm and part.Get_coords(part.rank) == [part.rank]
    got = np.empty(2 * 1, "i")
    made[6].Neighbor_allgather(np.array([rank], "i"), got)  # MPI's own
    assert got.tolist() == [(rank - 1) % size, (rank + 1) % size]
    for other in (part, *made):
        other.Free()


def test_a_rank_without_a_communicator_gets_comm_null(comm: collectives.Intracomm) -> None:
    alone = comm.Split(0 if comm.rank == 0 else MPI.UNDEFINED)
    assert (alone == MPI.COMM_NULL) == (comm.rank > 0)
    null = collectives.Intracomm(MPI.COMM_NULL)
    assert not null and not collectives.Intracomm()
    for call in (null.Barrier, null.Ibarrier, null.Barrier_init, lambda: null.bcast(1)):
        with pytest.raises(MPI.Exception) as caught:
            call()
        assert caught.value.Get_error_class() == MPI.ERR_COMM
    if comm.rank == 0:
        alone.Barrier()
        alone.Free()
        assert alone == MPI.COMM_NULL


def test_what_was_freed_cannot_be_called(mpi_world: MPI.Intracomm) -> None:
    comm = collectives.Intracomm(mpi_world.Dup())
    comm.Free()
    assert comm == MPI.COMM_NULL
    world = collectives.Intracomm(mpi_world)
    world.Free()
    assert MPI.COMM_WORLD.Get_size() == world.size  # MPI's world outlives ours
    for freed in (comm, world):
        with pytest.raises(MPI.Exception):
            freed.Barrier()


def test_a_subclass_of_ours_stays_what_it_is(mpi_world: MPI.Intracomm) -> None:
    class Mine(collectives.Intracomm):
        pass

    comm = Mine(mpi_world)
    other = comm.Dup()
    assert type(other) is Mine and other.allreduce(1) == comm.size
    other.Free()
    comm.Free()


# Requests


def ring(comm: MPI.Intracomm, number: int) -> tuple[np.ndarray, list[MPI.Request]]:
    """MPI's own requests: a number round the ring."""
    got = np.zeros(1, "i")
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    sent = np.array([number + comm.rank], "i")
    return got, [comm.Irecv(got, left, number), comm.Isend(sent, right, number)]


def wait_all(pending: list[MPI.Request]) -> None:
    statuses = [MPI.Status() for _ in pending]
    assert MPI.Request.Waitall(pending, statuses) is True


def wait_any(pending: list[MPI.Request]) -> None:
    done = {MPI.Request.Waitany(pending) for _ in pending}
    assert done == set(range(len(pending))) and MPI.Request.Waitany(pending) == MPI.UNDEFINED


def wait_some(pending: list[MPI.Request]) -> None:
    done: list[int] = []
    while (some := MPI.Request.Waitsome(pending)) is not None:
        done += some
    assert sorted(done) == list(range(len(pending)))


def test_all(pending: list[MPI.Request]) -> None:
    while not MPI.Request.Testall(pending):
        pass


def test_any(pending: list[MPI.Request]) -> None:
    done: set[int] = set()
    while len(done) < len(pending):
        index, is_done = MPI.Request.Testany(pending)
        done |= {index} if is_done else set()


def one_by_one(pending: list[MPI.Request]) -> None:
    for request in pending:
        request.Wait()


test_all.__test__ = test_any.__test__ = False  # type: ignore[attr-defined]
WAITS = [wait_all, wait_any, wait_some, test_all, test_any, one_by_one]


@pytest.mark.parametrize("wait", WAITS, ids=lambda wait: wait.__name__)
@pytest.mark.parametrize("is_persistent", [False, True])
def test_requests_stand_beside_mpis_own_in_any_order(
    comm: collectives.Intracomm, wait: Callable[[list[MPI.Request]], None], is_persistent: bool
) -> None:
    size, rank = comm.size, comm.rank
    x, total, rows = numbers(4000, rank), np.zeros(4000), np.zeros(4000 * size)
    word = np.full(3, rank)
    if is_persistent:
        ours: list[Any] = [
            comm.Allreduce_init(x, total),
            comm.Allgather_init(x, rows),
            comm.Bcast_init(word, size - 1),
            comm.Barrier_init(),
        ]
    for _ in range(2 if is_persistent else 1):
        total[:], rows[:], word[:] = 0, 0, rank
        got, theirs = ring(comm, 5)
        if is_persistent:
            type(ours[0]).Startall(ours)
        else:
            ours = [comm.Iallreduce(x, total), comm.Iallgather(x, rows)]
            ours += [comm.Ibcast(word, size - 1), comm.Ibarrier()]
        pending = [ours[0], theirs[0], *ours[1:3], theirs[1], ours[3]]
        # Another order on every rank.
        pending = pending[rank % 6 :] + pending[: rank % 6]
        wait(pending)
        assert got == [5 + (rank - 1) % size]
        everybodys = [numbers(4000, r) for r in range(size)]
        assert np.array_equal(total, np.sum(everybodys, axis=0))
        assert np.array_equal(rows, np.concatenate(everybodys))
        assert (word == size - 1).all()
        if is_persistent:
            assert not any(MPI.Prequest.__bool__(request) for request in ours)
    for request in ours:
        if is_persistent:
            request.Free()
            assert request == MPI.REQUEST_NULL


def test_a_persistent_request_is_what_mpi_says_it_is(comm: collectives.Intracomm) -> None:
    x, total = np.ones(3), np.zeros(3)
    request = comm.Iallreduce(x, total)
    assert isinstance(request, MPI.Request) and request.Wait() is True
    request = comm.Allreduce_init(x, total, MPI.SUM, MPI.INFO_NULL)
    assert isinstance(request, MPI.Prequest) and request and request != MPI.REQUEST_NULL
    assert request.Wait() is True and request.Test() is True  # inactive
    assert MPI.Request.Waitany([request]) == MPI.UNDEFINED
    for factor in (1, 2):
        x[:] = factor
        request.Start()
        with pytest.raises(MPI.Exception):
            request.Start()
        request.Wait()
        assert (total == factor * comm.size).all()
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    got = np.zeros(1)
    theirs = [comm.Recv_init(got, left, 3), comm.Send_init(np.array([7.0]), right, 3)]
    type(request).Startall([theirs[0], request, theirs[1]])
    MPI.Request.Waitall([request, *theirs])
    assert got == 7
    request.Start()
    request.Free()  # while it is active: it is carried to its end, and then its plan is freed
    request._operation.wait()
    with pytest.raises(MPI.Exception):
        request.Start()
    for other in theirs:
        other.Free()


def test_a_call_is_carried_on_while_nobody_waits_and_keeps_its_buffers(
    comm: collectives.Intracomm,
) -> None:
    rows = np.zeros(50_000 * comm.size)
    request = comm.Iallgather(np.full(50_000, comm.rank, "d"), rows)
    gc.collect()
    while not request.Get_status():
        pass
    assert np.array_equal(rows, np.repeat(np.arange(comm.size), 50_000))
    request.Wait()


def test_a_call_that_is_over_keeps_no_buffer(comm: collectives.Intracomm) -> None:
    rows = np.zeros(3 * comm.size)
    kept = weakref.ref(rows)
    request = comm.Iallgather(np.zeros(3), rows)
    request.Wait()
    del rows
    deadline = time.monotonic() + 10  # for the thread to take its hands off
    while kept() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    is_kept = kept() is not None
    assert not is_kept


def failing(comm: collectives.Intracomm) -> MPI.Request:
    """A request that fails on all ranks but 0."""
    length = 1 if comm.rank == 0 else 2
    return comm.Ibcast(np.zeros(length), algorithm="linear")


def test_a_failure_comes_out_where_it_is_waited_for(
    unchecked: None, comm: collectives.Intracomm
) -> None:
    ours = [failing(comm) for _ in range(2)]
    persistent = comm.Bcast_init(np.zeros(1 if comm.rank == 0 else 2), algorithm="linear")
    persistent.Start()
    if comm.rank == 0:
        MPI.Request.Waitall([*ours, persistent])
    else:
        with pytest.raises(CollectiveMismatch, match="expected 16 bytes from rank 0 and got 8"):
            ours[0].Wait()
        _, theirs = ring(MPI.COMM_SELF, 1)
        with pytest.raises(MPI.Exception):
            MPI.Request.Waitall([theirs[0], ours[1], theirs[1]])
        with pytest.raises(CollectiveMismatch):
            persistent.Wait()
    persistent.Free()
    comm.Barrier()


@pytest.mark.parametrize("is_tested", [False, True], ids=["Wait", "Test"])
def test_an_error_that_is_raised_is_not_printed_too(
    unchecked: None, comm: collectives.Intracomm, capfd: Any, is_tested: bool
) -> None:
    request = failing(comm)
    wait = partial(poll_until, request.Test, None) if is_tested else request.Wait
    with nullcontext() if comm.rank == 0 else pytest.raises(CollectiveMismatch):
        wait()
    assert not request and request.Test()  # the error is raised once
    comm.Barrier()
    assert capfd.readouterr().err == ""


def test_mpi4py_prints_an_error_that_only_mpi_raises(
    unchecked: None, comm: collectives.Intracomm, capfd: Any
) -> None:
    """Negative control.  MPI's own exception does not say why."""
    with raising_of_all_but_rank_0(comm):
        MPI.Request.Waitall([failing(comm)])
    comm.Barrier()
    assert ("expected 16 bytes" in capfd.readouterr().err) == (comm.rank > 0)


def test_failures_of_one_type_share_an_error_code_of_mpi(
    unchecked: None, comm: collectives.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, add = list[int](), MPI.Add_error_code
    monkeypatch.setattr(MPI, "Add_error_code", lambda kind: made.append(kind) or add(kind))
    requests._code_of.cache_clear()
    for _ in range(3):
        with raising_of_all_but_rank_0(comm):
            MPI.Request.Waitall([failing(comm)])
    comm.Barrier()
    assert made == ([MPI.ERR_OTHER] if comm.rank > 0 else [])


def raising_of_all_but_rank_0(comm: MPI.Comm) -> Any:
    return nullcontext() if comm.rank == 0 else pytest.raises(MPI.Exception)


def test_waiting_has_the_time_limit_of_the_communicator(
    unchecked: None, comm: collectives.Intracomm, mpi_world: MPI.Intracomm
) -> None:
    if comm.size == 1:
        return
    comm.communicator.timeout = 0.1
    total = np.zeros(3)
    if comm.rank == 0:  # before the others call it
        request = comm.Iallreduce(np.ones(3), total)
        with pytest.raises(collectives.CollectiveTimeout, match=r"waited 0\.1 s"):
            request.Wait()
    mpi_world.Barrier()
    comm.communicator.timeout = 30
    if comm.rank != 0:
        request = comm.Iallreduce(np.ones(3), total)
    else:
        while not request.Test():  # it goes on
            pass
    request.Wait()
    assert (total == comm.size).all()


def test_without_threads_a_sentence_says_what_is_missing(
    comm: collectives.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "progress_thread", lambda: None)
    for call in (comm.Ibarrier, comm.Barrier_init):
        with pytest.raises(RuntimeError, match="need a thread and MPI_THREAD_MULTIPLE"):
            call()
    comm.Barrier()


# Operations


def affine(left: MPI.buffer, right: MPI.buffer, datatype: MPI.Datatype) -> None:
    """x -> a x + b, one after the other: associative, and not commutative."""
    first, then = (np.frombuffer(x, "i8").reshape(-1, 2) for x in (left, right))
    then[:, 1] += then[:, 0] * first[:, 1]
    then[:, 0] *= first[:, 0]


def composed(size: int) -> np.ndarray:
    """All ranks' functions, one after the other."""
    a, b = 1, 0
    for rank in range(size):
        a, b = a * (rank + 2), b * (rank + 2) + rank
    return np.array([a, b])


@pytest.mark.parametrize("count", [1, 5000])
def test_operations_of_the_users_keep_the_order_of_ranks(
    comm: collectives.Intracomm, count: int
) -> None:
    size, rank = comm.size, comm.rank
    pair = MPI.INT64_T.Create_contiguous(2).Commit()
    op = MPI.Op.Create(affine, commute=False)
    x = np.tile(np.array([rank + 2, rank], "i8"), count)
    total = np.zeros_like(x)
    comm.Allreduce([x, count, pair], [total, count, pair], op)
    assert np.array_equal(total.reshape(-1, 2), np.tile(composed(size), (count, 1)))
    prefix = np.zeros_like(x)
    comm.Iscan([x, pair], [prefix, pair], op).Wait()
    assert np.array_equal(prefix.reshape(-1, 2), np.tile(composed(rank + 1), (count, 1)))
    comm.Exscan(IN_PLACE, [x, pair], op)
    expected = np.array([2, 0]) if rank == 0 else composed(rank)
    assert np.array_equal(x.reshape(-1, 2), np.tile(expected, (count, 1)))
    with pytest.raises(ValueError, match="needs a commutative operator"):
        comm.Allreduce([x, pair], [total, pair], op, algorithm="ring")
    op.Free()
    pair.Free()


PREDEFINED = [
    (MPI.MAXLOC, MPI.DOUBLE_INT, np.dtype([("value", "d"), ("rank", "i"), ("gap", "i")])),
    (MPI.MINLOC, MPI.TWOINT, np.dtype([("value", "i"), ("rank", "i")])),
    (MPI.LAND, MPI.INT, np.dtype("i")),
    (MPI.LXOR, MPI.C_BOOL, np.dtype("?")),
    (MPI.LOR, MPI.UNSIGNED_CHAR, np.dtype("u1")),
    (MPI.BXOR, MPI.BYTE, np.dtype("u1")),
    (MPI.BAND, MPI.INT16_T, np.dtype("i2")),
    (MPI.PROD, MPI.C_DOUBLE_COMPLEX, np.dtype("c16")),
    (MPI.SUM, MPI.LONG_DOUBLE, np.dtype("g")),
    (MPI.MAX, MPI.CHAR, np.dtype("S1")),
]


@pytest.mark.parametrize(("op", "datatype", "dtype"), PREDEFINED, ids=lambda x: str(x)[:12])
def test_predefined_operations_do_what_mpis_do(
    mpi_world: MPI.Intracomm,
    comm: collectives.Intracomm,
    op: MPI.Op,
    datatype: MPI.Datatype,
    dtype: np.dtype[Any],
) -> None:
    x = numbers(11 * dtype.itemsize, comm.rank, "u1").view(dtype)
    if dtype.names:
        x["value"], x["rank"] = numbers(11, comm.rank), comm.rank
    elif dtype.kind in "cf":
        x = numbers(11, comm.rank, dtype)
    elif dtype.kind == "?":
        x = numbers(11, comm.rank) > 2
    totals = []
    for world in (comm, mpi_world):
        y = np.zeros_like(x)
        world.Allreduce([x, datatype], [y, datatype], op)
        totals.append(y[["value", "rank"]] if dtype.names else y)
    assert np.array_equal(*totals)


@pytest.mark.parametrize("code", "bBhHiIlLqQfdg?FD")
def test_an_array_alone_and_one_with_its_type_speak_of_the_same(
    mpi_world: MPI.Intracomm, comm: collectives.Intracomm, code: str
) -> None:
    x = numbers(5, comm.rank, code)
    op = MPI.SUM if code in "FD" else MPI.LOR if code == "?" else MPI.MAX
    totals = []
    for world in (comm, mpi_world):
        for one, other in [(False, False), (False, True), (True, False)]:
            y = np.zeros_like(x)
            world.Allreduce([x, code] if one else x, [y, code] if other else y, op)
            totals.append(y)
    assert all(np.array_equal(totals[0], y) for y in totals)


class Odd(NamedTuple):
    """A datatype of two numbers, of which an element is more, or begins elsewhere, than these."""

    places: list[int]
    lower: int
    extent: int

    def as_datatype(self) -> MPI.Datatype:
        packed = MPI.DOUBLE.Create_hindexed([1, 1], self.places)
        datatype = packed.Create_resized(self.lower, self.extent).Commit()
        packed.Free()
        datatype.Set_name("odd")
        return datatype

    def as_dtype(self) -> np.dtype[Any]:
        names = ["first", "second"]
        fields: Any = {"names": names, "formats": ["d", "d"], "offsets": self.places}
        return np.dtype({**fields, "itemsize": self.extent})


ODD = {
    "room behind": Odd([0, 16], 0, 512),
    "room before": Odd([16, 24], 0, 32),
    "begins before its address": Odd([-8, 8], -8, 24),
    "is longer than its extent": Odd([0, 24], 0, 16),
}


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("name", ODD)
def test_an_operation_of_the_users_gets_whole_elements_of_his_own_datatype(
    comm: collectives.Intracomm, name: str, count: int
) -> None:
    odd, seen = ODD[name], []
    datatype, is_simple = odd.as_datatype(), name.startswith("room")

    def add(left: MPI.buffer, right: MPI.buffer, theirs: MPI.Datatype) -> None:
        seen.append(theirs.Get_name())
        if is_simple:
            one, other = (np.frombuffer(x, odd.as_dtype()).copy() for x in (left, right))
            for field in ("first", "second"):
                other[field] += one[field]
            right[:] = other.tobytes()  # to the last byte, as MPI allows

    op = MPI.Op.Create(add, commute=True)
    x, y = (np.zeros((count + 3) * odd.extent + 64, np.uint8) for _ in range(2))
    x.view("d")[:] = comm.rank + 1
    comm.Allreduce([x, (count, 1), datatype], [y, (count, 1), datatype], op)
    assert set(seen) <= {"odd"} and any(comm.allgather(len(seen))) == (comm.size > 1)
    if is_simple:
        results = np.frombuffer(y, odd.as_dtype(), count, odd.extent)
        total = comm.size * (comm.size + 1) // 2
        assert (results["first"] == total).all() and (results["second"] == total).all()
    op.Free()
    datatype.Free()


def test_elements_that_lie_backwards_are_refused_by_all_before_anything_is_sent(
    comm: collectives.Intracomm,
) -> None:
    backwards = MPI.DOUBLE.Create_resized(0, -8).Commit()
    op = MPI.Op.Create(lambda *_: None)
    with pytest.raises(NotImplementedError, match="negative extent"):
        comm.Allreduce([np.ones(3), (1, 0), backwards], [np.ones(3), (1, 0), backwards], op)
    comm.Barrier()
    op.Free()
    backwards.Free()


@pytest.mark.parametrize("op", [None, "sum", max])
def test_what_is_no_operation_is_refused_in_mpi4pys_words(
    mpi_world: MPI.Intracomm, comm: collectives.Intracomm, op: Any
) -> None:
    said = []
    for world in (comm, mpi_world):
        with pytest.raises(TypeError) as error:
            world.Allreduce(np.ones(1), np.ones(1), op)
        said.append(str(error.value))
    assert said[0] == said[1]


def test_a_root_may_be_what_mpi4py_takes(comm: collectives.Intracomm) -> None:
    x = np.full(2, comm.rank)
    comm.Bcast(x, root=0.0)  # type: ignore[arg-type]
    assert comm.bcast(comm.rank, root=np.int8(0)) == 0 == x[0]  # type: ignore[arg-type]


def test_calls_show_mpi4pys_arguments() -> None:
    for name in ("Allreduce", "Iallreduce", "Allreduce_init"):
        ours, theirs = (
            inspect.signature(getattr(c, name)) for c in (collectives.Intracomm, MPI.Intracomm)
        )
        assert [*ours.parameters][:4] == [*theirs.parameters][:4] == SENT
        assert "Prepared" not in str(ours)
    assert "info" in inspect.signature(collectives.Intracomm.Allreduce_init).parameters


@pytest.mark.parametrize("with_info", [False, True])
def test_a_call_on_what_idup_made_does_not_wait_for_the_others(
    mpi_world: MPI.Intracomm, comm: collectives.Intracomm, with_info: bool
) -> None:
    made, request = comm.Idup_with_info(MPI.INFO_ENV) if with_info else comm.Idup()
    unused, request_of_unused = comm.Idup()
    MPI.Request.Waitall([request, request_of_unused])
    assert type(made) is collectives.Intracomm
    if comm.rank == 0:
        barrier = made.Ibarrier()  # and only then may the others
        for peer in range(1, comm.size):
            mpi_world.send(None, peer)
    else:
        mpi_world.recv(source=0)
        barrier = made.Ibarrier()
    barrier.Wait()
    assert made.allreduce(1) == comm.size
    made.Free()
    unused.Free()


@pytest.mark.parametrize("count", [3, 100_000])
def test_what_is_under_way_when_its_communicator_is_freed_completes(
    comm: collectives.Intracomm, count: int
) -> None:
    x, results = np.full(count, 1.0), [np.zeros(count) for _ in range(3)]
    other = comm.Dup()
    started = [other.Iallreduce(x, y) for y in results[:2]]
    persistent = other.Allreduce_init(x, results[2])
    persistent.Start()
    other.Free()
    MPI.Request.Waitall([*started, persistent])
    persistent.Free()
    assert all((y == comm.size).all() for y in results)


def test_an_operation_without_meaning_is_refused_as_mpi_refuses_it(
    comm: collectives.Intracomm,
) -> None:
    x, y = np.ones(3), np.zeros(3)
    for op in (MPI.BAND, MPI.REPLACE, MPI.NO_OP, MPI.OP_NULL):
        with pytest.raises(MPI.Exception) as caught:
            comm.Allreduce(x, y, op)
        assert caught.value.Get_error_class() == MPI.ERR_OP
    comm.Allreduce(x, y)  # the ranks are still in step
    assert (y == comm.size).all()


# Datatypes and places


def test_gaps_of_derived_datatypes_are_left_alone(comm: collectives.Intracomm) -> None:
    size, rank = comm.size, comm.rank
    column = MPI.DOUBLE.Create_vector(3, 1, 4).Create_resized(0, 8).Commit()
    for wait in (False, True):
        matrix = np.full((3, 4), -1.0)
        if rank == 0:
            matrix[:, 1] = 1, 2, 3
        spec = [matrix, 1, 1, column]
        if wait:
            request = comm.Ibcast(spec)
            request.Wait()
        else:
            comm.Bcast(spec)
        assert matrix[:, 1].tolist() == [1, 2, 3] and (matrix[:, [0, 2, 3]] == -1).all()
    # A column from everybody becomes rows here, and columns of a matrix there.
    mine = numbers(12, rank).reshape(3, 4)
    rows = np.zeros((size, 3))
    comm.Allgather([mine, (1, 2), column], rows)
    assert all(np.array_equal(rows[r], numbers(12, r).reshape(3, 4)[:, 2]) for r in range(size))
    column.Free()


def test_a_datatype_may_be_freed_while_its_call_is_under_way(comm: collectives.Intracomm) -> None:
    every_other = MPI.INT.Create_vector(4, 1, 2).Commit()
    data = np.arange(8, dtype="i") if comm.rank == 0 else np.full(8, -1, "i")
    request = comm.Ibcast([data, 1, every_other])
    every_other.Free()
    request.Wait()
    assert data[::2].tolist() == [0, 2, 4, 6]
    assert comm.rank == 0 or (data[1::2] == -1).all()


def test_operations_are_applied_to_derived_datatypes(comm: collectives.Intracomm) -> None:
    size, rank = comm.size, comm.rank

    def add(left: MPI.buffer, right: MPI.buffer, _: MPI.Datatype) -> None:
        a, b = (np.frombuffer(x, "i4").reshape(-1, 3) for x in (left, right))
        b[:, ::2] += a[:, ::2]

    outer = MPI.INT.Create_indexed_block(1, [0, 2]).Create_resized(0, 12).Commit()
    op = MPI.Op.Create(add, commute=True)
    x, y = np.full((50, 3), rank + 1, "i4"), np.full((50, 3), -1, "i4")
    comm.Allreduce([x, 50, outer], [y, 50, outer], op)
    assert (y[:, ::2] == size * (size + 1) // 2).all() and (y[:, 1] == -1).all()
    op.Free()
    outer.Free()


def test_bottom_means_absolute_addresses(comm: collectives.Intracomm) -> None:
    data = np.full(3, comm.rank, "i")
    here = MPI.INT.Create_hindexed([3], [MPI.Get_address(data)]).Commit()
    comm.Bcast([MPI.BOTTOM, 1, here], comm.size - 1)
    assert (data == comm.size - 1).all()
    here.Free()


def exchanges(comm: MPI.Intracomm, **options: Any) -> list[np.ndarray]:
    """The vector variants, with displacements that leave gaps and change the order."""
    size, rank = comm.size, comm.rank
    counts = COUNTS[:size]
    far = [10 * ((r + 1) % size) for r in range(size)]
    buffers = []
    whole = np.full(10 * size, -1.0)
    comm.Allgatherv(numbers(counts[rank], rank), [whole, (counts, far)])
    buffers.append(whole.copy())
    whole[:] = -1
    comm.Gatherv(numbers(counts[rank], rank), [whole, counts, far, MPI.DOUBLE], 0, **options)
    buffers.append(whole.copy())
    own = np.full(counts[rank] + 1, -1.0)
    source = numbers(10 * size, 3)
    comm.Scatterv([source, (counts, far)], [own, counts[rank]], size - 1, **options)
    buffers.append(own)
    # s sends (s + d) % 3 to d.
    amounts = [(rank + peer) % 3 for peer in range(size)]
    got = np.full(10 * size, -1.0)
    sent = numbers(10 * size, rank)
    comm.Alltoallv([sent, amounts, far, "d"], [got, (amounts, far)], **options)
    buffers.append(got.copy())
    got[:] = -1
    kinds = [MPI.DOUBLE] * size
    places = [8 * place for place in far]
    comm.Alltoallw([sent, (amounts, places), kinds], [got, amounts, places, kinds], **options)
    buffers.append(got)
    symmetric = numbers(10 * size, rank)
    comm.Alltoallv(IN_PLACE, [symmetric, (amounts, far)], **options)
    buffers.append(symmetric)
    return buffers


def test_vector_variants_need_to_know_no_more_than_mpi_tells_a_rank(
    unchecked: None, mpi_world: MPI.Intracomm, comm: collectives.Intracomm
) -> None:
    with comm.record() as ledger:
        buffers = exchanges(comm)
    assert are_equal(buffers, exchanges(mpi_world))
    assert not any(row.collective == "counts" for row in ledger.rows())


def test_an_algorithm_that_needs_all_counts_gets_them(
    mpi_world: MPI.Intracomm, comm: collectives.Intracomm
) -> None:
    size, rank = comm.size, comm.rank
    counts = COUNTS[:size]
    everything = np.zeros(sum(counts))
    with comm.record() as ledger:
        comm.Gatherv(numbers(counts[rank], rank), [everything, counts], algorithm="binomial")
        own = np.zeros(counts[rank])
        comm.Scatterv([everything, counts], own, algorithm="binomial")
        amounts = [(rank + peer) % 3 for peer in range(size)]
        got = np.zeros(sum(amounts))
        sent = numbers(sum(amounts), rank)
        comm.Alltoallv([sent, amounts], [got, amounts], algorithm="bruck")
    theirs = np.zeros(sum(amounts))
    mpi_world.Alltoallv([sent, amounts], [theirs, amounts])
    assert np.array_equal(got, theirs) and np.array_equal(own, numbers(counts[rank], rank))
    if size > 1:
        assert any(row.collective == "counts" for row in ledger.rows())
    with pytest.raises(ValueError, match="magic"):
        comm.Gatherv(own, [everything, counts], algorithm="magic")


def in_place(comm: MPI.Intracomm) -> list[np.ndarray]:
    """The buffers after every call with one buffer for both sides."""
    size, rank = comm.size, comm.rank
    root, buffers = size - 1, []

    def at_root(x: Any) -> Any:
        return IN_PLACE if rank == root else x

    x = numbers(4, rank)
    comm.Reduce(at_root(x), x if rank == root else None, MPI.SUM, root)
    buffers.append(x)
    for call in (comm.Allreduce, comm.Scan, comm.Reduce_scatter_block):
        x = numbers(4 * size, rank)
        call(IN_PLACE, x)
        buffers.append(x[:4])
    x = numbers(sum(COUNTS[:size]), rank)
    comm.Reduce_scatter(IN_PLACE, x, COUNTS[:size], MPI.MAX)
    buffers.append(x[: COUNTS[rank]])
    for call in (comm.Allgather, comm.Alltoall):
        x = numbers(3 * size, rank)
        call(IN_PLACE, x)
        buffers.append(x)
    x = numbers(3 * size, rank)
    comm.Gather(at_root(x[:3]), x if rank == root else None, root)
    buffers.append(x)
    x = numbers(3 * size, rank)
    comm.Scatter(x if rank == root else None, at_root(x[:3]), root)
    buffers.append(x)
    return buffers


def test_in_place_does_what_mpis_does(
    mpi_world: MPI.Intracomm, comm: collectives.Intracomm
) -> None:
    assert are_equal(in_place(comm), in_place(mpi_world))


def test_checked_mode_changes_no_result(
    mpi_world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLLECTIVES_CHECK", "1")
    comm = collectives.Intracomm(mpi_world)
    with comm.record() as ledger:
        for program in (script, exchanges, in_place):
            assert are_equal(program(comm), program(mpi_world))
    assert comm.size == 1 or any(row.collective == "check" for row in ledger.rows())
    if comm.size > 1:
        op = MPI.SUM if comm.rank else MPI.PROD
        with pytest.raises(CollectiveMismatch, match="op=prod"):
            comm.Iallreduce(np.ones(3), np.empty(3), op).Wait()
    comm.free()


@pytest.mark.parametrize("check", ["0", "1"])
def test_ranks_may_write_the_same_reduction_in_other_ways(
    mpi_world: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, check: str
) -> None:
    monkeypatch.setenv("COLLECTIVES_CHECK", check)
    comm = collectives.Intracomm(mpi_world)
    for turn in range(2 * comm.size):
        x, y = np.ones((2, 3)), np.ones((2, 3))
        sent = [(x, y), (IN_PLACE, y), ([x, MPI.DOUBLE], [y, 6]), (x.ravel(), y)]
        comm.Allreduce(*sent[(turn + comm.rank) % len(sent)], MPI.SUM)
        assert (y == comm.size).all()
    comm.Free()


def test_what_is_sent_may_be_read_only_and_is_not_changed(comm: collectives.Intracomm) -> None:
    word = b"collective"
    got = bytearray(len(word))
    comm.Bcast(word if comm.rank == 0 else got)
    assert word == b"collective" and (comm.rank == 0 or got == word)
    x = numbers(100, comm.rank)
    x.flags.writeable = False
    comm.Allreduce(x, np.empty(100))
    parts = np.arange(2.0 * comm.size)
    parts.flags.writeable = False
    comm.Scatter(parts if comm.rank == 0 else None, IN_PLACE if comm.rank == 0 else np.empty(2))
    assert np.array_equal(x, numbers(100, comm.rank))
    with pytest.raises(BufferError):
        comm.Allreduce(np.ones(100), x)


# Errors

BUFFER = np.zeros(6)
BAD = [
    None,
    3,
    [BUFFER],
    [BUFFER, 1, 2, 3, 4],
    [BUFFER, -1],
    [BUFFER, (1, -1)],
    [BUFFER, (1, 7)],
    [BUFFER, 2.5],
    [BUFFER, "nonsense"],
    [BUFFER, 1, None, 5],
    [None, 2, MPI.INT],
    [None, 2],
    np.zeros(3, "M8[s]"),
    np.zeros(3, ">f8"),
    np.zeros((4, 4))[::2, ::2],
    [np.zeros(7, "u1"), MPI.INT],
    [BUFFER, MPI.DATATYPE_NULL],
]


@pytest.mark.parametrize("spec", BAD, ids=lambda spec: str(spec).replace("\n", "")[:30])
def test_wrong_specifications_are_refused_in_mpi4pys_words(
    comm: collectives.Intracomm, spec: Any
) -> None:
    raised = []
    alone = collectives.Intracomm(MPI.COMM_SELF)
    for world in (MPI.COMM_SELF, alone):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - compared below
            world.Bcast(spec)
        raised.append(caught.value)
    alone.Free()
    assert type(raised[0]) is type(raised[1])
    if not isinstance(raised[0], (BufferError, MPI.Exception)):
        assert str(raised[0]) == str(raised[1])


def test_arguments_that_cannot_work_are_refused(comm: collectives.Intracomm) -> None:
    x, y = np.ones(4), np.zeros(4)
    for root in (-1, comm.size):
        for call in (comm.Bcast, comm.Ibcast, comm.Bcast_init, comm.bcast):
            with pytest.raises(MPI.Exception) as caught:
                call(x, root)
            assert caught.value.Get_error_class() == MPI.ERR_ROOT
    with pytest.raises(ValueError, match="mismatch in send count 4 and receive count 3"):
        comm.Allreduce(x, y[:3])
    with pytest.raises(ValueError, match="mismatch in send and receive MPI datatypes"):
        comm.Allreduce(x, [np.zeros(4, "f4"), MPI.FLOAT])
    with pytest.raises(ValueError, match="reach beyond the buffer"):
        comm.Bcast([x, 100])
    with pytest.raises(ValueError, match=f"expecting {comm.size} items"):
        comm.Allgatherv(x, [y, [1] * (comm.size + 1)])
    with pytest.raises(ValueError, match=f"expecting {comm.size} items"):
        comm.alltoall([1] * (comm.size + 1))
    with pytest.raises(ValueError, match="mismatch in what a rank sends itself"):
        comm.Allgather(x, np.zeros(5 * comm.size))
    with pytest.raises(ValueError, match="magic"):
        comm.Allreduce(x, y, algorithm="magic")
    comm.Allreduce(x, y)  # nothing was sent, so the ranks are in step
    assert (y == comm.size).all()


def test_memory_of_a_device_is_refused(comm: collectives.Intracomm) -> None:
    class OnDevice:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

        def __dlpack__(self) -> None:
            raise AssertionError("read from a device")

    with pytest.raises(TypeError, match="in device memory"):
        comm.Bcast(OnDevice())
