"""`python -m collectives` lists the commands, and each of them explains itself."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from bench.docs.options import EXAMPLES
from collectives.__main__ import COMMANDS, about, lines

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


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_every_command_is_listed_with_what_it_does() -> None:
    listed = run("collectives")
    assert listed.returncode == 0, listed.stderr
    assert listed.stdout.splitlines() == list(lines())
    for module in COMMANDS:
        assert f"python -m {module}" in listed.stdout
        assert f"  {about(module)}:\n" in listed.stdout


@pytest.mark.parametrize("module", [*COMMANDS, *EXAMPLES])
def test_every_command_explains_itself(module: str) -> None:
    helped = run(module, "--help")
    assert helped.returncode == 0, helped.stderr
    assert helped.stdout.startswith("usage: ")


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

    for launcher in ("bench.own_job.launch", "bench.jobs.launch"):
        monkeypatch.setattr(launcher, start)
    monkeypatch.setattr("parallel.run.trainer.Trainer.step", start)
    (tmp_path / "a_file").touch()
    path = tmp_path / "a_file" / "x"
    with pytest.raises(SystemExit) as stop:
        sys.exit(importlib.import_module(module).main(words.format(path).split()))
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
        "bench.starting",
        "bench.sweep",
        "bench.gpu",
        "bench.device_mpi",
        "bench.mps",
        "bench.moe_ranks",
        "bench.torch.ranks",
        "bench.torch.start",
        "bench.torch.traffic_ranks",
    }
    commands = with_main("collectives", "parallel", "moe", "bench") - started
    assert commands == {"collectives", *COMMANDS}


def test_every_example_is_in_the_documents() -> None:
    folders = {f"examples.{path.parent.name}" for path in (ROOT / "examples").glob("*/__init__.py")}
    assert with_main("examples") == folders == set(EXAMPLES)
