"""The times of device programs, worked out by hand."""

from __future__ import annotations

import pytest

from collectives import ScheduleError
from collectives.lowering import DeviceProgram
from collectives.simulation import DeviceLink, simulate_devices
from tests.lowering.cases import Case

LINK = DeviceLink(
    synchronize=1, copy=10, kernel=100, hop=1000, start=1e4, rate=1, staging=1e6, staging_rate=1
)


def test_one_combination_of_two_ranks_takes_the_time_of_its_calls_and_bytes() -> None:
    programs = Case("all_reduce", "one_shot", 2, 4).lowered()
    # Signal and await are one call.  The combination reads 2 x 16 bytes and writes 16.
    begun = 1 + 1000
    combined = begun + 1e4 + 48
    assert simulate_devices(programs, LINK).tolist() == [combined + 1000] * 2


def test_a_device_waits_for_its_host() -> None:
    programs = Case("all_reduce", "one_shot", 2, 4).lowered()
    slow = LINK._replace(kernel=5000)
    assert simulate_devices(programs, slow).tolist() == [1 + 5000 + 1e4 + 48 + 1000] * 2


def test_what_is_staged_takes_the_host() -> None:
    programs = Case("broadcast", "binomial", 2, 4, staged={(0, 1)}).lowered()
    sent = 10 + 1e6 + 16
    assert simulate_devices(programs, LINK)[1] == sent + 1000 + 1e6 + 16


def test_one_rank_alone_only_copies() -> None:
    (program,) = Case("all_reduce", "ring", 1, 4).lowered()
    assert simulate_devices([program], LINK).tolist() == [10 + 1e4 + 32]


def test_devices_that_wait_for_each_other_are_noticed() -> None:
    programs = Case("all_reduce", "one_shot", 2, 4).lowered()
    without = DeviceProgram(programs[1].operations[1:])
    with pytest.raises(ScheduleError, match="wait for each other"):
        simulate_devices([programs[0], without])


def test_the_defaults_are_a_real_device() -> None:
    small, large = (
        simulate_devices(Case("all_reduce", "one_shot", 2, count).lowered()).max()
        for count in (256, 1 << 24)
    )
    assert 5e-6 < small < 5e-5 < large < 1e-3
