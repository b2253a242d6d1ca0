"""CuPy's devices and streams, as the library uses them; CuPy itself is not needed."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from collectives.arrays.backends import CupyBackend


class Runtime:
    """The state of a new thread: its device is 0, but no context is current."""

    device, has_context = 0, False
    CUDARuntimeError = RuntimeError

    def __init__(self) -> None:
        self.codes: dict[int, int] = {}  # of events

    def eventQuery(self, event: int) -> int:  # noqa: N802 - it raises nothing
        return self.codes.get(event, 0)

    def setDevice(self, device: int) -> None:  # noqa: N802 - as in CUDA
        self.device, self.has_context = device, True


class Device:
    """As in CuPy: to enter it sets the device only if another one is set."""

    def __init__(self, number: int, runtime: Runtime) -> None:
        self.id, self._runtime = number, runtime

    def __enter__(self) -> Device:
        self._before = self._runtime.device
        if self._before != self.id:
            self._runtime.setDevice(self.id)
        return self

    def __exit__(self, *_: Any) -> None:
        self._runtime.setDevice(self._before)


def backend_of(
    monkeypatch: pytest.MonkeyPatch, runtime: Runtime, number: int = 0, **more: Any
) -> CupyBackend:
    """The backend of a GPU, with a CuPy of which only a few functions exist."""
    cuda = SimpleNamespace(Device=lambda device: Device(device, runtime), runtime=runtime, **more)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupyx", SimpleNamespace())
    return CupyBackend(number)


def test_an_event_is_complete_or_not_or_the_device_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CuPy's own `Event.done` is False for ever after an error."""
    runtime, stream, event = Runtime(), Mock(), Mock(ptr=7)
    stream.is_capturing.return_value = False
    more = {"get_current_stream": lambda: stream, "Event": Mock(return_value=event)}
    mark = backend_of(monkeypatch, runtime, **more).record()
    event.record.assert_called_once_with(stream)
    assert mark.is_complete
    runtime.codes[7] = 600
    assert not mark.is_complete
    runtime.codes[7] = 719
    with pytest.raises(RuntimeError, match="719"):
        assert mark.is_complete
    mark.join()
    stream.wait_event.assert_called_once_with(event)


def test_nothing_is_recorded_on_a_stream_that_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Mock()
    backend = backend_of(monkeypatch, Runtime(), get_current_stream=lambda: stream)
    with pytest.raises(RuntimeError, match="captured"):
        backend.record()


@pytest.mark.parametrize("number", [0, 1])
def test_a_context_is_current_on_a_stream_in_a_new_thread(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Runtime()
    backend = backend_of(monkeypatch, runtime, number)
    with backend.on_stream(nullcontext()):
        assert (runtime.device, runtime.has_context) == (number, True)
    assert runtime.device == 0
