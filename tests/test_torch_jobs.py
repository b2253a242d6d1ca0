"""Jobs of PyTorch: how they start, what PyTorch's own checks do, and the examples of the page.

Collected where torch is installed (`conftest.py`).
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from collectives.launch import launch
from collectives.launch.mpirun import find_mpirun
from collectives.torch.versions import HAS_BACKENDS
from tests.chaos import __main__ as chaos
from tests.chaos.drawing import Job, Step
from tests.docs.pages import blocks

pytestmark = pytest.mark.ranks(n=4)

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "torch.md"
SCRIPT, OPTIONS, BUDGET = blocks(PAGE)

with_backends = pytest.mark.skipif(not HAS_BACKENDS, reason="PyTorch before 2.14 does not apply it")


def run(
    program: str, tmp_path: Path, num_ranks: int = 2, *, name: str = "train.py", **env: str
) -> CompletedProcess[str]:
    """Run a program as a job of our launcher."""
    script = tmp_path / name
    script.write_text(program)
    return launch(num_ranks, [str(script)], timeout=90, env=own(env), capture=True)


def printed_by_ranks(done: CompletedProcess[str]) -> str:
    """What a job printed, without the block that MPICH's mpirun may add when a job fails."""
    return done.stdout.partition(f"\n{'=' * 80}")[0]


def own(env: dict[str, str]) -> dict[str, str]:
    """The environment in which this tree comes first."""
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    return env | {"PYTHONPATH": os.pathsep.join(paths)}


# Starting


def test_an_unchanged_script_runs(tmp_path: Path) -> None:
    done = run(SCRIPT, tmp_path)
    assert done.returncode == 0, done.stderr
    ranks = dict(line.split() for line in done.stdout.splitlines())
    assert sorted(ranks) == ["0", "1"] and len(set(ranks.values())) == 1


def test_a_script_for_torchrun_finds_its_variables(tmp_path: Path) -> None:
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    program = f"import os, torch\nprint(*(os.environ[name] for name in {names}))\n"
    done = run(program, tmp_path, 3)
    assert sorted(done.stdout.splitlines()) == [f"{rank} 3 {rank} 3" for rank in range(3)]


def test_the_library_may_be_imported_before_torch(tmp_path: Path) -> None:
    """The imports in alphabetical order."""
    program = "import collectives.torch\nimport torch.distributed as dist\n"
    program += "dist.init_process_group('ring')\nprint(dist.get_world_size())\n"
    done = run(program, tmp_path)
    assert done.stdout == "2\n2\n", done.stderr


ONE_OF_TWO = """
import torch.distributed as dist
import collectives.torch
store = dist.HashStore()
dist.init_process_group("ring", store=store, rank=0, world_size=2)
"""


def test_a_process_that_mpi_does_not_know_gets_a_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ONE_OF_TWO],
        env={**os.environ, **own({})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (
        "RuntimeError: MPI has started this process alone, but the process group has 2 ranks"
        in (done.stderr)
    )
    assert "`ring launch`" in done.stderr


def test_elsewhere_importing_torch_does_not_import_the_library() -> None:
    program = "import sys, torch; print('collectives.torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **own({})},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "False"


FOUND = """
import sys, torch, torch.distributed as dist
assert "collectives.torch" not in sys.modules
dist.init_process_group("ring", store=dist.HashStore(), rank=0, world_size=1)
print(dist.get_backend(), "collectives.torch" in sys.modules)
dist.destroy_process_group()
"""


@with_backends
def test_pytorch_finds_the_backend_by_its_entry_point() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FOUND],
        env={**os.environ, **own({})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "ring True\n", done.stderr


# Checks


DIFFERENT_ROOTS = """\
import torch, torch.distributed as dist
dist.init_process_group("ring")
x = torch.ones(3)
def train():
    try:
        if dist.get_rank() == 0:
            dist.broadcast(x, 0)
        else:
            dist.broadcast(x, 1)
    except dist.DistBackendError as error:
        print(f"DistBackendError: {error}")
train()
dist.all_reduce(x, dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM)
"""


def test_checked_mode_names_both_lines_of_the_script(tmp_path: Path) -> None:
    done = run(DIFFERENT_ROOTS, tmp_path, COLLECTIVES_CHECK="1")
    shown = next(text for text in blocks(PAGE, "text") if text.startswith("DistBackendError"))
    assert printed_by_ranks(done) == 2 * shown
    assert (
        "rank 1 called all_reduce(op=max), rank 0 op=sum (call 2, from train.py:13)" in done.stderr
    )


NOT_A_NUMBER = """
import torch, torch.distributed as dist
dist.init_process_group("ring")
dist.all_reduce(torch.ones(2))
dist.all_reduce(torch.tensor([1.0, float("nan")]))
"""


@with_backends
def test_the_nan_check_of_pytorch_works(tmp_path: Path) -> None:
    done = run(NOT_A_NUMBER, tmp_path, TORCH_DIST_NAN_CHECK="1")
    assert "NaN found in input tensor" in done.stderr
    assert run(NOT_A_NUMBER, tmp_path).returncode == 0


OTHER_SIZES = """
import torch, torch.distributed as dist
dist.init_process_group("ring")
x = torch.ones(4)
dist.all_reduce(x)
print(x[0].item())
dist.all_reduce(torch.ones(3 + dist.get_rank()))
"""


@with_backends
def test_the_wrapper_of_pytorch_for_debugging_works(tmp_path: Path) -> None:
    done = run(OTHER_SIZES, tmp_path, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert printed_by_ranks(done) == "2.0\n2.0\n"
    assert "Detected mismatch between collectives on ranks" in done.stderr
    assert "Detected mismatch" not in run(OTHER_SIZES, tmp_path).stderr


FLIGHT = """
import json, torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json
dist.init_process_group("ring")
dist.all_reduce(torch.ones(2))
dist.all_reduce(torch.ones(2), async_op=True).wait()
entries = json.loads(_dump_fr_trace_json(backend="ring"))["entries"]
print([entry["profiling_name"] for entry in entries])
"""


@with_backends
def test_the_flight_recorder_of_pytorch_records_calls(tmp_path: Path) -> None:
    done = run(FLIGHT, tmp_path, 1)
    assert done.stdout == "['ring:all_reduce', 'ring:all_reduce']\n", done.stderr


# The table of what was sent

TRAFFIC = """
import sys, torch, torch.distributed as dist
dist.init_process_group(sys.argv[1])
dist.all_reduce(torch.ones(3000))
for peer in dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(5), 1 - dist.get_rank()),
                                    dist.P2POp(dist.irecv, torch.ones(5), 1 - dist.get_rank())]):
    peer.wait()
"""


def traffic_of(backend: str, tmp_path: Path, **env: str) -> list[list[str]]:
    """The table of a program on 2 ranks, and what it says that it does not show."""
    script = tmp_path / "train.py"
    script.write_text(TRAFFIC)
    command, more = [str(script), backend], {"drop_in": True, "traffic": True}
    done = launch(2, command, timeout=90, env=own(env), capture=True, **more)
    assert done.returncode == 0, done.stderr
    return [line.strip("| ").split(" | ") for line in done.stdout.splitlines()]


def test_traffic_has_what_the_backend_sends(tmp_path: Path) -> None:
    table = [[cell.strip() for cell in line] for line in traffic_of("ring", tmp_path)]
    sent = {(line[0], line[1]): line[-1] for line in table if len(line) > 1}
    assert sent["train.py:4", "all_reduce"] == str(2 * 3000 * 4)
    assert sent["train.py:5", "send"] == str(2 * 5 * 4)
    assert not any("backend" in line[0] for line in table)


RECORDED = """
import torch, torch.distributed as dist
from collectives.torch import communicator, record
dist.init_process_group("ring")
with communicator().record() as outer:
    dist.all_reduce(torch.ones(3000))
    model = torch.nn.Linear(4, 4)
    model.register_forward_hook(lambda *_: dist.all_reduce(torch.ones(5)))
    with record(model) as inner:
        model(torch.ones(1, 4))
if dist.get_rank() == 0:
    print(*outer.rows(), *inner.rows(), sep="\\n")
dist.destroy_process_group()
"""


def test_what_a_program_records_does_not_change_with_traffic(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RECORDED)
    plain, shown = (
        launch(
            2, [str(script)], timeout=90, env=own({}), capture=True, drop_in=True, traffic=traffic
        )
        for traffic in (False, True)
    )
    assert (plain.returncode, shown.returncode) == (0, 0), plain.stderr + shown.stderr
    ledgers, table = shown.stdout.split("What ranks", 1)
    assert ledgers == plain.stdout and ledgers.count("phase='forward'") == 2
    assert "| train.py:6 " in table and "| forward/train.py:8 " in table


def test_traffic_says_that_it_does_not_see_another_backend(tmp_path: Path) -> None:
    sentence = "Not seen: what torch.distributed sent by the backend gloo, without this library."
    assert [sentence] in traffic_of("gloo", tmp_path)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = str(server.getsockname()[1])
    without_mpi = traffic_of("gloo", tmp_path, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert without_mpi == [
        ["No table of what was sent: rank 0 has not used MPI by mpi4py."],
        [sentence],
    ]


# The end


def test_futures_complete_in_a_handler_that_runs_at_the_very_end() -> None:
    program = str(ROOT / "tests" / "launch" / "ending_program.py")
    done = launch(2, [program, "futures"], timeout=60, env=own({}), capture=True)
    assert sorted(done.stdout.splitlines()) == ["rank 0 futures 2", "rank 1 futures 2"], done.stderr


# Time limits

NOBODY_WAITS = """
import time, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("ring", timeout=timedelta(seconds=0.5))
if dist.get_rank() < 2:
    future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
    begin = time.monotonic()
    while not future.done():
        assert time.monotonic() - begin < 5
        time.sleep(0.01)
    try:
        future.wait()
    except RuntimeError as error:
        print(str(error).splitlines()[0])
else:
    time.sleep(2)
"""


def test_a_future_fails_at_the_time_limit_although_nobody_waits(tmp_path: Path) -> None:
    # In a job of its own, because a call that was given up can leave messages.
    done = run(NOBODY_WAITS, tmp_path, 3)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("waited 0.5 s") == 2 and "from rank 2" in done.stdout


HELD_DEVICE = """
import pytest, torch, torch.distributed as dist
from datetime import timedelta
from mpi4py import MPI
from tests.fakes.held_stream import hold, released
from tests.fakes.device import BACKEND
from tests.fakes.driver import gpu
from tests.torch.places import fake_place
from collectives.torch import communicator
dist.init_process_group("ring")
gpu().go_on_alone()
gpu().make_current()
with fake_place(pytest.MonkeyPatch()) as place, released() as word:
    x = place.on_device(torch.ones(300))
    dist.all_reduce(x)
    dist.barrier()
    communicator().timeout = 2.0
    if dist.get_rank() == 1:
        hold(BACKEND.current_stream(), word)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    print("enqueued")
    if dist.get_rank() == 1:
        MPI.COMM_WORLD.Barrier()
        word[:] = 1  # the other rank has given up
    for call in (lambda: work.wait(timedelta(seconds=60)), lambda: dist.all_reduce(x)):
        with pytest.raises(dist.DistBackendError) as caught:
            call()
        print(caught.value)
    if dist.get_rank() == 0:
        MPI.COMM_WORLD.Barrier()
"""


def test_a_device_that_stands_still_fails_what_follows(tmp_path: Path) -> None:
    """A rank's stream is held: the others give up at the time limit, and all learn of it."""
    done = run(HELD_DEVICE, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("enqueued") == 2
    assert done.stdout.count("the device of rank 0 waits for rank 1 at row") >= 2
    assert done.stdout.count("this communicator is unusable") == 2


AFTER_A_LIMIT = """
import time, torch, torch.distributed as dist
from datetime import timedelta
for limit in 2, 60:
    dist.init_process_group("ring", timeout=timedelta(seconds=limit))
    x = torch.ones(2)
    try:
        if limit == 2 and dist.get_rank() == 0:
            time.sleep(3)
        else:
            dist.all_reduce(x)
            print(x[0].item())
    except dist.DistBackendError as error:
        print("late")
    dist.destroy_process_group()
"""


def test_a_group_can_end_after_a_time_limit_and_another_one_begin(tmp_path: Path) -> None:
    done = run(AFTER_A_LIMIT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["2.0", "2.0", "late"]


LATE_IN_BACKWARD = """
import time, torch, torch.distributed as dist
from datetime import timedelta
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("ring")
for limit in (60, 0.5):  # the first time takes seconds
    group = dist.new_group(timeout=timedelta(seconds=limit))
    model = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
    if limit == 0.5 and dist.get_rank() == 0:
        time.sleep(1)
        break
    try:
        model(torch.ones(2)).backward()
    except RuntimeError as error:
        print(error)
dist.destroy_process_group()
"""


def test_the_backward_pass_of_ddp_says_for_whom_it_waited(tmp_path: Path) -> None:
    done = run(LATE_IN_BACKWARD, tmp_path)
    assert done.returncode == 0, done.stderr
    said = r"DistBackendError: .* rank 1 waited 0.5 s .* rank 0"
    assert re.search(said, done.stdout), done.stdout


LEFT_MESSAGES = """
import torch, torch.distributed as dist
for value in (7.0, 5.0):
    dist.init_process_group("ring")
    found, parts = torch.zeros(2), [torch.full((2,), value)] * 2
    try:
        is_mistaken = value == 7.0 or dist.get_rank() == 0
        dist.scatter(found, parts if is_mistaken else None, 0)
    except ValueError:
        print("refused")
    dist.destroy_process_group()
print(found.tolist())
"""


def test_messages_that_an_error_has_left_do_not_reach_the_next_group(tmp_path: Path) -> None:
    """MPI may give the communicator of the next group the number of the last one."""
    done = run(LEFT_MESSAGES, tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[5.0, 5.0]", "[5.0, 5.0]", "refused"]


MISSING = """
import time, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("ring")
dist.monitored_barrier()
if dist.get_rank() < 2:
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=0.5))
    except dist.DistBackendError as error:
        print(error)
time.sleep(1)
"""


@with_backends
def test_a_monitored_barrier_names_all_ranks_that_have_not_come(tmp_path: Path) -> None:
    lines = run(MISSING, tmp_path, 4).stdout.splitlines()
    assert sorted(lines) == [
        "rank 1 has come to the monitored barrier, but rank 0 has not said within 0.5 s that all "
        "have; the error on rank 0 names the others",
        "ranks 2, 3 have not come to the monitored barrier within 0.5 s",
    ]


# Faults


@pytest.mark.timeout(400)  # each step of the job has its own limit, and is reported
def test_faults_in_a_program_of_pytorch_are_survived(tmp_path: Path) -> None:
    steps = (
        Step("pytorch", "stop", 1, delay=0.01, duration=0.1),
        Step("pytorch", "slow", 0, duration=0.1),
        Step("pytorch", "dump", 2, duration=0.05, choice=14),
        Step("pytorch", "late", 1, limit=0.3),  # by its seed, DistributedDataParallel waits first
        Step("pytorch", "stop past limit", 2, delay=0.01, limit=0.3),
        Step("pytorch", "refused", 0),
        Step("pytorch", "kill", 1, delay=0.05),
    )
    outcome = chaos.run(Job("PyTorch", 3, steps), tmp_path / "job")
    assert not outcome.verdicts, "\n".join(map(str, outcome.verdicts))
    assert len(outcome.reached) == len(steps)


# The page


def test_the_example_with_options_runs(tmp_path: Path) -> None:
    done = run(OPTIONS, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "dissemination" in done.stdout


@pytest.mark.on_open_mpi
def test_the_budget_of_the_page_is_kept_and_can_fail(tmp_path: Path) -> None:
    path = tmp_path / "test_budget.py"
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = ["-m", "pytest", "--with-mpi", "-q", "-p", "no:cacheprovider", str(path)]
    path.write_text(BUDGET)
    kept = launch(2, command, timeout=90, env=own({}), capture=True)
    assert kept.returncode == 0 and "1 passed" in kept.stdout, kept.stdout + kept.stderr
    path.write_text(BUDGET.replace("64 * 64 * 4", "64 * 64 * 2"))
    failed = launch(2, command, timeout=90, env=own({}), capture=True)
    assert failed.returncode != 0 and "sent 32768 bytes, expected 16384" in failed.stdout


@pytest.mark.on_open_mpi
def test_the_traffic_of_the_page_is_what_the_command_prints() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", "torch_traffic", "--wide"],
        cwd=ROOT,
        env={**os.environ, **own({})},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (shown,) = (text for text in blocks(PAGE, "text") if "predicted" in text)
    printed = done.stdout
    if find_mpirun().vendor == "mpich":  # which has no counters
        shown = re.sub(r"\d+( \|\n)", r"n/a\1", shown)
    assert cells(printed) == cells(shown)


def cells(table: str) -> list[list[str]]:
    """The words of the lines of a table."""
    lines = (line.strip("| ").split("|") for line in table.splitlines() if line.startswith("|"))
    return [[cell.strip() for cell in line] for line in lines if not line[0].startswith("-")]
