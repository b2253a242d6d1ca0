"""`ring` lists the commands; each explains itself, fits 80 columns and writes JSON."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from collectives.__main__ import COMMAND as RING
from collectives.__main__ import main
from collectives.console import Command, summary
from docs.generate.options import CHECKOUT, commands, with_inner

CALL = "all_reduce ring --ranks 4 --bytes 1K --format goal"
STEP = "--mesh data=2 --topology hosts:2x1 --layers 1 --hidden 8 --heads 2"
# Commands with an output file; {} is the file.
WRITING = [
    ("collectives.export.__main__", f"{CALL} -o {{}}"),
    ("collectives.export.__main__", f"{CALL} --platform {{}}"),
    ("collectives.simulate", "all_reduce --ranks 2 --picture {}"),
    ("parallel.export", "--ranks 2 --format goal --layers 1 --hidden 8 --heads 2 -o {}"),
    ("parallel.simulate", f"{STEP} --picture {{}}"),
    ("parallel.pipeline.__main__", "show 1f1b --svg {}"),
    ("parallel.pipeline.__main__", "show 1f1b --csv {}"),
    ("parallel.train", "--threads 2 --json {}"),
    ("parallel.train", "--threads 2 --trace {}"),
    ("parallel.train", "--threads 2 --save {}"),
    ("moe.train", "--threads 2 --moe switch --json {}"),
    ("moe.train", "--threads 2 --moe switch --save-routing {}"),
    ("moe.generate", "--threads 2 --json {}"),
    ("examples.images.__main__", "--threads 2 --save {}"),
    ("bench.__main__", "all_reduce -g 2 -J {}"),
    ("bench.__main__", "pingpong -g 2 -J {}"),
    *[
        ("bench.__main__", f"{name} --json {{}}")
        for name in ("demo", "speed", "strategies", "moe", "balance", "torch")
    ],
    ("bench.__main__", "balance --svg {}"),
]

ROOT = Path(__file__).parent.parent


COMMANDS = {
    name: command
    for name, command in commands().items()
    if isinstance(command, Command) and name.startswith("ring ")
}
# Commands that print no table, or only in the ranks that they start.
WITHOUT_TABLES = {
    *("ring launch", "ring doctor", "ring flight", "ring warm", "ring export", "ring export step"),
    "ring bench plot",
}
# Those whose text is 80 columns wide or less, with small arguments.
NARROW = [
    "ring pipeline compare --stages 4 --micro-batches 8",
    "ring pipeline formulas",
    "ring plan --layers 8 --hidden 1024 --heads 16 --hosts 2x8 --batch 64",
    "ring memory --params 175e9 --ranks 1024",
    "ring memory --params 175e9 --ranks 1024 --optimizer sgd --dtype float64",
    "ring train --threads 4 --mesh pipe=2,data=2 --zero 1 --steps 2 --layers 2 --hidden 16",
    "ring train --threads 2 --strategy zero3 --offload host --steps 2 --layers 1 --hidden 16",
    "ring moe train --threads 2 --moe switch --mesh expert=2 --steps 2 --layers 2 --hidden 16",
    "ring moe plan --mesh data=2,expert=4 --hosts 2 --layers 2 --hidden 16",
    "ring moe generate --threads 2 --tokens 2 --layers 1 --hidden 16",
    "ring show zero3 --ranks 4",
    "ring simulate all_reduce --ranks 8 --topology hosts:4x2 --algorithm ring,swing",
    "ring simulate step --mesh pipe=2,data=2 --topology hosts:2x2 --layers 2 --hidden 8 --heads 2",
]


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_ring_lists_every_command_with_what_it_does(words: list[str]) -> None:
    program = [sys.executable, "-m", "collectives", *words]
    listed = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert listed.returncode == 0, listed.stderr
    text = " ".join(listed.stdout.split())
    for name in RING.commands:
        assert f" {name} {summary(str(RING.commands[name]))}" in text


def test_the_list_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    commands = capsys.readouterr().out.partition("run a program:")[2]
    assert max(map(len, commands.splitlines())) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([*name.split()[1:], "--help"])
    assert capsys.readouterr().out.startswith(f"usage: {name} ")


def lacking(name: str, command: Command, options: Sequence[str]) -> list[str]:
    """The options among some that the parsers of a command, or of commands in it, lack."""
    parsers = with_inner(command.parser())
    return [
        f"{name}: {option}"
        for option in options
        for parse in parsers
        if option not in parse._option_string_actions
    ]


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - WITHOUT_TABLES))
def test_every_command_that_prints_a_table_has_json_and_wide(name: str) -> None:
    assert lacking(name, COMMANDS[name], ["--json", "--wide"]) == []


def test_a_command_without_json_is_noticed() -> None:
    command = Command("some", "Do.", lambda parse: None, lambda options: 0)
    assert lacking("some", command, ["--json"]) == ["some: --json"]


@pytest.mark.parametrize("line", NARROW)
@pytest.mark.slow
def test_text_is_80_columns_wide(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(line.split()[1:]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [text for text in lines if len(text) > 80] == []


def test_text_that_is_wider_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "compare", "--wide"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) > 80


@pytest.mark.parametrize("line", NARROW)
def test_json_alone_is_printed_if_it_goes_to_standard_output(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*line.split()[1:], "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("module", "words"), WRITING)
def test_a_file_that_cannot_be_written_is_refused_at_once(
    module: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In one sentence with status 2, before anything is computed and any rank is started."""

    def start(*_: object, **__: object) -> None:
        raise AssertionError("a rank or a step was started")

    for launcher in ("bench.calls.start_ranks.launch", "bench.commands.jobs.launch"):
        monkeypatch.setattr(launcher, start)
    monkeypatch.setattr("parallel.run.trainer.Trainer.step", start)
    (tmp_path / "a_file").touch()
    path = tmp_path / "a_file" / "x"
    with pytest.raises(SystemExit) as stop:
        sys.exit(importlib.import_module(module).COMMAND.main(words.format(path).split()))
    assert stop.value.code == 2
    said = capsys.readouterr()
    (sentence,) = [line for line in (said.err + said.out).splitlines() if str(path) in line]
    assert "cannot be written" in sentence or "Not a directory" in sentence


def with_main(*packages: str) -> set[str]:
    """The modules of these packages that can be run."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        for package in packages
        for path in (ROOT / package).rglob("*.py")
        if '__name__ == "__main__"' in path.read_text()
    }


def test_every_module_with_a_command_is_listed() -> None:
    # Programs that a command starts; a user only where that command cannot (docs/clusters.md).
    started = {
        "collectives.launch.bootstrap",
        "collectives.doctor.exchange",
        "bench.speed.first_call",
        "bench.speed.ranks",
        "bench.gpu",
        "bench.calls.mpi_on_device",
        "bench.gpu.mps",
        "bench.experts.dispatch_ranks",
        "bench.torch.backend_ranks",
        "bench.torch.first_all_reduce",
        "bench.torch.traffic_ranks",
    }
    runnable = with_main("collectives", "parallel", "moe", "bench") - started
    modules = {command.module for command in COMMANDS.values()}
    assert {"collectives", "bench"} <= runnable <= {"collectives", "bench", *modules}
    assert {*map(str, RING.commands.values())} <= runnable


def test_every_example_is_in_the_documents() -> None:
    folders = {f"examples.{path.parent.name}" for path in (ROOT / "examples").glob("*/__init__.py")}
    assert with_main("examples") == folders
    assert with_main("examples", "docs") == set(CHECKOUT)
