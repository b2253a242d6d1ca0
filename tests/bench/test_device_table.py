"""The table of collectives on devices: its pure parts, and a job of two ranks on the fake GPU."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.device_results import (
    DEFAULT,
    STAGED,
    THROUGH_HOST,
    DeviceCase,
    as_dict,
    bytes_to_copy,
    cases_of,
    short,
    title,
)
from bench.docs import measured
from bench.docs.provenance import provenance
from bench.jobs import environment
from collectives.launch import launch

PROGRAM = str(Path(__file__).with_name("device_program.py"))
SECONDS = {STAGED: 9e-6, DEFAULT: 4e-6, "one_shot": 3e-6, "ring": 5e-6, THROUGH_HOST: 1e-6}
CASE = DeviceCase("all_reduce", 1024, "two_shot", SECONDS, {}, 2048, 2e-6)
FACTS = {"ranks": 2, "devices": "one device", "mps": False, "links": "peer", "mpi": "MPI 5"}


def test_the_best_is_an_algorithm_that_reads_the_memory_of_others() -> None:
    assert CASE.best == ("one_shot", 3e-6)
    alone = CASE._replace(seconds=SECONDS | {DEFAULT: 2e-6})
    assert alone.best == ("two_shot", 2e-6), "the default goes by the name of its algorithm"


def test_a_line_has_the_case_and_microseconds() -> None:
    assert CASE.cells == ["all_reduce", "1 KiB", "9.0", "4.0", "3.0 (one_shot)", "1.0", "2.0"]
    assert [short(9.94e-5), short(1.2345e-3)] == ["99.4", "1234"]


@pytest.mark.parametrize(
    ("collective", "num_bytes"),
    [
        ("all_reduce", 4 * 64),
        ("reduce_scatter", (4 + 1) * 32),
        ("all_gather", (1 + 4) * 32),
        ("all_to_all", 4 * 64),
        ("broadcast", 4 * 32),
    ],
)
def test_a_copy_moves_as_many_bytes_as_all_ranks_must(collective: str, num_bytes: int) -> None:
    assert bytes_to_copy(collective, 4, 64) == num_bytes


def test_the_title_says_whether_all_was_staged_after_all() -> None:
    assert title(FACTS) == "2 ranks on one device, without MPS"
    said = title(FACTS | {"mps": True, "links": "no driver"})
    assert said == "2 ranks on one device, with MPS; staged all the same: no driver"


def written(folder: Path, *, has_table: bool) -> str:
    """A gpu.json, as before there were tables of devices or as now."""
    summary = [
        {"collective": "scan", "size": 1024, "best": "ring", "best_seconds": 1e-6, "call": 2e-6}
    ]
    found: dict[str, Any] = {
        "provenance": provenance(["bench"]) | {"gpu": "GPU", "cupy": "14.0"},
        "scan": {"summary": summary, "ranks": 2, "mpi": "MPI 5"},
    }
    if has_table:
        found["devices 2"] = as_dict(FACTS, [CASE])
    path = folder / "gpu.json"
    path.write_text(json.dumps(found))
    return str(path)


def test_the_documents_have_the_table_if_the_file_has_it(tmp_path: Path) -> None:
    old = measured.gpu_section(written(tmp_path, has_table=False))
    new = measured.gpu_section(written(tmp_path, has_table=True))
    assert new.endswith(old) and old.startswith("| collective | 1 KiB: best | call |")
    lines = new.removesuffix(old).splitlines()
    assert lines[0] == "2 ranks on one device, without MPS:"
    assert lines[2].startswith("| collective | size | staged | auto | best of auto | get, MPI, set")
    assert lines[4] == "| all_reduce | 1 KiB | 9.0 | 4.0 | 3.0 (one_shot) | 1.0 | 2.0 |"


def run(path: Path, manner: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [PROGRAM, manner, "--sizes", "1K", "70K", "--json", str(path), *words]
    return launch(2, command, timeout=80, env=environment(), capture=True)


def test_every_collective_is_measured_on_two_ranks(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    done = run(path, "right")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = json.loads(path.read_text())
    assert (found["ranks"], found["arrays"], found["links"]) == (2, "fake", "peer")
    cases = list(cases_of(found))
    names = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"]
    assert [(case.collective, case.size) for case in cases] == [
        (name, size) for name in names for size in (1024, 71680)
    ]
    for case in cases:
        assert {STAGED, DEFAULT, THROUGH_HOST} < set(case.seconds)
        assert min(case.copy_seconds, *case.seconds.values()) > 0
        assert not any(case.wrong.values()) and case.best[1] > 0
        assert f"({case.best[0]})" in done.stdout
    assert "wrong: nothing" in done.stdout


def test_what_is_wrong_is_named_and_fails(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    done = run(path, "wrong", "--collectives", "all_gather")
    assert done.returncode == 1, f"{done.stdout}\n{done.stderr}"
    assert "wrong: all_gather, get, MPI, set" in done.stdout
    for case in cases_of(json.loads(path.read_text())):
        assert [name for name, number in case.wrong.items() if number] == [THROUGH_HOST]
