"""The generated documentation: written, found stale, and not touched without need."""

from __future__ import annotations

import json

import pytest

from bench.provenance import provenance
from collectives import algorithms
from docs.generate import measured
from docs.generate.__main__ import COMMAND
from docs.generate.formulas import readable
from docs.generate.pictures import num_messages, picture
from docs.generate.sections import with_section


def markers(name: str) -> tuple[str, str]:
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def command(root, *options: str) -> int:
    """Run it; return the status, also where it is refused."""
    try:
        return COMMAND.main(["--root", str(root), *options])
    except SystemExit as stop:
        return int(stop.code)


def test_the_repository_is_up_to_date():
    assert COMMAND.main(["--check"]) == 0


def test_stale_files_are_noticed_and_then_written(tmp_path, capsys):
    readme, (begin, end) = tmp_path / "README.md", markers("algorithms")
    readme.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    assert command(tmp_path, "--check") == 1
    said = capsys.readouterr().err
    assert "README.md is out of date; run make docs" in said
    assert "all_reduce.md is out of date; run make docs" in said
    assert "old" in readme.read_text(), "--check writes nothing"
    assert command(tmp_path) == 0
    assert command(tmp_path, "--check") == 0
    assert readme.read_text().startswith(f"before\n{begin}\n| collective | algorithms |")
    assert readme.read_text().endswith(f"{end}\nafter\n")


def test_one_changed_character_is_stale(tmp_path):
    assert command(tmp_path) == 0
    path = tmp_path / "docs" / "algorithms" / "broadcast.md"
    path.write_text(path.read_text().replace("| p - 1 |", "| p - 2 |", 1))
    assert command(tmp_path, "--check") == 1


def test_a_readme_without_markers_is_left_alone(tmp_path):
    (tmp_path / "README.md").write_text("nothing to see\n")
    assert command(tmp_path) == 0
    assert (tmp_path / "README.md").read_text() == "nothing to see\n"


def test_what_cannot_be_generated_is_said(tmp_path, capsys):
    assert command(tmp_path / "missing") == 2
    assert f"docs.generate: there is no folder {tmp_path / 'missing'}" in capsys.readouterr().err
    (tmp_path / "README.md").write_text(markers("algorithms")[0])
    assert command(tmp_path) == 2
    assert "docs.generate: <!-- algorithms:begin --> is not followed by" in capsys.readouterr().err


def test_a_missing_end_marker_is_refused():
    begin, _ = markers("algorithms")
    with pytest.raises(ValueError, match="is not followed by"):
        with_section(begin, "algorithms", "text")


# The tables of speed

FACTS = {
    "date": "2026-11-23",
    "commit": "1234567",
    "machine": "2 cores of a processor",
    "python": "3.12.0",
    "numpy": "2.4.0",
}


def speed_result(mpi: str, ratio: float, size: int = 8, *, is_met: bool | None = True) -> dict:
    cells = ["all-reduce", "plan", "8 B", "not slower", f"{ratio:.3f}", "-", "met"]
    if is_met is None:
        cells[4:] = ["-", "-", "not measured: lost"]
    goal = {
        "cells": cells,
        "value": None if is_met is None else ratio,
        "worst": size,
        "met": is_met,
        "measure": "times faster",
    }
    seconds = {"native": ratio * 2e-6, "plan": 2e-6, "call": 4e-6}
    seconds |= {"fresh native": 120e-6, "fresh call": 60e-6}
    cases = [{"collective": "all_reduce", "size": size, "seconds": seconds}]
    jobs = {"pair": {"cases": cases}}
    return {"mpi": mpi, "goals": [goal], "jobs": jobs, "provenance": FACTS}


def written(folder, *results: dict) -> list[str]:
    paths = [folder / f"{number}.json" for number in range(len(results))]
    for path, result in zip(paths, results, strict=True):
        path.write_text(json.dumps(result))
    return ["--speed", *map(str, paths)]


def readme_with(folder, *names: str):
    readme = folder / "README.md"
    readme.write_text("\n".join(line for name in names for line in markers(name)) + "\n")
    return readme


def test_the_tables_of_speed_have_a_column_for_each_mpi(tmp_path):
    readme = readme_with(tmp_path, "speed", "bandwidth")
    files = written(
        tmp_path, speed_result("Open MPI 5.0", 1.5), speed_result("MPICH 4.3", 0.5, is_met=False)
    )
    assert command(tmp_path, "--check", *files) == 1
    assert command(tmp_path, *files) == 0 and command(tmp_path, "--check", *files) == 0
    text = readme.read_text()
    assert "| what | by | sizes | measure | Open MPI | MPICH |" in text
    assert "| all-reduce | plan | 8 B | times faster | 1.500 | 0.500 |" in text
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
    assert "| times faster | not measured: lost |" in readme.read_text()


def test_a_worst_size_is_named():
    goal = {"cells": [*"abcd", "0.9", "16 B", "missed"], "value": 0.9, "worst": 16, "met": False}
    assert measured.goal_cell(goal) == "0.9 at 16 B"


@pytest.mark.parametrize(("size", "targets"), [(16, "sizes"), (8, "goals")])
def test_runs_that_do_not_go_together_are_refused(tmp_path, capsys, size, targets):
    readme = readme_with(tmp_path, "speed", "bandwidth")
    before, other = readme.read_text(), speed_result("MPICH 4.3", 1.0, size)
    if targets == "goals":
        other["goals"][0]["measure"] = "something else"
    assert command(tmp_path, *written(tmp_path, speed_result("Open MPI 5.0", 1.0), other)) == 2
    assert f"are not of the same {targets}" in capsys.readouterr().err
    assert readme.read_text() == before


@pytest.mark.parametrize("content", [None, "no JSON", "[]", "{}"])
def test_other_files_are_refused(tmp_path, capsys, content):
    path = tmp_path / "speed.json"
    if content is not None:
        path.write_text(content)
    assert command(tmp_path, "--speed", str(path)) == 2
    assert "speed.json" in capsys.readouterr().err


# When and with what they were measured


def test_a_note_says_when_on_what_and_with_which_versions():
    note = measured.note(FACTS, ["Open MPI 5.0.11", "MPICH 4.3"])
    for fact in (*FACTS.values(), "Open MPI 5.0.11", "MPICH 4.3"):
        assert fact in note


def test_a_measurement_writes_what_the_note_needs():
    assert provenance().keys() == FACTS.keys()
    assert all(provenance().values())


@pytest.mark.parametrize("what", ["commit", "machine"])
def test_runs_of_different_origin_are_refused(tmp_path, capsys, what):
    other = speed_result("MPICH 4.3", 1.0)
    other["provenance"] = FACTS | {what: "another"}
    assert command(tmp_path, *written(tmp_path, speed_result("Open MPI 5.0", 1.0), other)) == 2
    assert f"are not of the same {what}" in capsys.readouterr().err


def test_the_table_of_strategies_is_written_from_its_file(tmp_path):
    path, readme = tmp_path / "strategies.json", readme_with(tmp_path, "strategies")
    facts = FACTS | {"mpi": "openmpi 5.0.11"}
    path.write_text(json.dumps({"provenance": facts, "costs": {"ddp": [0.75, 0, 1, 1, 38.2]}}))
    assert command(tmp_path, "--strategies", str(path)) == 0
    assert "| ddp | 0.750 | 0.000 | 1.000 | 1.000 | 38 |" in readme.read_text()
    assert "Measured on 2026-11-23 at commit 1234567" in readme.read_text()
    path.write_text("{}")
    assert command(tmp_path, "--strategies", str(path)) == 2


# Formulas and pictures


@pytest.mark.parametrize(
    ("formula", "written_out"),
    [
        ("2 * f * n", "2 (p - 1)/p n"),
        ("(p - 2 + N) * n / N", "(p - 2 + N) n/N"),
        ("p * (p // 2)", "p ⌊p/2⌋"),
        ("ceil((p - 1) / m)", "⌈(p - 1)/m⌉"),
        ("n - (p - 1)", "n - (p - 1)"),
        ("n / (2 * N)", "n/(2 N)"),
        ("n * (p != P)", "n [p ≠ P]"),
        ("n / p * sum(2**i for i in range(k))", "n/p sum over i < k of (2^i)"),
        ("q if p > 2 else 1", "q if p > 2, else 1"),
        (None, "-"),
    ],
)
def test_formulas_are_written_in_ordinary_notation(formula, written_out):
    assert readable(formula) == written_out


def test_a_picture_has_an_arrow_for_each_message():
    schedules = [algorithms.schedule("all_reduce", "ring", rank=r, size=4) for r in range(4)]
    drawn = picture(schedules, "ring & <others>")
    assert num_messages(schedules) == 24 == drawn.count("marker-end")
    assert drawn.count("rank ") == 4 and drawn.count("round ") == 6
    assert drawn.count("#b3542d)") == 12, "half of the messages are combined"
    assert "<title>ring &amp; &lt;others&gt;</title>" in drawn


def test_every_algorithm_says_when_to_use_it():
    entries = [
        algorithms.info(c, name) for c in algorithms.collectives() for name in algorithms.names(c)
    ]
    assert [entry.label for entry in entries if not entry.use.startswith("Use it ")] == []
