"""The collectives with mpi4py's arguments.

What MPI lets a rank know is enough.  In the v-variants with a root, a rank that is not the root
knows only its own count, and in an all-to-all only its own row and column.  Their default
algorithms are those in which a rank needs no more.  With another algorithm, the ranks first
exchange their counts, which the ledger shows under "counts"; a non-blocking call waits for that
exchange too.  They also do so in checked mode, which compares the counts, and for a reduce-scatter
without counts.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from collectives.communicator import Communicator, SentReceived
from collectives.mpi4py_compat.buffers import (
    Message,
    is_in_place,
    one_block,
    one_block_per_rank,
    one_type_per_rank,
)
from collectives.mpi4py_compat.memory import PackedMessage, packed, sizes
from collectives.mpi4py_compat.ops import operator_for
from collectives.mpi4py_compat.prepared import (
    Prepared,
    check_alike,
    check_sizes,
    check_total,
    check_types,
    packed_or_none,
    prepare_move,
    prepare_reduction,
    prepare_with_operator,
    receive_place,
)
from collectives.mpi4py_compat.requests import Operation
from collectives.mpi4py_compat.variants import call_variants
from collectives.runtime import all_gather_integers
from collectives.selection import LOCAL_DEFAULTS, is_local


class Calls:
    """The collectives with buffers, as methods of an MPI communicator.

    Attributes
    ----------
    pending_operations : set of Operation
        The operations that were started here and are not complete.
    """

    pending_operations: set[Operation]

    @property
    def communicator(self) -> Communicator:
        """The library's own communicator of the same ranks."""
        raise NotImplementedError

    # Preparations.  As in mpi4py, the receiving side is read first, so its errors come first.

    def _barrier(self, *, algorithm: str | None = None) -> Prepared:
        """Return when every rank has called it."""
        return Prepared("barrier", {"algorithm": algorithm})

    def _bcast(self, buf: Any, root: int = 0, *, algorithm: str | None = None) -> Prepared:
        """Send the root's message to all ranks."""
        root, is_root = self._root(root)
        data = packed(one_block(buf, is_sent=is_root))
        sent, received = (data, receive_place(data)) if is_root else (None, data)
        return prepare_move("broadcast", sent, received, root=root, algorithm=algorithm)

    def _gather(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, algorithm: str | None = None
    ) -> Prepared:
        """Send a block of every rank to the root."""
        root, is_root = self._root(root)
        received = None
        if is_root:
            size = self.communicator.size
            received = one_block(recvbuf, is_sent=False, num_blocks=size).repeated(size)
        sent = self._own_part(sendbuf, received)
        return prepare_move(
            "gather", sent, packed_or_none(received), root=root, algorithm=algorithm
        )

    def _gatherv(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, algorithm: str | None = None
    ) -> Prepared:
        """Send a block of every rank, each of its own length, to the root."""
        root, is_root = self._root(root)
        received = None
        if is_root:
            received = one_block_per_rank(recvbuf, self.communicator.size, is_sent=False)
        sent, target = self._own_part(sendbuf, received), packed_or_none(received)
        counts, algorithm = self._rooted("gather", sent, target, algorithm)
        return prepare_move("gather", sent, target, root=root, counts=counts, algorithm=algorithm)

    def _scatter(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, algorithm: str | None = None
    ) -> Prepared:
        """Send a block of the root to every rank."""
        root, is_root = self._root(root)
        sent = None
        if is_root:
            size = self.communicator.size
            sent = one_block(sendbuf, is_sent=True, num_blocks=size).repeated(size)
        received = self._own_result(sent, recvbuf)
        return prepare_move(
            "scatter", packed_or_none(sent), received, root=root, algorithm=algorithm
        )

    def _scatterv(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, algorithm: str | None = None
    ) -> Prepared:
        """Send a block of the root, each of its own length, to every rank."""
        root, is_root = self._root(root)
        sent = None
        if is_root:
            sent = one_block_per_rank(sendbuf, self.communicator.size, is_sent=True)
        received, source = self._own_result(sent, recvbuf), packed_or_none(sent)
        counts, algorithm = self._rooted("scatter", received, source, algorithm)
        return prepare_move(
            "scatter", source, received, root=root, counts=counts, algorithm=algorithm
        )

    def _allgather(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> Prepared:
        """Send a block of every rank to all ranks."""
        size = self.communicator.size
        received = one_block(recvbuf, is_sent=False, num_blocks=size).repeated(size)
        sent = self._own_part(sendbuf, received)
        return prepare_move("all_gather", sent, packed(received), algorithm=algorithm)

    def _allgatherv(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> Prepared:
        """Send a block of every rank, each of its own length, to all ranks."""
        received = one_block_per_rank(recvbuf, self.communicator.size, is_sent=False)
        sent, target = self._own_part(sendbuf, received), packed(received)
        return prepare_move("all_gather", sent, target, counts=target.sizes, algorithm=algorithm)

    def _alltoall(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> Prepared:
        """Send a block of every rank to every rank."""
        size = self.communicator.size
        received = one_block(recvbuf, is_sent=False, num_blocks=size).repeated(size)
        sent = received
        if not is_in_place(sendbuf):
            sent = one_block(sendbuf, is_sent=True, num_blocks=size).repeated(size)
        source, target = packed(sent), packed(received)
        check_sizes(source.array.size, target.array.size)
        return prepare_move("all_to_all", source, target, algorithm=algorithm)

    def _alltoallv(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> Prepared:
        """Send a block of every rank to every rank, each of its own length."""
        return self._exchanged(one_block_per_rank, sendbuf, recvbuf, algorithm)

    def _alltoallw(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> Prepared:
        """Send a block of every rank to every rank, each of its own length and datatype."""
        return self._exchanged(one_type_per_rank, sendbuf, recvbuf, algorithm)

    def _reduce(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        root: int = 0,
        *,
        algorithm: str | None = None,
    ) -> Prepared:
        """Combine the elements of all ranks on the root."""
        root, is_root = self._root(root)
        if is_root:
            return prepare_reduction("reduce", sendbuf, recvbuf, op, root=root, algorithm=algorithm)
        sent = one_block(sendbuf, is_sent=True)
        return prepare_with_operator(
            "reduce", operator_for(op, sent.datatype), sent, None, root=root, algorithm=algorithm
        )

    def _allreduce(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, algorithm: str | None = None
    ) -> Prepared:
        """Combine the elements of all ranks on all ranks."""
        return prepare_reduction("all_reduce", sendbuf, recvbuf, op, algorithm=algorithm)

    def _reduce_scatter_block(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, algorithm: str | None = None
    ) -> Prepared:
        """Combine the elements of all ranks, and divide the result evenly among them."""
        size = self.communicator.size
        if is_in_place(sendbuf):
            received = one_block(recvbuf, is_sent=False, num_blocks=size)
            sent = received
        else:
            received = one_block(recvbuf, is_sent=False)
            sent = one_block(sendbuf, is_sent=True, num_blocks=size)
            check_alike(sent, received)
        chosen = operator_for(op, sent.datatype)
        return prepare_with_operator(
            "reduce_scatter", chosen, sent.repeated(size), received, algorithm=algorithm
        )

    def _reduce_scatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Any = None,
        op: MPI.Op = MPI.SUM,
        *,
        algorithm: str | None = None,
    ) -> Prepared:
        """Combine the elements of all ranks, and divide the result among them by counts."""
        received = one_block(recvbuf, is_sent=False)
        in_place = is_in_place(sendbuf)
        sent = received if in_place else one_block(sendbuf, is_sent=True)
        counts = self._result_counts(received.num_elements, recvcounts, in_place)
        own = counts[self.communicator.rank]
        if in_place:
            check_total(f"receive count {received.num_elements}", received.num_elements, counts)
            received = received.resized(own)
        else:
            check_types(sent, received)
            check_total(f"send count {sent.num_elements}", sent.num_elements, counts)
            if received.num_elements != own:
                raise ValueError(
                    f"mismatch in receive count {received.num_elements} "
                    f"and counts[{self.communicator.rank}] {own}"
                )
        chosen = operator_for(op, sent.datatype)
        return prepare_with_operator(
            "reduce_scatter", chosen, sent, received, counts=counts, algorithm=algorithm
        )

    def _scan(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, algorithm: str | None = None
    ) -> Prepared:
        """Combine the elements of all ranks up to and including this one."""
        return prepare_reduction("scan", sendbuf, recvbuf, op, algorithm=algorithm)

    def _exscan(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, algorithm: str | None = None
    ) -> Prepared:
        """Combine the elements of all lower ranks; rank 0 gets no result."""
        call = prepare_reduction("exscan", sendbuf, recvbuf, op, algorithm=algorithm)
        return call if self.communicator.rank else call._replace(store=())

    Barrier, Ibarrier, Barrier_init = call_variants("Barrier", _barrier)
    Bcast, Ibcast, Bcast_init = call_variants("Bcast", _bcast)
    Gather, Igather, Gather_init = call_variants("Gather", _gather)
    Gatherv, Igatherv, Gatherv_init = call_variants("Gatherv", _gatherv)
    Scatter, Iscatter, Scatter_init = call_variants("Scatter", _scatter)
    Scatterv, Iscatterv, Scatterv_init = call_variants("Scatterv", _scatterv)
    Allgather, Iallgather, Allgather_init = call_variants("Allgather", _allgather)
    Allgatherv, Iallgatherv, Allgatherv_init = call_variants("Allgatherv", _allgatherv)
    Alltoall, Ialltoall, Alltoall_init = call_variants("Alltoall", _alltoall)
    Alltoallv, Ialltoallv, Alltoallv_init = call_variants("Alltoallv", _alltoallv)
    Alltoallw, Ialltoallw, Alltoallw_init = call_variants("Alltoallw", _alltoallw)
    Reduce, Ireduce, Reduce_init = call_variants("Reduce", _reduce)
    Allreduce, Iallreduce, Allreduce_init = call_variants("Allreduce", _allreduce)
    Reduce_scatter_block, Ireduce_scatter_block, Reduce_scatter_block_init = call_variants(
        "Reduce_scatter_block", _reduce_scatter_block
    )
    Reduce_scatter, Ireduce_scatter, Reduce_scatter_init = call_variants(
        "Reduce_scatter", _reduce_scatter
    )
    Scan, Iscan, Scan_init = call_variants("Scan", _scan)
    Exscan, Iexscan, Exscan_init = call_variants("Exscan", _exscan)

    def _root(self, root: Any) -> tuple[int, bool]:
        """Return the root, and whether this rank is the root.

        Raises MPI.Exception if the root is not a rank.
        """
        communicator = self.communicator
        number = int(root) if isinstance(root, float) else operator.index(root)  # as mpi4py does
        if not 0 <= number < communicator.size:
            assert isinstance(self, MPI.Comm)
            self.Call_errhandler(MPI.ERR_ROOT)
            raise MPI.Exception(MPI.ERR_ROOT)
        return number, number == communicator.rank

    def _own_part(self, sendbuf: Any, received: Message | None) -> PackedMessage:
        """Return this rank's input.

        With `received`, the input has the size of this rank's part of it, or is that part.
        """
        if received is None:
            return packed(one_block(sendbuf, is_sent=True))
        own = received.only(self.communicator.rank)
        if is_in_place(sendbuf):
            return packed(own)
        sent = packed(one_block(sendbuf, is_sent=True))
        check_sizes(sent.array.size, sum(sizes(own)))
        return sent

    def _own_result(self, sent: Message | None, recvbuf: Any) -> PackedMessage:
        """Return the buffer in which this rank receives.

        With `sent`, the buffer has the size of this rank's part of it, or is that part.
        """
        if sent is None:
            return packed(one_block(recvbuf, is_sent=False))
        own = sent.only(self.communicator.rank)
        if is_in_place(recvbuf):
            place = packed(own)
            return receive_place(place)._replace(release=place.release)
        received = packed(one_block(recvbuf, is_sent=False))
        check_sizes(sum(sizes(own)), received.array.size)
        return received

    def _rooted(
        self,
        collective: str,
        own: PackedMessage,
        whole: PackedMessage | None,
        algorithm: str | None,
    ) -> tuple[list[int], str]:
        """Return the counts and the algorithm of a v-variant.

        The root has the parts of all ranks in `whole`; it is None on the other ranks.
        """
        size = self.communicator.size
        chosen = algorithm or LOCAL_DEFAULTS[collective]
        if self.communicator.check or not is_local(collective, chosen):
            table = all_gather_integers(self.communicator._session, [own.array.size], "counts")
            return table[:, 0].tolist(), chosen
        counts = [0] * size
        counts[self.communicator.rank] = own.array.size
        return counts if whole is None else whole.sizes, chosen

    def _exchanged(
        self, read: Callable[..., Message], sendbuf: Any, recvbuf: Any, algorithm: str | None
    ) -> Prepared:
        """Prepare an all-to-all of unequal blocks, of which `read` reads the specifications."""
        size, rank = self.communicator.size, self.communicator.rank
        received = read(recvbuf, size, is_sent=False)
        in_place = is_in_place(sendbuf)
        sent = received if in_place else read(sendbuf, size, is_sent=True)
        source, target = packed(sent), packed(received)
        check_sizes(source.sizes[rank], target.sizes[rank])
        chosen = algorithm or LOCAL_DEFAULTS["all_to_all"]
        counts: Any = source.sizes
        if is_local("all_to_all", chosen):
            counts = SentReceived(source.sizes, target.sizes)
        return prepare_move("all_to_all", source, target, counts=counts, algorithm=chosen)

    def _result_counts(self, own: int, counts: Any, in_place: bool) -> list[int]:
        """Return the number of elements that each rank gets in a reduce-scatter."""
        communicator = self.communicator
        if counts is None and not in_place:
            table = all_gather_integers(communicator._session, [own], "counts")
            return [int(number) for number in table[:, 0]]
        if len(counts) != communicator.size:
            raise ValueError(f"expecting {communicator.size} items, got {len(counts)}")
        return [operator.index(number) for number in counts]
