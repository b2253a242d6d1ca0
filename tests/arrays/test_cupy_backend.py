"""CuPy's devices and streams, as the library uses them; CuPy itself is not needed."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from collectives.arrays.backends import CupyBackend


class Runtime:
    """The state of a new thread: its device is 0, but no context is current."""

    device, has_context = 0, False

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


@pytest.mark.parametrize("number", [0, 1])
def test_a_context_is_current_on_a_stream_in_a_new_thread(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Runtime()
    cuda = SimpleNamespace(Device=lambda device: Device(device, runtime), runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupyx", SimpleNamespace())
    backend = CupyBackend(number)
    with backend.on_stream(nullcontext()):
        assert (runtime.device, runtime.has_context) == (number, True)
    assert runtime.device == 0
