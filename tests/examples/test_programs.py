"""The programs that train models of images with experts, and students of these."""

from __future__ import annotations

from pathlib import Path

import pytest

from collectives.console import Command
from examples.images.__main__ import COMMAND
from examples.students.__main__ import COMMAND as TEACH
from moe import RoutingLog
from tests.moe.experts import moved

SMALL = ("--steps", "2", "--batch", "8", "--hidden", "8", "--layers", "2")


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--model", "swin", "--moe", "gshard"),
        ("--mesh", "data=2", "--zero", "3"),
        ("--mesh", "tensor=2", "--dtype", "float64"),
        ("--model", "swin", "--mesh", "tensor=2"),
        ("--mesh", "pipe=2", "--micro-batches", "2"),
        ("--mesh", "data=2,expert=1", "--zero", "0"),
    ],
)
def test_every_option_sends_what_was_predicted(words: tuple[str, ...]) -> None:
    """All bytes are as predicted."""
    assert COMMAND.main(["--threads", "2", *SMALL, *words]) == 0


LARGE = ("--steps", "1", "--batch", "192", "--hidden", "48", "--layers", "2")


@pytest.mark.parametrize("words", [(), ("--model", "swin"), ("--mesh", "tensor=2")])
def test_the_memory_of_large_arrays_is_predicted(words: tuple[str, ...]) -> None:
    """The allocator makes arrays of more than 256 KiB; these are no powers of two."""
    assert COMMAND.main(["--threads", "2", *LARGE, *words]) == 0


def test_one_rank_trains_alone() -> None:
    assert COMMAND.main(["--threads", "1", *SMALL]) == 0


def test_a_student_learns_from_a_larger_teacher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The teacher was trained on one rank, and is larger; it is used in one of two steps."""
    folder = str(tmp_path)
    assert COMMAND.main(["--threads", "1", *SMALL, "--layers", "4", "--save", folder]) == 0
    taught = ("--teacher", folder, "--teacher-layers", "4", "--stop", "1")
    capsys.readouterr()
    assert TEACH.main(["--threads", "2", "--wide", *SMALL, *taught]) == 0
    text = capsys.readouterr().out
    assert "teacher 7192 parameters, student 3760: 1.91 times as many" in text
    assert "bytes of its teacher" in text
    (line,) = [line for line in text.splitlines() if "loss/teacher/block3/dispatch" in line]
    assert line.split("|")[4].strip() == "1"  # recorded calls


def test_a_teacher_of_another_number_of_blocks_is_refused_with_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--threads", "1", *SMALL]
    assert COMMAND.main([*words, "--save", str(tmp_path)]) == 0
    with pytest.raises(SystemExit) as caught:
        TEACH.main([*words, "--layers", "1", "--teacher", str(tmp_path)])
    assert caught.value.code == 2
    said = "the teacher cannot be loaded as a model of 1 blocks (--teacher-layers)"
    assert said in capsys.readouterr().err


def test_what_a_checkpoint_sends_is_predicted_and_none_is_overwritten(tmp_path: Path) -> None:
    words = ["--threads", "2", *SMALL, "--save", str(tmp_path)]
    assert COMMAND.main(words) == 0
    with pytest.raises(SystemExit) as caught:
        COMMAND.main(words)
    assert caught.value.code == 2


def test_bytes_of_another_routing_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the exit status is 1."""
    gathered = RoutingLog.gathered
    monkeypatch.setattr(RoutingLog, "gathered", lambda log, comm: moved(gathered(log, comm), 2))
    assert COMMAND.main(["--threads", "2", *SMALL]) == 1


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [
        (COMMAND, ("--mesh", "data=3"), "a mesh of data=3 has 3 ranks, not 2"),
        (COMMAND, ("--mesh", "context=2"), "ranks along 'context' divide the positions of a text"),
        (COMMAND, ("--batch", "1"), "a batch of 1 images is too small for 2 ranks"),
        (COMMAND, ("--moe", "hash"), "a gate without a router"),
        (COMMAND, ("--model", "swin", "--layers", "1"), "num_layers is 0"),
        (COMMAND, ("--heads", "3"), "3 heads do not divide a width of 8"),
        (COMMAND, ("--mesh", "pipe=2,sequence=1"), "sequence"),
        (TEACH, ("--teacher", "nowhere"), "there is no checkpoint in nowhere"),
        (TEACH, (), "the following arguments are required: --teacher"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    command: Command, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status is 2, and one sentence says why."""
    with pytest.raises(SystemExit) as caught:
        command.main(["--threads", "2", *SMALL, *words])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err
