"""Lets ranks that are threads run calls as kernels, as ranks of different processes do."""

from __future__ import annotations

import pytest

from collectives.devices import concurrency, kernel_table, links
from tests.devices.threads_with_counters import use_counters
from tests.fakes.driver import gpu


def run_as_kernels(monkeypatch: pytest.MonkeyPatch, seconds_between: float = 1e-6) -> None:
    """Let calls be kernels, of several blocks also on few bytes.

    `seconds_between`: what signals around all ranks seem to take.
    """
    use_counters(monkeypatch)
    monkeypatch.setattr(links.Links, "can_try_kernels", True)
    monkeypatch.setattr(kernel_table, "BYTES_OF_A_BLOCK", 32)
    monkeypatch.setattr(concurrency, "REASONS", {})
    monkeypatch.setattr(gpu(), "has_interpreter", True)
    monkeypatch.setattr(gpu(), "seconds_between", seconds_between)
