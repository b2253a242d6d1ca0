"""Measure collectives on devices: reading each other's memory, staged, and written with MPI.

    python -m collectives.launch -n 2 -m bench.device_table --json FILE

Contenders take turns in random order on the same float32 arrays, and the median of the slowest rank
counts.  `staged` and `auto` are the ways of `collectives.wrap(..., device=)`, both with the
algorithm that the library selects; then the fastest of a few algorithms.  `get, MPI, set` copies to
page-locked memory of the host, calls mpi4py, and copies back; its memory is kept from call to call.
`copy` is a copy within the memory of one device, made by rank 0 alone, of as many bytes as all
ranks together must read and write.  One result of each contender is checked.  `make gpu` starts it.

The exit status is 1 if any element is wrong, 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from rich.console import Console

import collectives
from bench import perf, sizes
from bench.case import (
    CALL,
    JOINS,
    POISON,
    SPLITS,
    Buffers,
    Case,
    in_place,
    out_of_place,
    prepare,
    wanted,
)
from bench.contenders import algorithm_of
from bench.device_results import (
    DEFAULT,
    HEADS,
    STAGED,
    THROUGH_HOST,
    DeviceCase,
    as_dict,
    bytes_to_copy,
    title,
)
from bench.native import native
from bench.oracle import Array
from bench.timing import SMALL, Effort, times
from bench.ways import Contender, nothing
from collectives import Communicator, algorithms
from collectives.arrays.backends import HOST, Backend
from collectives.devices import DeviceMode
from parallel.cli import console_of, print_table, table_with

SIZES = ["1K", "128K", "1M", "16M", "64M"]
TRIED = {
    "all_reduce": ("one_shot", "two_shot", "ring"),
    "reduce_scatter": ("direct", "ring", "recursive_halving"),
    "all_gather": ("direct", "ring", "bruck"),
    "all_to_all": ("linear", "pairwise", "bruck"),
    "broadcast": ("linear", "binomial", "scatter_all_gather"),
}
EFFORT = Effort(warmup=1, samples=7, seconds=0.1, calls=10)
NUM_COPIES = 7  # of which the median counts
LIMIT = 60.0  # seconds of a call


class Ways(NamedTuple):
    """Communicators of all ranks, one for each way of sending."""

    auto: Communicator
    staged: Communicator


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure as told."""
    options = parser().parse_args(arguments)
    console = console_of(MPI.COMM_WORLD.rank)
    with perf.ending_the_job():
        ways = Ways(wrapped("auto"), wrapped("staged"))
        try:
            backend = perf.backend(ways.auto, "cuda")
        except ValueError as error:
            console.print(f"bench: {error}", markup=False)
            return 2
        found = measured(ways, backend, options)
        report(found, console, options.json)
        status = int(any(sum(case.wrong.values()) for case in found.cases))
    ways.auto.barrier()
    return status


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parse = argparse.ArgumentParser("python -m bench.device_table", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    parse.add_argument("--collectives", nargs="+", choices=TRIED, default=list(TRIED))
    usual = [sizes.parse(text) for text in SIZES]
    parse.add_argument("--sizes", nargs="+", type=sizes.parse, default=usual, metavar="BYTES",
        help=f"of whole vectors; default: {' '.join(SIZES)}")  # fmt: skip
    parse.add_argument("--json", type=Path, metavar="FILE", help="write everything to FILE")
    return parse


def wrapped(device: DeviceMode) -> Communicator:
    """A communicator of all ranks that sends in this way."""
    return collectives.wrap(MPI.COMM_WORLD, timeout=LIMIT, device=device)


class Found(NamedTuple):
    """What a job has found."""

    facts: dict[str, Any]
    cases: list[DeviceCase]


def measured(ways: Ways, backend: Backend, options: argparse.Namespace) -> Found:
    """All cases, and what is known of the job."""
    cases = [measure(ways, case) for case in every_case(ways.auto, backend, options)]
    facts = {
        "ranks": ways.auto.size,
        "devices": "one device" if shares_device(ways.auto, backend) else "several devices",
        "mpi": perf.mpi_version(),
        "mps": "CUDA_MPS_PIPE_DIRECTORY" in os.environ,
        "arrays": backend.kind,
        "links": links_of(ways.auto),
    }
    return Found(facts, cases)


def every_case(comm: Communicator, backend: Backend, options: argparse.Namespace) -> Iterator[Case]:
    """The collectives at all sizes, which are rounded up to equal blocks."""
    kind = np.dtype(np.float32)
    for collective in options.collectives:
        num_blocks = comm.size if collective in SPLITS | JOINS else 1
        for size in options.sizes:
            count = sizes.whole_blocks(size, kind.itemsize, num_blocks)
            yield Case(collective, comm.rank, comm.size, count, kind, backend=backend,
                       topology=comm.topology)  # fmt: skip


def measure(ways: Ways, case: Case) -> DeviceCase:
    """Every contender of a case, and the copy."""
    buffers = out_of_place(case) or in_place(case)
    assert buffers is not None
    made = contenders(ways, case, buffers)
    runs, is_small = [each.run for each in made.values()], case.num_bytes < SMALL
    end = case.backend.synchronize
    seconds = times(runs, buffers.x, is_small=is_small, effort=EFFORT, end=end)
    copied = bytes_to_copy(case.collective, case.size, case.num_bytes)
    return DeviceCase(
        case.collective,
        case.num_bytes,
        algorithm_of(case, CALL) or "",
        dict(zip(made, seconds, strict=True)),
        wrong_elements(case, buffers, made),
        copied,
        copy_seconds(case.backend, copied),
    )


def wrong_elements(case: Case, buffers: Buffers, made: Mapping[str, Contender]) -> dict[str, int]:
    """How many elements of one result of each contender are wrong, on all ranks."""
    prepare(case, buffers)
    given, want, found = host_copy(case, buffers.x), wanted(case), dict[str, int]()
    for name, each in made.items():
        if buffers.y is not None:
            buffers.y.fill(POISON)
        if given is not None:
            case.backend.to_device([(buffers.x, HOST.host_buffer(given))])
        each.run()
        got = host_copy(case, each.result)
        number = 0 if got is None else int(np.count_nonzero(got != want))
        found[name] = int(MPI.COMM_WORLD.allreduce(number))
    return found


def host_copy(case: Case, x: Any) -> Array | None:
    """A copy of an array of a device."""
    if x is None:
        return None
    copied = np.empty(x.shape, case.dtype)
    case.backend.to_host([(x, HOST.host_buffer(copied))])
    case.backend.synchronize()
    return copied


def contenders(ways: Ways, case: Case, buffers: Buffers) -> dict[str, Contender]:
    """Everybody by name, in the same order on all ranks."""
    tried = [name for name in TRIED[case.collective] if serves(case, name)]
    return {
        STAGED: call(ways.staged, case, buffers),
        DEFAULT: call(ways.auto, case, buffers),
        **{name: call(ways.auto, case, buffers, algorithm=name) for name in tried},
        THROUGH_HOST: through_host(case, buffers),
    }


def serves(case: Case, name: str) -> bool:
    """Whether an algorithm can run on so many ranks."""
    return algorithms.info(case.collective, name).serves(case.size)


def call(comm: Communicator, case: Case, buffers: Buffers, **more: Any) -> Contender:
    """A call of this library, as a program makes it."""
    method = getattr(comm, case.collective)
    return Contender(partial(method, buffers.x, out=buffers.y, **more), nothing, buffers.y)


def through_host(case: Case, buffers: Buffers) -> Contender:
    """What a program does with an MPI that knows nothing of devices."""
    backend, (x, y, is_in_place) = case.backend, buffers
    source = None if x is None else backend.host_buffer(x)
    is_ready = is_in_place and x is not None  # the root of a broadcast has the result already
    target = source if is_ready else None if y is None else backend.host_buffer(y)
    seen = [None if memory is None else memory.view(case.dtype) for memory in (source, target)]
    send = native(case._replace(backend=HOST), Buffers(seen[0], seen[1], is_in_place))

    def run() -> None:
        if source is not None:
            backend.to_host([(x, source)])
            backend.synchronize()
        send.run()
        if target is not None and not is_ready:
            backend.to_device([(y, target)])
            backend.synchronize()

    return Contender(run, nothing, y)


def copy_seconds(backend: Backend, num_bytes: int) -> float:
    """The median time of a copy on the device of rank 0, while the others wait on the host."""
    world, taken = MPI.COMM_WORLD, [0.0]
    world.Barrier()
    if world.rank == 0:
        x, y = (backend.empty((num_bytes,), np.dtype(np.uint8)) for _ in range(2))
        backend.copy(x, y)
        backend.synchronize()
        taken = [_seconds(backend, x, y) for _ in range(NUM_COPIES)]
    return float(world.bcast(statistics.median(taken)))


def _seconds(backend: Backend, x: Any, y: Any) -> float:
    began = time.perf_counter()
    backend.copy(x, y)
    backend.synchronize()
    return time.perf_counter() - began


def shares_device(comm: Communicator, backend: Backend) -> bool:
    """Whether all ranks use the same device.

    Ranks may use different devices under the same number, so the driver is asked which one it is.
    """
    links = comm._session.devices._links
    return len(set(MPI.COMM_WORLD.allgather(backend.name if links is None else links.uuid))) == 1


def links_of(comm: Communicator) -> str:
    """The word "peer" if all ranks read each other's memory, else why some do not."""
    why = why_staged(comm._session.devices._links)
    return next(filter(None, MPI.COMM_WORLD.allgather(why)), "peer")


def why_staged(links: Any) -> str:
    """Why this rank and another one do not read each other's memory; "" if all do."""
    if links is None or links.staged is None:
        return "no call was made on a device"
    return "; ".join(filter(None, links.why.values())) if links.staged else ""


def report(found: Found, console: Console, path: Path | None) -> None:
    """Print the table, and write everything on rank 0."""
    facts, cases = found
    console.print(f"{facts['mpi']}, {facts['arrays']}, float32, {title(facts)}", markup=False)
    table = table_with("collective", numbers=["size", *HEADS])
    for case in cases:
        table.add_row(*case.cells)
    print_table(table, console)
    wrong = {f"{case.collective}, {name}" for case in cases for name, k in case.wrong.items() if k}
    console.print(f"wrong: {', '.join(sorted(wrong)) or 'nothing'}", markup=False)
    if path is not None and MPI.COMM_WORLD.rank == 0:
        path.write_text(json.dumps(as_dict(facts, cases), indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
