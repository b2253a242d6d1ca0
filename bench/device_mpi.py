"""Try the MPI library's own calls on arrays of a GPU, with which they may crash or hang.

    python -m collectives.launch -n 2 -m bench.device_mpi all_reduce --device cuda

The words are those of `python -m bench`, which runs this in a job of its own before it measures.
One result of the first and of the last case of each collective is compared.  The exit status is 0
if all are right.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter

from mpi4py import MPI

from bench import perf, sizes
from bench.__main__ import parsed
from bench.case import Case, Check, in_place, out_of_place
from bench.cases import every_case
from bench.native import native_lacks, native_on_device


def main(words: Sequence[str] | None = None) -> int:
    """Try all cases of a command line until one fails."""
    options = parsed(sys.argv[1:] if words is None else words)
    comm = perf.communicator(options.timeout)
    for case in extremes(every_case(comm, options, perf.backend(comm, options.device))):
        if native_lacks(case) is None and (number := num_wrong(case)):
            size = sizes.text(case.num_bytes)
            print(f"{number} elements of {case.collective} of {size} are wrong", file=sys.stderr)
            return 1
    return 0


def extremes(cases: Iterable[Case]) -> Iterator[Case]:
    """The first and the last case of each collective."""
    for _, group in groupby(cases, attrgetter("collective")):
        first, *others = group
        yield from [first, *others[-1:]]


def num_wrong(case: Case) -> int:
    """Wrong elements of all ranks, in both forms."""
    check, wrong = Check(case), 0
    for buffers in filter(None, (out_of_place(case), in_place(case))):
        made = native_on_device(case, buffers)
        check.prepare(buffers)
        made.run()
        wrong += check.num_wrong(made.result)
    return int(MPI.COMM_WORLD.allreduce(wrong))


if __name__ == "__main__":
    sys.exit(main())
