"""The torch command: its tables, its refusals, what its checks find, and one quick run of it all.

Collected where torch is installed (`conftest.py`).
"""

from __future__ import annotations

import argparse
import json
from types import SimpleNamespace

import pytest

from bench.__main__ import main, parsed
from bench.case import GLOO
from bench.jobs import environment
from bench.torch import cases, command, start
from bench.torch.cases import CALLS, DDP, FSDP, NCCL, PARTS, RING, START, Both
from bench.torch.steps import num_wrong
from collectives.launch import bootstrap, launch

# Runs the first job, but the group of "ring" has no other rank.
ALONE = """
import sys
from torch import distributed
from bench.torch import groups, ranks

join_all = groups.join_all

def join_alone(device):
    joined = join_all(device)
    alone, _ = distributed.new_subgroups(group_size=1)
    return joined | {"ring": alone}

groups.join_all = join_alone
sys.exit(ranks.main(sys.argv[1:]))
"""


def both(amount: int, ring: float, gloo: float, wrong: int | None = 0) -> Both:
    return Both(amount, {RING: ring, GLOO: gloo}, wrong)


def options(*words: str) -> argparse.Namespace:
    return parsed(["torch", *words])


def rows(table) -> list[tuple[str, ...]]:
    return list(zip(*(column.cells for column in table.columns), strict=True))


# The tables


def test_a_ratio_is_gloos_time_over_ours():
    assert both(8, ring=2.0, gloo=5.0).ratio == 2.5
    found = cases.as_dict({DDP: [both(32, 1.0, 2.0), both(64, 1.0, 8.0)]})
    assert [each["ratio"] for each in found[DDP]] == [2.0, 8.0]
    assert found["geometric_mean"] == {DDP: pytest.approx(4.0)}


def test_beside_nccl_the_table_says_so():
    (made,) = [Both(8, {RING: 1.0, NCCL: 2.0}, 0)]
    assert made.ratio == 2.0
    headers = [column.header for column in cases.table(PARTS[CALLS], [made]).columns]
    assert headers == ["size (B)", "ring", "nccl", "nccl / ring", "wrong"]


def test_the_start_is_not_measured_for_a_gpu_unless_it_is_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(start, "both", lambda *_: asked.append(START))
    jobs = SimpleNamespace(run=lambda name, ranks, words: (asked.extend(words), (0, {}))[1])
    command.measured(jobs, options("--device", "cuda"))
    assert START not in asked and asked[asked.index("--device") + 1] == "cuda"
    command.measured(jobs, options("--device", "cuda", "--part", "start"))
    assert asked[-1] == START


def test_the_table_has_a_line_for_each_case_and_one_for_the_mean():
    made = cases.table(PARTS[CALLS], [both(8, 2e-6, 4e-6), both(64, 1e-6, 8e-6, wrong=3)])
    assert [column.header for column in made.columns] == [
        "size (B)",
        "ring",
        "gloo",
        "gloo / ring",
        "wrong",
    ]
    assert rows(made) == [
        ("8", "2.00", "4.00", "2.00", "0"),
        ("64", "1.00", "8.00", "8.00", "3"),
        ("geom. mean", "", "", "4.00", ""),
    ]


def test_of_the_start_there_is_no_mean_and_no_check():
    made = cases.table(PARTS[START], [both(2, 0.5, 1.0, wrong=None)])
    assert rows(made) == [("2", "500.00", "1000.00", "2.00", "-")]


def test_only_parts_that_were_measured_have_tables():
    assert cases.found_in({}) == {}
    found = cases.found_in({"mpi": "MPI", FSDP: [both(32, 1.0, 2.0)._asdict()]})
    assert found == {FSDP: [both(32, 1.0, 2.0)]}
    found[START] = []  # a job has failed
    assert [title for title, _ in cases.tables(found)] == [PARTS[FSDP].title]


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
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert main(["torch"]) == 2
    assert capsys.readouterr().out == f"{command.NO_TORCH}\n"


def test_the_ranks_get_the_options():
    words = command.command([CALLS], options("--sizes", "8,1M", "--hidden", "64", "-n", "7"))
    assert words[:4] == ["-m", "bench.torch.ranks", "--part", CALLS]
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
    (found,) = start.both(jobs, ranks=2, count=5)
    pairs = [set(jobs.backends[i : i + 2]) for i in range(0, 10, 2)]
    assert pairs == [{RING, GLOO}] * 5
    third = {name: float(5 + jobs.backends[4:6].index(name)) for name in (RING, GLOO)}
    assert found == Both(2, third)


def test_a_start_that_fails_gives_no_times():
    assert start.both(FakeJobs(failing=2), ranks=2, count=5) == []


def test_gloo_is_told_its_ranks_as_torchrun_does(monkeypatch):
    for name in bootstrap.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(bootstrap.RANK_VARIABLES[-1], "1")
    given = start.as_torchrun(argparse.Namespace(ranks=3, port=1234))
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
    words = [str(program), "--json", str(path), *command.QUICK]
    words += [word for part in (CALLS, DDP, FSDP) for word in ("--part", part)]
    done = launch(2, words, env=environment(), timeout=100, capture=True)
    assert done.returncode == 1, done.stdout + done.stderr
    found = cases.found_in(json.loads(path.read_text()))
    assert found.keys() == {CALLS, DDP, FSDP}
    for measured in found.values():
        assert all(each.wrong for each in measured)


def test_a_quick_run_measures_everything_on_two_ranks(tmp_path, capfd):
    path = tmp_path / "torch.json"
    status = main(["torch", "-g", "2", "--quick", "--timeout", "100", "-J", str(path)])
    shown = capfd.readouterr()
    assert status == 0, shown
    found = json.loads(path.read_text())
    amounts = {name: [each["amount"] for each in found[name]] for name in PARTS}
    assert amounts == {CALLS: [8, 64 << 10], DDP: [32, 64], FSDP: [32, 64], START: [2]}
    for name in PARTS:
        assert PARTS[name].title in shown.out
        for each in found[name]:
            assert each["ratio"] == each["seconds"][GLOO] / each["seconds"][RING] > 0
            assert not each["wrong"]
    assert found["geometric_mean"].keys() == {CALLS, DDP, FSDP}
