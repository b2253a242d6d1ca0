"""The microbenchmark on two real ranks."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.calls import start_ranks
from collectives import algorithms
from collectives.launch import TIMED_OUT, launch
from tests.bench.parsing import parsed

pytestmark = [pytest.mark.ranks(n=2), pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = Path(__file__).with_name("collective_program.py")


def run(folder: Path, manner: str, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    program, env = [str(PROGRAM), str(folder), manner], {"PYTHONPATH": str(ROOT)}
    return launch(2, program, env=env, timeout=timeout, capture=True)


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    folder = tmp_path_factory.mktemp("right")
    job = run(folder, "right")
    assert job.returncode == 0, job.stdout + job.stderr
    return folder


@pytest.fixture
def uneven(right):
    names = ["scatter", "gather", "all_gather", "reduce_scatter", "all_to_all"]
    return {name: json.loads((right / f"{name} uneven.json").read_text()) for name in names}


def test_every_collective_is_measured_beside_mpi(right):
    for collective in algorithms.collectives():
        result = json.loads((right / f"{collective}.json").read_text())
        assert result["ranks"] == 2 and result["wrong"] == 0
        names = {row["name"] for row in result["rows"]}
        assert names == {*algorithms.names(collective), "call", "native"}
        forms = [form for row in result["rows"] for form in (row["out_of_place"], row["in_place"])]
        for form in filter(None, forms):
            assert form["wrong"] == 0 and form["samples"] == 2 and form["noise"] >= 0
            assert 0 < form["low"] <= form["seconds"] <= form["high"]
            assert form["fastest"] <= form["mean"] <= form["slowest"] == form["seconds"]


def test_uneven_blocks_are_measured_beside_mpi(uneven):
    for collective, result in uneven.items():
        num_bytes = 24 if collective == "all_to_all" else 280000  # 12 / 2 elements, and 70000
        assert {row["size"] for row in result["rows"]} == {num_bytes} and result["wrong"] == 0
        assert {row["name"] for row in result["rows"]} == {*algorithms.names(collective), "native"}


@pytest.mark.timeout(220)
@pytest.mark.on_open_mpi
def test_every_collective_on_a_device_is_measured(tmp_path):
    job = run(tmp_path, "device", timeout=200)
    assert job.returncode == 0, job.stdout + job.stderr
    for collective in set(algorithms.collectives()) - {"barrier"}:
        result = json.loads((tmp_path / f"{collective}.json").read_text())
        assert result["arrays"] == "fake" and result["wrong"] == 0
        names = {*algorithms.names(collective), "memcpy", "bound"}
        assert {row["name"] for row in result["rows"]} == names


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


def test_a_call_that_comes_too_late_fails_with_the_error_of_the_library(tmp_path):
    job = run(tmp_path, "late")
    assert job.returncode not in (0, TIMED_OUT), job.stdout + job.stderr
    assert re.search(r"bench: .* rank 1.*", job.stderr), job.stdout + job.stderr


def test_messages_between_two_ranks_are_measured_beside_mpi4py(right):
    result = json.loads((right / "links.json").read_text())
    assert [link["bytes"] for link in result["links"]] == [8, 65536] and result["ranks"] == 2
    for link in result["links"]:
        assert (link["pair"], link["link"], link["wrong"]) == ([1, 0], "same_host", 0)
        for engine in ("ours", "mpi4py"):
            exchange = link[engine]
            assert 0 < exchange["latency_low_seconds"] <= exchange["latency_seconds"]
            assert exchange["bandwidth_bytes_per_second"] > 0
            assert exchange["bidirectional_bytes_per_second"] > 0


def test_the_command_starts_its_own_ranks_and_measures_all_collectives_that_have_an_algorithm():
    options = ["-g", "2", "--algorithm", "ring,dissemination", "-r", "all", "--csv", "-m", "3"]
    sizes = ["-b", "64", "-e", "128", "-i", "64", "-n", "2", "-w", "0"]
    job = subprocess.run(
        [sys.executable, "-m", "bench", "all", *options, *sizes],
        cwd=ROOT,
        timeout=100,
        capture_output=True,
        text=True,
        check=False,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    rows = list(csv.DictReader(job.stdout.splitlines()))
    measured = {(row["collective"], row["name"]) for row in rows}
    assert measured == {
        (collective, name)
        for collective in algorithms.collectives()
        for name in {"ring", "dissemination"} & {*algorithms.names(collective)}
    }
    of_all_gather = [row["size"] for row in rows if row["collective"] == "all_gather"]
    assert of_all_gather == ["64", "64", "128", "128"]  # in both forms


def test_under_mpirun_the_command_starts_no_ranks_of_its_own(monkeypatch, capsys):
    monkeypatch.setenv("PMI_RANK", "0")
    with pytest.raises(SystemExit, match="2"):
        main(["all_reduce", "-g", "2"])
    assert "under mpirun leave it out" in capsys.readouterr().err


@pytest.mark.parametrize("is_terminal", [True, False])
def test_ranks_are_told_of_a_terminal(is_terminal, monkeypatch):
    def launch(size: int, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, int("--live" in command))

    monkeypatch.setattr(start_ranks, "launch", launch)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    assert main(["all_reduce", "-g", "2"]) == is_terminal


@pytest.mark.parametrize("words", ["-b 8 -g 4 -J x", "-g4 -b 8 -J x", "-b 8 -J x --ngpus=4"])
def test_the_ranks_run_the_rest_of_the_command_line(words):
    assert start_ranks.without_ranks(["scan", *words.split()]) == (
        4,
        ["scan", *["-b", "8", "-J", "x"]],
    )


@pytest.mark.parametrize(
    "command",
    [
        ["all_reduce", "-b", "eight"],
        ["all_reduce", "-i", "8", "-f", "2"],
        ["all_reduce", "--csv", "--format", "osu"],
        ["all_reduce", "-a", "4"],
        ["all_reduce", "-g", "0"],
        ["all", "--algorithm", "nonsense"],
        ["broadcast", "-r", "first"],
        ["pingpong", "--pairs", "1-1"],
        ["pingpong", "--pairs", "0"],
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
    + [[name, "--timeout"] for name in ("all_reduce", "pingpong")]
    + [[name, "--timeout"] for name in ("demo", "speed", "strategies")],
)
def test_what_is_no_time_is_refused(command, text, capsys):
    with pytest.raises(SystemExit) as stop:
        parsed([*command, text])
    assert stop.value.code == 2
    assert re.search(f"argument (-T/)?{command[1]}: ", capsys.readouterr().err)


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
    "all_reduce --sizes 8 64K -e 1M": "--sizes says which; leave out -b, -e, -i and -f",
    "broadcast -r 5": "root must be a rank from 0 to 1, got 5",
    "checked_mode -b 64 -e 8": "the least size, 64, is greater than the greatest, 8",
    "checked_mode -d bool": "op 'sum' is not defined for dtype bool",
    "broadcast --algorithm mine": "broadcast.mine, 2 ranks, root 0, segments=64: rank 1, round",
    "all_reduce --full": "--full adds columns to --format osu",
    "all_reduce --counts counts": "all_reduce has no blocks",
    "gather --counts counts -b 8": "leave out -b, -e, -i and -f",
    "gather --counts counts": "--counts: counts has 3 entries for 2 ranks",
    "all_to_all --counts counts": "counts has 1 rows",
    "gather --counts missing": "--counts: missing cannot be read",
    "gather --counts odd": "'-1' is not a number of elements",
    "gather --counts none": "none has no elements at all",
    "pingpong --pairs 0-5": "there is no rank 5 among 2 ranks",
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

def status(line):
    try:
        return main(line.split())
    except SystemExit as stop:
        return stop.code

sys.exit({status(line) for line in sys.argv[1:]} != {2})
"""


def test_what_cannot_be_measured_is_said_before_measuring(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {"counts": "1 2 3", "odd": "-1 2", "none": "0 0"}.items():
        (tmp_path / name).write_text(text)
    env = {"PYTHONPATH": str(ROOT)}
    job = launch(2, ["-c", REFUSING, *REFUSED], env=env, timeout=60, capture=True)
    assert job.returncode == 0, job.stdout + job.stderr
    said = [line for line in job.stderr.splitlines() if line.startswith("python -m bench ")]
    for line, sentence in zip(said, REFUSED.values(), strict=True):
        assert sentence in line
    assert "algbw" not in job.stdout and "|" not in job.stdout, "nothing was measured"


def test_options_of_algorithms_are_read_as_the_library_reads_them():
    command = ["all_gather", "--algorithm", "bruck( radix=4 ),pairwise", "--algorithm", "ring"]
    with pytest.raises(SystemExit):
        parsed(command)
    command[2] = "bruck( radix=4 ),recursive_doubling"
    assert parsed(command).names == ["bruck(radix=4)", "recursive_doubling", "ring"]


def test_names_of_datatypes_are_those_of_nccl_and_of_numpy():
    named = {name: parsed(["all_reduce", "-d", name]).dtypes for name in ("float", "half", "<f8")}
    assert named == {"float": ["float32"], "half": ["float16"], "<f8": ["float64"]}
    assert len(parsed(["all_reduce", "-d", "all"]).dtypes) == 10


def test_reading_the_command_line_does_not_start_mpi():
    code = "import sys, bench.__main__; sys.exit('mpi4py.MPI' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
