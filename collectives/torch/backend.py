"""The backend: PyTorch's calls, made with the calls of a communicator."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import collectives
from collectives.arrays import validation
from collectives.engines import deadline_in, poll_until
from collectives.torch import registry, versions
from collectives.torch.any_source import ReceiveFromAny
from collectives.torch.devices import memory_of, wait_for_streams
from collectives.torch.monitored import monitored_barrier
from collectives.torch.operators import Operation, operation
from collectives.torch.options import Options
from collectives.torch.tensors import HOST_MEMORY, Array, Filled, Memory, Tensor
from collectives.torch.work import Batch, InProgress, Joined, Postponed, fail, seconds

_NOTHING = Filled(None)
# The methods of a communicator that take an array and all options.
_METHODS = {name: name for name in collectives.algorithms.collectives()} | {"barrier": "_barrier"}


@versions.for_this_version
class RingBackend(versions.Base):  # type: ignore[misc]
    """One rank's end of a process group.  Its methods have PyTorch's names and arguments.

    Contiguous tensors are sent and filled as they are, in host memory and on a device; others are
    copied there and back.
    """

    # PyTorch 2.14 recurses without end if a class does not define these.
    supports_coalescing = True
    supports_splitting = supports_shrinking = versions.HAS_BACKENDS
    supports_reconfigure = supports_window = False
    supports_time_estimate = _supports_time_estimate = False

    def __init__(self, communicator: collectives.Communicator, settings: Options) -> None:
        super().__init__(communicator.rank, communicator.size)
        self.communicator, self.settings = communicator, settings
        self._calls = {
            name: (getattr(communicator, method), settings.algorithms.get(name))
            for name, method in _METHODS.items()
        }
        self._lock = threading.Lock()  # autograd calls from threads of its own
        self._batch: Batch | None = None  # of a block of several calls

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        (tensor,) = tensors
        op, memory = self._operation(opts, tensor), memory_of(tensor)
        target = memory.in_place(tensor)
        source = target.array
        if op.factor is not None:
            source = memory.sent([op.contribution(tensor)]).reshape(source.shape)
        return self._call("all_reduce", opts, memory, tensors, target, source, op.name)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        (tensor,) = tensors
        op, root, memory = self._operation(opts, tensor), opts.rootRank, memory_of(tensor)
        target = memory.filled(tensors) if self.communicator.rank == root else _NOTHING
        source = memory.sent([op.contribution(tensor)])
        return self._call("reduce", opts, memory, tensors, target, source, op.name, root)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        (output,), (parts,) = outputs, inputs
        return self._reduce_scatter(output, parts, opts, self._counts(parts, output))

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        self._check_parts(tensor, output)
        return self._reduce_scatter(output, [tensor], opts, None)

    def _reduce_scatter(
        self, output: Tensor, parts: list[Tensor], opts: Any, counts: Sequence[int] | None
    ) -> Any:
        op, memory = self._operation(opts, output), memory_of(output)
        target, source = memory.filled([output]), memory.sent([*map(op.contribution, parts)])
        return self._call(
            "reduce_scatter", opts, memory, [output], target, source, op.name, counts=counts
        )

    def _operation(self, opts: Any, tensor: Tensor) -> Operation:
        return operation(opts.reduceOp, tensor.dtype, self.communicator.size)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        (tensor,) = tensors
        memory, root = memory_of(tensor), opts.rootRank
        target = memory.in_place(tensor)
        source = target.array if self.communicator.rank == root else None
        return self._call("broadcast", opts, memory, tensors, target, source, root)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        (output,), root, source = outputs, opts.rootRank, None
        memory = memory_of(output)
        if self.communicator.rank == root:
            (parts,) = inputs
            self._check_equal(parts, output)
            source = memory.sent(parts)
        return self._call("scatter", opts, memory, outputs, memory.filled(outputs), source, root)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        (tensor,), root = inputs, opts.rootRank
        memory, parts, target = memory_of(tensor), list[Tensor](), _NOTHING
        if self.communicator.rank == root:
            (parts,) = outputs
            self._check_equal(parts, tensor)
            target = memory.filled(parts)
        return self._call("gather", opts, memory, parts, target, memory.sent(inputs), root)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        (parts,), (tensor,) = outputs, inputs
        return self._all_gather(parts, tensor, opts, self._counts(parts, tensor))

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        self._check_parts(output, tensor)
        return self._all_gather([output], tensor, opts, None)

    def _all_gather(
        self, parts: list[Tensor], tensor: Tensor, opts: Any, counts: Sequence[int] | None
    ) -> Any:
        memory = memory_of(tensor)
        target, source = memory.filled(parts), memory.sent([tensor])
        return self._call("all_gather", opts, memory, parts, target, source, counts=counts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Any:
        self._check_length(inputs)
        self._check_length(outputs)
        sizes = [[tensor.numel() for tensor in side] for side in (inputs, outputs)]
        return self._all_to_all(outputs, inputs, opts, *sizes)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any,
    ) -> Any:
        num_sent = self._split(tensor, input_splits)
        num_received = self._split(output, output_splits)
        return self._all_to_all([output], [tensor], opts, num_sent, num_received)

    def _all_to_all(
        self,
        outputs: list[Tensor],
        inputs: list[Tensor],
        opts: Any,
        num_sent: list[int],
        num_received: list[int],
    ) -> Any:
        """Make an all-to-all of so many elements to each rank and from each rank.

        The ranks do not exchange these numbers.
        """
        counts, memory = collectives.SentReceived(num_sent, num_received), memory_of(outputs[0])
        target, source = memory.filled(outputs), memory.sent(inputs)
        return self._call("all_to_all", opts, memory, outputs, target, source, counts=counts)

    def barrier(self, opts: Any) -> Any:
        """Make a barrier of the hosts, each of which first waits for what its device has to do."""
        try:
            self.communicator._session.devices.synchronize(seconds(opts.timeout))
        except collectives.CollectiveError as error:
            fail(error)
        wait_for_streams()
        return self._call("barrier", opts, HOST_MEMORY, [], _NOTHING, None)

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; the error on rank 0 always names all ranks that are late."""
        limit = seconds(opts.timeout)
        monitored_barrier(self.communicator, self.communicator.timeout if limit is None else limit)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> Any:
        return Joined([self.allreduce([tensor], opts) for tensor in tensors])

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any
    ) -> Any:
        """Fill `outputs[rank][i]` with the input number i of that rank."""
        self._check_length(outputs)
        if any(len(theirs) != len(inputs) for theirs in outputs):
            raise ValueError(f"each list must have one tensor for each of the {len(inputs)} inputs")
        parts = zip(*outputs, strict=True)
        pairs = zip(parts, inputs, strict=True)
        return Joined([self.allgather([list(theirs)], [mine], opts) for theirs, mine in pairs])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        opts = opts or versions.AllgatherOptions()  # which PyTorch 2.11 does not pass
        pairs = zip(outputs, inputs, strict=True)
        return Joined([self.all_gather_single(whole, part, opts) for whole, part in pairs])

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> Any:
        pairs = zip(outputs, inputs, strict=True)
        return Joined([self.reduce_scatter_single(part, whole, opts) for part, whole in pairs])

    def start_coalescing(self, _: object = None) -> None:
        self._batch = Batch()

    def end_coalescing(self, _: object = None) -> Any:
        batch, self._batch = self._batch or Batch(), None
        batch.start()
        return Joined(batch.works)

    def cancel_coalescing(self) -> None:
        """End a block that has raised; messages that it has not started are never sent."""
        self._batch = None

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        self._check_ends(peer, tag)
        memory = memory_of(tensors[0])
        array, send = memory.sent(tensors), self.communicator.send
        return self._message(send, memory, array, peer, tag, tensors, _NOTHING)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        self._check_ends(peer, tag)
        memory = memory_of(tensors[0])
        target, receive = memory.filled(tensors), self.communicator.recv
        return self._message(receive, memory, target.array, peer, tag, tensors, target)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        return self._collected(ReceiveFromAny(self.communicator, tensors, tag))

    def _message(
        self,
        call: Any,
        memory: Memory,
        array: Array,
        peer: int,
        tag: int,
        tensors: list[Tensor],
        target: Filled,
    ) -> Any:
        """Start a message; in a block of several calls, when the block ends, if none is refused."""

        def start() -> InProgress:
            try:
                with memory.in_order():
                    work = call(array, peer, tag, async_op=True)
            except collectives.CollectiveError as error:
                fail(error)
            return InProgress(memory, work, tensors, target.finish, self.communicator.timeout)

        if self._batch is None:
            return start()
        return self._collected(Postponed(memory, start, self._batch))

    def _call(
        self,
        name: str,
        opts: Any,
        memory: Memory,
        result: list[Tensor],
        target: Filled,
        *args: Any,
        **named: Any,
    ) -> Any:
        """Make a call of the communicator: wait for it, or return its work if it is asynchronous.

        Its arrays are in `memory`.  It fills the tensors `result` by way of `target`.
        """
        is_async, timeout = opts.asyncOp, seconds(opts.timeout)
        call, algorithm = self._calls[name]
        if self._batch is not None:
            self._batch.start()  # other ranks may wait for its messages before they make this call
        try:
            with self._lock, memory.in_order():
                work = call(
                    *args,
                    out=target.array,
                    algorithm=algorithm,
                    async_op=is_async,
                    timeout=timeout,
                    **named,
                )
        except collectives.CollectiveError as error:
            fail(error)
        if is_async:
            limit = self.communicator.timeout if timeout is None else timeout
            return self._collected(InProgress(memory, work, result, target.finish, limit))
        if target.finish is not None:
            target.finish()
        return None

    def _collected(self, work: Any) -> Any:
        """Return the work; in a block of several calls, `end_coalescing` joins it with others."""
        if self._batch is not None:
            self._batch.works.append(work)
        return work

    def _counts(self, parts: list[Tensor], mine: Tensor) -> Sequence[int] | None:
        """Return the number of elements of each rank; None, which is faster, if they are equal."""
        self._check_length(parts)
        counts = [part.numel() for part in parts]
        if counts[self.communicator.rank] != mine.numel():
            raise ValueError(
                f"rank {self.communicator.rank} has {mine.numel()} elements, and its place in the "
                f"list has {counts[self.communicator.rank]}"
            )
        return None if len(set(counts)) == 1 else counts

    def _check_length(self, parts: Sequence[object]) -> None:
        """Raise ValueError unless a list has one entry for each rank."""
        size = self.communicator.size
        if len(parts) != size:
            raise ValueError(
                f"the list must have one tensor for each of the {size} ranks; it has {len(parts)}"
            )

    def _check_equal(self, parts: list[Tensor], mine: Tensor) -> None:
        """Raise ValueError unless all tensors of a list have the size of this rank's."""
        counts, size = self._counts(parts, mine), self.communicator.size
        if counts is not None:
            raise ValueError(f"the tensors of {size} ranks must be equally large, not {counts}")

    def _check_ends(self, peer: int, tag: int) -> None:
        """Refuse now a message that would be refused when it starts."""
        validation.rank(peer, self.communicator.size, "peer")
        self.communicator._session.numbering.user_tag(tag)

    def _check_parts(self, whole: Tensor, part: Tensor) -> None:
        """Raise ValueError unless a tensor for all ranks is as large as theirs together."""
        size = self.communicator.size
        if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
            raise ValueError(
                f"{part.numel()} {part.dtype} on each of {size} ranks do not fit a tensor of "
                f"{whole.numel()} {whole.dtype}"
            )

    def _split(self, tensor: Tensor, splits: Sequence[int]) -> list[int]:
        """Return the number of elements of each part of a tensor, whose rows are divided.

        Without `splits` they are divided equally.
        """
        size, rows = self.communicator.size, tensor.shape[0] if tensor.dim() else 1
        if not splits:
            if rows % size:
                raise ValueError(f"{rows} rows cannot be divided equally among {size} ranks")
            splits = [rows // size] * size
        if len(splits) != size or sum(splits) != rows:
            raise ValueError(
                f"split sizes {list(splits)} do not divide {rows} rows among {size} ranks"
            )
        per_row = tensor.numel() // rows if rows else 0
        return [split * per_row for split in splits]

    def getBackendName(self) -> str:  # noqa: N802
        return registry.NAME

    def split(self, store: Any, ranks: Sequence[int], opts: Any) -> RingBackend | None:
        """Return the backend of some of the ranks; None on the others."""
        if self.communicator.rank not in ranks:
            return None
        return self._of_opts(ranks, opts)

    def shrink(
        self, ranks_to_exclude: Sequence[int], shrink_flags: int = 0, opts: Any = None
    ) -> RingBackend:
        """Return the backend of the ranks that are not excluded, which call this."""
        excluded = set(ranks_to_exclude)
        return self._of_opts([r for r in range(self.communicator.size) if r not in excluded], opts)

    def _of_opts(self, ranks: Sequence[int], opts: Any) -> RingBackend:
        """Return the backend of some ranks, with PyTorch's options if there are any."""
        if opts is None:
            return self.of_some(ranks, self.communicator.timeout)
        return registry.add(opts.group_name, self.of_some(ranks, seconds(opts._timeout)))

    def of_some(
        self, ranks: Sequence[int], limit: float | None, settings: Options | None = None
    ) -> RingBackend:
        """Return the backend of some ranks, which call this.

        Making it, and each of its calls, takes at most `limit` seconds.  Raises ValueError if
        `settings` has an option of the default group.
        """
        if settings is not None and settings.check is not None:
            raise ValueError("check is an option of the default group, and holds for all groups")
        try:
            with self._lock:
                subgroup = self.communicator.subgroup(ranks, timeout=limit)
        except collectives.CollectiveError as error:
            fail(error)
        subgroup.timeout = limit
        return type(self)(subgroup, settings or self.settings)

    @property
    def options(self) -> Any:
        """PyTorch's own options of a backend, which `split` copies."""
        return versions.options_with(self.getBackendName(), self.communicator.timeout)

    def perform_nocolor_split(self, device: object) -> None:
        """Do nothing: only the members of a group make it."""

    def eager_connect_single_device(self, device: object) -> None:
        """Do nothing: ranks are connected."""

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the calls of all groups are numbered."""

    def _get_sequence_number_for_group(self) -> int:
        return self.communicator._session.numbering.num_calls

    def set_timeout(self, timeout: timedelta) -> None:
        self.communicator.timeout = seconds(timeout)

    def shutdown(self) -> None:
        """Wait for the calls in progress, and free the communicator.

        If a call has reached its time limit or does so here, the communicator stays as it is.
        """
        registry.remove(self)
        session, limit = self.communicator._session, self.communicator.timeout
        if session.has_timed_out:
            return
        calls = session.pending_calls()
        try:
            poll_until(lambda: all(call.test() for call in calls), deadline_in(limit))
            self.communicator.free()
        except RuntimeError as error:  # which would prevent PyTorch from forgetting the group
            reason, *_ = str(error).splitlines()
            warnings.warn(f"a process group has ended during a call: {reason}", stacklevel=2)

    def abort(self) -> None:
        """Leave the communicator as it is, because other ranks may not free it."""
        registry.remove(self)
