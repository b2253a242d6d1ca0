"""The generated documentation: written, found stale, and not touched without need."""

from __future__ import annotations

import json

import pytest

from bench import docs, published
from bench.__main__ import main


def command(root, *options: str) -> int:
    return main(["docs", "--root", str(root), *options])


def test_the_repository_is_up_to_date():
    assert main(["docs", "--check"]) == 0


def test_stale_files_are_noticed_and_then_written(tmp_path, capsys):
    readme, (begin, end) = tmp_path / "README.md", docs.markers("algorithms")
    readme.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    assert command(tmp_path, "--check") == 1
    assert capsys.readouterr().err.count("is out of date; run python -m bench docs") == 2
    assert "old" in readme.read_text(), "--check writes nothing"
    assert command(tmp_path) == 0
    assert command(tmp_path, "--check") == 0
    assert readme.read_text().startswith(f"before\n{begin}\n| collective | algorithms |")
    assert readme.read_text().endswith(f"{end}\nafter\n")


def test_one_changed_character_is_stale(tmp_path):
    assert command(tmp_path) == 0
    path = tmp_path / "docs" / "algorithms.md"
    path.write_text(path.read_text().replace("`p - 1`", "`p - 2`", 1))
    assert command(tmp_path, "--check") == 1


def test_a_readme_without_markers_is_left_alone(tmp_path):
    (tmp_path / "README.md").write_text("nothing to see\n")
    assert command(tmp_path) == 0
    assert (tmp_path / "README.md").read_text() == "nothing to see\n"


def test_what_cannot_be_generated_is_said(tmp_path, capsys):
    assert command(tmp_path / "missing") == 2
    assert f"bench: there is no folder {tmp_path / 'missing'}" in capsys.readouterr().err
    (tmp_path / "README.md").write_text(docs.markers("algorithms")[0])
    assert command(tmp_path) == 2
    assert "bench: <!-- algorithms:begin --> is not followed by" in capsys.readouterr().err


def test_a_missing_end_marker_is_refused():
    begin, _ = docs.markers("algorithms")
    with pytest.raises(ValueError, match="is not followed by"):
        docs.with_section(begin, "algorithms", "text")


# The tables of speed


def speed_result(mpi: str, ratio: float, size: int = 8, *, is_met: bool | None = True) -> dict:
    cells = ["all-reduce", "plan", "8 B", "not slower", f"{ratio:.3f}", "-", "met"]
    if is_met is None:
        cells[4:] = ["-", "-", "not measured: lost"]
    goal = {
        "cells": cells,
        "value": None if is_met is None else ratio,
        "worst": size,
        "met": is_met,
    }
    seconds = {"native": ratio * 2e-6, "plan": 2e-6, "call": 4e-6}
    seconds |= {"fresh native": 120e-6, "fresh call": 60e-6}
    cases = [{"collective": "all_reduce", "size": size, "seconds": seconds}]
    return {"mpi": mpi, "goals": [goal], "jobs": {"pair": {"cases": cases}}}


def written(folder, *results: dict) -> list[str]:
    paths = [folder / f"{number}.json" for number in range(len(results))]
    for path, result in zip(paths, results, strict=True):
        path.write_text(json.dumps(result))
    return ["--speed", *map(str, paths)]


def readme_with(folder, *names: str):
    readme = folder / "README.md"
    readme.write_text("\n".join(line for name in names for line in docs.markers(name)) + "\n")
    return readme


def test_the_tables_of_speed_have_a_column_for_each_mpi(tmp_path):
    readme = readme_with(tmp_path, "speed", "bandwidth")
    files = written(tmp_path, speed_result("Open MPI 5.0", 1.5),
        speed_result("MPICH 4.3", 0.5, is_met=False))  # fmt: skip
    assert command(tmp_path, "--check", *files) == 1
    assert command(tmp_path, *files) == 0 and command(tmp_path, "--check", *files) == 0
    text = readme.read_text()
    assert "| what | by | sizes | wanted | Open MPI | MPICH |" in text
    assert "| all-reduce | plan | 8 B | not slower | **1.500** | 0.500 |" in text
    fresh = "120 | 60.0 | 2.00"
    cells = f"3.0 | 2.0 | 1.50 | 4.0 | 0.75 | {fresh} | 1.0 | 2.0 | 0.50 | 4.0 | 0.25 | {fresh} |"
    assert f"| 8 B | {cells}" in text


def test_without_files_the_tables_of_speed_stay(tmp_path):
    readme = readme_with(tmp_path, "speed")
    files = written(tmp_path, speed_result("MPICH 4.3", 1.5))
    assert command(tmp_path, *files) == 0
    before = readme.read_text()
    assert command(tmp_path) == 0 and readme.read_text() == before


def test_what_was_not_measured_is_told(tmp_path):
    readme = readme_with(tmp_path, "speed")
    assert command(tmp_path, *written(tmp_path, speed_result("MPICH 4.3", 1, is_met=None))) == 0
    assert "| not slower | not measured: lost |" in readme.read_text()


def test_a_worst_size_is_named():
    goal = {"cells": [*"abcd", "0.9", "16 B", "missed"], "value": 0.9, "worst": 16, "met": False}
    assert published.goal_cell(goal) == "0.9 at 16 B"


@pytest.mark.parametrize(("size", "targets"), [(16, "sizes"), (8, "goals")])
def test_runs_that_do_not_go_together_are_refused(tmp_path, capsys, size, targets):
    readme = readme_with(tmp_path, "speed", "bandwidth")
    before, other = readme.read_text(), speed_result("MPICH 4.3", 1.0, size)
    if targets == "goals":
        other["goals"][0]["cells"][3] = "much faster"
    assert command(tmp_path, *written(tmp_path, speed_result("Open MPI 5.0", 1.0), other)) == 2
    assert f"are not of the same {targets}" in capsys.readouterr().err
    assert readme.read_text() == before


@pytest.mark.parametrize("content", [None, "no JSON", "[]", "{}"])
def test_other_files_are_refused(tmp_path, capsys, content):
    path = tmp_path / "speed.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as stop:
        command(tmp_path, "--speed", str(path))
    assert stop.value.code == 2 and "speed.json" in capsys.readouterr().err
