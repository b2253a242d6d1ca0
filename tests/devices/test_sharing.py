"""Ranks that share a GPU although others are left are told so, once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from collectives.devices import sharing
from collectives.devices.sharing import tell_of_sharing

A, B = bytes(16), bytes(range(16))


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    sharing.warn_once.cache_clear()
    yield
    sharing.warn_once.cache_clear()


def test_ranks_that_leave_gpus_unused_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        tell_of_sharing({0: A, 1: A, 2: B}, 4)
    (said,) = caplog.messages
    assert said.startswith("3 ranks of this host use 2 of the 4 GPUs") and "comm.use_gpu()" in said


@pytest.mark.parametrize(
    ("uuids", "num_devices"),
    [({0: A, 1: B}, 4), ({0: A, 1: A}, 1), ({0: A, 1: B, 2: A}, 2)],
    ids=["one each", "there is one", "all are used"],
)
def test_ranks_that_leave_no_gpu_unused_are_told_nothing(
    uuids: dict[int, bytes], num_devices: int, caplog: pytest.LogCaptureFixture
) -> None:
    tell_of_sharing(uuids, num_devices)
    assert not caplog.messages
