"""Schedules are written and read as PyTorch does, drawn, and shown by the command line."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from xml.etree import ElementTree

import pytest

from parallel.pipeline import (
    SCHEDULES,
    Times,
    make,
    parse,
    read_csv,
    simulate,
    with_messages,
    write_csv,
)
from parallel.pipeline.__main__ import COMMAND
from parallel.pipeline.actions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Overlap,
    Receive,
    Send,
    Update,
)
from parallel.pipeline.picture import in_time, short, svg
from tests.parallel.pipeline.schedules_of_all_kinds import each_schedule


@each_schedule
def test_a_file_is_read_back(name: str, tmp_path: Path) -> None:
    schedule = make(name, 2, 4)
    write_csv(schedule.actions, tmp_path / f"{name}.csv")
    assert read_csv(tmp_path / f"{name}.csv") == schedule


def test_a_cell_that_is_no_action_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("0F0,,0B0\n0G0\n")
    with pytest.raises(ValueError, match=r"x.csv, row 2: '0G0' is not an action"):
        read_csv(tmp_path / "x.csv")


@pytest.mark.parametrize(
    "text", ["(" * 2000 + "0F0" + ")OVERLAP_F_B" * 2000, '"' + "x" * 200_000, "9" * 5000 + "F0"]
)
def test_a_cell_that_is_too_deep_or_too_long_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(f"0F0,0B0\n{text}\n")
    with pytest.raises(ValueError, match=r"x.csv, row [23]: ") as refused:
        read_csv(tmp_path / "x.csv")
    assert len(str(refused.value)) < 200


def test_actions_are_written_as_pytorch_writes_them() -> None:
    pair = Overlap.of(Forward(0, 5), Backward(3, 2))
    for action, word in (
        (Forward(2, 0), "2F0"),
        (Send(3, 1, "F"), "3SEND_F1"),
        (Receive(3, 1, "B"), "3RECV_B1"),
        (BackwardInput(1, 2), "1I2"),
        (BackwardWeight(1, 2), "1W2"),
        (Update(1, 2), "1UPDATE2"),
        (pair, "(0F5;3B2)OVERLAP_F_B"),
    ):
        assert str(action) == word and parse(word) == action


def test_messages_in_a_file_are_left_out(tmp_path: Path) -> None:
    schedule = make("1f1b", 2, 3)
    write_csv(with_messages(schedule), tmp_path / "1f1b.csv")
    assert "0SEND_F0" in (tmp_path / "1f1b.csv").read_text()
    assert read_csv(tmp_path / "1f1b.csv") == schedule


def test_small_letters_are_of_the_second_stage_or_the_other_direction() -> None:
    for name, stages in (("zb-v", {0: "F", 3: "f"}), ("dualpipe", {0: "F", 1: "f"})):
        schedule = make(name, 2, 4)
        for action in schedule.actions[0]:
            if isinstance(action, Forward):
                assert short(action, 0) == f"{stages[action.stage]}{action.micro_batch}"
    pair = next(x for x in make("dualpipe", 2, 4).actions[0] if isinstance(x, Overlap))
    assert short(pair, 0) == "/".join(short(part, 0) for part in pair.parts)


def test_the_width_of_a_drawing_does_not_depend_on_the_unit_of_time() -> None:
    schedule = make("gpipe", 2, 2)
    assert svg(simulate(schedule, Times(500, 500, 500)), "") == svg(simulate(schedule), "")


def test_a_column_is_the_longest_time_of_which_all_are_multiples() -> None:
    schedule = make("1f1b", 2, 1)
    assert in_time(simulate(schedule, Times(100, 100, 100))) == in_time(simulate(schedule))
    half = in_time(simulate(schedule, Times(Fraction(1, 2), 1, 1)))
    assert half.splitlines()[1] == "rank 1:  . F0 B0  -  -  -  .  .  .  ."
    assert "W0 . ." not in in_time(simulate(make("zb-h1", 1, 1), Times(1, 1, 0)))


def test_a_drawing_has_every_action() -> None:
    schedule = make("dualpipe-v", 2, 4)
    root = ElementTree.fromstring(svg(simulate(schedule), "a title"))
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words.count("F3") == words.count("f3") == 2 and "a title" in words


def test_the_command_draws_a_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--svg", str(tmp_path / "a.svg"), "--csv", str(tmp_path / "a.csv")]
    assert COMMAND.main(["show", "1f1b", "--stages", "2", "--micro-batches", "3", *files]) == 0
    said = capsys.readouterr().out
    assert "rank 0: F0 F1  .  . B0  - F2 B1  -  . B2  -" in said
    assert COMMAND.main(["show", str(tmp_path / "a.csv"), "--messages"]) == 0
    assert "0SEND_F0" in capsys.readouterr().out
    assert ElementTree.parse(tmp_path / "a.svg")


def test_the_command_compares_all_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        COMMAND.main(["compare", "--stages", "4", "--micro-batches", "8", "--times", "1:1:1"]) == 0
    )
    said = capsys.readouterr().out
    assert all(f"| {name}" in said for name in SCHEDULES)


def test_the_command_says_all_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    assert COMMAND.main(["formulas", "--wide"]) == 0
    said = capsys.readouterr().out
    for name, info in SCHEDULES.items():
        assert f"| {name} " in said
        assert info.bubble.text in said and info.kept.text in said


REFUSED = {
    "dualpipe --micro-batches 4": "at least 8, not 4",
    "1f1b --times 1:1": "not F:I:W",
    "1f1b --times=1/0:1:1": "not F:I:W",
    "1f1b --times=-1:1:1": "must not be negative",
    "1f1b --times 0:1:1": "nor F be 0",
    "2f2b": "choose from naive",
    "missing.csv": "No such file",
}


@pytest.mark.parametrize("words", REFUSED)
def test_the_command_refuses_in_a_sentence(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        COMMAND.main(["show", *words.split()])
    assert stop.value.code == 2 and REFUSED[words] in capsys.readouterr().err
