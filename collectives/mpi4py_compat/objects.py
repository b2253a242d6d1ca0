"""The lower-case collectives, which pickle Python objects as mpi4py does.

A rank that sends such a message can run code in the process that unpickles it: use them only among
ranks that trust each other.  Nothing else in the library unpickles anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.mpi4py_compat.calls import Calls
from collectives.runtime import all_gather_integers, broadcast_integers

Operation = MPI.Op | Callable[[Any, Any], Any]


class ObjectCalls(Calls):
    """The collectives of Python objects, as methods of an MPI communicator.

    The lengths of the pickles are sent first, under "counts" in the ledger.  `algorithm` is the
    algorithm of the call that sends the pickles.  A reduction gathers the objects and combines them
    in the order of the ranks, by an MPI operation or any function of two objects.
    """

    def barrier(self, *, algorithm: str | None = None) -> None:
        """Return when every rank has called it."""
        self.Barrier(algorithm=algorithm)

    def bcast(self, obj: Any, root: int = 0, *, algorithm: str | None = None) -> Any:
        """Return the root's object on all ranks."""
        root, is_root = self._root(root)
        data = _pickled(obj) if is_root else None
        (length,) = self._numbers(root, None if data is None else [data.size], 1)
        whole = np.empty(length, np.uint8)
        self.communicator.broadcast(data, root, out=whole, algorithm=algorithm)
        return _unpickled(whole)

    def gather(
        self, sendobj: Any, root: int = 0, *, algorithm: str | None = None
    ) -> list[Any] | None:
        """Return every rank's object, in the order of the ranks, on the root; None on others."""
        root, is_root = self._root(root)
        data = _pickled(sendobj)
        counts = self._table([data.size])[:, 0].tolist()
        out = np.empty(sum(counts), np.uint8) if is_root else None
        communicator = self.communicator
        communicator.gather(data, root, out=out, counts=counts, algorithm=algorithm)
        return None if out is None else _parts(out, counts)

    def scatter(
        self, sendobj: Sequence[Any] | None, root: int = 0, *, algorithm: str | None = None
    ) -> Any:
        """Return the root's object number `rank` on each rank."""
        root, is_root = self._root(root)
        parts = self._pickled_each(sendobj) if is_root else []
        size = self.communicator.size
        counts = self._numbers(root, [part.size for part in parts] if is_root else None, size)
        data = np.concatenate(parts) if is_root else None
        own = np.empty(counts[self.communicator.rank], np.uint8)
        self.communicator.scatter(data, root, out=own, counts=counts, algorithm=algorithm)
        return _unpickled(own)

    def allgather(self, sendobj: Any, *, algorithm: str | None = None) -> list[Any]:
        """Return every rank's object, in the order of the ranks, on all ranks."""
        data = _pickled(sendobj)
        counts = self._table([data.size])[:, 0].tolist()
        whole = self.communicator.all_gather(data, counts=counts, algorithm=algorithm)
        return _parts(whole, counts)

    def alltoall(self, sendobj: Sequence[Any], *, algorithm: str | None = None) -> list[Any]:
        """Return the objects number `rank` of all ranks, in the order of the ranks."""
        parts = self._pickled_each(sendobj)
        table = self._table([part.size for part in parts])
        data = np.concatenate(parts)
        counts = table.tolist()
        whole = self.communicator.all_to_all(data, counts=counts, algorithm=algorithm)
        return _parts(whole, table[:, self.communicator.rank].tolist())

    def reduce(self, sendobj: Any, op: Operation = MPI.SUM, root: int = 0) -> Any:
        """Return the combination of all ranks' objects on the root; None on the others."""
        items = self.gather(sendobj, root)
        return None if items is None else reduce(op, items)

    def allreduce(self, sendobj: Any, op: Operation = MPI.SUM) -> Any:
        """Return the combination of all ranks' objects on all ranks."""
        return reduce(op, self.allgather(sendobj))

    def scan(self, sendobj: Any, op: Operation = MPI.SUM) -> Any:
        """Return the combination of the objects of all ranks up to and including this one."""
        items = self.gather(sendobj)
        return self.scatter(None if items is None else list(accumulate(items, op)))

    def exscan(self, sendobj: Any, op: Operation = MPI.SUM) -> Any:
        """Return the combination of the objects of all lower ranks; None on rank 0."""
        items = self.gather(sendobj)
        return self.scatter(None if items is None else [None, *accumulate(items[:-1], op)])

    def _pickled_each(self, objects: Sequence[Any] | None) -> list[NDArray[np.uint8]]:
        """Return the pickles of the objects, one for each rank."""
        size = self.communicator.size
        items = [None] * size if objects is None else list(objects)
        if len(items) != size:
            raise ValueError(f"expecting {size} items, got {len(items)}")
        return [_pickled(item) for item in items]

    def _table(self, numbers: Sequence[int]) -> NDArray[np.int64]:
        """Return a few integers of every rank, one row for each, gathered on every rank."""
        return all_gather_integers(self.communicator._session, numbers, "counts")

    def _numbers(self, root: int, numbers: Sequence[int] | None, length: int) -> list[int]:
        """Return the integers of the root, which sends them to every rank."""
        return broadcast_integers(self.communicator._session, numbers, length, root, "counts")


def _pickled(obj: Any) -> NDArray[np.uint8]:
    return np.frombuffer(MPI.pickle.dumps(obj), np.uint8)


def _unpickled(data: NDArray[np.uint8]) -> Any:
    return MPI.pickle.loads(data.data)


def _parts(whole: NDArray[np.uint8], counts: Sequence[int]) -> list[Any]:
    """Return the objects in consecutive pickles."""
    ends = list(accumulate(counts))
    return [_unpickled(whole[end - n : end]) for end, n in zip(ends, counts, strict=True)]
