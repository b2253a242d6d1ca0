"""How much of the communication is hidden, and that measuring it changes nothing."""

from __future__ import annotations

import pytest

from parallel import PowerSGD
from parallel.run.computing.overlap import PERIOD, Overlap
from tests.parallel.training import ddp, train, zero3


def test_one_step_in_ten_is_the_reference_but_not_the_first() -> None:
    measured = Overlap()
    found = []
    for _ in range(2 * PERIOD):
        measured.begin()
        found.append(measured.is_reference)
    assert [i for i, is_reference in enumerate(found) if is_reference] == [1, 1 + PERIOD]


def test_what_is_hidden_is_what_the_reference_waits_for_and_the_others_do_not() -> None:
    measured = Overlap()
    for _ in range(3):
        measured.begin()
        measured.add(0.03 if measured.is_reference else 0.01)
        measured.add(0.01)
    assert measured.seconds() == (0.04, 0.02)
    assert "were not hidden by computation" in measured.summary()


def test_nothing_is_said_before_three_steps() -> None:
    measured = Overlap()
    measured.begin()
    measured.begin()
    assert measured.seconds() is None and measured.summary() == ""


@pytest.mark.parametrize("make", [ddp, zero3, lambda *a: ddp(*a, hook=PowerSGD(1))])
def test_a_reference_step_sends_and_computes_the_same(
    make: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = train(make, 3)  # type: ignore[arg-type] # its second step is a reference
    monkeypatch.setattr(
        Overlap, "is_reference", property(lambda _: False, lambda *_: None), raising=False
    )
    ends = train(make, 3)  # type: ignore[arg-type]
    assert [end.losses for end in ends] == [end.losses for end in wanted]
    assert wanted[0].table is not None and wanted[0].table.check()
    assert all(f == c for f, c in wanted[0].memory.values())
