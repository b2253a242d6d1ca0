"""The tune command on two real ranks: what it writes can be loaded, and decides."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import numpy as np
import pytest

import collectives
from bench.choosing.tune import COMMAND
from collectives.launch import launch
from collectives.selection.decisions import Decisions, Ranks
from collectives.selection.machine_file import Fitted, as_json
from collectives.simulation import Link, Machine

pytestmark = [pytest.mark.ranks(n=2), pytest.mark.on_open_mpi, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[3]
QUICK = ["-b", "8", "-e", "64K", "-f", "8192", "--seconds", "1"]
LIMIT = 724  # between 8 and 65536


def run(*arguments: str, num_ranks: int = 2) -> subprocess.CompletedProcess[str]:
    return launch(num_ranks, arguments, env={"PYTHONPATH": str(ROOT)}, timeout=100, capture=True)


def tune(output: Path, *more: str, num_ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """Run the part of the command that measures algorithms; test_machine.py runs the others."""
    options = ["--only", "algorithms", *QUICK, "--output", str(output), *more]
    return run("-m", "bench", "tune", *options, num_ranks=num_ranks)


def test_what_is_measured_is_written_and_can_be_loaded(tmp_path):
    path = tmp_path / "decisions.json"
    numbers = tmp_path / "numbers.json"
    job = tune(path, "--json", str(numbers))
    assert job.returncode == 0, job.stdout + job.stderr
    (measured,) = Decisions.from_json(path.read_text()).measured.values()
    assert set(measured.tables) == set(collectives.algorithms.collectives())
    assert {row.largest for rows in measured.tables.values() for row in rows} <= {LIMIT, math.inf}
    assert measured.facts["dtype"] == "float32" and measured.facts["mpi"] in job.stdout
    printed = json.loads(numbers.read_text())
    assert set(printed["tables"]) == set(measured.tables)
    least, most = printed["tables"]["all_reduce"]
    rows = measured.tables["all_reduce"]
    assert (least["bytes"], most["bytes"]) == (8, 65536)
    assert (least["best"], most["best"]) == (rows[0].labels[0], rows[-1].labels[0])
    assert f"{least['us']:.2f}" in job.stdout and f"{most['us']:.2f}" in job.stdout

    def loaded(comm: collectives.Communicator) -> tuple[str, str]:
        comm.load_decisions(path)
        told = comm.explain("all_reduce", np.zeros(2, np.float32))
        return told.chosen, told.reason.partition(":")[0]

    best = measured.tables["all_reduce"][0].labels[0]
    assert collectives.run(loaded, 2) == [(best, "table measured on 2 ranks")] * 2


def test_what_is_not_measured_again_stays(tmp_path):
    path = tmp_path / "decisions.json"
    tables = {"barrier": ["tree", "dissemination"], "scan": ["linear"]}
    known = {
        "facts": {"mpi": "an older one"},
        "tables": {name: [{"up_to": None, "best": best}] for name, best in tables.items()},
    }
    fitted = as_json(Fitted({}, Machine({"same_host": (Link(latency_seconds=1.0),)})))
    path.write_text(json.dumps({"machine": fitted, "measured": {"2": known, "7": known}}))
    before = Decisions.from_json(path.read_text()).measured
    job = tune(path, "--collective", "barrier")
    assert job.returncode == 0, job.stdout + job.stderr
    after = Decisions.from_json(path.read_text()).measured
    assert json.loads(path.read_text())["machine"] == fitted
    two = Ranks(2)
    assert after[Ranks(7)] == before[Ranks(7)]
    assert after[two].tables["scan"] == before[two].tables["scan"]
    assert after[two].tables["barrier"] != before[two].tables["barrier"], "one is never reached"
    assert after[two].facts["mpi"] != "an older one"


def test_what_is_measured_on_devices_is_apart(tmp_path):
    path = tmp_path / "decisions.json"
    host = {"facts": {}, "tables": {"exscan": [{"up_to": None, "best": ["doubling"]}]}}
    path.write_text(json.dumps({"machine": None, "measured": {"2": host}}))
    program = str(Path(__file__).with_name("tune_program.py"))
    options = ["--device", "cuda", "--collective", "exscan", "--output", str(path)]
    job = run(program, *QUICK, "-e", "8", *options)
    assert job.returncode == 0, job.stdout + job.stderr
    decisions = Decisions.from_json(path.read_text())
    assert decisions.measured[Ranks(2)].tables["exscan"][0].labels == ("doubling",)
    (two,) = decisions.on_devices.values()
    assert two.facts["arrays"] == "fake" and set(two.tables) == {"exscan"}
    labels = {label for row in two.tables["exscan"] for label in row.labels}
    on_device = collectives.choose("exscan", None, 2, 8, decisions=decisions, on_device=True)
    assert on_device.label in labels and "measured on devices of 2 ranks" in on_device.reason
    assert collectives.choose("exscan", None, 2, 8, decisions=decisions).label == "doubling"
    assert "linear" in job.stdout, "the built-in rule for devices"


def test_a_call_that_would_be_staged_is_not_measured(tmp_path):
    """Nothing is written."""
    path = tmp_path / "decisions.json"
    program = str(Path(__file__).with_name("tune_program.py"))
    options = ["--device", "cuda", "--collective", "exscan", "--output", str(path)]
    job = run(program, *QUICK, *options, "-d", "longdouble")
    assert job.returncode == 1 and "the call would be staged" in job.stderr, job.stderr
    assert not path.exists()


REFUSED = {
    "wrong.json": "decisions are not JSON",
    "missing/new.json": "there is no folder",
    "new.json -d bool": "op 'sum' is not defined for dtype bool",
    "new.json -b 1M": "the least size, 1048576, is greater than the greatest, 65536",
    "new.json --only check": "--only check: {folder}/new.json has no machine to check",
    "new.json --only algorithms --check": "--only algorithms: {folder}/new.json has no machine",
    "new.json --device cuda --check": "--device cuda measures algorithms only; predictions are",
    "new.json --json {folder}/missing/numbers.json": "there is no folder",
}
PROGRAM = """
import sys
from bench.__main__ import main

def status(line):
    try:
        return main(["tune", *line.split()])
    except SystemExit as stop:
        return stop.code

statuses = [status(line) for line in sys.argv[1:]]
sys.exit(set(statuses) != {2})
"""


def test_what_cannot_be_measured_is_said_at_once_and_leaves_the_file_alone(tmp_path):
    (tmp_path / "wrong.json").write_text("{")
    lines, sentences = (
        [text.format(folder=tmp_path) for text in texts] for texts in (REFUSED, REFUSED.values())
    )
    job = run("-c", PROGRAM, *(" ".join([*QUICK, "--output", f"{tmp_path}/{x}"]) for x in lines))
    assert job.returncode == 0, job.stdout + job.stderr
    said = job.stderr.splitlines()
    assert [sum(text in line for line in said) for text in sentences] == [
        sentences.count(text) for text in sentences
    ]
    assert "us" not in job.stdout.split(), "no table of times"
    assert (tmp_path / "wrong.json").read_text() == "{"
    assert [path.name for path in tmp_path.iterdir()] == ["wrong.json"]


def test_one_rank_has_nothing_to_choose(tmp_path):
    job = tune(tmp_path / "decisions.json", num_ranks=1)
    assert job.returncode == 2 and "on one rank there is nothing to choose" in job.stderr


@pytest.mark.parametrize(
    "more", [["--collective", "allreduce"], ["-d", "object"], ["-e", "0"], ["--only", "nothing"]]
)
def test_options_without_a_meaning_are_refused(more, capsys):
    with pytest.raises(SystemExit) as stop:
        COMMAND.main(more)
    assert stop.value.code == 2
    assert "error:" in capsys.readouterr().err
