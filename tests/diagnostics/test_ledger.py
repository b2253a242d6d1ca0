"""What is recorded is what was sent."""

from __future__ import annotations

import csv
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator, Topology
from collectives.selection import select
from tests.scenarios.jobs import ALGORITHMS, Job, perform

P = 4


def recorded(body: Any, size: int = P) -> Any:
    """The whole ledger of `body(comm)`, as rank 0 gathers it."""

    def rank(comm: Communicator) -> Any:
        with comm.record() as ledger:
            body(comm)
        return ledger.gather()

    return collectives.run(rank, size)[0]


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize(("collective", "algorithm"), ALGORITHMS)
@pytest.mark.slow
def test_bytes_and_messages_are_those_of_the_formula(
    collective: str, algorithm: str, size: int
) -> None:
    rows: Any = 24 * size  # every number of pieces divides it
    n = 4 * rows * (size if collective in ("gather", "all_gather") else 1)
    if collective in ("gather", "all_gather"):
        rows = (rows,) * size
    with_out = {"broadcast", "scatter"}  # without a header

    def body(comm: Communicator) -> None:
        if collective in with_out:
            x = np.zeros(rows, np.float32)
            out = x if collective == "broadcast" else np.empty(rows // size, np.float32)
            getattr(comm, collective)(x, out=out, algorithm=algorithm)
        else:
            perform(comm, Job(collective, algorithm, size, rows))

    ledger = recorded(body, size)
    info = collectives.algorithms.info(collective, algorithm)
    options = select.options(info, size, n)
    messages = info.messages(p=size, n=n, **options)
    total = info.total_bytes(p=size, n=n, **options)
    assert ledger.summary(by=("collective", "algorithm")) == {
        (collective, algorithm): (1, messages, total)
    }
    assert ledger.matrix().sum() == total


@pytest.mark.parametrize(
    ("given", "wanted", "messages"),
    [
        ("chain", "chain", P - 1),
        ("chain()", "chain", P - 1),
        (" chain( segments=3,chains = 1 ) ", "chain(chains=1, segments=3)", 3 * (P - 1)),
        ("chain(segments=3)", "chain(segments=3)", 3 * (P - 1)),
    ],
)
def test_options_are_shown_where_they_were_given(given: str, wanted: str, messages: int) -> None:
    ledger = recorded(lambda comm: comm.reduce(np.zeros(9), algorithm=given))
    assert ledger.summary(by=("algorithm",)) == {(wanted,): (1, messages, (P - 1) * 72)}


def test_uneven_blocks_are_counted_exactly() -> None:
    ledger = recorded(lambda comm: comm.all_reduce(np.zeros(1003, np.uint8), algorithm="ring"))
    assert ledger.summary(by=())[()].bytes == 2 * (P - 1) * 1003
    sizes = [251, 251, 251, 250]
    for rank in range(P):  # to the right all blocks but the own one, to the left all but another
        assert ledger.matrix()[rank, (rank + 1) % P] == 1003 - sizes[rank]
        assert ledger.matrix()[rank, rank - 1] == 1003 - sizes[rank - 1]


def test_phases_nest_and_belong_to_their_thread() -> None:
    def body(comm: Communicator) -> None:
        with collectives.phase("backward"), collectives.phase(f"layer{comm.rank % 2}"):
            comm.all_reduce(np.zeros(4), algorithm="ring")
        comm.barrier()

    by_phase = recorded(body).summary(by=("phase",))
    assert {phase for (phase,) in by_phase} == {"backward/layer0", "backward/layer1", ""}


def test_nothing_is_recorded_outside_the_block() -> None:
    def body(comm: Communicator) -> Any:
        comm.all_reduce(np.zeros(4))
        with comm.record() as ledger:
            pass
        comm.all_reduce(np.zeros(4))
        return ledger.rows()

    assert collectives.run(body, P) == [[]] * P


def test_ledgers_nest() -> None:
    def body(comm: Communicator) -> Any:
        with comm.record() as outer:
            comm.barrier()
            with comm.record() as inner:
                comm.barrier()
        return len(outer.rows()), len(inner.rows())

    assert collectives.run(body, P) == [(4, 2)] * P


def test_subgroups_are_recorded_in_the_ranks_of_the_recorder() -> None:
    def body(comm: Communicator) -> None:
        group = comm.split(comm.rank % 2)
        assert group is not None
        group.all_reduce(np.zeros(10, np.uint8), algorithm="recursive_doubling")

    ledger = recorded(body)
    edges = {(row.src, row.dst) for row in ledger.rows() if row.collective == "all_reduce"}
    assert edges == {(0, 2), (2, 0), (1, 3), (3, 1)}
    assert ledger.summary(by=("collective",))[("all_reduce",)] == (2, 4, 40)
    assert ("split",) in ledger.summary(by=("collective",))


def test_a_subgroups_own_ledger_sees_only_itself() -> None:
    def body(comm: Communicator) -> Any:
        group = comm.split(comm.rank % 2)
        assert group is not None
        with group.record() as ledger:
            comm.barrier()
            group.all_reduce(np.zeros(10, np.uint8))
        return {(row.src, row.dst) for row in ledger.rows()}

    assert collectives.run(body, P) == [{(0, 1)}, {(0, 1)}, {(1, 0)}, {(1, 0)}]


def test_each_run_of_a_plan_is_a_call() -> None:
    def body(comm: Communicator) -> None:
        x = np.zeros(8)
        plan = comm.plan.all_reduce(x, out=x)
        for _ in range(3):
            plan.run()
        plan.free()

    assert recorded(body).summary(by=("collective",))[("all_reduce",)].calls == 3


def test_every_message_of_a_user_is_a_call() -> None:
    def body(comm: Communicator) -> None:
        for _ in range(5):
            comm.send_recv(np.zeros(1), (comm.rank + 1) % P, (comm.rank - 1) % P)

    assert recorded(body).summary(by=("collective",))[("send_recv",)].calls == 5


def test_calls_of_groups_with_the_same_members_are_told_apart() -> None:
    def body(comm: Communicator) -> None:
        for _ in range(2):
            comm.subgroup(range(P)).all_reduce(np.zeros(1))

    assert recorded(body).summary(by=("collective",))[("all_reduce",)].calls == 2


def test_what_gather_sends_for_itself_is_labelled() -> None:
    def body(comm: Communicator) -> Any:
        with comm.record() as outer:
            with comm.record() as inner:
                comm.barrier()
            inner.gather()
        return outer.gather()

    kinds = collectives.run(body, P)[0].summary(by=("collective",))
    assert {kind for (kind,) in kinds} == {"barrier", "ledger"}


def test_point_to_point_is_recorded() -> None:
    def body(comm: Communicator) -> None:
        right, left = (comm.rank + 1) % P, (comm.rank - 1) % P
        comm.send_recv(np.zeros(3), right, left)

    matrix = recorded(body).matrix()
    assert np.array_equal(matrix, 24 * np.roll(np.eye(P, dtype=int), 1, axis=1))


def test_exports_hold_every_row(tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        with comm.record() as ledger, collectives.phase("step"):
            comm.all_reduce(np.zeros(8), algorithm="ring")
        if comm.rank == 0:
            ledger.to_csv(tmp_path / "rows.csv")
            ledger.to_json(tmp_path / "rows.json")
            ledger.to_chrome_trace(tmp_path / "trace.json")

    collectives.run(body, P)
    with open(tmp_path / "rows.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * (P - 1) == len(json.loads((tmp_path / "rows.json").read_text()))
    assert rows[0]["phase"] == "step" and rows[0]["bytes"] == "16"
    (event,) = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert event["dur"] > 0 and event["args"]["bytes"] == 6 * 16


def written(ledger: Any, path: Path, form: str) -> str:
    """What a ledger writes in this form, and nothing else beside it."""
    getattr(ledger, f"to_{form}")(path)
    assert list(path.parent.iterdir()) == [path]
    return path.read_text()


def test_a_gathered_ledger_is_traced_with_the_calls_of_every_rank(tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        group = comm.split(comm.rank % 2)
        assert group is not None
        with collectives.phase("step"):
            comm.all_reduce(np.zeros(8), algorithm="ring")
            group.all_gather(np.zeros(2 + comm.rank), counts=(2 + comm.rank % 2, 4 + comm.rank % 2))

    ledger = recorded(body)
    events = json.loads(written(ledger, tmp_path / "trace.json", "chrome_trace"))["traceEvents"]
    steps = [event for event in events if event["cat"] == "step"]
    assert sorted((event["pid"], event["name"].split()[0]) for event in steps) == sorted(
        (rank, name) for rank in range(P) for name in ("all_reduce", "all_gather")
    )
    assert all(event["dur"] > 0 for event in steps)
    sent = sum(event["args"]["bytes"] for event in events)
    assert sent == sum(row.bytes for row in ledger.rows()) == ledger.matrix().sum()


def test_a_gathered_ledger_has_the_rows_of_every_rank() -> None:
    def body(comm: Communicator) -> Any:
        with comm.record() as ledger:
            group = comm.split(comm.rank % 2)
            assert group is not None
            group.all_reduce(np.zeros(10, np.uint8), algorithm="ring")
            comm.send_recv(np.zeros(3), (comm.rank + 1) % P, (comm.rank - 1) % P)
        return ledger.rows(), ledger.gather()

    ranks = collectives.run(body, P)
    whole = ranks[0][1]
    assert whole.rows() == [row for rows, _ in ranks for row in rows]
    assert [entry.call.src for entry in whole.entries] == sorted(
        entry.call.src for entry in whole.entries
    )


def test_messages_between_hosts_are_a_column_of_their_own(tmp_path: Path) -> None:
    def body(comm: Communicator) -> Any:
        with comm.record() as ledger:
            comm.all_reduce(np.zeros(12, np.uint8), algorithm="ring")
            with collectives.phase("half"):
                half = comm.split(comm.rank // 2)
                assert half is not None
                half.all_reduce(np.zeros(12, np.uint8), algorithm="ring")
        return ledger.gather()

    ledger = collectives.run(body, 4, topology=Topology("abab"))[0]
    # Every message of the ring is from one host to the other; a half has a rank of each.
    sent = ledger.summary(by=("collective", "off_host"))
    assert [key for key in sent if key[0] == "all_reduce"] == [("all_reduce", True)]
    matrix, hosts = ledger.matrix(), ledger.host_matrix()
    assert hosts[0, 1] == matrix[::2, 1::2].sum() and hosts[1, 1] == matrix[1::2, 1::2].sum()
    away = sum(row.bytes for row in ledger.rows() if row.off_host)
    assert away == hosts[0, 1] + hosts[1, 0] >= 4 * 18 + 4 * 12
    rows = csv.DictReader(written(ledger, tmp_path / "rows.csv", "csv").splitlines())
    assert sum(int(row["bytes"]) for row in rows if row["off_host"] == "True") == away
    (tmp_path / "rows.csv").unlink()
    events = json.loads(written(ledger, tmp_path / "trace", "chrome_trace"))["traceEvents"]
    assert sum(event["args"]["off_host_bytes"] for event in events) == away


def test_on_one_host_nothing_is_between_hosts() -> None:
    ledger = recorded(lambda comm: comm.all_reduce(np.zeros(8), algorithm="ring"))
    assert not any(row.off_host for row in ledger.rows())
    assert ledger.host_matrix().tolist() == [[ledger.matrix().sum()]]


def test_only_what_was_recorded_can_be_gathered() -> None:
    whole = recorded(lambda comm: comm.barrier())
    with pytest.raises(ValueError, match="only a ledger made by `record` can be gathered"):
        whole.gather()


def with_surrogate() -> Any:
    def body(comm: Communicator) -> None:
        with collectives.phase("caf\udce9 \N{SNOWMAN}"):
            comm.barrier()

    return recorded(body, 2)


def test_a_phase_that_is_no_unicode_is_written_as_its_escape_sequence(tmp_path: Path) -> None:
    text = written(with_surrogate(), tmp_path / "rows.csv", "csv")
    assert [row["phase"] for row in csv.DictReader(text.splitlines())] == ["caf\\udce9 \u2603"] * 2


@pytest.mark.parametrize("form", ["json", "chrome_trace"])
def test_a_phase_that_is_no_unicode_is_the_same_in_json(tmp_path: Path, form: str) -> None:
    text = written(with_surrogate(), tmp_path / "file", form)
    assert text.count(r'"caf\udce9 \u2603"') >= 2
    assert json.loads(text)


@contextmanager
def full_disk() -> Iterator[None]:
    """Files cannot grow beyond a hundred bytes; those that pytest writes to meanwhile neither."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("form", ["csv", "json", "chrome_trace"])
def test_what_cannot_be_written_leaves_the_file_as_it_was(tmp_path: Path, form: str) -> None:
    ledger = recorded(lambda comm: comm.all_reduce(np.zeros(8), algorithm="ring"))
    path = tmp_path / "file"
    with pytest.raises(OSError, match="large"), full_disk():
        written(ledger, path, form)
    assert not list(tmp_path.iterdir())
    path.write_text("before")
    with pytest.raises(OSError, match="large"), full_disk():
        written(ledger, path, form)
    assert list(tmp_path.iterdir()) == [path] and path.read_text() == "before"


def test_links_and_devices_are_written_in_place(tmp_path: Path) -> None:
    ledger = recorded(lambda comm: comm.barrier())
    (link := tmp_path / "link").symlink_to(tmp_path / "file")
    for path in (link, Path("/dev/null")):
        ledger.to_csv(path)
    assert link.is_symlink() and "barrier" in (tmp_path / "file").read_text()
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("label", [5, None, b"step"])
def test_only_a_text_can_label_a_phase(label: Any) -> None:
    with pytest.raises(TypeError, match="the label of a phase must be a text, not"):
        collectives.phase(label)


@pytest.mark.parametrize("by", ["phase", ("phase", "bites")])
def test_a_summary_is_by_columns_that_there_are(by: Any) -> None:
    ledger = recorded(lambda comm: comm.barrier())
    with pytest.raises(ValueError, match="by must be a sequence of columns from"):
        ledger.summary(by=by)


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"timeout": float("nan")}, ValueError, "timeout must not be negative, got nan"),
        ({"timeout": -1}, ValueError, "timeout must not be negative, got -1"),
        ({"timeout": True}, TypeError, "timeout must be a number of seconds or None, not True"),
        ({"timeout": "5"}, TypeError, "timeout must be a number of seconds or None, not '5'"),
        ({"size": 0}, ValueError, "size must be at least 1, got 0"),
        ({"size": 2.0}, TypeError, "size must be an integer, not 2.0"),
        ({"size": True}, TypeError, "size must be an integer, not True"),
        ({"size": "2"}, TypeError, "size must be an integer, not '2'"),
        ({"fn": "barrier"}, TypeError, "fn must be a function of a communicator, not 'barrier'"),
    ],
)
def test_ranks_that_cannot_be_run_are_refused(
    arguments: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    def body(comm: Communicator) -> None:
        pytest.fail("a rank was started")

    with pytest.raises(error, match=sentence):
        collectives.run(**{"fn": body, "size": 2, **arguments})


def test_recording_changes_no_result() -> None:
    def body(comm: Communicator) -> Any:
        x = np.random.default_rng(comm.rank).random(100)
        plain = comm.all_reduce(x)
        with comm.record():
            return np.array_equal(plain, comm.all_reduce(x))

    assert all(collectives.run(body, P))


def test_a_row_has_the_name_of_its_communicator() -> None:
    def sent(comm: Communicator) -> set[tuple[str, str]]:
        with comm.record() as ledger:
            half = comm.split(comm.rank % 2, name="tensor")
            assert half is not None and half.name == "tensor"
            pair = comm.subgroup(sorted([comm.rank, comm.rank ^ 1]), name="data")
            half.all_reduce(np.zeros(1))
            pair.all_reduce(np.zeros(2))
            comm.all_reduce(np.zeros(3))
        whole = ledger.gather() or ledger
        return {(row.axis, row.collective) for row in whole.rows()}

    kinds = collectives.run(sent, 4)[0]
    assert kinds >= {("tensor", "all_reduce"), ("data", "all_reduce"), ("", "all_reduce")}
    assert {axis for axis, collective in kinds if collective == "split"} == {""}


def test_a_call_that_continues_later_keeps_its_phase() -> None:
    """In checked mode the messages of a call follow those of its check."""

    def sent(comm: Communicator) -> set[tuple[str, str]]:
        with comm.record() as ledger:
            with collectives.phase("first"):
                works = [comm.all_reduce(np.zeros(n), async_op=True) for n in (1, 2)]
            with collectives.phase("later"):
                works[1].wait()
                works[0].wait()
        return {(row.phase, row.collective) for row in ledger.rows()}

    kinds = collectives.run(sent, 3, check=True)
    assert set.union(*kinds) == {("first", "check"), ("first", "all_reduce")}
