"""The ledger of calls on devices: the link of each message, and the same bytes for all links."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import combinations, permutations
from typing import Any, Literal

import numpy as np
import pytest

import collectives
from collectives import Communicator, Ledger
from collectives.devices.links import Proposal
from collectives.diagnostics.ledger import Row
from tests.fake_device import BACKEND, on_device, on_host
from tests.scenarios import Job, all_jobs, call

pytestmark = pytest.mark.usefixtures("new_gpu")


def run(body: Callable[[Communicator], Any], size: int, **options: Any) -> list[Any]:
    return collectives.run(body, size, timeout=60, **options)


def links_of(rows: list[Row]) -> set[str]:
    """The links of the calls that a test makes; the library's own messages are on the host."""
    return {row.link for row in rows if row.collective == "all_reduce"}


def all_reduce(kind: str, on: Callable[[np.ndarray], Any] = on_device) -> Callable[..., Ledger]:
    """What calls all_reduce a few times, and returns the ledger of all ranks on rank 0."""

    def body(comm: Communicator) -> Ledger | None:
        x = on(np.ones(12))
        y = on(np.ones(12))
        plan = comm.plan.all_reduce(x, algorithm="ring")
        for _ in range(3):
            with comm.record() as ledger:
                if kind == "plan":
                    plan.run()
                elif kind == "call":
                    comm.all_reduce(x, out=y, algorithm="ring")
                else:
                    comm.all_reduce(x, async_op=True, algorithm="ring").wait()
            whole = ledger.gather()
        comm.synchronize()
        plan.free()
        return whole

    return body


@pytest.mark.parametrize("kind", ["call", "async", "plan"])
@pytest.mark.parametrize(("device", "link"), [("auto", "thread"), ("staged", "staged")])
def test_a_message_has_its_link(kind: str, device: Literal["auto", "staged"], link: str) -> None:
    ledger, *_ = run(all_reduce(kind), 3, device=device)
    assert links_of(ledger.rows()) == {link}
    assert ledger.matrix().sum() == 2 * 2 * 96  # 2 (p - 1) n


def test_a_message_from_host_memory_has_no_device() -> None:
    ledger, *_ = run(all_reduce("call", np.copy), 3)
    assert links_of(ledger.rows()) == {"host"}


def test_pairs_of_ranks_may_have_different_links(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = lambda self, verdicts: [p for p in combinations(verdicts, 2) if 1 in p]  # noqa: E731
    monkeypatch.setattr(Proposal, "_staged_pairs", pairs)
    ledger, *_ = run(all_reduce("call"), 3)
    found = {(row.src, row.dst): row.link for row in ledger.rows()}
    assert found == {
        pair: "staged" if 1 in pair else "thread" for pair in permutations(range(3), 2)
    }


def test_a_call_with_arrays_of_both_kinds_is_staged_where_there_is_a_device() -> None:
    def body(comm: Communicator) -> set[str]:
        with comm.record() as ledger:
            x = np.ones(12) if comm.rank == 1 else on_device(np.ones(12))
            comm.all_reduce(x, algorithm="ring")
        return links_of(ledger.rows())

    assert run(body, 3) == [{"staged"}, {"host"}, {"staged"}]


def test_a_message_of_a_call_that_is_not_complete_has_no_link() -> None:
    has_looked = threading.Event()

    def body(comm: Communicator) -> None:
        x = on_device(np.ones(12))
        assert comm.rank == 0 or has_looked.wait(20)
        with comm.record() as ledger:
            work = comm.all_reduce(x, async_op=True, algorithm="ring")
            if comm.rank == 0:
                assert links_of(ledger.rows()) == {""}
                has_looked.set()
            work.wait()
        assert links_of(ledger.rows()) == {"thread"}

    run(body, 3)


@pytest.mark.parametrize("device", ["auto", "staged"])
def test_every_algorithm_sends_on_devices_what_it_sends_on_the_host(
    device: Literal["auto", "staged"],
) -> None:
    def recorded(comm: Communicator, job: Job, on: Callable[[np.ndarray], Any]) -> list[Row]:
        with comm.record() as ledger:
            call(comm, job, on(job.inputs()[comm.rank]), on_host)
        return [row._replace(call="", link="") for row in ledger.rows()]

    def body(comm: Communicator) -> None:
        for job in all_jobs(comm.size)[::7]:
            assert recorded(comm, job, on_device) == recorded(comm, job, np.copy), job
        comm.synchronize()

    run(body, 3, device=device)
    assert (BACKEND.bytes_to_host > 0) == (device == "staged")
