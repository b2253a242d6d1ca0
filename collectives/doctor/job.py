"""What a running job shows: its ranks and hosts, threads, versions, and the speed of its links."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import collectives
from collectives.arrays import Array, num_gpus
from collectives.communicator import Communicator
from collectives.doctor.environment import num_cores
from collectives.doctor.findings import Finding, good, slow, wrong
from collectives.errors import CollectiveError
from collectives.schedule import Topology

# Where launchers say how many ranks they started.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_SECONDS = 30.0  # for each wait
_PROBE_SECONDS = 120.0  # for the jobs that find out whether MPI takes addresses of device memory
_SMALL, _LARGE = 8, 2**20  # bytes of the messages that are timed
_SLOW_LATENCY = 50e-6  # seconds; more is unusual between ranks that share memory


def started(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of ranks that a launcher says it has started; None outside of a job."""
    texts = (environment.get(name, "") for name in _SIZES)
    return next((int(text) for text in texts if text.isdecimal()), None)


def job() -> list[Finding] | None:
    """Return what this job shows, on rank 0; None on the other ranks.

    All ranks call it.
    """
    comm = collectives.world()
    comm.timeout = _SECONDS
    findings = list(_alone(comm.size, started()))
    if not findings:
        facts = _gathered(comm, _facts())
        links = list(_links(comm))
        sums = comm.all_reduce(np.full(1000, comm.rank, np.int64))
        if facts is not None:
            findings += [*alike(facts), *placed(comm.topology, [fact["cores"] for fact in facts])]
            findings += [*_threads(), *links]
        if all_have_gpus(comm):
            gpus = _gathered(comm, _gpu(comm))
            findings += [] if gpus is None else used_gpus(comm.topology, gpus)
            findings += _devices(comm)
        if sums[0] != comm.size * (comm.size - 1) // 2:
            findings.append(wrong("An all-reduce has a wrong result."))
    return findings if comm.rank == 0 else None


def _alone(size: int, promised: int | None) -> Iterator[Finding]:
    """Yield whether the launcher started as many ranks as MPI knows."""
    if promised is not None and promised != size:
        yield wrong(
            f"The launcher started {promised} ranks, but MPI has a world of {size}: this is not "
            "the launcher of the MPI library, or they do not use the same PMI. python -m "
            "collectives.doctor names the mpirun of the library; srun needs --mpi=pmix for Open "
            "MPI, and --mpi=pmi2 for MPICH."
        )


def _facts() -> dict[str, Any]:
    """Return what must be alike on all ranks, and the cores of this rank."""
    from mpi4py import MPI  # noqa: PLC0415 - this is under MPI

    return {
        "library": collectives.__version__,
        "MPI library": _mpi_version(MPI.Get_library_version()),
        "NumPy": np.__version__,
        "cores": num_cores(),
    }


def _mpi_version(text: str) -> str:
    """Return the name and the number of an MPI library, which tells more about itself."""
    return " ".join(re.split("[,\\n\\0]", text)[0].split())


def _gathered(comm: Communicator, facts: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the facts of all ranks, on rank 0."""
    text = np.frombuffer(json.dumps(facts).encode(), np.uint8)
    lengths = comm.all_gather(np.array([len(text)]))
    texts = comm.gather(text, counts=lengths.tolist())
    if texts is None:
        return None
    parts = np.split(texts, np.cumsum(lengths)[:-1])
    return [json.loads(part.tobytes()) for part in parts]


def alike(facts: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield whether all ranks run the same versions."""
    for name in ("library", "MPI library", "NumPy"):
        rank_with = {str(fact[name]): rank for rank, fact in reversed(list(enumerate(facts)))}
        if len(rank_with) > 1:
            where = "; ".join(
                f"rank {rank} has {value}" for value, rank in sorted(rank_with.items())
            )
            yield wrong(f"The ranks have different versions of {name}: {where}.")
    yield good(f"{facts[0]['MPI library']} on all ranks.")


def placed(topology: Topology, cores: Sequence[int]) -> Iterator[Finding]:
    """Yield where the ranks are, and whether hosts have more ranks than cores."""
    yield good(f"{topology.size} rank(s) on {topology.num_hosts} host(s): {topology}.")
    crowded = [
        f"{len(ranks)} ranks on {cores[ranks[0]]} core(s)"
        for ranks in topology.hosts
        if len(ranks) > cores[ranks[0]]
    ]
    if crowded:
        yield slow(
            f"{len(crowded)} host(s) have more ranks than cores ({crowded[0]}): ranks wait for a "
            "core, and times are not those of the network."
        )


def _threads() -> Iterator[Finding]:
    from mpi4py import MPI  # noqa: PLC0415 - this is under MPI

    if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        yield good("MPI was started with MPI_THREAD_MULTIPLE.")
    else:
        yield slow(
            "MPI was started without MPI_THREAD_MULTIPLE: progress='thread' is refused, and "
            "asynchronous calls continue only in test and wait."
        )


def all_have_gpus(comm: Communicator) -> bool:
    """Return whether CuPy finds a GPU on every rank."""
    number, _ = num_gpus()
    return bool(comm.all_reduce(np.array([number]), "min")[0])


def _gpu(comm: Communicator) -> dict[str, Any]:
    """Return the GPU that this rank uses from now on."""
    import cupy  # noqa: PLC0415 - there is a GPU

    number = comm.use_gpu()
    properties = cupy.cuda.runtime.getDeviceProperties(number)
    name, uuid = properties["name"].decode(), properties["uuid"].hex()
    return {"number": number, "of": num_gpus()[0], "name": name, "uuid": uuid}


def used_gpus(topology: Topology, gpus: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield which GPU each rank uses, and whether ranks of a host share one."""
    for ranks in topology.hosts:
        said = ", ".join(
            f"rank {rank} GPU {gpus[rank]['number']} of {gpus[rank]['of']} ({gpus[rank]['name']})"
            for rank in ranks
        )
        num_used = len({gpus[rank]["uuid"] for rank in ranks})
        if num_used < len(ranks):
            shared = f"{len(ranks)} ranks share {num_used} GPU(s), and take turns unless MPS runs"
            yield slow(f"With comm.use_gpu, {said}: {shared}.")
        else:
            yield good(f"With comm.use_gpu, {said}.")


def _devices(comm: Communicator) -> list[Finding]:
    """Return which ranks read each other's arrays on GPUs, as rank 0 sees it."""
    import cupy  # noqa: PLC0415 - there is a GPU

    x = cupy.full(1000, comm.rank, np.float32)
    is_right = float(comm.all_reduce(x)[0]) == comm.size * (comm.size - 1) // 2
    if not _on_all_ranks(comm, is_right):
        return [wrong("An all-reduce of arrays on GPUs has a wrong result.")]
    links = comm.explain("all_reduce", x).links
    said = f"Arrays on GPUs, from rank 0: {links or 'there is no other rank'}."
    findings = [slow(said) if "staged" in links else good(said)]
    if comm.topology.num_hosts > 1:
        findings.append(between_hosts(comm, cupy.asarray, cupy.asnumpy))
    return findings


def _on_all_ranks(comm: Communicator, is_right: bool) -> bool:
    """Return whether something is right on all ranks, which decide alike what they do next."""
    return bool(comm.all_reduce(np.array([is_right]), "min")[0])


def between_hosts(
    world: Communicator,
    to_device: Callable[[np.ndarray[Any, Any]], Array],
    to_host: Callable[[Array], np.ndarray[Any, Any]],
) -> Finding:
    """Return whether MPI sends arrays of devices between the hosts of this job.

    That is what device='direct' does.  All ranks of `world` agree by it on the host.  `to_device`
    and `to_host` copy an array.
    """
    from mpi4py import MPI  # noqa: PLC0415 - this is under MPI

    try:
        comm = collectives.wrap(MPI.COMM_WORLD, device="direct", timeout=_PROBE_SECONDS)
    except CollectiveError as error:
        return good(f"Arrays on GPUs are staged between hosts: {error}.")
    wanted, why = comm.size * (comm.size - 1) // 2, ""
    try:
        for size in (_SMALL, _LARGE):
            total = comm.all_reduce(to_device(np.full(size, comm.rank, np.int64)), algorithm="ring")
            why = why if (to_host(total) == wanted).all() else "it has a wrong result"
    except CollectiveError as error:
        why = str(error)
    comm.free()
    if not _on_all_ranks(world, not why):
        why = why or "another rank finds that"
        return wrong(f"With device='direct' an all-reduce of arrays on GPUs fails: {why}.")
    return good("device='direct' works: MPI sends arrays on GPUs between these hosts.")


def _links(comm: Communicator) -> Iterator[Finding]:
    """Yield the links from rank 0 to a rank of its host and to one of another host."""
    mates = comm.topology.mates(0)
    others = [rank for rank in range(comm.size) if rank not in mates]
    for where, peers in (("same host", mates[1:]), ("other host", others)):
        if peers:
            seconds = [_one_way(comm, peers[0], size) for size in (_SMALL, _LARGE)]
            yield link(where, peers[0], *seconds)


def link(where: str, peer: int, latency: float, large: float) -> Finding:
    """Return a sentence about the link from rank 0 to a rank."""
    rate = _LARGE / large / 1e9
    said = f"Rank 0 to rank {peer} ({where}): {latency * 1e6:.1f} us, {rate:.2f} GB/s."
    if where == "same host" and latency > _SLOW_LATENCY:
        return slow(f"{said} Shared memory is not used, or the ranks wait for a core.")
    return good(said)


def _one_way(comm: Communicator, peer: int, num_bytes: int) -> float:
    """Return the median seconds of a message from rank 0 to a rank: half of a round trip."""
    message, times = np.zeros(num_bytes, np.uint8), []
    for _ in range(20):
        start = time.perf_counter()
        if comm.rank == 0:
            comm.send(message, peer)
            comm.recv(message, peer)
        elif comm.rank == peer:
            comm.recv(message, 0)
            comm.send(message, 0)
        times.append((time.perf_counter() - start) / 2)
    return float(np.median(times))
