"""The speed command: what it demands, that it tells what is missed, and one quick run of it all."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.commands import jobs
from bench.contenders.contender import (
    ASYNC,
    CALL,
    CHECKED,
    DROP_IN,
    DROP_IN_ASYNC,
    DROP_IN_PERSISTENT,
    FRESH,
    MEMCPY,
    NATIVE,
    NATIVE_FRESH,
    PLAN,
)
from bench.speed import command, first_call, goals, tables
from bench.speed.goals import (
    ABOVE,
    ALONE,
    AT_ONCE,
    COPY_RATE,
    CROWD,
    FASTER,
    GOALS,
    HIDDEN,
    IN_TURN,
    MPI4PY,
    OVERLAP,
    PAIR,
    RANKS,
    SHARE_ABOVE,
    TIME,
    WAYS,
    WITH_GLOO,
    Finding,
    Formula,
    Goal,
)
from bench.speed.memory_limit import Limit
from bench.speed.timed_case import Timed, less_disturbed
from collectives.launch import launch
from collectives.launch.mpirun import MpiNotFound
from tests.bench.parsing import parsed

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = Path(__file__).parents[1] / "calls/collective_program.py"
TINY, HUGE = 8, 64 << 20
BESIDE_MPI = (PLAN, NATIVE)


def timed(size: int = TINY, cores: float = 1.0, wrong: int = 0, **seconds: float) -> Timed:
    return Timed("all_reduce", size, "ring", seconds, dict.fromkeys(seconds, wrong), cores)


def goal(formula: Formula, who: tuple[str, ...], bound: float, *sizes: int, **more) -> Goal:
    return Goal("all_reduce", PAIR, sizes or (TINY,), formula, who, bound, **more)


def judged(goal: Goal, *cases: Timed, cores: int = 2, **reasons: str) -> Finding:
    times = {(goal.job, case.collective, case.size): case for case in cases}
    return goals.finding(goal, times, reasons, cores)


# What is demanded


@pytest.mark.parametrize(
    ("formula", "bound", "good", "bad", "verdict"),
    [
        (FASTER, 1, {PLAN: 1.0, NATIVE: 1.0}, {PLAN: 1.0, NATIVE: 0.9}, "10.0%"),
        (FASTER, 3, {PLAN: 1.0, NATIVE: 3.0}, {PLAN: 1.0, NATIVE: 2.4}, "20.0%"),
        (FASTER, 1, {FRESH: 2.0, NATIVE_FRESH: 2.0}, {FRESH: 2.0, NATIVE_FRESH: 1.0}, "50.0%"),
        (ABOVE, 1e-6, {CALL: 3.9e-6, PLAN: 3e-6}, {CALL: 4.5e-6, PLAN: 3e-6}, "0.50 us"),
        (
            SHARE_ABOVE,
            0.03,
            {CALL: 1.029, PLAN: 1.0},
            {CALL: 1.045, PLAN: 1.0},
            "1.5 percentage points",
        ),
        (TIME, 10e-6, {ASYNC: 9.9e-6}, {ASYNC: 12e-6}, "2.00 us"),
        (
            HIDDEN,
            0.9,
            {AT_ONCE: 1.05, IN_TURN: 2.0, ALONE: 1.0},
            {AT_ONCE: 1.5, IN_TURN: 2.0, ALONE: 1.0},
            "40.0 percentage points",
        ),
    ],
)
def test_each_formula_is_met_and_missed(formula, bound, good, bad, verdict):
    wanted = goal(formula, tuple(good), bound)
    assert judged(wanted, timed(**good)).verdict == "met"
    missed = judged(wanted, timed(**bad))
    assert missed.is_met is False and missed.verdict == f"missed by {verdict}"


def test_the_rate_of_an_all_reduce_is_compared_with_that_of_a_copy():
    seconds = Limit(2, timed(1000, memcpy=1e-6)).seconds
    for share, is_met in ((0.91, True), (0.89, False)):
        result = judged(
            goal(COPY_RATE, (PLAN, MEMCPY), 0.9, 1000),
            timed(1000, memcpy=1e-6, plan=seconds / share),
        )
        assert result.value == pytest.approx(share) and result.is_met is is_met


def test_the_worst_size_is_judged_and_the_missed_ones_are_counted():
    cases = [timed(n, native=native, plan=1.0) for n, native in ((8, 2.0), (16, 0.8), (32, 0.9))]
    result = judged(goal(FASTER, BESIDE_MPI, 1, 8, 16, 32), *cases)
    assert (result.worst, result.missed) == (16, [16, 32])
    assert goals.as_dict(result)["cells"] == [
        "all-reduce",
        "plan",
        "8 B to 32 B",
        "not slower",
        "0.800",
        "16 B",
        "missed by 20.0%, at 2 of 3 sizes",
    ]


def test_the_worst_difference_is_the_greatest():
    cases = [timed(8, plan=1e-6, call=1.5e-6), timed(16, plan=1e-6, call=3e-6)]
    assert judged(goal(ABOVE, (CALL, PLAN), 1e-6, 8, 16), *cases).worst == 16


def test_a_mean_is_geometric_and_one_bad_size_does_not_decide():
    cases = timed(8, native=0.5, plan=1), timed(32, native=8, plan=1)
    wanted = goal(FASTER, BESIDE_MPI, 1.7, 8, 32, in_the_mean=True)
    result = judged(wanted, *cases)
    assert result.value == pytest.approx(2.0) and result.verdict == "met"
    assert goals.as_dict(result)["cells"][3:6] == [
        "at least 1.7x faster in the mean",
        "2.000",
        "the mean",
    ]
    assert judged(wanted._replace(bound=2.5), *cases).verdict == "missed by 20.0%"


def test_what_was_not_measured_is_not_met():
    result = judged(goal(FASTER, BESIDE_MPI, 1), pair=command.NO_TORCH)
    assert result.is_met is None
    assert result.verdict == "not measured: torch is not installed"


def test_what_needs_more_cores_is_told_and_not_judged():
    wanted = goal(FASTER, BESIDE_MPI, 1, cores=4)
    result = judged(wanted, timed(native=1.0, plan=9.0), cores=2)
    assert result.is_met is None and result.value == pytest.approx(1 / 9)
    assert result.verdict == "not judged: it needs 4 cores, there are 2"
    assert judged(wanted, timed(native=1.0, plan=9.0), cores=4).is_met is False


def test_the_summary_counts_goals_that_are_met_missed_and_not_judged():
    met = judged(goal(FASTER, BESIDE_MPI, 1), timed(native=1.0, plan=1.0))
    missed = judged(goal(FASTER, BESIDE_MPI, 1), timed(native=1.0, plan=2.0))
    unknown = judged(goal(FASTER, BESIDE_MPI, 1), pair="lost")
    assert goals.summary([met, met, missed]) == "2 of 3 goals are met, 1 are missed."
    assert goals.summary([met, missed, unknown]).endswith("1 are missed, 1 are not judged.")


@pytest.mark.parametrize(
    ("job", "collective", "ours", "targets"),
    [
        (
            PAIR,
            "all_reduce",
            PLAN,
            {
                "not slower",
                "at least 1.7x faster in the mean",
                "at least 3x faster",
                "at least 90% of the rate of a copy",
            },
        ),
        (PAIR, "all_reduce", CALL, {"at most 1 us above the plan", "at most 3% above the plan"}),
        (PAIR, "all_reduce", FRESH, {"not slower"}),
        (PAIR, "reduce_scatter", PLAN, {"not slower", "at least 2x faster in the mean"}),
        (PAIR, "gather", PLAN, {"not slower"}),
        (PAIR, "gather", CALL, {"not slower"}),
        (CROWD, "all_reduce", PLAN, {"not slower", "at least 1.3x faster in the mean"}),
        (WAYS, "all_reduce", ASYNC, {"at most 2 us above the call"}),
        (WAYS, "all_reduce", CHECKED, {"at most 3 us above the call"}),
        (MPI4PY, "all_reduce", DROP_IN, {"at most 2 us above the call"}),
        (MPI4PY, "all_reduce", DROP_IN_ASYNC, {"at most 10 us"}),
        (MPI4PY, "all_reduce", DROP_IN_PERSISTENT, {"at most 5 us"}),
        (OVERLAP, "sleep", AT_ONCE, {"at least 90% hidden"}),
        (WITH_GLOO, "all_reduce", PLAN, {"at least 50x faster", "at least 4x faster"}),
    ],
)
def test_goals_demand_what_the_documents_say(job, collective, ours, targets):
    mine = [goal for goal in GOALS if (goal.job, goal.collective) == (job, collective)]
    assert {goals.target(goal) for goal in mine if goal.contenders[0] == ours} == targets


def test_goals_span_the_sizes_that_the_documents_say():
    spans = {
        (goal.collective, goal.contenders[0], goals.target(goal)): (goal.sizes[0], goal.sizes[-1])
        for goal in GOALS
        if goal.job == PAIR
    }
    assert spans["all_reduce", PLAN, "not slower"] == (TINY, HUGE)
    assert spans["all_reduce", CALL, "at most 1 us above the plan"] == (TINY, 4 << 10)
    assert spans["all_reduce", CALL, "at most 3% above the plan"] == (8 << 10, HUGE)
    assert spans["all_reduce", FRESH, "not slower"] == (4 << 10, HUGE)
    assert spans["scatter", CALL, "not slower"] == (4 << 10, HUGE)


def test_an_all_reduce_has_every_power_of_two_and_some_between():
    sizes = goals.ALL_REDUCE
    assert {1 << k for k in range(3, 27)} < set(sizes) and len(sizes) == 27
    assert {48 << 10, 3 << 20, 40 << 20} < set(sizes)


def test_every_goal_has_its_cases():
    for goal in GOALS:
        cases = goals.cases(GOALS, goal.job)
        for size in goal.sizes:
            assert set(goal.contenders) <= set(cases[goal.collective, size])


def test_the_copy_and_the_mpi_library_are_timed_beside_each_other():
    names = goals.cases(GOALS, PAIR)["all_reduce", HUGE]
    assert sorted(names) == sorted([NATIVE, MEMCPY, PLAN, CALL, FRESH, NATIVE_FRESH])


def test_the_tables_find_their_contenders():
    for (name, _), names in goals.cases(GOALS, PAIR).items():
        assert {NATIVE, PLAN, CALL} <= set(names)
        assert ({FRESH, NATIVE_FRESH} <= set(names)) == (name == "all_reduce")
    assert all({NATIVE, PLAN, CALL} <= set(n) for n in goals.cases(GOALS, CROWD).values())


def test_of_two_timings_the_less_disturbed_counts_but_every_wrong_element():
    first, second = timed(cores=0.7, wrong=2, plan=9.0), timed(cores=0.9, plan=8.0)
    assert less_disturbed(first, second) == second._replace(wrong={PLAN: 2})
    assert less_disturbed(second, first).seconds == second.seconds


# What limits it


def test_an_all_reduce_is_limited_by_the_bytes_that_it_moves():
    n = 1000
    ring = Limit(2, timed(n, memcpy=1e-6, plan=2e-6, call=3e-6))
    assert ring.bandwidth == pytest.approx(4e9)  # 2 ranks that read and write n each
    assert ring.moved == 5 * n  # each sends n, gets n / 2 to combine and n / 2 to keep
    assert ring.seconds == pytest.approx(1.25e-6)
    doubling = Limit(2, ring.timed._replace(algorithm="recursive_doubling"))
    assert doubling.moved == 6 * n  # each sends n, reads n to combine it, and writes n


# What is shown


def test_tables_show_medians_and_their_ratios():
    case = timed(native=4e-6, plan=2e-6, call=5e-6)
    assert tables.beside_native(case) == pytest.approx([4.0, 2.0, 2.0, 5.0, 0.8])
    assert tables.above_plan(case) == pytest.approx([3.0, 150.0])
    fresh = case._replace(seconds=case.seconds | {NATIVE_FRESH: 6e-6, FRESH: 3e-6})
    assert tables.fresh_cells(fresh) == pytest.approx([6.0, 3.0, 2.0])


def test_the_limit_is_that_of_the_largest_copy():
    cases = {
        (PAIR, "all_reduce", size): timed(size, memcpy=1.0, plan=1.0, call=1.0) for size in (8, 16)
    }
    limit = tables.limit_of(cases)
    assert limit is not None and limit.timed.size == 16
    assert tables.limit_of({}) is None


def test_disturbed_cases_are_told():
    def times(*shares: float, job: str = PAIR) -> dict:
        return {(job, "all_reduce", n): timed(cores=cores) for n, cores in enumerate(shares)}

    assert tables.disturbance(times(1.0, 0.98)) is None
    assert tables.disturbance(times(0.3, job=WAYS)) is None, "those ranks sleep"
    assert tables.disturbance(times(1.0, 0.5, 0.9)) == (
        "2 of 3 cases were disturbed by other programs: their ranks had less than 97% of the "
        "cores, at worst 50%."
    )


def test_an_overlap_becomes_a_case():
    way = {"beside": "sleep", "all_reduce": 1.0, "other": 1.0, "in_turn": 2.0, "at_once": 1.25}
    ways = [
        way | {"progress": progress, "slices": slices, "wrong": 0, "hidden": 0.75}
        for progress in (None, "thread")
        for slices in (1, 16)
    ]
    times = command.times_of({OVERLAP: {"size": HUGE, "ways": ways}})
    assert list(times) == [(OVERLAP, "sleep", HUGE)]
    assert HIDDEN.value(times[OVERLAP, "sleep", HUGE], AT_ONCE, IN_TURN, ALONE) == 0.75


def test_medians_are_over_jobs():
    jobs = [{"first": 3.0}, {"first": 1.0}, {"first": 2.0}]
    assert first_call.medians(jobs) == {"first": 2.0}


# The command


def options(*words: str) -> argparse.Namespace:
    return parsed(["speed", *words])


class FakeJobs:
    """Jobs of which one ends with wrong elements, one at its time limit."""

    def run(self, name: str, size: int, command: list[str]) -> tuple[int, dict]:
        wrong = {"cases": [timed(wrong=3, plan=1.0)._asdict()]}
        return {PAIR: (1, wrong), CROWD: (124, {})}.get(name, (0, {}))


def test_jobs_that_failed_give_a_reason(monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert command.run_jobs(FakeJobs(), options("--quick")) == {
        PAIR: "3 elements were wrong",
        CROWD: "exit status 124",
        WITH_GLOO: command.NO_TORCH,
    }


def test_only_the_jobs_that_are_chosen_run():
    reasons = command.run_jobs(FakeJobs(), options("--job", WAYS))
    assert reasons == dict.fromkeys([PAIR, CROWD, MPI4PY, WITH_GLOO, OVERLAP], command.NOT_CHOSEN)


@pytest.mark.parametrize(
    "words",
    [
        ["--effort", "0"],
        ["--effort", "much"],
        ["--effort", "nan"],
        ["--effort", "inf"],
        ["--job", "solo"],
    ],
)
def test_options_without_a_meaning_are_refused(words, capsys):
    with pytest.raises(SystemExit) as stop:
        options(*words)
    assert stop.value.code == 2 and "error:" in capsys.readouterr().err


def test_without_mpi_what_to_install_is_said(monkeypatch, capsys):
    def find_mpirun():
        raise MpiNotFound("pip install one")

    monkeypatch.setattr(jobs, "find_mpirun", find_mpirun)
    with pytest.raises(SystemExit, match="2"):
        main(["speed"])
    assert capsys.readouterr().err == "python -m bench speed: pip install one\n"


@pytest.mark.ranks(n=4)
@pytest.mark.on_open_mpi
def test_a_quick_run_measures_everything(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(command, "find_spec", lambda name: None)  # PyTorch takes long to import
    path = tmp_path / "speed.json"
    assert main(["speed", "--quick", "--timeout", "100", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert len(result["goals"]) == len(GOALS)
    without = {goal["cells"][-1] for goal in result["goals"] if goal["value"] is None}
    assert without == {"not measured: torch is not installed"}
    cases = [case for job in result["jobs"].values() for case in job.get("cases", [])]
    assert all(min(case["seconds"].values()) > 0 for case in cases)
    assert not any(any(case["wrong"].values()) for case in cases)
    assert result["start"].keys() == {"1 process", "1 rank", "2 ranks"}
    shown = capfd.readouterr().out
    assert "at least 1.3x faster" in shown and "What limits the all-reduce of 64 KiB" in shown
    assert f"of {len(GOALS)} goals are met" in shown


@pytest.mark.parametrize("job", [PAIR, CROWD, WAYS, MPI4PY])
@pytest.mark.ranks(n=4)
@pytest.mark.on_open_mpi
def test_wrong_elements_fail_the_command(tmp_path, job):
    command = [str(PROGRAM), str(tmp_path), "swept", job]
    env = {"PYTHONPATH": str(ROOT)}
    done = launch(RANKS[job], command, env=env, timeout=100, capture=True)
    assert done.returncode == 1
    cases = json.loads((tmp_path / "swept.json").read_text())["cases"]
    summed = [case["wrong"] for case in cases if case["collective"] == "all_reduce"]
    assert summed
    for wrong in summed:
        assert {name for name, count in wrong.items() if not count} <= {
            NATIVE,
            NATIVE_FRESH,
            MEMCPY,
        }
        assert wrong[CALL] and not wrong[NATIVE]
