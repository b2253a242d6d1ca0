"""The lower-case collectives, which pickle Python objects as mpi4py does.

Whoever can send such a message can run code in the process that unpickles it: use them only among
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

    The lengths of what comes are sent ahead, under "counts" in the ledger.  `algorithm` is that of
    the call which moves the pickles.  A reduction gathers objects and combines them in the order of
    the ranks; what combines two is an MPI operation or any function.
    """

    def barrier(self, *, algorithm: str | None = None) -> None:
        """Return when every rank has called it."""
        self.Barrier(algorithm=algorithm)

    def bcast(self, obj: Any, root: int = 0, *, algorithm: str | None = None) -> Any:
        """The root's object, on all ranks."""
        root, is_root = self._root(root)
        data = _pickled(obj) if is_root else None
        (length,) = self._numbers(root, None if data is None else [data.size], 1)
        whole = np.empty(length, np.uint8)
        self.communicator.broadcast(data, root, out=whole, algorithm=algorithm)
        return _unpickled(whole)

    def gather(
        self, sendobj: Any, root: int = 0, *, algorithm: str | None = None
    ) -> list[Any] | None:
        """Every rank's object, in the order of ranks, on the root; None on the others."""
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
        """To every rank the root's object of its number."""
        root, is_root = self._root(root)
        parts = self._pickled_each(sendobj) if is_root else []
        size = self.communicator.size
        counts = self._numbers(root, [part.size for part in parts] if is_root else None, size)
        data = np.concatenate(parts) if is_root else None
        own = np.empty(counts[self.communicator.rank], np.uint8)
        self.communicator.scatter(data, root, out=own, counts=counts, algorithm=algorithm)
        return _unpickled(own)

    def allgather(self, sendobj: Any, *, algorithm: str | None = None) -> list[Any]:
        """Every rank's object, in the order of ranks, on all."""
        data = _pickled(sendobj)
        counts = self._table([data.size])[:, 0].tolist()
        whole = self.communicator.all_gather(data, counts=counts, algorithm=algorithm)
        return _parts(whole, counts)

    def alltoall(self, sendobj: Sequence[Any], *, algorithm: str | None = None) -> list[Any]:
        """To every rank the object of its number, from all."""
        parts = self._pickled_each(sendobj)
        table = self._table([part.size for part in parts])
        data = np.concatenate(parts)
        counts = table.tolist()
        whole = self.communicator.all_to_all(data, counts=counts, algorithm=algorithm)
        return _parts(whole, table[:, self.communicator.rank].tolist())

    def reduce(self, sendobj: Any, op: Operation = MPI.SUM, root: int = 0) -> Any:
        """The combination of every rank's object, on the root; None on the others."""
        items = self.gather(sendobj, root)
        return None if items is None else reduce(op, items)

    def allreduce(self, sendobj: Any, op: Operation = MPI.SUM) -> Any:
        """The combination of every rank's object, on all."""
        return reduce(op, self.allgather(sendobj))

    def scan(self, sendobj: Any, op: Operation = MPI.SUM) -> Any:
        """The combination of the objects of all ranks up to and including this one."""
        items = self.gather(sendobj)
        return self.scatter(None if items is None else list(accumulate(items, op)))

    def exscan(self, sendobj: Any, op: Operation = MPI.SUM) -> Any:
        """The combination of the objects of all ranks before this one; None on the first."""
        items = self.gather(sendobj)
        return self.scatter(None if items is None else [None, *accumulate(items[:-1], op)])

    def _pickled_each(self, objects: Sequence[Any] | None) -> list[NDArray[np.uint8]]:
        """One pickle for each rank."""
        size = self.communicator.size
        items = [None] * size if objects is None else list(objects)
        if len(items) != size:
            raise ValueError(f"expecting {size} items, got {len(items)}")
        return [_pickled(item) for item in items]

    def _table(self, numbers: Sequence[int]) -> NDArray[np.int64]:
        """A few integers of every rank on every rank, one row each."""
        return all_gather_integers(self.communicator._session, numbers, "counts")

    def _numbers(self, root: int, numbers: Sequence[int] | None, length: int) -> list[int]:
        """The root's integers, on every rank."""
        return broadcast_integers(self.communicator._session, numbers, length, root, "counts")


def _pickled(obj: Any) -> NDArray[np.uint8]:
    return np.frombuffer(MPI.pickle.dumps(obj), np.uint8)


def _unpickled(data: NDArray[np.uint8]) -> Any:
    return MPI.pickle.loads(data.data)


def _parts(whole: NDArray[np.uint8], counts: Sequence[int]) -> list[Any]:
    """The objects in pickles that lie one behind the other."""
    ends = list(accumulate(counts))
    return [_unpickled(whole[end - n : end]) for end, n in zip(ends, counts, strict=True)]
