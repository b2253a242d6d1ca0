"""Commands end with a sentence and status 2, are found by name, and are completed by shells."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from collectives.console import Command, Group, Refused, refusing


def add_options(parse: argparse.ArgumentParser) -> None:
    parse.add_argument("--size", type=int, default=1)


def run(options: argparse.Namespace) -> int:
    with refusing():
        if options.size < 0:
            raise ValueError("the size is negative")
    if options.size == 0:
        raise Refused("there is nothing to do")
    return options.size


COMMAND = Command("some.module", "Do something.\n\nMore text.", add_options, run)
GROUP = Group(
    "some",
    "All commands.",
    {
        "first": {"do": lambda: COMMAND, "do twice": lambda: COMMAND},
        "then": {"a b": lambda: COMMAND},
    },
)


def test_the_exit_status_is_what_the_command_returns() -> None:
    assert COMMAND.main(["--size", "3"]) == 3


@pytest.mark.parametrize(
    ("words", "sentence"),
    [("--size 0", "there is nothing to do"), ("--size=-1", "the size is negative")],
)
def test_what_is_refused_is_a_sentence_with_status_2(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        COMMAND.main(words.split())
    said = capsys.readouterr()
    assert said.err == f"python -m some.module: {sentence}\n" and not said.out


def test_other_errors_are_not_hidden() -> None:
    def fail(options: argparse.Namespace) -> int:
        raise ValueError("a mistake in the program")

    with pytest.raises(ValueError, match="a mistake"):
        Command("m", None, add_options, fail).main([])


def test_an_error_without_text_is_named() -> None:
    with pytest.raises(Refused, match="there is not enough memory"), refusing(MemoryError):
        raise MemoryError


@pytest.mark.parametrize(
    ("words", "prog"),
    [
        ("do --size 0", "ring do"),
        ("do twice --size 0", "ring do twice"),
        ("a b --size 0", "ring a b"),
    ],
)
def test_commands_have_names_of_one_word_or_two(
    words: str, prog: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        GROUP.main(words.split(), "ring")
    assert capsys.readouterr().err == f"{prog}: there is nothing to do\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("fly", "there is no command 'fly'; ring --help lists all"),
        ("a", "a is followed by b"),
        ("a c", "a is followed by b"),
        ("--fly", "unrecognized arguments: --fly"),
    ],
)
def test_an_unknown_command_is_refused(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        GROUP.main(words.split(), "ring")
    assert capsys.readouterr().err.endswith(f"ring: error: {sentence}\n")


def test_without_a_command_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert GROUP.main([], "ring") == 0
    said = capsys.readouterr().out
    assert "first:\n  do        Do something\n  do twice  Do something\n\nthen:\n" in said


def test_the_list_of_ring_imports_no_other_package() -> None:
    program = (
        "import sys; from collectives.__main__ import COMMAND; COMMAND.main([], 'ring');"
        "assert not {'parallel', 'moe', 'bench', 'mpi4py', 'numba'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "moe train" in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_shells_complete_commands_and_options(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from collectives.__main__ import COMMAND as RING

    with pytest.raises(SystemExit, match="0"):
        RING.main(["--print-completion", shell], "ring")
    said = capsys.readouterr().out
    for word in ("launch", "pingpong", "generate", "--micro-batches", "--sequence-parallel"):
        assert word in said, word


def test_bash_completes_commands_of_two_words_and_their_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from collectives.__main__ import COMMAND as RING

    with pytest.raises(SystemExit):
        RING.main(["--print-completion", "bash"], "ring")
    script = capsys.readouterr().out
    for line in ("ring mem", "ring moe tr", "ring moe train --mic", "ring bench ping"):
        place = line.count(" ")
        script += f"\nCOMP_WORDS=({line}); COMP_CWORD={place}; _shtab_ring; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    completed = ["memory", "train", "--micro-batches", "pingpong"]
    assert done.stdout.splitlines() == completed, done.stderr
