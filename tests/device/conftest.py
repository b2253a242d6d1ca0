"""Resets the fake GPU for tests, and says how many device programs the tests have proved."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.device.held_stream import released
from tests.fake_device import BACKEND
from tests.fake_driver import gpu

PROVED = "device_programs_proved"


@pytest.fixture
def new_gpu() -> Iterator[None]:
    """The fake GPU as it is at first; afterwards nothing was done that CUDA forbids."""
    BACKEND.reset()
    gpu().reset()
    yield
    try:
        gpu().check()
    finally:
        gpu().reset()  # or what a failure has left would be waited for when Python ends


@pytest.fixture
def word() -> Iterator[np.ndarray]:
    """A word for which streams can wait; see `hold`."""
    with released() as word:
        yield word


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.stats.get("passed", [])
    properties = [pair for report in reports for pair in report.user_properties]
    number = sum(value for name, value in properties if name == PROVED)
    if number:
        terminalreporter.write_line(f"device programs proved: {number:,}")
