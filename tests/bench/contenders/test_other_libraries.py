"""Calls on a device beside those of other libraries, which may fail, hang or be wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.__main__ import main
from bench.calls import start_ranks
from bench.commands.jobs import environment
from bench.contenders.contender import NATIVE, NCCL, RIVALS, THROUGH_HOST, UNTRIED, WORKS
from bench.contenders.nccl import SWITCH, usable
from bench.provenance import provenance
from bench.results import plot
from bench.results.files import result
from bench.results.measurement import FORMS, least_copied, measurement
from bench.timing.quartiles import Quartiles, Samples
from bench.workloads.collective import Case
from collectives.launch import TIMED_OUT, launch
from docs.generate import measured

pytestmark = [pytest.mark.ranks(n=2), pytest.mark.on_open_mpi, pytest.mark.slow]

PROGRAM = str(Path(__file__).with_name("other_libraries_program.py"))
FAULTS = (
    "right",
    "old",
    "wrong",
    "hanging",
    "failing on one",
    "not connecting",
    "connecting without one",
)
SUMMARY = {"collective": "scan", "size": 8, "best": "ring", "best_seconds": 1e-6, "call": 2e-6}
LATE = "it was not done after 2 s"
Result = dict[str, Any]


def job(folder: Path, *faults: str) -> subprocess.CompletedProcess[str]:
    return launch(2, [PROGRAM, str(folder), *faults], timeout=100, env=environment(), capture=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rivals")
    done = job(folder, *FAULTS)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    (folder / "said.txt").write_text(done.stdout)
    return folder


def read(folder: Path, name: str) -> Result:
    result: Result = json.loads((folder / f"{name}.json").read_text())
    return result


def wrong(result: Result, name: str) -> dict[int, set[int]]:
    """By size, the numbers of wrong elements of a contender in both forms."""
    return {
        row["size"]: {row[form]["wrong"] for form in FORMS if row[form]}
        for row in result["rows"]
        if row["name"] == name
    }


ALL_RIGHT = {1024: {0}, 65536: {0}}


def test_other_libraries_are_measured_and_checked_beside_ours(folder: Path) -> None:
    result = read(folder, "right")
    for name in ("call", NCCL, THROUGH_HOST):
        assert wrong(result, name) == ALL_RIGHT
    assert result["left_out"] == {NATIVE: UNTRIED}
    assert (result["devices"], result["links"], result["mps"]) == (1, "peer", False)
    assert result["copy_rate"] > 0
    assert all(row[form]["of_copy"] > 0 for row in result["rows"] for form in FORMS)


def test_every_collective_that_nccl_has_is_measured_beside_mpi_on_devices(folder: Path) -> None:
    result = read(folder, "all")
    assert result["left_out"] == {} and result["wrong"] == 0
    names: dict[str, set[str]] = {}
    for row in result["rows"]:
        names.setdefault(row["collective"], set()).add(row["name"])
        is_nccl_in_place = row["collective"] == "all_to_all" and row["name"] == NCCL
        assert (row["in_place"] is None) == is_nccl_in_place
    assert names.pop("scan") == {"call", THROUGH_HOST, NATIVE}
    assert len(names) == 7 and all(contenders == {"call", *RIVALS} for contenders in names.values())
    assert "# NCCL: not measured, there is no scan" in (folder / "said.txt").read_text()


def test_wrong_results_of_another_library_are_counted(folder: Path) -> None:
    result = read(folder, "wrong")
    assert wrong(result, NCCL) == {1024: {1}, 65536: {1}}
    assert wrong(result, "call") == wrong(result, THROUGH_HOST) == ALL_RIGHT


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("old", "several ranks use one GPU, which takes NCCL 2.30 or newer, not 2.29"),
        ("failing on one", "rank 1: RuntimeError: NCCL_ERROR_INTERNAL_ERROR: internal error"),
        ("not connecting", "RuntimeError: NCCL_ERROR_SYSTEM_ERROR: no route"),
        ("connecting without one", "rank 1: RuntimeError: NCCL_ERROR_SYSTEM_ERROR: no route"),
        ("hanging", LATE),
    ],
)
def test_a_library_that_fails_is_left_out_from_then_on_and_the_run_goes_on(
    folder: Path, fault: str, why: str
) -> None:
    result = read(folder, fault)
    assert result["left_out"] == {NCCL: why, NATIVE: UNTRIED}
    assert wrong(result, NCCL) == ({1024: {0}} if fault == "hanging" else {})
    assert wrong(result, "call") == wrong(result, THROUGH_HOST) == ALL_RIGHT
    assert f"# NCCL: left out, {why}\n" in (folder / "said.txt").read_text()


def test_what_cannot_be_ended_ends_the_job_with_a_sentence(tmp_path: Path) -> None:
    done = job(tmp_path, "endless")
    assert done.returncode not in (0, TIMED_OUT), f"{done.stdout}\n{done.stderr}"
    assert f"bench: NCCL hangs and cannot be ended, so the job is ({LATE})" in done.stderr


def test_lines_of_devices_are_drawn_and_written_to_tables(folder: Path) -> None:
    read_result = result(str(folder / "right.json"))
    ((title, lines),) = plot.grouped(read_result, None).items()
    assert title.startswith("all_reduce on 2 ranks on one device, float32") and set(lines) == {
        "call",
        NCCL,
        THROUGH_HOST,
    }
    path = folder / "drawn.svg"
    assert main(["plot", str(folder / "right.json"), "--out", str(path)]) == 0
    assert all(name in path.read_text() for name in lines)


def test_a_table_has_the_best_of_ours_beside_the_others(folder: Path) -> None:
    form = {"seconds": 4e-6, "busbw": 2.0, "of_copy": 0.25}
    faster = form | {"seconds": 3e-6, "of_copy": 0.5}
    times = {"ring": form, "linear": faster, "call": form | {"seconds": 5e-6}, NCCL: form}
    rows = [
        {"collective": "scan", "size": 1024, "name": name, "out_of_place": timing, "in_place": None}
        for name, timing in times.items()
    ]
    facts = {"ranks": 2, "devices": 1, "mps": True, "links": "no driver", "copy_rate": 1.5e12}
    steps = {
        "provenance": provenance() | {"gpu": "GPU", "cupy": "14.0"},
        "devices 2": facts | {"rows": rows, "left_out": {NATIVE: "why"}, "summary": []},
        "collectives": {"summary": [SUMMARY], "ranks": 2, "mpi": "MPI 5"},
    }
    path = folder / "gpu.json"
    path.write_text(json.dumps(steps))
    lines = measured.gpu_section(str(path)).splitlines()
    assert lines[0] == (
        "2 ranks on one device, with MPS; staged all the same: no driver;"
        " a copy on it moves 1500 GB/s:"
    )
    assert lines[4] == "| scan | 1 KiB | 3.0 (linear) | 5.0 | 4.0 | - | - | 2.0 | 50.0% |"
    assert lines[6] == "native was left out: why." and "| scan | 1.0 (ring) | 2.0 |" in lines
    del steps["devices 2"]
    path.write_text(json.dumps(steps))
    assert measured.gpu_section(str(path)).startswith(f"{measured.NOT_BESIDE}\n\n| collective |")


@pytest.mark.parametrize(
    ("collective", "num_bytes"),
    [
        ("all_reduce", 64),
        ("reduce_scatter", (64 + 16) / 2),
        ("all_gather", (16 + 64) / 2),
        ("all_to_all", 64),
        ("gather", (16 + 64) / 2),
        ("broadcast", 32),
    ],
)
def test_the_busiest_rank_must_read_its_input_and_write_its_result(
    collective: str, num_bytes: float
) -> None:
    case = Case(collective, 3, 4, 16, np.dtype("float32"))
    assert least_copied(case) == num_bytes
    samples = Samples((Quartiles(2.0, 2.0, 2.0),) * 4, 1)
    row = measurement(case, NCCL, None, samples, 0, average=3, noise=0.0, rate=128.0)
    assert row.of_copy == num_bytes / 2 / 128


def module(monkeypatch: pytest.MonkeyPatch, **named: Any) -> None:
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", SimpleNamespace(**named))  # type: ignore[arg-type]


def test_why_nccl_cannot_be_used_is_known_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", None)  # type: ignore[arg-type]
    assert usable(is_shared=False)[1].startswith("CuPy has no NCCL (")
    module(monkeypatch, available=False)
    assert usable(is_shared=False) == (None, "CuPy finds no NCCL library")
    module(monkeypatch, available=True, get_version=lambda: 23000)
    assert usable(is_shared=False)[1] == ""
    assert SWITCH in usable(is_shared=True)[1]
    monkeypatch.setenv(SWITCH, "1")
    assert usable(is_shared=True)[1] == ""
    module(monkeypatch, available=True, get_version=lambda: 21805)
    assert "not 2.18" in usable(is_shared=True)[1] and usable(is_shared=False)[1] == ""


@pytest.mark.parametrize(
    ("status", "word"),
    [
        (0, WORKS),
        (TIMED_OUT, "a job that tried it on arrays of a GPU was not done after 60 s"),
        (139, "a job that tried it on arrays of a GPU ended with status 139: rank 1 crashed"),
    ],
)
def test_mpi_is_tried_on_devices_in_a_job_of_its_own(
    status: int, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def launch(size: int, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        started.append(command)
        is_trial = command[1] == "bench.calls.mpi_on_device"
        return subprocess.CompletedProcess(command, status * is_trial, "", "x\nrank 1 crashed\n")

    monkeypatch.setattr(start_ranks, "launch", launch)
    words = ["all_reduce", "--device", "cuda", "--native"]
    assert main([*words, "-g", "2"]) == 0
    trial, measuring = started
    assert trial == ["-m", "bench.calls.mpi_on_device", *words]
    assert measuring[: len(words) + 3] == ["-m", "bench", *words, f"--device-mpi={word}"]
    for others in (words[:3], [*words, "--device-mpi", "works"]):
        started.clear()
        assert main([*others, "-g", "2"]) == 0 and len(started) == 1, "nothing is to be tried"
