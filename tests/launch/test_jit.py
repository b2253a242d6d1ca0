"""Processes compile once for a machine, and work where they cannot compile or keep the code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIME_LIMIT = 100  # seconds

# Waits for a line, then combines with each of these functions and says whether the result is right.
PROGRAM = """
import ctypes, logging, sys
import numpy as np
from collectives.arrays import jit, kernels

logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)
jit.why_unavailable()
print("ready", flush=True)
sys.stdin.readline()
for function in sys.argv[1:]:
    x, y = np.arange(1, 9, dtype=np.int32), np.arange(11, 19, dtype=np.int32)
    address = kernels.combine(function, x.dtype)
    out = np.empty_like(x)
    prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
    prototype(address)(*(a.ctypes.data for a in (out, x, y)), x.size)
    print("right" if np.array_equal(out, getattr(np, function)(x, y)) else "wrong")
"""
FUNCTIONS = ["add", "multiply", "minimum", "bitwise_xor"]


def start(program: str, *arguments: str, **environment: object) -> subprocess.Popen[str]:
    settings = {name: str(value) for name, value in environment.items()}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **settings},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def lines_of(processes: list[subprocess.Popen[str]]) -> list[str]:
    """What they print, all of them begun at the same time."""
    try:
        for process in processes:
            assert process.stdout and process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin
            process.stdin.write("go\n")
            process.stdin.flush()
        outputs = [process.communicate(timeout=TIME_LIMIT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return [line for output in outputs for line in output.splitlines()]


def count(beginning: str, lines: list[str]) -> int:
    return sum(line.startswith(beginning) for line in lines)


def output_of(program: str, **environment: object) -> list[str]:
    process = start(program, **environment)
    try:
        return process.communicate(timeout=TIME_LIMIT)[0].splitlines()
    finally:
        process.kill()


@pytest.mark.slow
def test_every_function_is_compiled_once_by_processes_that_come_at_once(tmp_path: Path) -> None:
    orders = [FUNCTIONS[i:] + FUNCTIONS[:i] for i in range(4)]
    lines = lines_of([start(PROGRAM, *order, NUMBA_CACHE_DIR=tmp_path) for order in orders])
    assert count("right", lines) == 16
    assert count("WARNING compiling", lines) + count("INFO compiling", lines) == 4
    lines = lines_of([start(PROGRAM, *FUNCTIONS, NUMBA_CACHE_DIR=tmp_path)])
    assert lines == ["right"] * 4


def test_compiling_works_where_nothing_can_be_kept(tmp_path: Path) -> None:
    file = tmp_path / "a file, no directory"
    file.touch()
    elsewhere = {"NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator"}
    process = start(PROGRAM, "add", "multiply", NUMBA_CACHE_DIR=file / "cache", **elsewhere)
    lines = lines_of([process])
    assert count("right", lines) == 2
    assert [line for line in lines if line.startswith("WARNING")] == [
        "WARNING compiling collectives.arrays.loops.combining(int32, add, 1) "
        "again in every process: "
        "cannot cache function 'combining.<locals>.combine': no locator available "
        f"for file '{ROOT}/collectives/arrays/loops.py'"
    ]


WHY_NOT = """
import numpy as np
from collectives.arrays import jit, kernels
print(jit.why_unavailable())
print(kernels.combine("add", np.dtype("float32")), kernels.divide(np.dtype("float32")))
"""


@pytest.mark.parametrize(
    ("numba", "reason"),
    [
        ("raise ImportError('no LLVM')", "ImportError: no LLVM"),
        ("class Odd(Exception): ...\nraise Odd", "Odd: "),
        ("import warnings\nwarnings.warn('NumPy is too new')", "UserWarning: NumPy is too new"),
        ("", "ModuleNotFoundError: No module named 'numba.core'; 'numba' is not a package"),
    ],
)
def test_a_broken_numba_breaks_nothing(tmp_path: Path, numba: str, reason: str) -> None:
    (tmp_path / "numba.py").write_text(numba)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    lines = output_of(WHY_NOT, PYTHONPATH=path)
    assert lines == [f"numba cannot be imported: {reason}", "None None"]


def test_a_user_may_forbid_compiling() -> None:
    assert output_of(WHY_NOT, NUMBA_DISABLE_JIT=1) == ["NUMBA_DISABLE_JIT is set", "None None"]


def test_numba_is_imported_when_it_is_needed() -> None:
    program = """
import sys
import collectives
from collectives.arrays import jit, kernels
print("numba" in sys.modules)
jit.why_unavailable()
print("numba" in sys.modules)
"""
    assert output_of(program) == ["False", "True"]


def test_a_child_that_is_forked_while_numba_is_imported_can_import_it() -> None:
    """Without waiting, the child has the locks of a thread that it does not have."""
    program = """
import os, sys
from collectives.engines import compiled
compiled.load_in_background()
print(compiled.why_unavailable())
child = os.fork()
if child == 0:
    import numba
    os._exit(0)
print(os.waitpid(child, 0)[1], compiled.why_unavailable(), "numba" in sys.modules)
"""
    assert output_of(program) == ["compiled code is being loaded", "0 None True"]
