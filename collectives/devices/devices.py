"""What a communicator needs for calls on devices: its links, and the executions that use them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal
from weakref import ReferenceType, ref

import numpy as np

from collectives.arrays import Backend, Operator, jit
from collectives.devices.call import DeviceCall
from collectives.devices.direct import DirectMemory
from collectives.devices.driver import DriverError, Kernels
from collectives.devices.drivers import driver_of
from collectives.devices.execution import OnDevice, not_staged
from collectives.devices.kept import Kept
from collectives.devices.links import Links
from collectives.devices.messages import Mail, Route
from collectives.devices.order import Order, Turns
from collectives.devices.watch import Watch
from collectives.diagnostics import COMPLETE, CallLog
from collectives.engines import Enqueued, Operands, Transport
from collectives.errors import CollectiveError
from collectives.programs import OwnCounts

DeviceMode = Literal["auto", "peer", "direct", "staged"]
DEVICE_MODES: tuple[DeviceMode, ...] = ("auto", "peer", "direct", "staged")


class Devices:
    """The calls of one rank of a communicator on devices.

    Attributes
    ----------
    mode : {"auto", "peer", "direct", "staged"}
        With "auto", ranks of one host read each other's memory where they can.  With "peer" a call
        that cannot do so is refused.  "direct" is as "auto", but MPI sends all other messages from
        memory of devices.  With "staged" all messages go through host memory.
    turns : Turns
        The turns of the calls.
    """

    _order: Order | None = None  # of the calls
    _watch: Watch | None = None
    _failure: CollectiveError | None = None  # before the communicator was freed

    def __init__(
        self,
        transport: Transport,
        mode: DeviceMode,
        when_failed: Callable[[CollectiveError], object],
        limit: Callable[[], float | None],
    ) -> None:
        self._transport, self.mode = transport, mode
        if mode == "direct":
            transport.message_memory = DirectMemory
        self._when_failed, self._limit = when_failed, limit
        self._links: Links | None = None
        self._lock = threading.RLock()  # threads may send at the same time
        self._kept, self.turns = Kept(), Turns()
        self.mail = Mail(transport.board)
        self._logs = [transport.log]
        self._inherited: list[int] = []
        self._used: Backend | None = None  # by those from which that was inherited

    def execution(
        self, operands: Operands, tag: int, call: DeviceCall, number: int
    ) -> OnDevice | None:
        """Return the execution of a call on devices; None if this rank stages its messages alone.

        `number` is that of the call or plan.  Raises CollectiveError if it would and `mode` is
        "peer".
        """
        board, backend = self._transport.board, operands.backend
        is_strict = self.mode == "peer" and self._transport.size > 1
        with backend.on_stream(backend.current_stream()):  # the device is the current one
            why = self._why_all_stage(operands, call)
            if why and is_strict:
                raise board.on_this_host(not_staged(why))
            try:
                why = why or self._why_this_rank_stages(operands, call)
                if not why:
                    return self._on_device(operands, tag, call)
            except (LookupError, DriverError) as error:
                why = str(error)
                if call.plan:
                    board.forget_plan(call.plan)
            if is_strict:
                board.note_host_call(number)  # or the others would wait for this rank
                raise not_staged(why)
            return None

    def _on_device(self, operands: Operands, tag: int, call: DeviceCall) -> OnDevice:
        links = self._links
        assert links is not None
        why = ""
        if links.backend is not operands.backend:
            why = f"the array is on {operands.backend.name}, the links are for {links.backend.name}"
        with links.backend.on_stream(links.backend.current_stream()):
            watch = self._watched()
            self._open_mail(links)
            order, turns = self._order_of(call, links, watch)
            return OnDevice(
                *(self._transport, links, self._kept, call, operands, tag),
                *(order, turns, watch, why),
                is_strict=self.mode == "peer",
            )

    def _watched(self) -> Watch:
        """Return the watch of this communicator."""
        with self._lock:
            if self._watch is None:
                self._watch = Watch(self._transport, self._when_failed, self._limit)
                for log in self._logs:
                    log.device_state = partial(_state_of, ref(self._watch))
            return self._watch

    def add_log(self, log: CallLog) -> None:
        """Let another log show the state of what is left to a device."""
        self._logs.append(log)
        if self._watch is not None:
            log.device_state = partial(_state_of, ref(self._watch))

    def _order_of(self, call: DeviceCall, links: Links, watch: Watch) -> tuple[Order, Turns]:
        """Return the order of a call among calls, or of a plan, and its turns.

        Ranks may start plans in any order.
        """
        if call.plan:
            return watch.new_order(links), Turns()
        self._order = self._order or watch.new_order(links)
        return self._order, self.turns

    # Messages

    def inherit(self, parent: Devices, members: Sequence[int]) -> None:
        """Take over which ranks are neighbours from a communicator of which this is a part."""
        self._inherited = [rank for rank, of in enumerate(members) if parent.is_neighbour(of)]
        self._used = parent._used if parent._links is None else parent._links.backend

    def is_neighbour(self, rank: int) -> bool:
        """Return whether this rank and another one are known to read each other's memory."""
        if self._links is not None and self._links.staged is not None:
            return rank != self._transport.rank and self._links.is_peer(rank)
        return rank in self._inherited

    def connect(self, backend: Backend) -> None:
        """Let messages on arrays of a backend go from device to device, where that is known."""
        with self._lock:  # or another thread sees the links before there is a route
            if self._links is None and self._inherited and self._used is backend:
                on_stream = backend.on_stream(backend.current_stream())
                with on_stream, suppress(LookupError, DriverError):
                    self._open_mail(self._links_for(backend))
        if self.mail.route is not None:
            self._open_mail(self.mail.route.links)

    def _open_mail(self, links: Links) -> None:
        """Let ranks hand messages over to this one, before they know that they can.

        Not so if they rely on what is known of another GPU.
        """
        with self._lock:
            if self.mail.route is None:
                self.mail.route = Route(links, self._watched(), self.is_neighbour)
        if links.staged is not None or self._used in (None, links.backend):
            self.mail.take_envelopes()

    # The end of what is enqueued

    def synchronize(self, limit: float | None) -> None:
        """Wait until the device has done all that is enqueued, and raise what went wrong.

        `limit` is the seconds that a run may take on the device; None for its own limit.
        """
        if self._watch is not None:
            self._watch.synchronize(limit)

    def give_up(self) -> bool:
        """Let the device end after a failure; return whether it has ended."""
        return self._watch is None or self._watch.give_up()

    def has_done(self, enqueued: Enqueued) -> bool:
        """Return whether the device has come to an event.

        Raises the failure after which the event is void.
        """
        is_done, watch = enqueued.is_complete, self._watch
        if watch is not None and (is_done or watch.failure is not None):
            watch.check()
        self._raise_past_failure()
        return is_done

    def _raise_past_failure(self) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def wait_for(self, enqueued: Enqueued, deadline: float | None) -> bool:
        """Wait until the device has come to an event; return False if the deadline comes first."""
        self._raise_past_failure()
        if self._watch is None:
            return True
        return self._watch.wait_until(lambda: enqueued.is_complete, deadline=deadline)

    def free_plan(self, number: int) -> None:
        """Note that the plan of this number was freed."""
        self._transport.board.forget_plan(number)
        self._kept.free_plan(number)

    def _why_all_stage(self, operands: Operands, call: DeviceCall) -> str:
        """Return why all ranks of this host stage the messages of a call by themselves, or ""."""
        if why := self._why_always_staged():
            return why
        if isinstance(call.spec.counts, OwnCounts):
            return "no rank knows all counts"
        try:
            function, is_average = operands.function, operands.divisor > 1
            kernels = driver_of(operands.backend).kernels
            return _why_no_kernel(kernels, function, operands.output.dtype, is_average=is_average)
        except LookupError:  # on this rank
            return ""

    def _why_this_rank_stages(self, operands: Operands, call: DeviceCall) -> str:
        """Return why this rank stages the messages of a call, though others may not, or "".

        Raises LookupError or DriverError if it cannot use its device.
        """
        board = self._transport.board
        if why := self._links_for(operands.backend).why_lost:
            return why
        if board.area is None:
            return board.why_no_area
        if call.plan and not board.note_plan(call.plan):
            return "too many plans use a device"
        return ""

    def _why_always_staged(self) -> str:
        """Return why the ranks of this host stage all calls; "" if they do not."""
        board = self._transport.board
        if self.mode == "staged":
            return "device='staged' was asked for"
        if len(board.local_ranks) == 1:
            return "no other rank is on this host"
        return board.why_no_device or jit.why_unavailable() or ""

    def why_staged(self, backend: Backend, op: Operator | None, dtype: np.dtype[Any]) -> str:
        """Return why a call on arrays of a backend would be staged, or "".

        The answer is what this rank knows.
        """
        if why := self._why_always_staged() or self._transport.board.why_no_area:
            return why
        if op is None:
            return ""
        try:
            with backend.on_stream(backend.current_stream()):  # the device is the current one
                kernels = driver_of(backend).kernels
                return _why_no_kernel(kernels, op.function, dtype, is_average=op.is_average)
        except (LookupError, DriverError) as error:
            return str(error)

    def explain(self, backend: Backend, why_staged: str) -> str:
        """Return how this rank and others send each other arrays of a backend; "" on the host."""
        links, board = self._links, self._transport.board
        if backend.is_host:
            return ""
        is_direct = self._transport.message_memory(backend).link == "direct"
        if why_staged:
            way = "sent by MPI from device memory" if is_direct else "staged in host memory"
            return f"all {way}: {why_staged}"
        if links is None or links.staged is None:
            return "not known before the first call on devices"
        others = [rank for rank in range(self._transport.size) if rank != board.rank]
        peers = [str(rank) for rank in others if links.is_peer(rank)]
        texts = [f"memory of rank {', '.join(peers)} is read directly"] if peers else []
        way = "sent device memory by MPI" if is_direct else "staged"
        texts += [
            f"rank {rank} is {way}: {links.why.get(rank) or 'it is on another host'}"
            for rank in others
            if str(rank) not in peers
        ]
        pairs = sum(board.rank not in pair for pair in links.staged)
        if not links.staged and links.can_try_kernels and links.why_no_kernels is not None:
            why = links.why_no_kernels
            texts.append(f"calls are not kernels: {why}" if why else "a kernel runs a whole call")
        if pairs:
            texts.append(f"{pairs} pair(s) of other ranks are {way}")
        if links.why_last_staged:
            what = "of which MPI carried all messages" if is_direct else "that was staged"
            texts.append(f"the last call {what}: {links.why_last_staged}")
        return "; ".join(texts)

    def _links_for(self, backend: Backend) -> Links:
        with self._lock:
            if self._links is None:
                board, link = self._transport.board, self._transport.message_memory(backend).link
                self._links = Links(board, backend, driver_of(backend), link)
            return self._links

    def free(self) -> None:
        """Close the memory of peers."""
        self._kept.free()
        for log in self._logs:
            log.note_device_state()
        self._failure = None if self._watch is None else self._watch.failure
        self._order = self._watch = None
        if (links := self._links) is not None:
            with links.backend.on_stream(links.backend.current_stream()):
                self.mail.free()
                links.free(has_failed=self._failure is not None)
            self._links = None


def _state_of(reference: ReferenceType[Watch]) -> int:
    """Return the state of what was left to a device; complete if its communicator was freed."""
    watch = reference()
    return COMPLETE if watch is None else watch.state


def _why_no_kernel(
    kernels: Kernels, function: Any, dtype: np.dtype[Any], *, is_average: bool
) -> str:
    """Return why no kernel combines or divides; "" if there is one where one is needed."""
    if function is None:
        return ""
    if not isinstance(function, str):
        return "its operator is a function in Python"
    if kernels.combine(function, dtype) is None:
        return f"no kernel combines {dtype}"
    if is_average and kernels.divide(dtype) is None and dtype.kind in "fcV":
        return f"no kernel divides {dtype}"
    return ""
