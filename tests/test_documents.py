"""The README is true: its example runs and prints what it says, its files exist."""

from __future__ import annotations

import re
from pathlib import Path
from subprocess import CompletedProcess

from collectives.launch import launch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


EXAMPLE, EXTENSION, TRAINING = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(example: str, num_ranks: int, tmp_path: Path) -> CompletedProcess[str]:
    script = tmp_path / "example.py"
    script.write_text(example)
    env = {"PYTHONPATH": str(ROOT)}
    return launch(num_ranks, [str(script)], timeout=60, env=env, capture=True)


def test_the_example_runs(tmp_path: Path) -> None:
    done = run(EXAMPLE, 4, tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(EXAMPLE.strip().splitlines()) <= 12
    lines = sorted(done.stdout.split("\n"))
    assert "0 6.0 example all_reduce 12 6000000" in lines
    assert "3 6.0 example reduce_scatter 6 3000000" in lines


def test_an_algorithm_of_ones_own_takes_fifteen_lines(tmp_path: Path) -> None:
    done = run(EXTENSION, 3, tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(EXTENSION.strip().splitlines()) <= 15
    grid, *_ = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    assert done.stdout.count(grid) >= 1 and done.stdout.count("[3. 3.]") == 3


def test_the_training_example_runs(tmp_path: Path) -> None:
    done = run(TRAINING, 2, tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = sorted(done.stdout.strip().splitlines())
    assert first.split()[:2] == ["0", second.split()[1]] and "'gradients': " in first


def test_without_its_second_half_it_is_refused_as_shown(tmp_path: Path) -> None:
    lines = EXTENSION.splitlines()
    (second,) = (number for number, line in enumerate(lines) if "size - 1, 0, -1" in line)
    done = run("\n".join(lines[:second] + lines[second + 2 :]), 1, tmp_path)
    _, refusal, *_ = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    assert done.returncode != 0 and refusal in done.stderr


def test_every_link_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) >= 4
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_command_of_make_exists() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    documents = README + (ROOT / "CONTRIBUTING.md").read_text()
    commands = re.findall(r"(?:^|`)(?:MPI=\w+ )?make (\w+)", documents, re.MULTILINE)
    assert {"demo", "test"} <= set(commands) <= targets
