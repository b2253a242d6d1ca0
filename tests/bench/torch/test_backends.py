"""The torch command: its tables, its refusals, what its checks find, and one quick run of it all.

Collected where torch is installed (`conftest.py`).
"""

from __future__ import annotations

import argparse
import json
from types import SimpleNamespace

import pytest

from bench.__main__ import main
from bench.commands.jobs import environment
from bench.contenders.contender import GLOO
from bench.contenders.process_groups import NCCL
from bench.torch import backends, first_all_reduce, results
from bench.torch.results import CALLS, DDP, FSDP, PARTS, RING, START, Both
from bench.torch.transformer import num_wrong
from collectives.launch import bootstrap, launch
from tests.bench.parsing import parsed

pytestmark = [pytest.mark.on_open_mpi, pytest.mark.ranks(n=2), pytest.mark.slow]

# Runs the first job, but the group of "ring" has no other rank.
ALONE = """
import sys
from torch import distributed
from bench.contenders import process_groups
from bench.torch import backend_ranks

join_all = process_groups.join_all

def join_alone(device):
    joined = join_all(device)
    alone, _ = distributed.new_subgroups(group_size=1)
    return joined | {"ring": alone}

process_groups.join_all = join_alone
sys.exit(backend_ranks.COMMAND.main(sys.argv[1:]))
"""


def both(amount: int, ring: float, gloo: float, wrong: int | None = 0) -> Both:
    return Both(amount, {RING: ring, GLOO: gloo}, wrong)


def options(*words: str) -> argparse.Namespace:
    return parsed(["torch", *words])


# The tables


def test_a_ratio_is_gloos_time_over_ours():
    assert both(8, ring=2.0, gloo=5.0).ratio == 2.5
    result = results.as_dict({DDP: [both(32, 1.0, 2.0), both(64, 1.0, 8.0)]})
    assert [case["ratio"] for case in result[DDP]] == [2.0, 8.0]
    assert result["geometric_mean"] == {DDP: pytest.approx(4.0)}


def test_beside_nccl_the_table_says_so():
    (made,) = [Both(8, {RING: 1.0, NCCL: 2.0}, 0)]
    assert made.ratio == 2.0
    assert results.table(PARTS[CALLS], [made]).heads == [
        "size (B)",
        "ring",
        "nccl",
        "nccl / ring",
        "wrong",
    ]


def test_the_start_is_not_measured_for_a_gpu_unless_it_is_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(first_all_reduce, "both", lambda *_: asked.append(START))
    jobs = SimpleNamespace(run=lambda name, ranks, words: (asked.extend(words), (0, {}))[1])
    backends.measured(jobs, options("--device", "cuda"))
    assert START not in asked and asked[asked.index("--device") + 1] == "cuda"
    backends.measured(jobs, options("--device", "cuda", "--part", "start"))
    assert asked[-1] == START


def test_the_table_has_a_line_for_each_case_and_one_for_the_mean():
    made = results.table(PARTS[CALLS], [both(8, 2e-6, 4e-6), both(64, 1e-6, 8e-6, wrong=3)])
    assert made.heads == ["size (B)", "ring", "gloo", "gloo / ring", "wrong"]
    assert made.rows == [
        (8, pytest.approx(2.0), pytest.approx(4.0), 2.0, 0),
        (64, pytest.approx(1.0), pytest.approx(8.0), 8.0, 3),
        ("geom. mean", None, None, pytest.approx(4.0), None),
    ]


def test_of_the_start_there_is_no_mean_and_no_check():
    made = results.table(PARTS[START], [both(2, 0.5, 1.0, wrong=None)])
    assert made.rows == [(2, 500.0, 1000.0, 2.0, "-")]


def test_only_parts_that_were_measured_have_tables():
    assert results.cases_in({}) == {}
    cases_by_part = results.cases_in({"mpi": "MPI", FSDP: [both(32, 1.0, 2.0)._asdict()]})
    assert cases_by_part == {FSDP: [both(32, 1.0, 2.0)]}
    cases_by_part[START] = []  # a job has failed
    assert list(results.tables(cases_by_part)) == [PARTS[FSDP].title]


# The command line


@pytest.mark.parametrize(
    "words",
    [
        ["--sizes", "8,many"],
        ["--sizes", ""],
        ["--hidden", "32,33"],
        ["--hidden", "0"],
        ["--part", "nccl"],
        ["-g", "0"],
        ["-n", "0"],
        ["--jobs", "0"],
        ["--json", "/no/such/folder/file"],
    ],
)
def test_options_without_a_meaning_are_refused(words, capsys):
    with pytest.raises(SystemExit) as stop:
        options(*words)
    assert stop.value.code == 2 and "error:" in capsys.readouterr().err


def test_without_torch_what_to_install_is_said(monkeypatch, capsys):
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        main(["torch"])
    assert capsys.readouterr().err == f"python -m bench torch: {backends.NO_TORCH}\n"


def test_the_ranks_get_the_options():
    words = backends.command([CALLS], options("--sizes", "8,1M", "--hidden", "64", "-n", "7"))
    assert words[:4] == ["-m", "bench.torch.backend_ranks", "--part", CALLS]
    given = dict(zip(words[4::2], words[5::2], strict=True))
    assert given["--sizes"] == "8,1048576" and given["--hidden"] == "64" and given["-n"] == "7"


# The start


class FakeJobs:
    """Jobs whose programs take 1 s, 2 s, ...; that of a number fails."""

    def __init__(self, failing: int = 0) -> None:
        self.failing, self.backends = failing, list[str]()

    def run(self, name: str, ranks: int, words: list[str]) -> tuple[int, dict]:
        self.backends.append(words[words.index("--backend") + 1])
        number = len(self.backends)
        return (1, {}) if number == self.failing else (0, {"seconds": float(number)})


def test_backends_take_turns_to_start_and_medians_count():
    jobs = FakeJobs()
    (case,) = first_all_reduce.both(jobs, ranks=2, count=5)
    pairs = [set(jobs.backends[i : i + 2]) for i in range(0, 10, 2)]
    assert pairs == [{RING, GLOO}] * 5
    third = {name: float(5 + jobs.backends[4:6].index(name)) for name in (RING, GLOO)}
    assert case == Both(2, third)


def test_a_start_that_fails_gives_no_times():
    assert first_all_reduce.both(FakeJobs(failing=2), ranks=2, count=5) == []


def test_gloo_is_told_its_ranks_as_torchrun_does(monkeypatch):
    for name in bootstrap.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(bootstrap.RANK_VARIABLES[-1], "1")
    given = first_all_reduce.as_torchrun(argparse.Namespace(ranks=3, port=1234))
    assert (given["RANK"], given["WORLD_SIZE"], given["MASTER_PORT"]) == ("1", "3", "1234")


# What is measured


def test_models_that_differ_are_counted():
    def losses(ring: float, gloo: float) -> dict:
        return {RING: SimpleNamespace(loss=ring), GLOO: SimpleNamespace(loss=gloo)}

    assert num_wrong(losses(5.0, 5.0)) == num_wrong(losses(5.0, 5.000001)) == 0
    assert num_wrong(losses(5.0, 5.01)) == num_wrong(losses(5.0, float("nan"))) == 1


def test_ranks_that_do_not_hear_of_each_other_fail(tmp_path):
    program, path = tmp_path / "alone.py", tmp_path / "times.json"
    program.write_text(ALONE)
    words = [str(program), "--json", str(path), *backends.QUICK]
    words += [word for part in (CALLS, DDP, FSDP) for word in ("--part", part)]
    done = launch(2, words, env=environment(), timeout=100, capture=True)
    assert done.returncode == 1, done.stdout + done.stderr
    cases_by_part = results.cases_in(json.loads(path.read_text()))
    assert cases_by_part.keys() == {CALLS, DDP, FSDP}
    for measured in cases_by_part.values():
        assert all(case.wrong for case in measured)


def test_a_quick_run_measures_everything_on_two_ranks(tmp_path, capfd):
    path = tmp_path / "torch.json"
    status = main(["torch", "-g", "2", "--quick", "--timeout", "100", "-J", str(path)])
    shown = capfd.readouterr()
    assert status == 0, shown
    result = json.loads(path.read_text())
    amounts = {name: [case["amount"] for case in result[name]] for name in PARTS}
    assert amounts == {CALLS: [8, 64 << 10], DDP: [32, 64], FSDP: [32, 64], START: [2]}
    for name in PARTS:
        assert PARTS[name].title in shown.out
        for case in result[name]:
            assert case["ratio"] == case["seconds"][GLOO] / case["seconds"][RING] > 0
            assert not case["wrong"]
    assert result["geometric_mean"].keys() == {CALLS, DDP, FSDP}
