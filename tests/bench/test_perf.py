"""The microbenchmark on two real ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import main, parsed
from collectives import algorithms
from collectives.launch import launch

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("perf_program.py")


def run(folder: Path, manner: str) -> subprocess.CompletedProcess[str]:
    env = {"PYTHONPATH": str(ROOT)}
    return launch(2, [str(PROGRAM), str(folder), manner], env=env, timeout=100, capture=True)


def test_every_collective_beside_mpi(tmp_path):
    job = run(tmp_path, "right")
    assert job.returncode == 0, job.stdout + job.stderr
    for collective in algorithms.collectives():
        result = json.loads((tmp_path / f"{collective}.json").read_text())
        assert result["ranks"] == 2 and result["wrong"] == 0
        names = {row["name"] for row in result["rows"]}
        assert names == {*algorithms.names(collective), "call", "native"}
        forms = [form for row in result["rows"] for form in (row["out_of_place"], row["in_place"])]
        assert all(form["seconds"] > 0 and form["wrong"] == 0 for form in forms if form)


def test_every_collective_on_a_device(tmp_path):
    job = run(tmp_path, "device")
    assert job.returncode == 0, job.stdout + job.stderr
    for collective in set(algorithms.collectives()) - {"barrier"}:
        result = json.loads((tmp_path / f"{collective}.json").read_text())
        assert result["arrays"] == "fake" and result["wrong"] == 0
        assert {row["name"] for row in result["rows"]} == set(algorithms.names(collective))


def test_wrong_elements_are_reported_and_fail(tmp_path):
    job = run(tmp_path, "wrong")
    assert job.returncode == 1
    result = json.loads((tmp_path / "all_reduce.json").read_text())
    wrong = {(row["name"], row["out_of_place"]["wrong"] > 0) for row in result["rows"]}
    names = algorithms.names("all_reduce")
    assert wrong == {*((name, True) for name in [*names, "call"]), ("native", False)}
    assert result["wrong"] > 0


def test_a_registered_algorithm_is_measured_by_its_name(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import collectives\n"
        "from collectives.algorithms import all_reduce\n"
        "collectives.algorithms.register('all_reduce', name='mine')(all_reduce.census)\n"
    )
    command = ["-m", "bench", "--import", "mine", "all_reduce", "--algorithm", "mine"]
    options = ["-b", "8", "-e", "8", "-n", "2", "-J", str(tmp_path / "result.json")]
    env = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    job = launch(2, [*command, *options], env=env, timeout=100, capture=True)
    assert job.returncode == 0, job.stdout + job.stderr
    (row,) = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert row["name"] == "mine" and row["out_of_place"]["wrong"] == 0


@pytest.mark.parametrize(
    "command",
    [
        ["all_reduce", "-b", "eight"],
        ["all_reduce", "-d", "object"],
        ["all_reduce", "--algorithm", "linaer"],
        ["all_reduce", "--algorithm", "ring(segments=8)"],
        ["all_gather", "--algorithm", "bruck(radix=1)"],
        ["scan", "-o", "avg"],
        ["broadcast", "-o", "sum"],
        ["barrier", "-b", "8"],
    ],
)
def test_options_without_a_meaning_are_refused(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main(command)
    assert stop.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["nan", "inf", "0", "-1", "soon"])
@pytest.mark.parametrize(
    "command",
    [[name, "--seconds"] for name in ("all_reduce", "tune")]
    + [[name, "--timeout"] for name in ("demo", "speed", "strategies")],
)
def test_what_is_no_time_is_refused(command, text, capsys):
    with pytest.raises(SystemExit) as stop:
        parsed([*command, text])
    assert stop.value.code == 2
    assert f"argument {command[1]}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["demo", "speed", "strategies"])
def test_a_file_that_cannot_be_written_is_refused_before_any_job(command, tmp_path, capsys):
    for path in (tmp_path / "missing" / "all.json", tmp_path):
        with pytest.raises(SystemExit) as stop:
            parsed([command, "--json", str(path)])
        assert stop.value.code == 2
        assert f"argument --json: {path} cannot be written" in capsys.readouterr().err


REFUSED = {
    "all_reduce -J missing/all.json": "missing/all.json cannot be written",
    "all_reduce -J .": ". cannot be written",
    "overlap --json missing/all.json": "missing/all.json cannot be written",
    "tune --output .": ". cannot be written",
    "all_reduce -d >f4 --native": "MPI has no numbers of another byte order (>f4)",
    "all_reduce --device cuda --native": "call gets no arrays of a GPU",
    "broadcast -r 5": "root must be a rank from 0 to 1, got 5",
    "check -b 64 -e 8": "the least size, 64, is greater than the greatest, 8",
    "check -d bool": "op 'sum' is not defined for dtype bool",
    "broadcast --algorithm mine": "broadcast.mine, 2 ranks, root 0, segments=64: rank 1, round",
    "tune --collective broadcast": "broadcast.mine, 2 ranks, root 0, segments=64: rank 1, round",
}
REFUSING = """
import sys
import collectives
from bench.__main__ import main
from collectives.algorithms import broadcast

@collectives.algorithms.register("broadcast", options={"segments": 1}, pieces="N")
def mine(rank, size, root, segments):
    rounds = [*broadcast.pipeline(rank, size, root, segments)]
    return iter(rounds[:-1] if segments > 32 else rounds)

statuses = [main(line.split()) for line in sys.argv[1:]]
sys.exit(set(statuses) != {2})
"""


def test_what_cannot_be_measured_is_said_before_measuring(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    env = {"PYTHONPATH": str(ROOT)}
    job = launch(2, ["-c", REFUSING, *REFUSED], env=env, timeout=60, capture=True)
    assert job.returncode == 0, job.stdout + job.stderr
    said = [line for line in job.stdout.splitlines() if line.startswith("bench: ")]
    for line, sentence in zip(said, REFUSED.values(), strict=True):
        assert sentence in line
    assert "algbw" not in job.stdout and "|" not in job.stdout, "nothing was measured"


def test_options_of_algorithms_are_read_as_the_library_reads_them():
    command = ["all_gather", "--algorithm", "bruck( radix=4 )", "--algorithm", "ring"]
    assert parsed(command).names == ["bruck(radix=4)", "ring"]


def test_reading_the_command_line_does_not_start_mpi():
    code = "import sys, bench.__main__; sys.exit('mpi4py.MPI' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
