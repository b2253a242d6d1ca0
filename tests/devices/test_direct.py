"""Messages that MPI sends from memory of devices, and how it is found out that it can.

The ranks are threads here: what takes addresses of the fake GPU's memory is the engine of threads.
`test_over_mpi.py` does the same with an MPI.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import CollectiveError, Communicator
from collectives.communicator import probing
from collectives.devices import DirectMemory
from collectives.devices.rows import HostRows
from collectives.doctor import Level, device_pointers
from collectives.doctor.device_pointers import Way, best_way, ucx_folder, ways, why_failed
from collectives.engines import threads
from collectives.launch import Mpirun
from tests.devices.staged_pairs import stage_pairs
from tests.fakes.device import BACKEND, on_device, on_host
from tests.fakes.driver import gpu
from tests.fakes.held_stream import hold_each
from tests.scenarios import on_devices as scenarios
from tests.scenarios.jobs import all_jobs

pytestmark = pytest.mark.usefixtures("new_gpu")


def run(body: Callable[[Communicator], Any], size: int, **options: Any) -> list[Any]:
    return collectives.run(body, size, timeout=60, **options)


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine of threads send from, and receive into, memory of the fake GPU."""
    monkeypatch.setattr(threads, "PageLockedMemory", DirectMemory)
    monkeypatch.setattr(probing, "_has_succeeded", [])


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rank 1 and the others not read each other's memory."""
    stage_pairs(monkeypatch, lambda *pair: 1 in pair)


def sums(comm: Communicator) -> None:
    """All-reduces of different sizes, several under way at once."""
    for size in (3, 5000) * 3:
        x, y = on_device(np.full(size, 1.0 + comm.rank)), on_device(np.zeros(size))
        works = [
            comm.all_reduce(x, out=out, algorithm="ring", async_op=True) for out in (None, y, None)
        ]
        for work in works:
            assert on_host(work.wait()).tolist() == [comm.size * (comm.size + 1) / 2] * size


@pytest.mark.parametrize("device", ["auto", "staged"])
@pytest.mark.slow
def test_no_data_of_a_device_goes_through_host_memory(pairs: None, device: str) -> None:
    """If ranks cannot read each other's memory, and if none does."""

    def body(comm: Communicator) -> set[tuple[bool, str]]:
        comm.all_reduce(on_device(np.ones(3)))  # in which they agree on their links
        with comm.record() as ledger:
            sums(comm)
        for job in all_jobs(comm.size)[::20]:
            scenarios.perform_on_device(comm, job, on_device, on_host)
        before = (comm.rank - 1) % 3
        y = comm.send_recv(on_device(np.full(3, comm.rank)), (comm.rank + 1) % 3, before)
        assert on_host(y).tolist() == [before] * 3
        comm.synchronize()
        return {(1 in (row.src, row.dst), row.link) for row in ledger.rows()}

    by_mpi = {(True, "direct")}
    others = {(False, "thread")} if device == "auto" else {(False, "direct")}
    assert set().union(*run(body, 3, device=device)) == by_mpi | others
    assert BACKEND.bytes_to_host == BACKEND.bytes_to_device == 0
    assert gpu().bytes_copied["DtoH"] == (3 * 2 * 512 if device == "auto" else 0)  # patterns


@pytest.mark.parametrize("waits", [True, False])
def test_a_rank_sends_when_its_device_has_copied_a_message(
    waits: bool, pairs: None, monkeypatch: pytest.MonkeyPatch, word: np.ndarray
) -> None:
    """The control: what is sent before is wrong."""
    if not waits:
        monkeypatch.setattr(HostRows, "is_copied", lambda self: True)

    def is_right(comm: Communicator) -> bool:
        comm.all_reduce(on_device(np.zeros(99)), algorithm="ring")  # leaves other messages
        hold_each(comm, BACKEND.current_stream(), word)
        work = comm.all_reduce(on_device(np.ones(99)), algorithm="ring", async_op=True)
        for _ in range(4):  # until all ranks have come, and have gone on as far as they can
            comm.barrier()
            for _ in range(50):
                work.test()
        comm.barrier()
        word[:] = 1
        y = on_host(work.wait())
        comm.synchronize()
        return y.tolist() == [3.0] * 99

    assert all(run(is_right, 3)) == waits


def test_explain_says_what_mpi_sends(pairs: None) -> None:
    def body(comm: Communicator) -> str:
        comm.all_reduce(on_device(np.ones(3)))
        return comm.explain("all_reduce", on_device(np.ones(3))).links

    zero, one, _ = run(body, 3)
    assert "memory of rank 2 is read directly; rank 1 is sent device memory by MPI:" in zero
    assert "rank 0 is sent device memory by MPI:" in one
    assert run(body, 3, device="staged")[0].startswith("all sent by MPI from device memory: ")


# The job that finds out whether MPI takes device pointers


def agreed(*whys: str) -> list[str]:
    """What ranks raise, if this is why the jobs of some have failed."""

    def body(comm: Communicator) -> str:
        with pytest.raises(CollectiveError) as caught:
            probing.agree(comm, whys[comm.rank])
        assert comm.all_reduce(np.ones(1)).tolist() == [comm.size]  # nothing is under way
        return str(caught.value)

    return run(body, len(whys))


def test_all_ranks_refuse_if_the_job_of_one_host_has_failed() -> None:
    run(lambda comm: probing.agree(comm, ""), 3)
    one, other, last = agreed("", "", "what rank 2 saw")
    assert one == other == last
    assert "(on the host of rank 2: what rank 2 saw)" in one
    two, *_ = agreed("\u00e9" * 300, "b", "")
    assert "on the host of rank 0: \u00e9\u00e9" in two and "on the host of rank 1: b)" in two


def test_no_job_is_started_if_one_is_known_to_be_right(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(probing, "why_it_fails", lambda timeout: started.append(timeout) or "no")

    def body(comm: Communicator) -> None:
        probing.refuse_unless_probed(comm, 60)

    with pytest.raises(CollectiveError, match="on the host of rank 0: no"):
        run(body, 3)
    assert started == [60]  # by the first rank of the host
    with monkeypatch.context() as patch:
        patch.setenv(probing.KNOWN, "1")
        run(body, 3)
    run(body, 3)  # it is known from now on
    assert started == [60]


def command(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("", ""),
        ("print('ok  a'); print('WRONG  65536 bytes'); exit(1)", "65536 bytes"),
        ("exit('no such module')", "no such module"),
        ("import os; os.kill(os.getpid(), 11)", "status -11"),
        ("import time; time.sleep(30)", "a job of two ranks did not end within 0.4 s"),
    ],
)
def test_a_failed_job_says_why(code: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "COMMAND", command(code))
    limit = 0.8 if "sleep" in code else None
    assert probing.why_it_fails(limit) == why


def test_the_job_has_the_settings_of_this_one_but_is_not_part_of_it() -> None:
    settings = {
        "PATH": "a",
        "OMPI_MCA_pml": "ucx",
        "UCX_TLS": "b",
        "MPICH_GPU_SUPPORT_ENABLED": "1",
    }
    of_job = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_FD", "SLURM_PROCID", "PRTE_LAUNCHED")
    environment = {**settings, **dict.fromkeys(of_job, "1")}
    assert probing.outside_of_job(environment) == settings


# What the doctor says


def test_the_doctor_names_the_ucx_of_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    information = tmp_path / "libucx_cu13-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: libucx-cu13\nVersion: 1.0\n")
    (information / "RECORD").write_text("libucx/lib/libucp.so,,\nlibucx/lib/libucp.so.0,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert ucx_folder("libucx-cu13") == tmp_path / "libucx" / "lib"
    assert ucx_folder("libucx-cu12") is None
    monkeypatch.setattr(device_pointers, "find_mpirun", lambda: Mpirun("mpirun", "openmpi"))
    plain, by_ucx = map(str, ways())
    assert plain == "mpirun"
    assert by_ucx == (
        f"LD_LIBRARY_PATH={tmp_path}/libucx/lib mpirun -x LD_LIBRARY_PATH --mca pml ucx "
        "--mca pml_ucx_tls any --mca pml_ucx_devices any"
    )
    monkeypatch.setattr(device_pointers, "find_mpirun", lambda: Mpirun("mpirun", "mpich"))
    assert [*map(str, ways())] == ["mpirun"]


def test_the_doctor_says_how_far_a_job_has_come() -> None:
    last = "\n-----\nRank 1 died\n \n"
    assert why_failed(1, "", last) == "the job ended with status 1 before any message: Rank 1 died"
    begun = "8 bytes from device to device memory\n8 bytes from device to host memory\nnoise\n"
    assert "to exchange 8 bytes from device to host memory: Rank 1" in why_failed(139, begun, last)
    assert why_failed(1, f"{begun}A rank has raised ImportError: no", last).endswith(
        "ImportError: no"
    )


def test_the_doctor_tries_one_way_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, by_ucx = Way(), Way(("--mca", "pml", "ucx"), {"LD_LIBRARY_PATH": "a b"})
    refused = {str(plain): "it has crashed", str(by_ucx): "it has hung"}
    monkeypatch.setattr(device_pointers, "ways", lambda: [plain, by_ucx])
    monkeypatch.setattr(device_pointers, "why_refused", lambda way: refused.get(str(way), ""))
    monkeypatch.setattr(device_pointers, "num_gpus", lambda: (0, "CuPy finds no GPU"))
    assert "CuPy finds no GPU, so device='direct' was not tried" in best_way().sentence
    monkeypatch.setattr(device_pointers, "num_gpus", lambda: (1, ""))
    assert "mpirun: it has crashed; LD_LIBRARY_PATH='a b' mpirun --mca" in best_way().sentence
    del refused[str(by_ucx)]
    assert best_way().sentence.endswith(": LD_LIBRARY_PATH='a b' mpirun --mca pml ucx")
    del refused[str(plain)]
    assert best_way().sentence.endswith("for device='direct': mpirun")
    assert best_way().level is Level.GOOD
