"""The example and the sentences of docs/choosing.md."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

import collectives
from bench.choosing.tune import PARTS
from collectives.launch import launch
from collectives.selection import explain
from collectives.selection.decisions import Decisions, Measured, Ranks, Row
from collectives.selection.machine_file import Fitted
from tests.bench.choosing.test_machine import MACHINE
from tests.docs.pages import blocks

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "choosing.md"
(EXAMPLE,) = blocks(PAGE)
(SHOWN,) = blocks(PAGE, "text")
ROWS = Row(1448, ("recursive_doubling",)), Row(11585, ("one_shot",)), Row(math.inf, ("ring",))


def measured_on(number: int) -> dict[Ranks, Measured]:
    """A table of all-reduces on so many ranks."""
    return {Ranks(number): Measured({}, {"all_reduce": ROWS})}


@pytest.mark.ranks(n=2)
@pytest.mark.on_open_mpi
@pytest.mark.slow
def test_the_example_loads_a_file_and_prints_what_is_shown(tmp_path: Path) -> None:
    decisions = Decisions(measured_on(2), Fitted({}, MACHINE))
    (tmp_path / "decisions.json").write_text(decisions.to_json())
    (tmp_path / "example.py").write_text(EXAMPLE)
    program = f"import os, runpy; os.chdir({str(tmp_path)!r}); runpy.run_path('example.py')"
    done = launch(2, ["-c", program], env={"PYTHONPATH": str(ROOT)}, timeout=60, capture=True)
    assert done.returncode == 0, done.stderr
    printed, shown = ([*map(without_time, text.splitlines())] for text in (done.stdout, SHOWN))
    assert shown[-1] == "  ..." and printed[:4] == shown[:4]
    assert set(shown[:-1]) <= set(printed) and sum(line.startswith("* ") for line in shown) == 1


def without_time(line: str) -> str:
    """A line without the predicted time at its end, which follows from the file."""
    return re.sub(r" +\d+\.\d$", "", line)


def test_every_reason_is_given_as_shown() -> None:
    page = PAGE.read_text()
    rows = re.findall(r"^\| `(.+?)` \| (.+?) \|$", page, re.MULTILINE)
    shown = {reason: source for reason, source in rows if not reason.startswith("-")}
    with collectives.using(all_reduce="ring"):
        inside = explain("all_reduce", None, 4, 8).reason
    machine = Decisions({}, Fitted({}, MACHINE))
    reasons = {
        explain("all_reduce", "ring", 4, 8).reason: "`algorithm=`",
        inside: "the block around the call",
        explain("all_reduce", None, 4, 8, decisions=Decisions(measured_on(4))).reason: "1",
        explain("all_reduce", None, 4, 8, decisions=machine).reason: "2",
        explain("all_reduce", None, 6, 8, decisions=Decisions(measured_on(4))).reason: "3",
        explain("all_reduce", None, 4, 8).reason: "4",
    }
    assert {reason: shown.get(reason) for reason in reasons} == reasons


def test_tables_come_before_predictions_and_predictions_before_other_ranks() -> None:
    def reason(number: int, fitted: Fitted | None) -> str:
        decisions = Decisions(measured_on(number), fitted)
        return explain("all_reduce", None, 4, 8, decisions=decisions).reason

    fitted = Fitted({}, MACHINE)
    assert reason(4, fitted).startswith("table measured on 4 ranks:")
    assert reason(2, fitted).startswith("least time predicted on the fitted machine")
    assert reason(2, None).startswith("table measured on 2 ranks, the nearest to 4")


def test_every_part_is_on_the_page() -> None:
    page = PAGE.read_text()
    assert [part for part in PARTS if f"`--only {part}`" not in page] == []
