"""The simulator against what LogGOPSim said of the same GOAL files (see `loggopsim.py`)."""

from __future__ import annotations

import json

import pytest

from collectives.export import Call, goal
from tests.export.loggopsim import (
    FILES,
    NANOSECOND,
    PARAMETERS,
    RECORDED,
    RECORDED_CALLS,
    name_of,
    simulated,
)

TIMES = json.loads(RECORDED.read_text())


def test_parameters_are_the_recorded_ones() -> None:
    assert TIMES["parameters"] == [parameters._asdict() for parameters in PARAMETERS]
    assert TIMES["times"].keys() == {name_of(call) for call in RECORDED_CALLS}
    assert {path.stem for path in FILES.iterdir()} == TIMES["times"].keys()


@pytest.mark.parametrize("call", RECORDED_CALLS, ids=name_of)
def test_the_export_is_the_file_that_loggopsim_read(call: Call) -> None:
    lines = goal.lines(call.tasks(PARAMETERS[0].machine(NANOSECOND)))
    assert (FILES / f"{name_of(call)}.goal").read_text().splitlines() == list(lines)


@pytest.mark.parametrize("call", RECORDED_CALLS, ids=name_of)
def test_every_rank_ends_to_the_nanosecond_when_loggopsim_says(call: Call) -> None:
    for parameters, times in zip(PARAMETERS, TIMES["times"][name_of(call)], strict=True):
        assert simulated(call, parameters) == times


def test_another_latency_is_noticed() -> None:
    call = RECORDED_CALLS[0]
    other = PARAMETERS[0]._replace(L=PARAMETERS[0].L + 1)
    assert simulated(call, other) != TIMES["times"][name_of(call)][0]
