"""What the dumps of the ranks say together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from collectives import flight


def call(name: str, state: str = "complete", ordinal: int = 1, **more: Any) -> dict[str, Any]:
    said = {"members": [0, 1, 2], "ordinal": ordinal, "call": name, "collective": "all_reduce"}
    return said | {"algorithm": "ring", "bytes": 8, "seconds_ago": 3.0, "state": state} | more


def waiting(name: str, peer: int, **more: Any) -> dict[str, Any]:
    position = {"round": 1, "among": "4", "waiting_for": [[peer, True]]}
    return call(name, "under way", **position, **more)


def dump(rank: int, *calls: dict[str, Any], at: str = "train.py:7 in step") -> dict[str, Any]:
    return {"rank": rank, "size": 3, "calls": list(calls), "at": [at]}


def test_it_says_who_waits_for_whom_and_who_has_not_called() -> None:
    dumps = {
        0: dump(0, call("16"), waiting("17", 2)),
        1: dump(1, call("16"), waiting("17", 0)),
        2: dump(2, call("16"), at="train.py:42 in load_batch"),
    }
    assert list(flight.lines(dumps)) == [
        "call 17 of ranks 0, 1, 2: all_reduce (ring)",
        "  rank 0: waits in round 1 of 4 for a message from rank 2, since 3 s; "
        "it is at train.py:7 in step",
        "  rank 1: waits in round 1 of 4 for a message from rank 0, since 3 s; "
        "it is at train.py:7 in step",
        "  rank 2: has not called it; its last call is 16, all_reduce, complete, 3 s ago; "
        "it is at train.py:42 in load_batch",
    ]


def test_a_rank_without_a_dump_is_named() -> None:
    said = list(flight.lines({0: dump(0, waiting("1", 1)), 1: dump(1)}))
    assert said[-2].startswith("  rank 1: has not called it; it has called nothing there")
    assert said[-1] == "  rank 2: no dump: it is dead, stopped, or was not asked"


def test_ranks_that_call_different_things_at_once_are_shown_as_such() -> None:
    other = waiting("5", 0, collective="broadcast")
    said = list(flight.lines({0: dump(0, waiting("5", 1)), 1: dump(1, other)}))
    assert said[0] == "call 5 of ranks 0, 1, 2: all_reduce (ring) or broadcast (ring)"


def test_a_rank_that_is_through_is_told_from_one_that_is_late() -> None:
    said = list(flight.lines({0: dump(0, waiting("5", 1)), 1: dump(1, call("5"), call("6"))}))
    assert said[2].startswith("  rank 1: its call is complete; its last call is 6,")


def test_communicators_of_the_same_ranks_are_kept_apart() -> None:
    dumps = {0: dump(0, waiting("5", 1, ordinal=2)), 1: dump(1, call("5"))}
    said = list(flight.lines(dumps))
    assert said[0] == "call 5 of ranks 0, 1, 2 (#2): all_reduce (ring)"
    assert "has called nothing there" in said[2]


def test_where_nothing_is_under_way_the_last_calls_are_shown() -> None:
    said = list(flight.lines({0: dump(0, call("5"))}))
    assert said[0] == "no call is under way"
    assert said[1].startswith("  rank 0: its last call is 5, all_reduce, complete")


def test_dumps_are_read_from_a_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "flight.0.json").write_text(json.dumps(dump(0, waiting("5", 1))))
    assert flight.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("call 5 of ranks 0, 1, 2: all_reduce (ring)\n")


@pytest.mark.parametrize(
    ("text", "sentence"), [(None, "holds no dumps"), ("{", "is not the dump of a flight recorder")]
)
def test_a_directory_without_dumps_is_refused(
    text: str | None, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "flight.0.json").write_text(text)
    with pytest.raises(SystemExit, match="2"):
        flight.main([str(tmp_path)])
    assert sentence in capsys.readouterr().err
