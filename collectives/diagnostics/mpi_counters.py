"""The independent witness: what Open MPI itself counted of this process's messages.

The ledger says what the library believes it sent.  Open MPI's monitoring component counts, below
every line of ours, what was handed to MPI.  It is read here through MPI's tool interface (MPI_T) of
the library that the process has loaded, by ctypes: mpi4py has no binding for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

MPIRUN_ARGS = ("--mca", "pml_monitoring_enable", "2")
"""What mpirun must be given.  2: MPI's own messages (negative tags) are counted apart from ours."""

_SONAMES = ("libmpi.so.40", "libmpi.40.dylib")
_MPI_THREAD_MULTIPLE = 3
_MPI_T_PVAR_CLASS_SIZE = 2  # Open MPI's number for it


class MonitorUnavailable(RuntimeError):  # noqa: N818
    """This MPI keeps no such counters, or they were not switched on; the message says which."""


class Counters:
    """Messages and payload bytes sent by this process since the counters were opened.

    By destination rank in COMM_WORLD, itself included.  A message is counted when it is posted, as
    one message whatever its size.  What MPI sends for itself, in a barrier or to make a
    communicator, is left out; of its collectives only the all-to-alls show up, and so do mpi4py's
    reductions of Python objects, which are point-to-point messages of mpi4py's own.

    Open MPI does NOT count persistent requests: Start and Startall go to the layer beneath the one
    that counts.  Whoever wants a witness has to post Isend and the like anew for every message.
    """

    def __init__(self, comm_handle_address: int, size: int) -> None:
        """Open COMM_WORLD's counters, given ``MPI._handleof(MPI.COMM_WORLD)`` and its size."""
        self._mpi = _loaded_open_mpi()
        _require_world(self._mpi, comm_handle_address)
        self._comm = ctypes.c_void_p(comm_handle_address)
        self._size = size
        self._session = ctypes.c_void_p()
        with contextlib.ExitStack() as undo:
            self._messages, self._bytes = self._open(undo)
            # Open MPI counts from MPI_Init on, whenever a handle is started.
            self._before = self._totals()
            self._undo = undo.pop_all()

    def read(self) -> tuple[list[int], list[int]]:
        """Messages and bytes, one entry per destination."""
        messages, sizes = (
            [now - then for now, then in zip(total, before, strict=True)]
            for total, before in zip(self._totals(), self._before, strict=True)
        )
        return messages, sizes

    def close(self) -> None:
        """Give the handles back.  Reading is over; closing twice is harmless."""
        self._undo.close()

    def _open(self, undo: contextlib.ExitStack) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        self._call("MPI_T_init_thread", _MPI_THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
        undo.callback(self._call, "MPI_T_finalize")
        self._call("MPI_T_pvar_session_create", ctypes.byref(self._session))
        undo.callback(self._call, "MPI_T_pvar_session_free", ctypes.byref(self._session))
        return (
            self._start("pml_monitoring_messages_count", undo),
            self._start("pml_monitoring_messages_size", undo),
        )

    def _start(self, name: str, undo: contextlib.ExitStack) -> ctypes.c_void_p:
        comm, handle = ctypes.byref(self._comm), ctypes.c_void_p()
        index, num_values = self._index(name), ctypes.c_int()
        self._call(
            "MPI_T_pvar_handle_alloc",
            *(self._session, index, comm, ctypes.byref(handle), ctypes.byref(num_values)),
        )
        # Never MPI_T_pvar_stop: it switches the counting off for every other reader as well.
        undo.callback(self._call, "MPI_T_pvar_handle_free", self._session, ctypes.byref(handle))
        if num_values.value != self._size:
            raise ValueError(f"COMM_WORLD has {num_values.value} ranks, not {self._size}")
        self._call("MPI_T_pvar_start", self._session, handle)
        return handle

    def _index(self, name: str) -> ctypes.c_int:
        index = ctypes.c_int()
        kind = _MPI_T_PVAR_CLASS_SIZE
        if self._mpi.MPI_T_pvar_get_index(name.encode(), kind, ctypes.byref(index)):
            raise MonitorUnavailable(
                "Open MPI is not counting messages: it does from version 5 on, when started with "
                "mpirun " + " ".join(MPIRUN_ARGS)
            )
        return index

    def _totals(self) -> tuple[list[int], list[int]]:
        return self._read(self._messages), self._read(self._bytes)

    def _read(self, handle: ctypes.c_void_p) -> list[int]:
        values = (ctypes.c_ulonglong * self._size)()
        self._call("MPI_T_pvar_read", self._session, handle, ctypes.byref(values))
        return list(values)

    def _call(self, function: str, *arguments: object) -> None:
        if status := getattr(self._mpi, function)(*arguments):
            raise MonitorUnavailable(f"{function} of Open MPI failed with error {status}")


def _loaded_open_mpi() -> ctypes.CDLL:
    """The Open MPI this process runs on; a second one, loaded now, would have counted nothing."""
    for name in _SONAMES:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    raise MonitorUnavailable(
        "message counters exist in Open MPI only, and that is not the MPI of this process"
    )


def _require_world(mpi: ctypes.CDLL, comm_handle_address: int) -> None:
    """Open MPI fails on every other communicator, and would crash on what is not one."""
    world = ctypes.c_char.in_dll(mpi, "ompi_mpi_comm_world")
    if comm_handle_address != ctypes.addressof(world):
        raise ValueError("the counters are COMM_WORLD's: pass MPI._handleof(MPI.COMM_WORLD)")
