"""mpi4py's other tests, run unchanged in a job whose COMM_WORLD was replaced.  One rank of it:

    python -m collectives.launch -n 3 --drop-in tests/mpi4py_compat/world_program.py \
        path/to/mpi4py/test [--all]

These are all test files but those of the collectives, which `drop_in_program.py` runs, and those of
what the drop-in does not touch: spawned processes, windows, files, sessions, and pools of threads
(a test of these is a race between threads that sleep).  Without `--all` the slowest are left out as
well: they test datatypes, point-to-point messages and neighbourhood collectives with buffers, all
of which are MPI's own.  Every test must do what it does on MPI's own COMM_WORLD, but for those in
`ASK_FOR_MPIS_OWN`, which must fail.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import unittest
from pathlib import Path

import pytest
from mpi4py import MPI

import collectives
from tests.mpi4py_compat.drop_in_program import MODULES, WORDS, cases, outcomes

NOT_TOUCHED = ["spawn", "dynproc", "win", "rma", "rma_nb", "file", "io", "session", "util_pool"]
SLOW = [
    "datatype",
    "util_dtlib",
    "pack",
    "p2p_buf",
    "p2p_buf_part",
    "cco_ngh_buf",
    "cco_pr_ngh_buf",
]
# `MPI.Comm.fromint` makes a communicator of MPI's own class from the handle of one of ours; and
# `MPI._comm_lock_table` is where MPI's own `bcast` leaves a lock.
TOPOLOGIES = ["Cartcomm", "Graphcomm", "Distgraphcomm", "DistgraphcommAdjacent"]
ASK_FOR_MPIS_OWN = {
    f"{case}{kind}.{name}"
    for kind in ("", "Dup")
    for case, names in {
        "test_comm_topo.TestTopoWorld": [f"test{name}" for name in TOPOLOGIES],
        "test_p2p_obj.TestP2PObjWorld": ["testCommLock"],
    }.items()
    for name in names
}


# MPICH 5.0.2 calls Fortran's integers unsupported, and says elsewhere that it has them.
MAY_FAIL = {*ASK_FOR_MPIS_OWN, "test_mpiabi.TestMPIABI.testGetFortranInfo"}


def files(directory: Path, left_out: list[str]) -> list[str]:
    """The names of the test files, without some."""
    return sorted(
        path.stem
        for path in directory.glob("test_*.py")
        if path.stem.removeprefix("test_") not in left_out
    )


def imported(names: list[str]) -> list[type[unittest.TestCase]]:
    """The test cases of these files, which take the present COMM_WORLD."""
    with pytest.MonkeyPatch.context() as patch:  # as mpi4py's main does; we need numba ourselves
        for name in ("cupy", "numba"):
            patch.setitem(sys.modules, name, None)
        return cases(names)


def on_plain_world(tests: set[str], agreement: MPI.Intracomm) -> dict[str, str]:
    """The outcomes of these tests on MPI's own COMM_WORLD."""
    names = sorted({test.partition(".")[0] for test in tests})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MPI, "COMM_WORLD", MPI.Intracomm(MPI.COMM_WORLD))
        for name in names:
            importlib.reload(sys.modules[name])
        return outcomes(imported(names), agreement, only=tests, may_fail=MAY_FAIL)


def kind(outcome: str) -> str:
    """The outcome without its reason, which can depend on how often a file was imported."""
    return outcome.partition(":")[0]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--all", action="store_true", help="run the slow files too")
    parser.add_argument("--verbose", action="store_true", help="say how long each test took")
    chosen = parser.parse_args()
    if not isinstance(MPI.COMM_WORLD, collectives.Intracomm):
        sys.exit("COMM_WORLD was not replaced")
    sys.path.insert(0, str(chosen.directory))
    agreement = MPI.COMM_WORLD.Dup()
    agreement.Barrier()  # loads compiled code, before numba is hidden
    left_out = [*(f"cco_{name}" for name in MODULES), *NOT_TOUCHED, *([] if chosen.all else SLOW)]
    tests = imported(files(chosen.directory, left_out))
    ended = outcomes(tests, agreement, chosen.verbose, may_fail=MAY_FAIL)
    failed = {name for name in ASK_FOR_MPIS_OWN if ended.pop(name, "") == "failed"}
    others = {name for name, outcome in ended.items() if outcome != "passed"}
    plain = on_plain_world(others, agreement) if others else {}
    is_alike = all(kind(ended[name]) == kind(plain.get(name, "")) for name in others)
    ok = is_alike and failed == ASK_FOR_MPIS_OWN
    if agreement.rank == 0:
        counted = [sum(word in outcome for outcome in ended.values()) for word in WORDS]
        print(", ".join(f"{n} {word}" for n, word in zip(counted, WORDS, strict=True)))
        print(
            "as on MPI's own:", *(f"{name}: {ended[name]}" for name in sorted(others)), sep="\n  "
        )
        print("asked for MPI's own:", *sorted(failed), sep="\n  ")
        print("mpi4py's other tests pass" if ok else "mpi4py's other tests FAIL", flush=True)
    agreement.Barrier()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
