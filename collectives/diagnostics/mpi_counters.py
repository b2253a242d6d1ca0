"""The message counters of Open MPI, an independent check of the ledger.

The ledger contains what the library believes it sent.  Open MPI's monitoring component counts the
messages that MPI received from this process.  The counters are read by ctypes through MPI's tool
interface (MPI_T), for which mpi4py has no bindings.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

MPIRUN_ARGS = ("--mca", "pml_monitoring_enable", "2")
"""Options for mpirun.  2: MPI's own messages (with negative tags) are counted separately."""

_SONAMES = ("libmpi.so.40", "libmpi.40.dylib")
_MPI_THREAD_MULTIPLE = 3
_MPI_T_PVAR_CLASS_SIZE = 2  # Open MPI's number for it


class MonitorUnavailable(RuntimeError):  # noqa: N818
    """MPI has no such counters, or they are not enabled; the message says which."""


class Counters:
    """The messages and payload bytes that this process has sent since the counters were opened.

    They are counted by destination rank in COMM_WORLD, including this rank.  A message counts when
    it is posted, as one message of any size.  MPI's own messages, for example in a barrier or when
    it makes a communicator, do not count.  Of MPI's collectives only the all-to-alls count, and so
    do mpi4py's reductions of Python objects, which mpi4py makes of point-to-point messages.

    Open MPI does NOT count persistent requests, because Start and Startall bypass the layer that
    counts.
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
            # Open MPI counts from MPI_Init on, even if a handle is started later.
            self._before = self._totals()
            self._undo = undo.pop_all()

    def read(self) -> tuple[list[int], list[int]]:
        """Return the numbers of messages and of bytes, each with one entry per destination."""
        messages, sizes = (
            [now - then for now, then in zip(total, before, strict=True)]
            for total, before in zip(self._totals(), self._before, strict=True)
        )
        return messages, sizes

    def close(self) -> None:
        """Free the handles.  Nothing can be read after that; closing twice has no effect."""
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
        # MPI_T_pvar_stop is not called, because it would stop the counters for other readers too.
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
                "Open MPI is not counting messages; version 5 or newer does if it is started with "
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
    """Return the Open MPI that this process has loaded; another one would have counted nothing."""
    for name in _SONAMES:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    raise MonitorUnavailable(
        "only Open MPI has message counters, and this process uses another MPI"
    )


def _require_world(mpi: ctypes.CDLL, comm_handle_address: int) -> None:
    """Raise ValueError unless the handle is COMM_WORLD's; Open MPI would fail or crash."""
    world = ctypes.c_char.in_dll(mpi, "ompi_mpi_comm_world")
    if comm_handle_address != ctypes.addressof(world):
        raise ValueError("only COMM_WORLD has counters: pass MPI._handleof(MPI.COMM_WORLD)")
