"""What the dumps of the ranks say together."""

from __future__ import annotations

import copy
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from collectives import flight
from collectives.diagnostics import hang_report
from tests.mutations import places


def call(name: str, state: str = "complete", ordinal: int = 1, **more: Any) -> dict[str, Any]:
    said = {"members": [0, 1, 2], "ordinal": ordinal, "call": name, "collective": "all_reduce"}
    return said | {"algorithm": "ring", "bytes": 8, "seconds_ago": 3.0, "state": state} | more


def waiting(name: str, peer: int, **more: Any) -> dict[str, Any]:
    position = {"round": 1, "num_rounds": "4", "waiting_for": [[peer, True]], "device_row": ""}
    return call(name, "under way", **position, **more)


def dump(rank: int, *calls: dict[str, Any], at: str = "train.py:7 in step") -> dict[str, Any]:
    return {"rank": rank, "size": 3, "calls": list(calls), "at": [at]}


def test_the_report_says_who_waits_for_whom_and_who_has_not_called() -> None:
    dumps = {
        0: dump(0, call("16"), waiting("17", 2)),
        1: dump(1, call("16"), waiting("17", 0)),
        2: dump(2, call("16"), at="train.py:42 in load_batch"),
    }
    assert list(hang_report.lines(dumps)) == [
        "call 17 of ranks 0, 1, 2: all_reduce (ring)",
        "  rank 0: waits in round 1 of 4 for a message from rank 2, since 3 s; "
        "it is at train.py:7 in step",
        "  rank 1: waits in round 1 of 4 for a message from rank 0, since 3 s; "
        "it is at train.py:7 in step",
        "  rank 2: has not called it; its last call is 16, all_reduce, complete, 3 s ago; "
        "it is at train.py:42 in load_batch",
    ]


def test_a_rank_without_a_dump_is_named() -> None:
    said = list(hang_report.lines({0: dump(0, waiting("1", 1)), 1: dump(1)}))
    assert said[-2].startswith("  rank 1: has not called it; it has made no call there")
    assert said[-1] == "  rank 2: no dump: it is dead or stopped, or has not been asked"


def test_a_dump_of_another_time_is_named() -> None:
    dumps = {rank: dump(rank, call("5")) | {"time": 100.0 + rank / 2} for rank in range(3)}
    assert not any("older" in line for line in hang_report.lines(dumps))
    dumps[0]["time"] = 90.0
    assert next(hang_report.lines(dumps)) == "the dump of rank 0 is 11 s older than the latest one"


def test_ranks_that_call_different_things_at_once_are_shown_as_such() -> None:
    other = waiting("5", 0, collective="broadcast")
    said = list(hang_report.lines({0: dump(0, waiting("5", 1)), 1: dump(1, other)}))
    assert said[0] == "call 5 of ranks 0, 1, 2: all_reduce (ring) or broadcast (ring)"


def test_a_rank_that_is_through_is_told_from_one_that_is_late() -> None:
    said = list(hang_report.lines({0: dump(0, waiting("5", 1)), 1: dump(1, call("5"), call("6"))}))
    assert said[2].startswith("  rank 1: its call is complete; its last call is 6,")


def test_communicators_of_the_same_ranks_are_kept_apart() -> None:
    dumps = {0: dump(0, waiting("5", 1, ordinal=2)), 1: dump(1, call("5"))}
    said = list(hang_report.lines(dumps))
    assert said[0] == "call 5 of ranks 0, 1, 2 (#2): all_reduce (ring)"
    assert "has made no call there" in said[2]


def test_where_nothing_is_under_way_the_last_calls_are_shown() -> None:
    said = list(hang_report.lines({0: dump(0, call("5"))}))
    assert said[0] == "no call is under way"
    assert said[1].startswith("  rank 0: its last call is 5, all_reduce, complete")


def test_dumps_are_read_from_a_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "flight.0.json").write_text(json.dumps(dump(0, waiting("5", 1))))
    assert flight.COMMAND.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("call 5 of ranks 0, 1, 2: all_reduce (ring)\n")


@pytest.mark.parametrize(
    ("text", "sentence"), [(None, "has no dumps"), ("{", "is not the dump of a flight recorder")]
)
def test_a_directory_without_dumps_is_refused(
    text: str | None, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "flight.0.json").write_text(text)
    with pytest.raises(SystemExit, match="2"):
        flight.COMMAND.main([str(tmp_path)])
    assert sentence in capsys.readouterr().err


def test_a_missing_directory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        flight.COMMAND.main([str(tmp_path / "nowhere")])
    said = capsys.readouterr().err
    assert said.endswith("nowhere cannot be read as a directory (No such file or directory)\n")


def test_older_dumps_can_be_left_out(tmp_path: Path) -> None:
    for rank, age in ((0, 0), (1, 1_000_000_000)):
        (tmp_path / f"flight.{rank}.json").touch()
        os.utime(tmp_path / f"flight.{rank}.json", (age, age))
    assert [hang_report.rank_of(path) for path in hang_report.files(tmp_path)] == [0, 1]
    assert [
        hang_report.rank_of(path) for path in hang_report.files(tmp_path, since=999_999_999)
    ] == [1]


# --- what is no dump ----------------------------------------------------------------------------

GOOD = dump(1, call("16"), waiting("17", 2))


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in GOOD.items() if key != name}


def with_call(**wrong: Any) -> dict[str, Any]:
    return dump(1, call("16"), waiting("17", 2) | wrong)


def waiting_without(name: str) -> dict[str, Any]:
    return dump(1, {key: value for key, value in waiting("17", 2).items() if key != name})


DEEP = "[" * 100_000 + "]" * 100_000
FOREIGN_FILES = [
    (b"", "it is not JSON (Expecting value"),
    (b'{"rank": 1, "calls": [', "it is not JSON (Expecting value"),
    (b'"\xff"', "it is not JSON ('utf-8' codec can't decode"),
    (DEEP.encode(), "it is nested too deeply"),
    (b"1" * 5000, "it is not JSON (Exceeds the limit"),
]
FOREIGN_DUMPS = [
    (None, "the dump is not an object with fields"),
    ([GOOD], "the dump is not an object with fields"),
    ({}, "the dump has no field 'rank'"),
    (without("calls"), "the dump has no field 'calls'"),
    (without("at"), "the dump has no field 'at'"),
    (GOOD | {"rank": "1"}, "the field 'rank' of the dump is not a rank"),
    (GOOD | {"rank": True}, "the field 'rank' of the dump is not a rank"),
    (GOOD | {"rank": -1}, "the field 'rank' of the dump is not a rank"),
    (GOOD | {"rank": 2}, "it is the dump of rank 2"),
    (GOOD | {"at": "here"}, "the field 'at' of the dump is not a list of texts"),
    (GOOD | {"at": [None]}, "the field 'at' of the dump is not a list of texts"),
    (GOOD | {"calls": {}}, "the field 'calls' of the dump is not a list"),
    (GOOD | {"calls": [7]}, "call 0 is not an object with fields"),
    (with_call(members=[]), "call 1 is of ranks to which rank 1 does not belong"),
    (with_call(members=[0, 2]), "call 1 is of ranks to which rank 1 does not belong"),
    (with_call(members=[1, 1]), "the field 'members' of call 1 is not a list of different ranks"),
    (with_call(members=[[], 1]), "the field 'members' of call 1 is not a list of different ranks"),
    (with_call(ordinal=None), "the field 'ordinal' of call 1 is not a number"),
    (with_call(call=["17"]), "the field 'call' of call 1 is not a text"),
    (with_call(collective={}), "the field 'collective' of call 1 is not a text"),
    (with_call(algorithm=1), "the field 'algorithm' of call 1 is not a text"),
    (with_call(seconds_ago="3"), "the field 'seconds_ago' of call 1 is not a time in seconds"),
    (with_call(seconds_ago=10**400), "the field 'seconds_ago' of call 1 is not a time in seconds"),
    (with_call(seconds_ago=float("nan")), "the field 'seconds_ago' of call 1 is not a time"),
    (with_call(state="lost"), "the field 'state' of call 1 is not the state of a call"),
    (with_call(state=[]), "the field 'state' of call 1 is not the state of a call"),
    (with_call(round="1"), "the field 'round' of call 1 is not a number"),
    (with_call(num_rounds=4), "the field 'num_rounds' of call 1 is not a text"),
    (with_call(device_row=4), "the field 'device_row' of call 1 is not a text"),
    (with_call(waiting_for=[[3, True]]), "call 1 waits for a rank that its communicator does not"),
    (with_call(waiting_for=[[-1, True]]), "the field 'waiting_for' of call 1 is not a list of"),
    (with_call(waiting_for=[2]), "the field 'waiting_for' of call 1 is not a list of"),
    (with_call(waiting_for=[[2]]), "the field 'waiting_for' of call 1 is not a list of"),
    (with_call(waiting_for=[[2, 1]]), "the field 'waiting_for' of call 1 is not a list of"),
    (with_call(waiting_for=None), "the field 'waiting_for' of call 1 is not a list of"),
    (waiting_without("round"), "call 0 has no field 'round'"),
    (waiting_without("waiting_for"), "call 0 has no field 'waiting_for'"),
    (waiting_without("members"), "call 0 has no field 'members'"),
    (waiting_without("seconds_ago"), "call 0 has no field 'seconds_ago'"),
]
FOREIGN = FOREIGN_FILES + [(json.dumps(dump).encode(), why) for dump, why in FOREIGN_DUMPS]


@pytest.mark.parametrize(("content", "why"), FOREIGN)
def test_a_foreign_file_is_named_and_hides_nothing(
    content: bytes, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "flight.0.json").write_text(json.dumps(dump(0, waiting("17", 1))))
    foreign = tmp_path / "flight.1.json"
    foreign.write_bytes(content)
    assert flight.COMMAND.main([str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.err.startswith(f"{foreign} is not the dump of a flight recorder: {why}"), said.err
    assert said.err.count("\n") == 1
    assert said.out.startswith("call 17 of ranks 0, 1, 2: all_reduce (ring)\n")
    assert "rank 1: no dump" in said.out


def test_the_dump_that_the_others_are_made_of_is_accepted() -> None:
    """So that each of the foreign ones is refused for what is wrong with it."""
    hang_report.check(GOOD)


ODD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flight.1.json": (Path.mkdir, "it is not a file"),
    "flight.2.json": (os.mkfifo, "it is not a file"),
    "flight.3.json": (lambda path: path.symlink_to("nowhere"), "it is not a file"),
    "flight.x.json": (Path.touch, "its name is not flight.<rank>.json"),
    "flight.01.json": (Path.touch, "its name is not flight.<rank>.json"),
    "flight.1.2.json": (Path.touch, "its name is not flight.<rank>.json"),
    "flight.\u0661.json": (Path.touch, "its name is not flight.<rank>.json"),
}


@pytest.mark.parametrize("name", ODD_FILES)
def test_what_is_no_file_or_has_another_name_is_named(name: str, tmp_path: Path) -> None:
    make, why = ODD_FILES[name]
    make(tmp_path / name)
    (tmp_path / "flight.0.json").write_text(json.dumps(dump(0)))
    (tmp_path / "notes.json").touch()
    dumps, faults = hang_report.read(hang_report.files(tmp_path))
    assert faults == [f"{tmp_path / name} is not the dump of a flight recorder: {why}"]
    assert list(dumps) == [0]


def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "flight.0.json").touch()
    monkeypatch.setattr(Path, "read_bytes", denied)
    dumps, (fault,) = hang_report.read(hang_report.files(tmp_path))
    assert dumps == {}
    assert fault.endswith("it cannot be read (Permission denied)")


def test_text_that_cannot_be_written_is_escaped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of a program may be no UTF-8; such a byte is a lone surrogate in a dump."""
    (tmp_path / "flight.0.json").write_text(json.dumps(dump(0, call("5"), at="\udcff.py:7 in f")))
    with open(tmp_path / "said", "w", encoding="ascii") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert flight.COMMAND.main([str(tmp_path)]) == 0
    assert "it is at \\udcff.py:7 in f" in (tmp_path / "said").read_text()


def test_what_could_control_a_terminal_is_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In all texts of dumps, and in the names of files that are none."""
    control = "\x1b[2J\r\n\x07\x9b\u202e"
    odd = waiting(control, 1, collective=control, algorithm=control) | {"num_rounds": control}
    (tmp_path / "flight.0.json").write_text(json.dumps(dump(0, odd, at=control)))
    (tmp_path / f"flight.{control}.json").touch()
    assert flight.COMMAND.main([str(tmp_path)]) == 0
    said = capsys.readouterr()
    text = said.out + said.err
    assert text.count("\\x1b[2J\\r\\n\\x07\\x9b\\u202e") == 6
    assert text.replace("\n", "").isprintable()
    assert hang_report.escaped("rank 0: Grüße, 环") == "rank 0: Grüße, 环"


# What a field may hold instead.
WRONG = [
    None,
    True,
    -1,
    0,
    1,
    2,
    3,
    7.5,
    float("nan"),
    10**400,
    "",
    "x",
    "17",
    "under way",
    [],
    [0],
    [[0, True]],
    [[3, False]],
    [[]],
    {},
    {"rank": 0},
]


def spoiled(good: dict[int, Any], chance: random.Random) -> dict[int, Any]:
    """A copy in which one or two things are wrong, or missing, or only otherwise."""
    dumps = copy.deepcopy(good)
    for _ in range(chance.choice((1, 1, 2))):
        holder, name = chance.choice(list(places(dumps)))
        if chance.random() < 0.2:
            del holder[name]
        else:
            holder[name] = copy.deepcopy(chance.choice(WRONG))
    return dumps


def test_a_malformed_dump_is_refused_with_a_sentence_whatever_is_wrong_with_it() -> None:
    chance = random.Random(2026)
    good = {
        0: dump(0, call("16"), waiting("17", 2)),
        1: dump(1, call("16", "failed"), waiting("3", 0, ordinal=2, members=[0, 1])),
        2: dump(2, call("16"), call("17")),
    }
    said: list[str] = []
    refused: list[str] = []
    for _ in range(5000):
        try:
            said += hang_report.lines(spoiled(good, chance))
        except ValueError as error:
            refused.append(str(error))
    assert all(sentence.startswith("the dump of rank ") for sentence in refused)
    assert len(refused) > 1000 and len(said) > 1000
