"""GOAL files, read back: messages in pairs, no circles, and the predicted bytes."""

from __future__ import annotations

import pytest

from collectives.export import Call, goal
from tests.export import calls
from tests.export.goal_reader import read, run


@pytest.mark.parametrize("collective", calls.COLLECTIVES)
def test_messages_are_received_and_have_the_predicted_bytes(collective: str) -> None:
    for call in calls.calls(collective):
        ranks = read(goal.lines(call.tasks(calls.MACHINE)))
        sent, expected = run(ranks), calls.predicted(call)
        summed = calls.summed(sent)
        assert {ends: number for ends, (number, _) in summed.items()} == {
            ends: number for ends, (number, _) in expected.items()
        }
        for number, rank in enumerate(ranks):
            messages = [pair for (source, _), pair in expected.items() if source == number]
            assert rank.summary[:2] == tuple(map(sum, zip((0, 0), *messages, strict=True)))
            written = sum(total for (source, _), (_, total) in summed.items() if source == number)
            assert written - rank.summary[2] == rank.summary[1], call


def test_empty_messages_are_written_as_one_byte() -> None:
    text = list(goal.lines(Call("barrier", 4, 0).tasks(calls.MACHINE)))
    assert text[3] == "// sends 2 messages, 0 bytes; 2 empty ones are written as 1b"
    assert sum(" 1b " in line for line in text) == 16
    assert not any(" 0b " in line for line in text)


def test_work_is_in_nanoseconds_of_the_machine() -> None:
    call = Call("all_reduce", 4, 400, "ring")
    calcs = [line for line in goal.lines(call.tasks(calls.MACHINE)) if "calc" in line]
    assert calcs[:4] == [
        "l0: calc 100 cpu 0",  # of the call
        "l3: calc 200 cpu 0",  # 100 bytes combined at 2 ns each
        "l6: calc 200 cpu 0",
        "l9: calc 200 cpu 0",
    ]


def test_the_reader_finds_a_missing_receive_a_circle_and_another_size() -> None:
    text = list(goal.lines(Call("all_reduce", 4, 400, "ring").tasks(calls.MACHINE)))
    receive = next(line for line in text if "recv" in line)
    label = receive.partition(":")[0]
    without = [line for line in text if not line.startswith(f"{label}:")]
    with pytest.raises(AssertionError, match="requires"):
        run(read(without))
    last = text.index("}")
    with pytest.raises(AssertionError, match="never completed"):
        run(read([*text[:last], f"{label} requires l3", *text[last:]]))
    with pytest.raises(AssertionError, match="size=99"):
        run(read([line.replace("100b", "99b") if line == receive else line for line in text]))
