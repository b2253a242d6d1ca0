"""A receive from any rank, which first looks for a message that has arrived."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import DistBackendError, Work

import collectives
from collectives.arrays import jit
from collectives.engines import deadline_in, poll_until
from collectives.torch.devices import memory_of
from collectives.torch.tensors import Tensor, check_filled
from collectives.torch.versions import untraced
from collectives.torch.work import NO_LIMIT, InProgress, Result, fail, seconds, unwrapped

_received = threading.local()


def source_of_last() -> int:
    """Return the rank that sent the message from any rank that this thread has waited for last."""
    source: int | None = getattr(_received, "source", None)
    if source is None:
        raise RuntimeError("this thread has waited for no message from any rank")
    return source


@untraced
class ReceiveFromAny(Work):  # type: ignore[misc]
    """A receive from any rank, which makes progress while it is waited for or looked at."""

    def __init__(
        self, communicator: collectives.Communicator, tensors: list[Tensor], tag: int
    ) -> None:
        super().__init__()
        check_filled(tensors)
        self._communicator, self._tensors, self._tag = communicator, tensors, tag
        self.memory = memory_of(tensors[0])
        self._source: int | None = None
        self._received: InProgress | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        limit = seconds(timeout) or self._communicator.timeout
        if not poll_until(self._try, deadline_in(limit)):
            raise DistBackendError(
                f"rank {self._communicator.rank} has waited {limit} s for a message with tag "
                f"{self._tag} from any rank"
            )
        _received.source = self._source
        assert self._received is not None, "it has come"
        return self._received.wait()

    def _try(self) -> bool:
        """Receive the message if it has arrived; return whether it is here."""
        with self._lock:
            if self._source is None:
                source = self._communicator.probe(self._tag)
                if source is not None:
                    self._received = self._receive(source)
                    self._source = source
            return self._source is not None

    def _receive(self, source: int) -> InProgress:
        """Receive the message of a rank, on a device in the order of streams."""
        with self.memory.in_order():
            target = self.memory.filled(self._tensors)
            try:
                # Asynchronous, because it may be a message of the rank to itself.
                call = self._communicator.recv(target.array, source, self._tag, async_op=True)
            except collectives.CollectiveError as error:
                fail(error)
        received = InProgress(self.memory, call, self._tensors, target.finish)
        received.wait()
        return received

    def is_completed(self) -> bool:
        return self._try() and self._received is not None and self._received.is_completed()

    def result(self) -> list[Tensor]:
        self.wait()
        return self._tensors

    def _source_rank(self) -> int:
        """Return the rank that sent the message, which has been waited for."""
        assert self._source is not None
        return self._source

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future; a thread of its own looks for the message until the time limit."""
        outcome: Any = self.memory.new_future()

        def complete() -> None:
            with self.memory.beside():
                try:
                    self.wait()
                except Exception as error:  # noqa: BLE001 - whoever waits for the future raises it
                    outcome.set_result(error)
                else:
                    outcome.set_result(Result(self._tensors, self))

        if jit.is_at_exit():
            complete()
        else:
            threading.Thread(target=complete, name="collectives receive", daemon=True).start()
        return unwrapped(outcome)
