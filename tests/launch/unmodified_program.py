"""A program that uses mpi4py and does not know this library.  One rank of a job with `--drop-in`.

Its argument says how it ends: `end`, `exit` or `one`.  Lines are found by the comments on them.
"""

import copy
import pickle
import sys
from collections.abc import Callable

import mpi4py
import numpy as np

if sys.argv[1] == "exit":  # it initializes MPI itself
    mpi4py.rc.initialize = False

from mpi4py import MPI
from mpi4py.MPI import COMM_WORLD

if not MPI.Is_initialized():
    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    COMM_WORLD = MPI.COMM_WORLD

x, y = np.arange(300.0), np.empty(300)


def behave_as_the_constant() -> None:
    for copied in (copy.copy, copy.deepcopy, lambda comm: pickle.loads(pickle.dumps(comm))):
        assert copied(MPI.COMM_WORLD) is MPI.COMM_WORLD is COMM_WORLD
    plain = MPI.Intracomm(MPI.COMM_WORLD)
    for copied in (copy.copy, lambda comm: pickle.loads(pickle.dumps(comm))):
        again = copied(plain)
        assert again == plain and again is not plain and type(again) is MPI.Intracomm
    assert MPI.COMM_WORLD.fromhandle(COMM_WORLD.handle) is COMM_WORLD
    for free in (MPI.COMM_WORLD.Free, MPI.COMM_WORLD.Disconnect):
        error = raised(free)
        assert isinstance(error, MPI.Exception) and error.Get_error_class() == MPI.ERR_COMM
    COMM_WORLD.free()
    assert COMM_WORLD.Get_size() == 3
    duplicate = COMM_WORLD.Dup()
    assert isinstance(raised(lambda: pickle.dumps(duplicate)), ValueError)
    duplicate.Free()


def raised(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - it is looked at
        return error
    return None


def call() -> None:
    for _ in range(5):
        COMM_WORLD.Allreduce(x, y)  # allreduce
    assert (y == 3 * x).all()
    half = COMM_WORLD.Split(0 if COMM_WORLD.rank < 2 else MPI.UNDEFINED)
    if half:
        half.Allgather(x[:7], y[:14])  # allgather of two
        assert half.bcast({"word": 1} if half.rank == 0 else None) == {"word": 1}  # bcast of two
        half.Free()
    ring = COMM_WORLD.Create_cart([3], [True])
    assert isinstance(MPI.Cartcomm(ring), MPI.Cartcomm) and ring.Shift(0, 1)[1] in range(3)
    ring.Iallgather(x[:5], y[:15]).Wait()  # iallgather
    again = ring.Allreduce_init(x, y, MPI.MAX)
    for _ in range(2):
        again.Start()  # start
        again.Wait()
    again.Free()
    ring.Free()


behave_as_the_constant()
call()
if sys.argv[1] == "exit":
    sys.exit(7)
if sys.argv[1] == "one":
    if COMM_WORLD.rank == 1:
        raise RuntimeError("rank 1 fails")
    COMM_WORLD.Barrier()
COMM_WORLD.Allreduce(x, y, MPI.PROD if COMM_WORLD.rank else MPI.SUM)  # mismatch
MPI.Finalize()
