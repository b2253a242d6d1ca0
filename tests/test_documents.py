"""The documents are true: examples run, links lead somewhere, commands exist, README is short."""

from __future__ import annotations

import json
import re
from ast import literal_eval
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest

import collectives
from bench.__main__ import COMMANDS as BENCH_COMMANDS
from collectives import algorithms
from collectives.launch import launch
from parallel import train
from tests.pages import PAGES, ROOT, blocks, outside_of_blocks

README = (ROOT / "README.md").read_text()
MAX_WORDS = 1500


EXAMPLE, EXTENSION = blocks(ROOT / "README.md")
TRAINING, *DIVIDED = blocks(ROOT / "docs" / "training.md")


def run(example: str, num_ranks: int, tmp_path: Path) -> CompletedProcess[str]:
    script = tmp_path / "example.py"
    script.write_text(example)
    env = {"PYTHONPATH": str(ROOT)}
    return launch(num_ranks, [str(script)], timeout=60, env=env, capture=True)


# Examples


def test_the_example_runs(tmp_path: Path) -> None:
    done = run(EXAMPLE, 4, tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(EXAMPLE.strip().splitlines()) <= 12
    lines = sorted(done.stdout.split("\n"))
    assert "rank 2 of 4 has the sum 6.0" in lines
    assert "0 6.0 example all_reduce 12 6000000" in lines
    assert "3 6.0 example reduce_scatter 6 3000000" in lines


def test_on_one_rank_the_example_shows_a_sum_and_sends_nothing(tmp_path: Path) -> None:
    assert run(EXAMPLE, 1, tmp_path).stdout == "rank 0 of 1 has the sum 0.0\n"


def test_an_algorithm_of_ones_own_takes_fifteen_lines(tmp_path: Path) -> None:
    done = run(EXTENSION, 3, tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(EXTENSION.strip().splitlines()) <= 15
    grid, *_ = blocks(ROOT / "README.md", "text")
    assert done.stdout.count(grid) >= 1 and done.stdout.count("[3. 3.]") == 3


def test_a_test_of_traffic_passes_and_fails_as_shown() -> None:
    path = ROOT / "docs" / "testing.md"
    example, comparison = blocks(path)
    (refusal,) = blocks(path, "text")
    names: dict[str, Any] = {}
    exec(example, names)
    collectives.run(names["test_a_step_sends_its_gradients_once"], size=4)
    call = next(line for line in example.splitlines() if "comm.all_reduce" in line)
    exec(example.replace(call, f"{call}\n{call}"), names)
    with pytest.raises(AssertionError) as raised:
        collectives.run(names["test_a_step_sends_its_gradients_once"], size=4)
    assert f"AssertionError: {raised.value}" == refusal.strip()
    exec(comparison, names)


def test_without_its_second_half_it_is_refused_as_shown(tmp_path: Path) -> None:
    lines = EXTENSION.splitlines()
    (second,) = (number for number, line in enumerate(lines) if "size - 1, 0, -1" in line)
    done = run("\n".join(lines[:second] + lines[second + 2 :]), 1, tmp_path)
    _, refusal, *_ = blocks(ROOT / "README.md", "text")
    assert done.returncode != 0 and refusal in done.stderr


def test_the_training_example_runs(tmp_path: Path) -> None:
    done = run(TRAINING, 2, tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = sorted(done.stdout.strip().splitlines())
    assert first.split()[:2] == ["0", second.split()[1]] and "'gradients': " in first


def test_the_examples_of_divided_models_print_what_one_rank_computes(tmp_path: Path) -> None:
    done = run("\n".join(DIVIDED), 1, tmp_path)
    assert done.returncode == 0, done.stderr
    alone, *lines = done.stdout.splitlines()
    of_ranks = [line for line in lines if line.startswith("[") and "." in line]
    for line in of_ranks:
        np.testing.assert_allclose(literal_eval(line), float(alone), rtol=1e-12)
    printed = [line.strip("[]").split(", ") for line in of_ranks]
    assert [len(each) for each in printed] == [2, 4, 2]  # tensor, data and context, pipe
    others = [line for line in lines if line not in of_ranks]
    assert others == ["27 3 [4, 4, 4, 4]", "[True, True]", "rowwise 0.201", "tensorwise 13.032"]


def test_the_traffic_of_the_readme_is_what_the_command_prints(tmp_path: Path) -> None:
    _, _, table = blocks(ROOT / "README.md", "text")
    words = ["-m", "parallel.train", "--mesh", "data=4", "--zero", "2", "--steps", "20"]
    done = launch(4, [*words, "--layers", "2", "--hidden", "64"], timeout=100, capture=True)
    assert done.returncode == 0, done.stderr
    printed = {cells(line) for line in done.stdout.splitlines()}
    shown = [cells(line) for line in table.splitlines() if line.startswith("| ")]
    assert len(shown) == 5
    # What MPI observes depends on the MPI; what is predicted and recorded does not.
    for row in shown[1:]:
        if row[1] != "(together)":  # a sum is printed only where MPI counts
            assert row[:6] in {each[:6] for each in printed}
            assert row[7:9] in {each[7:9] for each in printed if each[:2] == row[:2]}


def test_the_simulated_step_with_experts_takes_what_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = ROOT / "docs" / "simulation.md"
    (example,) = blocks(page)
    names: dict[str, Any] = {}
    exec(example, names)
    assert capsys.readouterr().out in blocks(page, "text")
    assert "expert" in names["svg"]


@pytest.mark.parametrize("module", ["pipeline show", "pipeline compare", "plan"])
def test_what_training_shows_is_what_the_command_prints(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Perhaps without some of its lines."""
    pages = blocks(ROOT / "docs" / "training.md", "text")
    (shown,) = (page for page in pages if page.startswith(f"$ python -m parallel.{module} "))
    command, *lines = shown.splitlines()
    _, _, _, name, *arguments = command.split()
    assert import_module(f"{name}.__main__").main(arguments) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(lines) > 5 and [line for line in lines if line not in printed] == []


# The run of "Together" in docs/training.md, on threads.
TOGETHER = [
    "--threads",
    "8",
    "--mesh",
    "pipe=2,data=2,tensor=2",
    "--micro-batches",
    "8",
    "--sequence-parallel",
    "--ranks-per-host",
    "4",
    "--steps",
    "1",
    "--hidden",
    "64",
]


def test_the_traffic_by_axis_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    pages = blocks(ROOT / "docs" / "training.md", "text")
    (shown,) = (page for page in pages if page.startswith("By axis"))
    assert train.main([*TOGETHER, "--zero", "1"]) == 0
    printed = capsys.readouterr().out.splitlines()
    *lines, dots, observed = shown.splitlines()
    assert dots == "..." and observed.startswith("predicted = recorded = observed")
    assert len(lines) == 12 and [line for line in lines if line not in printed] == []


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_what_each_stage_of_zero_sends_and_keeps_is_what_is_shown(
    zero: int, tmp_path: Path
) -> None:
    text = (ROOT / "docs" / "training.md").read_text()
    rows = [cells(line) for line in text.partition("| bytes | ZeRO-1 |")[2].splitlines()[2:]]
    shown = {row[0]: int(row[zero].rpartition("= ")[2].replace(",", "")) for row in rows[:5]}
    result = tmp_path / "result.json"
    assert train.main([*TOGETHER, "--zero", str(zero), "--json", str(result)]) == 0
    run = json.loads(result.read_text())
    kept, (_, sent) = run["ranks_kept"][0], run["traffic"]["axes"]["data"]
    counted = [kept[name][1] for name in ("parameters", "gradients", "optimizer", "buffers")]
    assert list(shown.values()) == [sum(sent[0]), *counted]  # of rank 0


def cells(line: str) -> tuple[str, ...]:
    """The cells of a printed table's line."""
    return tuple(cell.strip() for cell in line.strip("|\n ").split("|"))


def test_other_pages_have_no_examples_that_nobody_runs() -> None:
    with_python = {path.name for path in PAGES if blocks(path)}
    generated = {"api.md", "api_moe.md", "api_parallel.md"}
    # Those of `architecture` and `CONTRIBUTING` are fragments.
    assert with_python - generated == {
        "README.md",
        "simulation.md",
        "training.md",
        "testing.md",
        "torch.md",  # by tests/test_torch_jobs.py
        "architecture.md",
        "architecture_training.md",
        "CONTRIBUTING.md",
    }


# Links


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors of a page's headings, as Markdown makes them."""
    headings = re.findall(r"^#+ (.+)$", outside_of_blocks(path.read_text()), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings)


def broken_links(path: Path) -> Iterator[str]:
    """The links of a page that lead to no file or no heading."""
    text = outside_of_blocks(path.read_text())
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("https://", "http://")):
            continue
        target, _, heading = link.partition("#")
        other = (path.parent / target).resolve() if target else path
        if not other.exists() or (heading and heading not in anchors(other)):
            yield link


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(path: Path) -> None:
    assert list(broken_links(path)) == []


def test_broken_links_are_noticed(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("# One `two`\n[a](#one-two) [b](#three) [c](b.md) [d](a.md#one-two)\n")
    assert list(broken_links(page)) == ["#three", "b.md"]


def test_the_readme_links_every_page() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert pages <= {Path(link).name for link in re.findall(r"\]\(([^)#\s]+)", README)}


# Commands and length


def test_every_command_of_make_exists() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    documents = "".join(path.read_text() for path in PAGES)
    commands = re.findall(r"(?:^|`)(?:\w+=\w+ )?make (\w+)", documents, re.MULTILINE)
    assert {"demo", "test", "gpu"} <= set(commands) <= targets


def unknown_commands(text: str) -> set[str]:
    """Modules and commands of bench that a document names and that do not exist."""
    modules = set(re.findall(r"-m\s+((?:collectives|parallel|moe|bench|examples)[\w.]*)", text))
    named = set(re.findall(r"-m\s+bench (\w+)", text))
    known = {*BENCH_COMMANDS, *algorithms.collectives(), "all", "COLLECTIVE"}
    return {name for name in modules if find_spec(name) is None} | (named - known)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_exists(path: Path) -> None:
    assert unknown_commands(path.read_text()) == set()


def test_unknown_commands_are_noticed() -> None:
    text = "python -m collectives.launch -n 2 -m bench fly; python -m collectives.land"
    assert unknown_commands(text) == {"fly", "collectives.land"}


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= MAX_WORDS
