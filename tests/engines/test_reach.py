"""No engine runs a program that reaches outside the arrays that it is given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import collectives
from collectives.devices import call
from collectives.runtime import performing
from tests.fakes.device import on_device
from tests.scenarios.wrong_programs import (
    WRONG,
    compiling_with,
    require_comparison_at_every_attachment,
    require_refusal,
)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("make", [np.copy, on_device], ids=["interpreted", "staged"])
def test_a_wrong_program_is_refused_before_it_runs(
    make: Any, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, sentence = WRONG[wrong]
    for module in (performing, call):
        monkeypatch.setattr(module, "compile_call", compiling_with(row))
    collectives.run(lambda comm: require_refusal(comm, make, sentence), 2)


@pytest.mark.parametrize("make", [np.copy, on_device], ids=["interpreted", "staged"])
def test_arrays_that_an_execution_gets_later_are_compared_too(make: Any) -> None:
    collectives.run(lambda comm: require_comparison_at_every_attachment(comm, make), 2)
