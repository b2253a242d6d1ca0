"""The speed command: what it demands, that it tells what is missed, and one quick run of it all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import goals, jobs, speed
from bench.__main__ import main
from bench.case import CALL, GLOO, MEMCPY, NATIVE, PLAN
from bench.goals import Goal, Overhead, Timed
from bench.limit import Limit
from collectives.launch import launch
from collectives.mpirun import MpiNotFound

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("perf_program.py")
TINY, HUGE = 8, 64 << 20
OF_OPEN_MPI, OF_MPICH = goals.demands(is_open_mpi=True), goals.demands(is_open_mpi=False)


def timed(size: int = TINY, cores: float = 1.0, wrong: int = 0, **seconds: float) -> Timed:
    return Timed("all_reduce", size, "ring", seconds, dict.fromkeys(seconds, wrong), cores)


def found(demand, *cases: Timed, **reasons: str) -> goals.Finding:
    times = {(demand.job, case.collective, case.size): case for case in cases}
    return goals.finding(demand, times, reasons)


def goal(least: float, *sizes: int, **more) -> Goal:
    return Goal("pair", "all_reduce", sizes or (TINY,), least, **more)


# What is demanded


def test_a_goal_may_be_met_by_the_plan_and_missed_by_the_call():
    result = found(goal(3), timed(native=3.0, plan=1.0, call=1.001))
    assert result.met == {PLAN: True, CALL: False}
    assert speed.cells(result) == [
        "all-reduce", "8 B", "3.000", "2.997", "at least 3x faster", "yes / NO"
    ]  # fmt: skip


def test_ratios_are_averaged_geometrically():
    result = found(goal(1.5, 8, 32), timed(8, native=1, plan=4, call=1),
        timed(32, native=9, plan=1, call=1))  # fmt: skip
    assert result.found == pytest.approx({PLAN: 1.5, CALL: 3.0})


def test_at_most_so_much_slower():
    result = found(goal(1 / 1.5), timed(native=1.0, plan=1.49, call=1.51))
    assert result.met == {PLAN: True, CALL: False}
    assert result.demand.target == "at most 1.5x slower"


def test_who_is_not_judged_is_shown():
    result = found(goal(1, judged=(PLAN,)), timed(native=1.0, plan=0.9, call=2.0))
    assert result.met == {PLAN: True} and result.found[CALL] == 0.5
    assert speed.cells(result)[3:] == ["0.500", "by plan: not slower", "yes / -"]


def test_the_rival_is_the_one_named():
    case = timed(native=100.0, memcpy=1.0, plan=2.0, call=2.0)
    assert found(goal(1 / 1.2, rival=MEMCPY), case).met == {PLAN: False, CALL: False}


@pytest.mark.parametrize(("slowest", "is_met"), [(4.0, True), (4.1, False)])
def test_the_overhead_is_a_median_of_differences(slowest, is_met):
    cases = [timed(8, plan=1e-6, call=3e-6), timed(32, plan=9e-6, call=(9 + slowest) * 1e-6),
        timed(128, plan=5e-6, call=99e-6)]  # fmt: skip
    result = found(Overhead("all_reduce", (8, 32, 128), 4.0001e-6), *cases)
    assert result.met == {CALL: is_met}
    assert speed.cells(result)[2:4] == ["-", f"+{slowest:.2f} us"]


def test_an_overhead_without_a_target_is_only_told():
    result = found(Overhead("all_reduce", (TINY,)), timed(plan=1e-6, call=3e-6))
    assert result.met == {} and speed.cells(result)[4:] == ["-", "- / -"]


def test_what_was_not_measured_is_not_met():
    result = found(goal(50, rival=GLOO), pair=speed.NO_TORCH)
    assert result.met == {}
    assert speed.met_in_words(result) == "not measured: torch is not installed"


@pytest.mark.parametrize(
    ("what", "greatest", "of_open_mpi", "of_mpich"),
    [
        ("all-reduce", 1 << 10, "by plan: at most 1.5x slower", "by plan: not slower"),
        ("reduce", 16 << 20, "not slower", "at least 2x faster"),
        ("gather", 1 << 10, "by plan: at most 1.6x slower", "by plan: not slower"),
        ("gather", 16 << 20, "not slower", "not slower"),
        ("all-reduce, 4 ranks", HUGE, "at least 1.2x faster", "at least 1.2x faster"),
    ],
)
def test_what_is_demanded_depends_on_the_mpi(what, greatest, of_open_mpi, of_mpich):
    for demands, wanted in ((OF_OPEN_MPI, of_open_mpi), (OF_MPICH, of_mpich)):
        targets = [
            each.target for each in demands if (each.what, each.sizes[-1]) == (what, greatest)
        ]
        assert targets == [wanted]


def test_every_demand_has_its_cases():
    for demand in OF_OPEN_MPI:
        cases = goals.cases(OF_OPEN_MPI, demand.job)
        for size in demand.sizes:
            assert set(demand.contenders) <= set(cases[demand.collective, size])


def test_the_copy_and_the_mpi_library_are_timed_beside_each_other():
    names = goals.cases(OF_MPICH, goals.PAIR)["all_reduce", HUGE]
    assert sorted(names) == sorted([NATIVE, MEMCPY, PLAN, CALL])


def test_of_two_timings_the_less_disturbed_counts_but_every_wrong_element():
    first, second = timed(cores=0.7, wrong=2, plan=9.0), timed(cores=0.9, plan=8.0)
    assert goals.less_disturbed(first, second) == second._replace(wrong={PLAN: 2})
    assert goals.less_disturbed(second, first).seconds == second.seconds


# What limits it


def test_the_bytes_that_an_all_reduce_moves():
    n = 1000
    ring = Limit(2, timed(n, memcpy=1e-6, plan=2e-6, call=3e-6))
    assert ring.bandwidth == pytest.approx(4e9)  # 2 ranks that read and write n each
    assert ring.moved == 5 * n  # each sends n, gets n / 2 to combine and n / 2 to keep
    assert ring.seconds == pytest.approx(1.25e-6)
    doubling = Limit(2, ring.timed._replace(algorithm="recursive_doubling"))
    assert doubling.moved == 6 * n  # each sends n, reads n to combine it, and writes n


# The command


class FakeJobs:
    """Jobs of which one ends with wrong elements, one at its time limit."""

    def run(self, name: str, size: int, command: list[str]) -> tuple[int, dict]:
        wrong = {"cases": [timed(wrong=3, plan=1.0)._asdict()]}
        return {"pair": (1, wrong), "crowd": (124, {})}.get(name, (0, {}))


def test_jobs_that_failed_give_a_reason(monkeypatch):
    monkeypatch.setattr(speed, "find_spec", lambda name: None)
    assert speed.run_jobs(FakeJobs(), is_quick=True) == {
        "pair": "3 elements were wrong",
        "crowd": "exit status 124",
        "gloo": "torch is not installed",
    }


def test_without_mpi_what_to_install_is_said(monkeypatch, capsys):
    def find_mpirun():
        raise MpiNotFound("pip install one")

    monkeypatch.setattr(jobs, "find_mpirun", find_mpirun)
    assert main(["speed"]) == 2
    assert capsys.readouterr().out == "pip install one\n"


def test_a_quick_run_of_everything(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(speed, "find_spec", lambda name: None)  # PyTorch takes long to import
    path = tmp_path / "speed.json"
    assert main(["speed", "--quick", "--timeout", "100", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert len(result["goals"]) == len(OF_OPEN_MPI)
    reasons = {each["reason"] for each in result["goals"] if not each["found"]}
    assert reasons == {"torch is not installed"}
    cases = [case for job in result["jobs"].values() for case in job["cases"]]
    assert all(min(case["seconds"].values()) > 0 for case in cases)
    assert not any(any(case["wrong"].values()) for case in cases)
    shown = capfd.readouterr().out
    assert "at least 1.2x faster" in shown and "What limits the all-reduce of 64 KiB" in shown


def test_wrong_elements_fail(tmp_path):
    job = launch(4, [str(PROGRAM), str(tmp_path), "swept"], env={"PYTHONPATH": str(ROOT)},
        timeout=100, capture=True)  # fmt: skip
    assert job.returncode == 1
    for case in json.loads((tmp_path / "swept.json").read_text())["cases"]:
        assert {name: count > 0 for name, count in case["wrong"].items()} == {
            NATIVE: False, PLAN: True, CALL: True
        }  # fmt: skip
