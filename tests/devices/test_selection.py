"""Which algorithm a call on devices runs, and what all ranks run if it is staged."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import CollectiveError, CollectiveMismatch, Communicator, ScheduleError
from collectives.arrays import Arrays, operator
from collectives.devices.call import DeviceCall
from collectives.diagnostics.totals import Totals
from collectives.lowering import lower
from collectives.programs import CallSpec
from collectives.runtime.prepared import Prepared
from collectives.selection import Decisions, select
from collectives.selection.rules import DEVICE_RULES, RULES
from tests.devices.staged_pairs import stage_pairs
from tests.fakes.device import BACKEND, on_device, on_host
from tests.inside import execution_of, forget_choices, scratch_of, session_of
from tests.scenarios import on_devices as scenarios
from tests.scenarios.jobs import COLLECTIVES, Job, random_rows

pytestmark = pytest.mark.usefixtures("new_gpu")

SIZE, COUNT = 4, 2**15  # 128 KiB of float32: the rules for the host and for devices differ
STAGED, DIRECT = (
    select.choose("all_reduce", None, SIZE, 4 * COUNT, on_device=each).label
    for each in (False, True)
)


def run(body: Callable[[Communicator], Any], size: int = SIZE, **options: Any) -> list[Any]:
    return collectives.run(body, size, timeout=60, **options)


def vector(comm: Communicator) -> np.ndarray:
    return np.arange(COUNT, dtype=np.float32) % 64 + comm.rank


def total() -> np.ndarray:
    return SIZE * (np.arange(COUNT, dtype=np.float32) % 64) + sum(range(SIZE))


def is_predicted(comm: Communicator, ledger: collectives.Ledger, algorithm: str) -> bool:
    """Whether this rank has recorded, in one call, what is predicted of an algorithm."""
    found = collectives.predict("all_reduce", SIZE, COUNT, itemsize=4, algorithm=algorithm)
    rows = [row for row in ledger.rows() if row.collective == "all_reduce"]
    assert {row.algorithm for row in rows} == {algorithm}
    sent = np.zeros(SIZE, np.int64)
    for row in rows:
        sent[row.dst] += row.bytes
    return sent.tolist() == found.bytes[comm.rank].tolist()


def test_the_rules_differ_and_what_they_send_too() -> None:
    """Or nothing below would be tested."""
    predicted = [
        collectives.predict("all_reduce", SIZE, COUNT, itemsize=4, algorithm=label).bytes.sum()
        for label in (STAGED, DIRECT)
    ]
    assert DIRECT != STAGED and predicted[0] != predicted[1]
    by_rule = collectives.predict("all_reduce", SIZE, COUNT, itemsize=4, on_device=True)
    assert by_rule.bytes.sum() == predicted[1]


KINDS = "call", "async", "plan"


def made(comm: Communicator, x: Any, kind: str) -> Callable[[], Any]:
    """What makes the same call again and again, and returns its result in host memory."""
    to_host = np.copy if isinstance(x, np.ndarray) else on_host
    if kind == "plan":
        plan = comm.plan.all_reduce(x)
        return lambda: to_host(plan.run())
    if kind == "async":
        return lambda: to_host(comm.all_reduce(x, async_op=True).wait())
    return lambda: to_host(comm.all_reduce(x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hosts", [(), (2,), (0, 1), (0, 1, 2, 3)])
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.slow
def test_all_ranks_run_the_same_algorithm(kind: str, hosts: tuple[int, ...], check: bool) -> None:
    """`hosts`: the ranks with arrays of the host, for which the others stage their messages."""
    runs = STAGED if hosts else DIRECT

    def body(comm: Communicator) -> None:
        totals = Totals()
        session_of(comm).add_ledger(totals)
        x = vector(comm) if comm.rank in hosts else on_device(vector(comm))
        call = made(comm, x, kind)
        for _ in range(3):
            with comm.record() as ledger:
                np.testing.assert_array_equal(call(), total())
            assert is_predicted(comm, ledger, runs)
        found = {
            kind.algorithm: each
            for kind, each in totals.summary().items()
            if kind.collective == "all_reduce"
        }
        assert {runs: 3} == {name: each.calls for name, each in found.items()}
        own = collectives.predict("all_reduce", SIZE, COUNT, itemsize=4, algorithm=runs)
        assert found[runs].bytes == 3 * own.bytes[comm.rank].sum()

    run(body, check=check)
    assert (BACKEND.bytes_to_host > 0) == (0 < len(hosts) < SIZE)


@pytest.mark.parametrize("size", [2, 4, 5])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_what_the_rules_choose_is_right(
    collective: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small and large, of all ranks on devices, and of one on the host."""
    for rules in (RULES, DEVICE_RULES):  # so that a few bytes are already large
        small = [rule._replace(largest=rule.largest / 1024) for rule in rules[collective]]
        monkeypatch.setitem(rules, collective, small)
    forget_choices()
    jobs = [
        Job(
            collective,
            None,
            size,
            random_rows(collective, size, rows, is_even),
            root=size - 1,
            tail=(5,),
            is_in_place=is_in_place,
        )
        for rows, is_even, is_in_place in ((8, True, False), (600, False, True))
    ]

    def body(comm: Communicator) -> None:
        for job in jobs:
            scenarios.perform_on_device(comm, job, on_device, on_host)
            if collective != "scatter":  # without `out`, all get the kind of the root's array
                is_host = comm.rank == size - 1
                here, back = (np.copy, np.copy) if is_host else (on_device, on_host)
                scenarios.perform_on_device(comm, job, here, back)

    run(body, size)
    forget_choices()


def test_calls_that_follow_each_other_are_staged_by_turns() -> None:
    """The log and the ledger tell them apart; so does the log of those that are not recorded."""
    kinds = [True, True, False, True, False, False, True]

    def body(comm: Communicator) -> None:
        x, y, host = on_device(vector(comm)), on_device(vector(comm)), vector(comm)
        with comm.record() as ledger:
            for is_direct in kinds:
                comm.all_reduce(x if is_direct or comm.rank else host)
        for is_direct in kinds:  # without an open ledger compiled code may start them
            is_host = not is_direct and comm.rank == 0
            comm.all_reduce(host if is_host else x, out=np.empty_like(host) if is_host else y)
        names = [DIRECT if is_direct else STAGED for is_direct in kinds]
        calls = [each for each in comm.last_calls() if each["collective"] == "all_reduce"]
        assert [each["algorithm"] for each in calls] == 2 * names
        for each in calls:
            sent = collectives.predict(
                "all_reduce", SIZE, COUNT, itemsize=4, algorithm=each["algorithm"]
            )
            assert each["bytes"] == sent.bytes[comm.rank].sum()
        found = [entry.call.algorithm for entry in ledger.entries if entry.call.sent]
        assert found == names

    run(body)


def test_a_call_that_hangs_is_shown_as_it_is_staged() -> None:
    """One rank comes with a host array, and then does nothing."""
    has_seen = threading.Barrier(SIZE, timeout=30)

    def body(comm: Communicator) -> None:
        comm.all_reduce(on_device(vector(comm)))
        x = vector(comm) if comm.rank == 0 else on_device(vector(comm))
        work = comm.all_reduce(x, async_op=True)
        if comm.rank == 0:
            has_seen.wait()
            work.wait()
            return
        with pytest.raises(collectives.CollectiveTimeout) as caught:
            work.wait(0.5)
        assert f"all_reduce ({STAGED}), call 2" in str(caught.value)
        last = comm.last_calls()[-1]
        assert (last["algorithm"], last["state"]) == (STAGED, "under way")
        has_seen.wait()
        work.wait()

    run(body)


# Scratch


def test_data_that_is_read_where_it_lies_needs_no_scratch() -> None:
    """But if the call is staged, it does."""

    def body(comm: Communicator) -> list[int]:
        x, y = on_device(vector(comm)), on_device(vector(comm))
        comm.all_reduce(x, out=y)  # now it is known which ranks are staged
        found = []
        for x_of_two in (x, vector(comm)):
            is_host = comm.rank == 2 and x_of_two is not x
            given, out = (x_of_two, None) if is_host else (x, y)
            plan = comm.plan.all_reduce(given, out=out, algorithm="two_shot")
            got = plan.run()
            np.testing.assert_array_equal(got if is_host else on_host(got), total())
            found.append(0 if is_host else scratch_of(execution_of(plan)).nbytes)
            plan.free()
        return found

    assert run(body) == [[0, 0]] * SIZE
    program = DeviceCall(choose_spec()._replace(direct=None)).staged_program(0, SIZE)
    assert program.num_scratch > 0


# Named algorithms, and calls that may not be staged


@pytest.mark.parametrize("name", ["ring", "segmented_ring(segments=3)"])
def test_a_named_algorithm_runs_either_way(name: str) -> None:
    def body(comm: Communicator) -> None:
        for x in (on_device(vector(comm)), vector(comm) if comm.rank else on_device(vector(comm))):
            with comm.record() as ledger:
                comm.all_reduce(x, algorithm=name)
            with collectives.using(all_reduce=name), comm.record() as preferred:
                comm.all_reduce(x)
            assert {row.algorithm for row in (*ledger.rows(), *preferred.rows())} == {name}

    run(body)


def test_a_strict_call_runs_the_rules_for_devices() -> None:
    def body(comm: Communicator) -> None:
        with comm.record() as ledger:
            comm.all_reduce(on_device(vector(comm)))
        assert is_predicted(comm, ledger, DIRECT)

    run(body, device="peer")


@pytest.mark.parametrize("pairs", [[(0, 1)], [*combinations(range(SIZE), 2)]])
def test_pairs_that_are_staged_run_the_rules_for_devices(
    pairs: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage_pairs(monkeypatch, lambda *pair: pair in pairs)

    def body(comm: Communicator) -> None:
        with comm.record() as ledger:
            got = comm.all_reduce(on_device(vector(comm)))
        np.testing.assert_array_equal(on_host(got), total())
        assert is_predicted(comm, ledger, DIRECT)

    run(body)


# Explanations, and measurements


def test_an_explanation_says_what_runs() -> None:
    def body(comm: Communicator) -> None:
        told = comm.explain("all_reduce", on_device(vector(comm)))
        assert (told.chosen, told.reason) == (
            DIRECT,
            "built-in rule for devices: up to 2097152 bytes",
        )
        assert told.if_staged.startswith(f"{STAGED}, built-in rule: ")
        assert f"if staged: {STAGED}, " in str(told)
        assert comm.explain("all_reduce", vector(comm)).chosen == STAGED
        named = comm.explain("all_reduce", on_device(vector(comm)), algorithm="ring")
        assert (named.chosen, named.if_staged) == ("ring", "")

    run(body)


@pytest.mark.parametrize("dtype", ["float32", "longdouble"])
def test_a_call_that_is_always_staged_is_explained_as_staged(dtype: str) -> None:
    def body(comm: Communicator) -> None:
        x = on_device(vector(comm).astype(dtype))
        told = comm.explain("all_reduce", x)
        with comm.record() as ledger:
            comm.all_reduce(x)
        assert {row.algorithm for row in ledger.rows()} == {told.chosen}
        assert "for devices" not in told.reason and not told.if_staged
        assert told.links.startswith("all staged in host memory: ")

    run(body, device="staged" if dtype == "float32" else "auto")


def measured(*best: str) -> dict[str, Any]:
    """A file that names the same algorithms on devices, and another one on the host."""

    def by(labels: tuple[str, ...]) -> dict[str, Any]:
        rows = [{"up_to": None, "best": labels}]
        return {str(SIZE): {"facts": {}, "tables": {"all_reduce": rows}}}

    return {"machine": None, "measured": by(("linear",)), "measured_on_devices": by(best)}


def test_measurements_on_devices_choose_the_algorithm(tmp_path: Path) -> None:
    path = tmp_path / "decisions.json"
    path.write_text(json.dumps(measured("reduce_broadcast")))

    def body(comm: Communicator) -> None:
        comm.load_decisions(path)
        told = comm.explain("all_reduce", on_device(vector(comm)))
        where = "table measured on devices of 4 ranks: every size"
        assert (told.chosen, told.reason) == ("reduce_broadcast", where)
        assert told.if_staged == "linear, table measured on 4 ranks: every size"
        for host, algorithm in ((0, "reduce_broadcast"), (1, "linear")):
            with comm.record() as ledger:
                comm.all_reduce(vector(comm) if comm.rank < host else on_device(vector(comm)))
            assert is_predicted(comm, ledger, algorithm)

    run(body)


@pytest.mark.parametrize("check", [False, True])
def test_ranks_that_would_run_different_algorithms_are_told(check: bool) -> None:
    """Here only what runs on devices differs, as after a file that only one rank has loaded."""

    def body(comm: Communicator) -> None:
        best = "reduce_broadcast" if comm.rank == 2 else "two_shot"
        session_of(comm).decisions = Decisions.from_json(json.dumps(measured(best)))
        with pytest.raises(CollectiveMismatch, match=r"rank 2: all_reduce \(reduce_broadcast"):
            comm.all_reduce(on_device(vector(comm)))

    run(body, check=check)


# Negative controls


def test_ranks_that_do_not_agree_on_what_is_staged_would_not_match() -> None:
    """Or it would not matter what a rank with a host array runs."""
    spec = choose_spec()
    call = DeviceCall(spec)
    programs = [call.staged_program(rank, SIZE) for rank in range(SIZE)]
    assert len(lower(programs, ["none"] * SIZE)) == SIZE
    programs[1] = call.direct_program(1, SIZE)
    with pytest.raises(ScheduleError):
        lower(programs, ["none"] * SIZE)


def choose_spec() -> CallSpec:
    """The call of this file, as a session describes it."""
    found: list[CallSpec] = run(
        lambda comm: session_of(comm).spec(
            "all_reduce",
            Arrays(BACKEND, on_device(vector(comm)), on_device(vector(comm))),
            COUNT,
            op=operator("sum", "all_reduce"),
        )
    )
    assert len(set(found)) == 1
    return found[0]


def test_a_ledger_that_does_not_hear_of_it_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prepared, "note_staged", lambda self: None)

    def body(comm: Communicator) -> bool:
        with comm.record() as ledger:
            comm.all_reduce(vector(comm) if comm.rank == 1 else on_device(vector(comm)))
        return {row.algorithm for row in ledger.rows()} == {STAGED}

    assert run(body) == [False, True, False, False]


def test_a_digest_without_the_algorithm_for_devices_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digest = DeviceCall.digest.fget
    assert digest is not None
    staged = property(lambda self: digest(self._replace(spec=self.spec._replace(direct=None))))
    monkeypatch.setattr(DeviceCall, "digest", staged)
    with pytest.raises((CollectiveError, AssertionError, pytest.fail.Exception)):
        test_ranks_that_would_run_different_algorithms_are_told(check=False)
