"""Functions are compiled once in a process, whatever goes wrong around numba's cache."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collectives
from collectives.arrays import jit
from tests.inside import forget_compiled, without_numba


@pytest.fixture(autouse=True)
def _new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this process had compiled nothing, with an empty cache in `tmp_path`."""
    import numba

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    forget_compiled(monkeypatch)


def adding(number: int) -> Callable[[int], int]:
    def add(x: int) -> int:
        return x + number

    return add


def called(address: int, x: int) -> int:
    return int(ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(address)(x))


def lock_file(directory: Path) -> Path:
    [file] = directory.rglob(jit.LOCK_FILE)
    return file


@contextmanager
def locked(path: Path, operation: int) -> Iterator[None]:
    """Hold the lock, as another process does; BlockingIOError if it cannot be had at once."""
    with path.open("a") as file:
        fcntl.flock(file, operation | fcntl.LOCK_NB)
        yield


def test_a_signal_interrupts_no_loading_and_is_handled_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """LLVM would crash if a handler raised an exception in one of numba's functions."""
    right, loaded = jit._LockedCache.load_overload, list[bool]()

    def load_overload(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        overload = right(*arguments)
        loaded.append(True)
        return overload

    monkeypatch.setattr(jit._LockedCache, "load_overload", load_overload)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        jit.pointer(adding(1), "int64(int64)")
    assert loaded == [True]
    assert signal.getsignal(signal.SIGINT) is handler
    assert called(jit.pointer(adding(1), "int64(int64)"), 2) == 3
    assert loaded == [True]  # what was loaded then is kept


def test_each_of_several_signals_is_handled_though_one_handler_raises() -> None:
    handled = list[int]()

    def receive_all() -> None:
        with jit._signals_deferred():
            for number in (signal.SIGUSR2, signal.SIGINT, signal.SIGUSR2):
                signal.raise_signal(number)
            assert handled == []

    before = signal.signal(signal.SIGUSR2, lambda number, _: handled.append(number))
    try:
        with pytest.raises(KeyboardInterrupt):
            receive_all()
        assert handled == [signal.SIGUSR2] * 2
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_compiled_function_can_be_called_and_has_a_pointer() -> None:
    assert jit.why_unavailable() is None
    assert jit.function(adding(1), "int64(int64)")(2) == 3
    assert called(jit.pointer(adding(1), "int64(int64)"), 2) == 3


def test_callers_get_a_compiled_function_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = collectives.compiled(adding(1), "int64(int64)")
    assert compiled is not None and compiled(2) == 3
    without_numba(monkeypatch, "numba is missing")
    assert collectives.compiled(adding(1), "int64(int64)") is None


def test_a_function_takes_its_signature_only() -> None:
    compiled = jit.function(adding(1), "int64(int64)")
    with pytest.raises(TypeError):
        compiled(np.zeros(3))


def test_equal_functions_are_one_and_others_are_not() -> None:
    one, again, two = (jit.pointer(adding(number), "int64(int64)") for number in (1, 1, 2))
    assert one == again
    assert [called(one, 5), called(two, 5)] == [6, 7]
    assert jit.function(adding(1), "int64(int64)") is jit.function(adding(1), "int64(int64)")


def test_threads_that_come_at_once_get_the_same(caplog: pytest.LogCaptureFixture) -> None:
    addresses = []
    together = threading.Barrier(6)

    def rank() -> None:
        together.wait()
        addresses.append(jit.pointer(adding(3), "int64(int64)"))

    caplog.set_level(logging.INFO, jit.__name__)
    threads = [threading.Thread(target=rank) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(addresses) == 6 and len(set(addresses)) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "compiling tests.arrays.test_jit.adding(3), once for this machine"
    ]


def test_a_closure_that_differs_in_every_process_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"adding\(\[\]\) cannot be cached: its closure holds a list"
    ):
        jit.function(adding([]), "int64(int64)")  # type: ignore[arg-type]


@pytest.mark.parametrize("compiler", [jit.function, jit.pointer])
def test_where_it_cannot_compile_it_says_why(
    monkeypatch: pytest.MonkeyPatch, compiler: Callable[..., object]
) -> None:
    without_numba(monkeypatch)
    with pytest.raises(RuntimeError, match=r"adding\(1\) cannot be compiled: numba cannot be"):
        compiler(adding(1), "int64(int64)")


LOADED = """
import sys
import numpy as np
from collectives import warm
from collectives.arrays import jit
assert warm.COMMAND.main([]) == 0
print("numba.np.linalg" in sys.modules)
def median(x):
    return np.median(np.sort(x)) + np.random.randint(0, 1)
compiled = jit.function(median, "float64(float64[::1])")
assert compiled(np.array([3.0, 1.0, 2.0])) == 2.0
print("numba.np.linalg" in sys.modules)
"""


@pytest.mark.slow
def test_what_only_compiling_needs_is_not_loaded_with_the_librarys_functions(
    tmp_path: Path,
) -> None:
    """A user's function in the same process has it, where it is compiled and where it is loaded."""
    (tmp_path / "program.py").write_text(LOADED)
    of_first_run, of_second_run = (
        subprocess.run(
            [sys.executable, tmp_path / "program.py"],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
        for _ in range(2)
    )
    assert "compiling __main__.median" in of_first_run.stderr
    assert "compiling" not in of_second_run.stderr
    assert of_second_run.stdout.split() == ["False", "True"]


def test_the_lock_is_free_after_compiling(tmp_path: Path) -> None:
    jit.function(adding(1), "int64(int64)")
    with locked(lock_file(tmp_path), fcntl.LOCK_EX):
        pass


def test_the_lock_is_free_after_an_error(tmp_path: Path) -> None:
    import numba

    with pytest.raises(numba.TypingError):
        jit.function(adding("a string"), "int64(int64)")  # type: ignore[arg-type]
    with locked(lock_file(tmp_path), fcntl.LOCK_EX):
        pass


class WhenLogged(logging.Handler):
    """Does something when the module says that it compiles, while it holds the lock."""

    def __init__(self, action: Callable[[], object]) -> None:
        super().__init__()
        self.action = action

    def emit(self, record: logging.LogRecord) -> None:
        self.action()

    def __enter__(self) -> None:
        logging.getLogger(jit.__name__).addHandler(self)

    def __exit__(self, *_: object) -> None:
        logging.getLogger(jit.__name__).removeHandler(self)


def test_the_lock_is_held_while_it_compiles(tmp_path: Path) -> None:
    def look() -> None:
        with pytest.raises(BlockingIOError), locked(lock_file(tmp_path), fcntl.LOCK_SH):
            pass
        was_locked.append(True)

    was_locked: list[bool] = []
    with WhenLogged(look):
        jit.function(adding(1), "int64(int64)")
    assert was_locked == [True]


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """It has a copy of every open file, which closing it here leaves open there."""
    import os

    copies: list[int] = []
    with WhenLogged(lambda: copies.extend(map(os.dup, open_on(lock_file(tmp_path))))):
        jit.function(adding(1), "int64(int64)")
    assert copies
    try:
        with locked(lock_file(tmp_path), fcntl.LOCK_EX):
            pass
    finally:
        for copy in copies:
            os.close(copy)


def open_on(path: Path) -> list[int]:
    """This process's descriptors of a file."""
    files = [link for link in Path("/proc/self/fd").iterdir() if link.exists()]
    return [int(link.name) for link in files if link.samefile(path)]


def test_what_is_in_the_cache_is_loaded_beside_others_that_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    jit.pointer(adding(1), "int64(int64)")
    forget_compiled(monkeypatch)
    caplog.clear()
    caplog.set_level(logging.INFO, jit.__name__)
    with locked(lock_file(tmp_path), fcntl.LOCK_SH):
        assert called(jit.pointer(adding(1), "int64(int64)"), 1) == 2
    assert not caplog.records


@pytest.mark.parametrize("damaged", ["*.nbi", "*.nbc"])
def test_a_damaged_cache_is_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, damaged: str
) -> None:
    jit.pointer(adding(1), "int64(int64)")
    [file] = tmp_path.rglob(damaged)
    file.write_bytes(file.read_bytes()[:20])
    for is_damaged in (True, False):
        forget_compiled(monkeypatch)
        caplog.clear()
        assert called(jit.pointer(adding(1), "int64(int64)"), 1) == 2
        assert any("cannot be loaded" in message for message in caplog.messages) == is_damaged


def test_what_cannot_be_saved_works_nevertheless(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from numba.core.caching import FunctionCache

    def save(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(FunctionCache, "save_overload", save)
    assert called(jit.pointer(adding(1), "int64(int64)"), 1) == 2
    assert "cannot be saved" in caplog.text and "No space left on device" in caplog.text


def test_a_file_system_without_locks_will_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(*_: Any) -> None:
        raise OSError("No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    caplog.set_level(logging.INFO, jit.__name__)
    assert called(jit.pointer(adding(1), "int64(int64)"), 1) == 2
    assert "cannot be locked: No locks available" in caplog.text


def test_users_see_once_that_it_compiles(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, jit.__name__)
    for number in (1, 2):
        jit.pointer(adding(number), "int64(int64)")
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
