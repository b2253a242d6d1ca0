"""The overlap command: its arithmetic, its words, and one small run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.overlap.other_work import KINDS
from bench.overlap.results import Overlap, cores_in_words
from collectives.launch import launch

pytestmark = [pytest.mark.ranks(n=2), pytest.mark.on_open_mpi, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[3]


def overlap(at_once: float, *, progress: str | None = None, slices: int = 1) -> Overlap:
    """Of an all-reduce of 4 s and a product of 5 s."""
    return Overlap("product", progress, slices, 4.0, 5.0, 9.0, at_once, wrong=0)


@pytest.mark.parametrize(
    ("at_once", "hidden"), [(9.0, 0.0), (6.0, 0.75), (5.0, 1.0), (10.0, -0.25)]
)
def test_the_time_that_was_saved_is_hidden(at_once, hidden):
    assert overlap(at_once).hidden == hidden


def test_a_way_says_who_lets_the_call_go_on():
    ways = [overlap(9.0, progress=p, slices=s) for p in (None, "thread") for s in (1, 16)]
    assert [(way.who, way.what) for way in ways] == [
        ("nobody", "product, one piece"),
        ("test()", "product, 16 slices"),
        ("a thread", "product, one piece"),
        ("a thread and test()", "product, 16 slices"),
    ]


def test_a_thread_without_a_core_is_said_to_have_none():
    assert cores_in_words(8, 4) == "8 cores for 4 ranks, 2 for each"
    assert "1.75 for each: a thread without a core" in cores_in_words(7, 4)


def run(size: int, *options: str):
    command = ["-m", "bench", "overlap", "--size", "256K", "-n", "3", *options]
    return launch(size, command, env={"PYTHONPATH": str(ROOT)}, timeout=100, capture=True)


@pytest.mark.parametrize("beside", [["product"], ["sleep", "loop"]])
def test_every_way_is_measured(tmp_path, beside):
    options = [word for name in beside for word in ("--beside", name)]
    job = run(2, "--json", str(tmp_path / "overlap.json"), *options)
    assert job.returncode == 0, job.stdout + job.stderr
    result = json.loads((tmp_path / "overlap.json").read_text())
    assert result["ranks"] == 2 and result["cores"] >= 1
    assert list(result["amounts"]) == beside
    assert all(amount % 16 == 0 for amount in result["amounts"].values())
    ways = [(way["beside"], way["progress"], way["slices"]) for way in result["ways"]]
    assert ways == [(name, p, s) for name in beside for s in (1, 16) for p in (None, "thread")]
    for way in result["ways"]:
        assert way["wrong"] == 0
        assert min(way[name] for name in ("all_reduce", "other", "in_turn", "at_once")) > 0


@pytest.mark.parametrize("kind", KINDS.values())
def test_slices_make_up_the_whole_of_the_work(kind):
    done: list[int] = []
    other = kind(64)
    if kind.name == "product":
        other.out.fill(0)
    other.run(16, lambda: done.append(1))
    assert len(done) == 16
    if kind.name == "product":
        assert (other.out == 64).all()


def test_an_unknown_kind_of_work_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["overlap", "--beside", "lunch"])
    assert stop.value.code == 2 and "invalid choice" in capsys.readouterr().err


def test_one_rank_has_nothing_to_hide():
    job = run(1)
    assert job.returncode == 2
    assert "nothing to communicate" in job.stderr
