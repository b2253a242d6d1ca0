"""A daemon of NVIDIA's Multi-Process Service for a command, with a program in its place."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.gpu import mps

# It says what it is told in a file beside itself, and goes when it is told to quit.
CONTROL = """#!{python}
import os, subprocess, sys, time
from pathlib import Path

pipes, log = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]), Path(__file__).with_name("log")
if sys.argv[1:] == ["-f"]:
    if {fails}:
        sys.exit("no permission\\n")
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (pipes / "server").write_text(str(server.pid))
    log.write_text(f"{{os.getpid()}} {{server.pid}}\\n")
    (pipes / "control").touch()
    while not (pipes / "quit").exists() or {stays}:
        time.sleep(0.02)
    sys.exit()
word = sys.stdin.read().strip()
with log.open("a") as file:
    file.write(word + "\\n")
if word == "get_server_list":
    print((pipes / "server").read_text())
else:
    (pipes / "quit").touch()
"""


@pytest.fixture
def control(tmp_path, monkeypatch):
    """Puts the program on the path; its log."""

    def make(*, fails: bool = False, stays: bool = False) -> Path:
        path = tmp_path / mps.CONTROL
        path.write_text(CONTROL.format(python=sys.executable, fails=fails, stays=stays))
        path.chmod(0o755)
        return tmp_path / "log"

    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(mps, "PROBE", "")
    monkeypatch.setattr(mps, "QUIT_SECONDS", 1.0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # of the process of the tests
    return make


def check_nothing_is_left(log: Path) -> None:
    processes, *words = log.read_text().splitlines()
    assert words == ["get_server_list", "quit"]
    assert not any(mps.is_alive(int(number)) for number in processes.split())


SHOW = "import os; print(os.path.exists(os.environ['CUDA_MPS_PIPE_DIRECTORY'] + '/control'))"


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.slow
def test_a_command_runs_beside_the_daemon_of_which_nothing_is_left(control, capfd, stays):
    log = control(stays=stays)
    assert mps.COMMAND.main(["60", "-c", SHOW]) == 0
    assert capfd.readouterr().out == "True\n"
    check_nothing_is_left(log)


@pytest.mark.slow
def test_the_status_is_that_of_the_command(control):
    log = control()
    assert mps.COMMAND.main(["60", "-c", "raise SystemExit(3)"]) == 3
    check_nothing_is_left(log)


@pytest.mark.slow
def test_a_command_that_takes_too_long_is_ended(control, capfd):
    log = control()
    began = time.monotonic()
    words = ["0.5", "-c", "import time; time.sleep(60)"]
    assert mps.COMMAND.main(words) == mps.TIMED_OUT
    assert time.monotonic() - began < 30
    assert "the command did not end in 0.5 s" in capfd.readouterr().out
    check_nothing_is_left(log)


@pytest.mark.slow
def test_after_sigterm_nothing_is_left(control, tmp_path, monkeypatch):
    log, started = control(), tmp_path / "started"
    monkeypatch.undo()
    code = f"import pathlib, time; pathlib.Path({str(started)!r}).touch(); time.sleep(60)"
    begin = "import sys; from bench.gpu import mps; mps.PROBE = ''; mps.QUIT_SECONDS = 1.0;"
    command = [sys.executable, "-c", f"{begin} sys.exit(mps.COMMAND.main(sys.argv[1:]))", "60"]
    command += ["-c", code]
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    process = subprocess.Popen(command, cwd=Path(mps.__file__).parents[2])
    try:
        deadline = time.monotonic() + 30
        while not started.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
    finally:
        process.kill()
    check_nothing_is_left(log)


def test_where_there_is_no_mps_it_says_so(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert mps.COMMAND.main(["60", "-c", "print('run')"]) == 0
    said = capfd.readouterr().out
    assert said == f"MPS is not available: there is no {mps.CONTROL} on the path\n"


def test_a_daemon_that_does_not_start_is_not_available(control, capfd):
    control(fails=True)
    assert mps.COMMAND.main(["60", "-c", "print('run')"]) == 0
    said = capfd.readouterr().out
    assert said == "MPS is not available: its daemon does not start: no permission\n"


def test_a_daemon_that_serves_nobody_is_not_available(control, capfd, monkeypatch):
    log = control()
    monkeypatch.setattr(mps, "PROBE", "raise RuntimeError('cudaErrorMpsConnectionFailed')")
    assert mps.COMMAND.main(["60", "-c", "print('run')"]) == 0
    said = capfd.readouterr().out
    wanted = "a process cannot use it: RuntimeError: cudaErrorMpsConnectionFailed"
    assert said == f"MPS is not available: {wanted}\n"
    check_nothing_is_left(log)
