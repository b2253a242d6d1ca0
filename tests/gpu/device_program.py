"""Calls of ranks that are processes, whose GPUs read each other's memory.

Arguments: a place of `places.py`, and names of functions below, which run one after the other.  All
raise an error for what is wrong.  `test_devices.py` starts it on a GPU, and
`tests/fakes/test_gpu_programs.py` on the fake one, so that the programs themselves are known to be
right.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np
import pytest

import collectives
from bench.workloads.expected import expected
from collectives import Communicator, algorithms
from collectives.arrays.operators import operators
from tests.devices.staged_pairs import stage_pairs
from tests.fakes.held_stream import hold, released
from tests.gpu.places import PLACES, Place
from tests.inside import links_of
from tests.scenarios import on_devices as scenarios
from tests.scenarios.jobs import (
    COMPLEX,
    FLOATS,
    INTEGERS,
    OPS,
    REDUCTIONS,
    Job,
    all_jobs,
    call,
    dtype,
    same,
)

Program = Callable[[Place, Communicator], None]
PROGRAMS: dict[str, Program] = {}
ALONE: dict[str, Program] = {}  # those that may end their job
NUMBERS = [name for name in (*INTEGERS, *FLOATS, *COMPLEX) if not name.endswith("longdouble")]
# Not their products of complex numbers: on the host, NumPy fuses a product with the sum where its
# processor can; kernels round each product.
COMPARED = ["float16", "bfloat16", "float32", "complex64"]
NUM_AT_ONCE = 5  # calls under way; when there are many more, they are staged
SECONDS = 20  # for a call that may wait for one that is never made


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def check_links(comm: Communicator) -> None:
    """All ranks read each other's memory."""
    links = links_of(comm)
    assert links is not None, "no call was made on a device"
    assert links.staged == frozenset(), links.why


def random_input(job: Job, rank: int, seed: int) -> np.ndarray:
    """What a rank passes: any integers, or normally distributed numbers."""
    rng, kind = np.random.default_rng((seed, rank)), dtype(job.dtype)
    shape = job.num_rows(rank), *job.tail
    if kind.kind in "iu":
        return rng.integers(0, 256, (*shape, kind.itemsize), np.uint8).view(kind).reshape(shape)
    if kind.kind == "b":
        return rng.integers(0, 2, shape).astype(kind)
    x = rng.standard_normal(shape)
    return (x + 1j * rng.standard_normal(shape) if kind.kind == "c" else x).astype(kind)


def same_bits(got: Any, want: Any, what: object) -> None:
    """Equal in shape, dtype and every bit."""
    assert (got is None) == (want is None), f"{what}: got {got!r}, wanted {want!r}"
    if want is not None:
        assert got.dtype == want.dtype and got.shape == want.shape, what
        assert got.tobytes() == want.tobytes(), f"{what}: got {got}, wanted {want}"


def random_job(place: Place, comm: Communicator, job: Job, seed: int) -> None:
    """One call on random data that comes late, beside the same call on the host."""
    inputs = [random_input(job, rank, seed) for rank in range(job.size)]
    mine = inputs[comm.rank]
    want = call(comm, replace(job, is_async=False), mine.copy())
    if job.collective not in REDUCTIONS:
        oracle = expected(job.collective, inputs, root=job.root, counts=job.counts())
        same_bits(want, oracle[comm.rank], f"{job} on the host")
    x, known = place.late(mine), [mine]

    def to_host(array: Any) -> Any:
        """What is late is known without waiting for it."""
        return known.pop() if known and array is x else place.on_host(array)

    got = call(comm, job, x, to_host)
    assert got is None or type(got) is type(x), f"{job}: the result is a {type(got)}"
    same_bits(place.on_host(got), want, job)
    if not job.is_in_place and (job.collective != "broadcast" or comm.rank == job.root):
        same_bits(place.on_host(x), mine, f"the input of {job}")


@program
def every_algorithm(place: Place, comm: Communicator) -> None:
    """On random data of all dtypes, each call on one of several streams, after slow work."""
    streams = [place.new_stream() for _ in range(3)]
    for number, job in list(enumerate(all_jobs(comm.size)))[:: place.stride]:
        kinds = NUMBERS if job.collective in REDUCTIONS else ["bool", *NUMBERS]
        with place.on_stream(streams[number % 3]):
            random_job(place, comm, replace(job, dtype=kinds[number % len(kinds)]), number)


@program
def exact_results(place: Place, comm: Communicator) -> None:
    """Every sixth call of all, compared with what is computed without the library."""
    for job in all_jobs(comm.size)[1 :: 6 * place.stride]:
        scenarios.perform_on_device(comm, job, place.on_device, place.on_host)


def compared_jobs(size: int) -> Iterator[Job]:
    """Each reduction in each dtype by each algorithm, with the operators in turn."""
    number = 0
    for collective in REDUCTIONS:
        for name in algorithms.names(collective):
            if algorithms.info(collective, name).serves(size):
                for kind in COMPARED:
                    ops = [op for op in operators(collective) if kind in OPS[op]]
                    ops = [op for op in ops if (kind, op) != ("complex64", "prod")]
                    yield Job(collective, name, size, 203, kind, ops[number // 4 % len(ops)])
                    number += 1


@program
def bits_of_the_host(place: Place, comm: Communicator) -> None:
    """Every combination is rounded as the host rounds it."""
    for number, job in list(enumerate(compared_jobs(comm.size)))[:: place.stride]:
        x = random_input(job, comm.rank, number)
        want = call(comm, job, x)
        same_bits(place.on_host(call(comm, job, place.on_device(x), place.on_host)), want, job)


@program
def streams_at_once(place: Place, comm: Communicator) -> None:
    """Calls under way on several streams, finished in different orders on different ranks."""
    streams = [place.new_stream() for _ in range(3)]
    for turn in range(8):
        works = []
        for k in range(NUM_AT_ONCE):
            with place.on_stream(streams[(k + comm.rank) % 3]):
                x = place.late(np.full(1001, float(k + turn)))
                works.append((k, comm.all_reduce(x, async_op=True)))
        for k, work in works if comm.rank % 2 else works[::-1]:
            same(place.on_host(work.wait()), np.full(1001, float(comm.size * (k + turn))), k)


@program
def in_the_order_of_streams(place: Place, comm: Communicator) -> None:
    """Calls on three streams in every order; inputs are overwritten before the device is done."""
    streams = [place.new_stream() for _ in range(3)]
    for turn, order in enumerate(permutations(range(3))):
        results = []
        for k, name in zip(order, ("ring", "one_shot", "two_shot"), strict=True):
            with place.on_stream(streams[k]):
                x = place.late(np.full(1001, float(k + turn)))
                results.append((k, comm.all_reduce(x, algorithm=name)))
                x.fill(-1.0)
        comm.synchronize(timeout=SECONDS)
        for k, y in results:
            same(place.on_host(y), np.full(1001, float(comm.size * (k + turn))), (turn, k))


@program
def memory_that_cannot_be_opened(place: Place, comm: Communicator) -> None:
    """On one rank, or on all: it is copied into memory that can be opened."""
    for who in ({0}, set(range(comm.size))):
        with place.not_exportable() if comm.rank in who else nullcontext():
            for name in ("ring", "one_shot", "two_shot"):
                x = place.late(np.arange(301.0))
                same(place.on_host(comm.all_reduce(x, algorithm=name)), _sums(comm, 301), name)
                same(place.on_host(x), np.arange(301.0), f"the input of {name}")
                comm.all_reduce(x, out=x, algorithm=name)
                same(place.on_host(x), _sums(comm, 301), f"{name} in place")
            plan = comm.plan.all_gather(place.on_device(np.full(3, float(comm.rank))))
            for _ in range(3):
                same(place.on_host(plan.run()), np.repeat(np.arange(float(comm.size)), 3), "plan")
            plan.free()


def _sums(comm: Communicator, length: int) -> np.ndarray:
    return comm.size * np.arange(float(length))


@program
def memory_that_is_freed(place: Place, comm: Communicator) -> None:
    """New memory, at addresses where peers have had other memory open."""
    for turn in range(30):
        x = place.on_device(np.full((1 << 19) + turn, float(turn)))
        comm.all_reduce(x, out=x, algorithm=("one_shot", "ring")[turn % 2])
        assert place.on_host(x)[-1] == comm.size * turn
        del x
        place.free_unused()


@program
def communicators_and_plans(place: Place, comm: Communicator) -> None:
    """Several of both, with calls under way that ranks finish in different orders."""
    for _ in range(3):
        scenarios.mixed_program(comm, place.on_device, place.on_host)
        scenarios.plan_reads_afresh(comm, place.on_device, place.on_host)
        other = comm.split(comm.rank % 2)
        assert place.on_host(other.all_reduce(place.on_device(np.ones(3))))[0] == other.size
        other.free()
    groups = [comm.split(0) for _ in range(3)]
    works = [c.all_reduce(place.late(np.ones(2)), async_op=True) for c in groups * 3]
    for work in works if comm.rank % 2 else works[::-1]:
        assert place.on_host(work.wait())[0] == comm.size
    arrays = [place.on_device(np.full(6, float(k))) for k in range(4)]
    plans = [c.plan.all_reduce(x) for c, x in zip((*groups, comm), arrays, strict=True)]
    for _ in range(3):
        for plan in plans if comm.rank % 2 else plans[::-1]:
            plan.start()
        for k, plan in enumerate(plans):
            assert place.on_host(plan.wait())[0] == comm.size * k
    for made in (*plans, *groups):
        made.free()


@program
def views_at_odd_offsets(place: Place, comm: Communicator) -> None:
    """Arrays that begin at no multiple of 16 bytes, each rank's at another one."""
    for kind in ("uint8", "float16", "float32", "complex64"):
        for offset in (1, 2, 3):
            for name in ("ring", "one_shot", "two_shot", "recursive_doubling"):
                job = Job("all_reduce", name, comm.size, 997, kind)
                _on_views(place, comm, job, offset + comm.rank, 997)
            for collective, rows in _blocks(comm.size).items():
                job = Job(collective, None, comm.size, rows, kind)
                _on_views(place, comm, job, offset + comm.rank, _length_out(job))


def _blocks(size: int) -> dict[str, Any]:
    return {"reduce_scatter": 13 * size, "all_gather": (13,) * size, "all_to_all": 13 * size}


def _length_out(job: Job) -> int:
    lengths = {"reduce_scatter": 13, "all_gather": 13 * job.size, "all_to_all": 13 * job.size}
    return lengths[job.collective]


def _on_views(place: Place, comm: Communicator, job: Job, offset: int, length: int) -> None:
    """A call whose input and output are views into larger arrays, which stay as they are."""
    mine, want = job.inputs()[comm.rank], expected(job.collective, job.inputs())[comm.rank]
    whole = place.on_device(np.pad(mine, (offset, 7), constant_values=9))
    result = place.on_device(np.full(length + offset + 9, 9, mine.dtype))
    x, y = whole[offset : offset + len(mine)], result[offset + 2 : offset + 2 + length]
    getattr(comm, job.collective)(x, out=y, algorithm=job.algorithm)
    written = np.array(place.on_host(result))
    same(written[offset + 2 :][:length], want, f"{job} at {offset}")
    around = np.delete(written, slice(offset + 2, offset + 2 + length))
    assert np.all(around == mine.dtype.type(9)), f"{job} at {offset} wrote beside its result"


@program
def in_place(place: Place, comm: Communicator) -> None:
    """Input and output in the same memory, by every algorithm."""
    for collective, run in IN_PLACE.items():
        for name in algorithms.names(collective):
            if algorithms.info(collective, name).serves(comm.size):
                for block in (5, 1001):
                    run(place, comm, block, partial(getattr(comm, collective), algorithm=name))


def _reduced(place: Place, comm: Communicator, block: int, run: Callable[..., Any]) -> None:
    x = place.late(np.arange(float(block)) + comm.rank)
    run(x, out=x)
    want = comm.size * np.arange(float(block)) + sum(range(comm.size))
    same(place.on_host(x), want, run)


def _scattered_sum(place: Place, comm: Communicator, block: int, run: Callable[..., Any]) -> None:
    x = place.late(np.arange(float(block * comm.size)))
    mine = slice(block * comm.rank, block * (comm.rank + 1))
    run(x, out=x[mine])
    same(place.on_host(x[mine]), comm.size * np.arange(float(block * comm.size))[mine], run)


def _gathered(place: Place, comm: Communicator, block: int, run: Callable[..., Any]) -> None:
    mine = slice(block * comm.rank, block * (comm.rank + 1))
    contents = np.full(block * comm.size, -1.0)
    contents[mine] = np.arange(float(block * comm.size))[mine]
    x = place.late(contents)
    run(x[mine], out=x)
    same(place.on_host(x), np.arange(float(block * comm.size)), run)


def _exchanged(place: Place, comm: Communicator, block: int, run: Callable[..., Any]) -> None:
    inputs = [np.arange(float(block * comm.size)) + 7000 * r for r in range(comm.size)]
    x = place.late(inputs[comm.rank])
    run(x, out=x)
    same(place.on_host(x), expected("all_to_all", inputs)[comm.rank], run)


def _broadcast(place: Place, comm: Communicator, block: int, run: Callable[..., Any]) -> None:
    x = place.late(np.arange(float(block)) * (comm.rank == 0))
    run(x, out=x)
    same(place.on_host(x), np.arange(float(block)), run)


IN_PLACE: dict[str, Callable[..., None]] = {
    "all_reduce": _reduced,
    "reduce_scatter": _scattered_sum,
    "all_gather": _gathered,
    "all_to_all": _exchanged,
    "broadcast": _broadcast,
}


@program
def large_arrays(place: Place, comm: Communicator) -> None:
    """Of a length that no number of ranks divides, by every algorithm of an all-reduce."""
    x = np.random.default_rng(0).integers(0, 1000, place.large, np.int32)
    mine = place.on_device(x * (comm.rank + 1))
    for name in algorithms.names("all_reduce"):
        if algorithms.info("all_reduce", name).serves(comm.size):
            y = place.on_host(comm.all_reduce(mine, algorithm=name))
            same(y, x * sum(range(1, comm.size + 1)), name)


@program
def calls_in_a_thread(place: Place, world: Communicator) -> None:
    """A communicator whose calls a thread continues."""
    from mpi4py import MPI

    world.all_reduce(place.on_device(np.ones(4)))
    comm = collectives.wrap(MPI.COMM_WORLD, progress="thread")
    arrays = [place.late(np.full(4, float(k))) for k in range(NUM_AT_ONCE)]
    works = [comm.all_reduce(x, async_op=True) for x in arrays]
    for k, work in enumerate(works):
        assert place.on_host(work.wait())[0] == comm.size * k
    check_links(comm)
    comm.free()


@program
def checked_calls(place: Place, world: Communicator) -> None:
    """A communicator that compares calls before they are made."""
    from mpi4py import MPI

    x = place.on_device(np.ones(4))
    world.all_reduce(x)
    comm = collectives.wrap(MPI.COMM_WORLD, check=True)
    with pytest.raises(collectives.CollectiveMismatch, match="all_gather"):
        comm.all_gather(x) if comm.rank == 0 else comm.all_reduce(x)
    assert place.on_host(comm.all_reduce(x))[0] == comm.size
    check_links(comm)
    comm.free()


def captured_stream(place: Place, comm: Communicator) -> None:
    """The stream of one rank is captured: all ranks refuse the call, and go on after that."""
    x, y = place.on_device(np.ones(301)), place.on_device(np.zeros(301))
    comm.all_reduce(x, out=y)
    check_links(comm)
    stream = place.new_stream()
    with place.on_stream(stream):
        if comm.rank == 1:
            place.capture(stream)
        with pytest.raises(collectives.CollectiveError, match="rank 1: the stream is being capt"):
            comm.all_reduce(x, out=y, timeout=SECONDS)
        if comm.rank == 1:
            place.end_capture(stream)
        comm.all_reduce(x, out=y)
    same(place.on_host(y), np.full(301, float(comm.size)), "after the capture")


ALONE["captured_stream"] = captured_stream


def held_stream(place: Place, world: Communicator) -> None:
    """A rank's stream stands still before a call: the others give up, and all know that."""
    from mpi4py import MPI

    for name in ("ring", "one_shot", "two_shot"):
        comm = collectives.wrap(MPI.COMM_WORLD)
        comm.all_reduce(place.on_device(np.ones(301)), algorithm=name)
        comm.synchronize(timeout=SECONDS)
        check_links(comm)
        x = place.on_device(np.ones(301))
        with released(links_of(comm).driver) as word, place.on_stream(place.new_stream()):
            if comm.rank == 1:
                hold(place.current_stream(), word, links_of(comm).driver)
            comm.all_reduce(x, algorithm=name)  # returns on all ranks
            world.barrier()
            with pytest.raises(collectives.CollectiveTimeout, match=r"waits for rank . at row"):
                comm.synchronize(timeout=0.3)
            with pytest.raises(collectives.CollectiveError, match="unusable"):
                comm.all_reduce(x)
        world.barrier()
        comm.free()
        y = world.all_reduce(place.on_device(np.ones(301)), algorithm=name)
        same(place.on_host(y), np.full(301, float(comm.size)), name)
        world.synchronize(timeout=SECONDS)


ALONE["held_stream"] = held_stream


def staged_after_all(place: Place, comm: Communicator) -> None:
    """With device="staged", no rank looks for links."""
    from mpi4py import MPI

    staged = collectives.wrap(MPI.COMM_WORLD, device="staged")
    for job in all_jobs(staged.size)[::5]:
        scenarios.perform_on_device(staged, job, place.on_device, place.on_host)
    assert links_of(staged) is None and place.bytes_staged
    staged.free()


ALONE["staged_after_all"] = staged_after_all


def direct_between_all_ranks(place: Place, comm: Communicator) -> None:
    """MPI sends from, and receives into, memory of GPUs; as if no rank could read another's."""
    from mpi4py import MPI

    before = place.bytes_staged
    with pytest.MonkeyPatch.context() as patch:
        stage_pairs(patch)
        direct = collectives.wrap(MPI.COMM_WORLD, device="direct", timeout=100)
        for job in all_jobs(direct.size)[:: 3 * place.stride]:
            scenarios.perform_on_device(direct, job, place.on_device, place.on_host)
        for number in (3, place.large):
            y = direct.all_reduce(place.late(np.ones(number)), algorithm="ring")
            same(place.on_host(y), np.full(number, float(direct.size)), number)
        with direct.record() as ledger:
            direct.all_reduce(place.on_device(np.ones(3)))
        assert {row.link for row in ledger.rows()} == {"direct"}
        direct.synchronize(timeout=SECONDS)
    assert place.bytes_staged == before
    direct.free()


ALONE["direct_between_all_ranks"] = direct_between_all_ranks


def main(kind: str, *names: str) -> None:
    """Run programs, and say so after each."""
    comm = collectives.world()
    place = PLACES[kind](comm)
    for name in names:
        (PROGRAMS | ALONE)[name](place, comm)
        place.check()
        if name in PROGRAMS:
            check_links(comm)
            assert not place.are_kernels or links_of(comm).why_no_kernels == ""
            assert not place.bytes_staged, f"{name}: messages were staged"
        print(f"{name} is right on rank {comm.rank}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
