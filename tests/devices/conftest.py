"""The fake GPU as it is at first, and words for which its streams can wait."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.fakes.device import BACKEND
from tests.fakes.driver import gpu
from tests.fakes.held_stream import released


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
