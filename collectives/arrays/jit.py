"""Compile Python functions with numba, if it is installed, once per machine.

The first call of a function here imports numba; importing this module does not.

Compiled code is kept on disk, in numba's cache, which is not safe for several processes: all ranks
of a job would compile the same function, and two that save at the same time can leave an index that
names the wrong file.  Therefore a process that loads holds a shared lock on a file in the cache
directory, and a process that compiles and saves holds it exclusively.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

LOCK_FILE = "collectives.lock"
_OPTIONS = {"nogil": True, "boundscheck": False, "error_model": "numpy"}

_log = logging.getLogger(__name__)
_one_thread = threading.RLock()
_compiled: dict[object, Any] = {}  # numba's objects; the code lives as long as they do
_warned: set[str] = set()  # messages that were logged as warnings


def is_at_exit() -> bool:
    """Return whether the main thread of the program has ended.

    What `atexit` has registered runs then, and perhaps other threads of the program.  It is too
    late to register more functions, and from Python 3.12 on no thread can be started.
    """
    return not threading.main_thread().is_alive()


def why_unavailable() -> str | None:
    """Return why numba cannot compile here, as text; None if it can."""
    with _one_thread:
        return _why_unavailable()


@cache
def _why_unavailable() -> str | None:
    if is_at_exit() and "numba" not in sys.modules:
        return "the program has ended, too late to import numba"
    try:
        import numba  # noqa: PLC0415 - takes a quarter of a second
        from numba.core import caching, ccallback, sigutils  # noqa: F401, PLC0415
    except Exception as error:  # noqa: BLE001 - a broken installation may raise anything
        return f"numba cannot be imported: {type(error).__name__}: {error}"
    if numba.config.DISABLE_JIT:
        return "NUMBA_DISABLE_JIT is set"
    return None


def compiled(py_function: Callable[..., Any], signature: str) -> Callable[..., Any] | None:
    """Compile a function of numbers and NumPy arrays with numba, once per machine.

    Compiled code is kept on disk, safely for ranks that compile at the same time.

    Parameters
    ----------
    py_function : function
        A function that numba can compile.  Its closure may contain only numbers and strings.
    signature : str
        numba's types of its arguments.  They are not checked when the function is called.

    Returns
    -------
    function or None
        The compiled function, which takes arguments of these types and releases the interpreter
        lock.  None where numba is missing or disabled, so that the caller uses NumPy.

    Examples
    --------
    >>> import collectives
    >>> import numpy as np
    >>> def add_to(x, y):
    ...     for i in range(x.size):
    ...         x[i] += y[i]
    >>> add = collectives.compiled(add_to, "void(float32[::1], float32[::1])") or np.add
    """
    return None if why_unavailable() is not None else function(py_function, signature)


def helper(py_function: Function) -> Function:
    """Decorate a function that compiled functions call; without numba it stays as it is."""
    if why_unavailable() is not None:
        return py_function
    import numba  # noqa: PLC0415

    dispatcher: Function = numba.njit(nogil=True, error_model="numpy")(py_function)
    return dispatcher


def function(py_function: Callable[..., Any], signature: object) -> Callable[..., Any]:
    """Return the compiled function, which takes arguments of this signature and releases the GIL.

    Its closure may contain only numbers and strings.  It is compiled again when its own file or
    numba changes, but not when another file changes whose compiled functions it calls.  Raises
    RuntimeError if `why_unavailable()` gives a reason.
    """

    def make() -> Any:
        import numba  # noqa: PLC0415

        dispatcher = numba.njit(**_OPTIONS)(py_function)
        _load_or_compile(dispatcher, signature)
        return dispatcher

    # The dispatcher would call this after a check of the types, which takes as long as the call.
    (compiled,) = _once("function", py_function, signature, make).overloads.values()
    entry: Callable[..., Any] = compiled.entry_point
    return entry


def pointer(py_function: Callable[..., Any], signature: str) -> int:
    """Return the address of the compiled function as a C function.

    The address is valid as long as the process lives.  The conditions are those of `function`.
    """

    def make() -> Any:
        from numba.core.ccallback import CFunc  # noqa: PLC0415 - numba.cfunc compiles at once
        from numba.core.sigutils import normalize_signature  # noqa: PLC0415

        c_function = CFunc(py_function, normalize_signature(signature), {}, dict(_OPTIONS))
        _load_or_compile(c_function)
        return c_function

    address: int = _once("pointer", py_function, signature, make).address
    return address


def _once(kind: str, py_function: Any, signature: object, make: Callable[[], Any]) -> Any:
    """Return the result of `make`, which is called once for equal functions."""
    name, closure = _name(py_function), _closure(py_function)
    for value in closure:
        if not isinstance(value, (str, int, float)):
            kind_of_value = type(value).__name__
            raise TypeError(f"{name} cannot be cached: its closure holds a {kind_of_value}")
    key = kind, py_function.__code__, repr(closure), signature
    with _one_thread:
        if key not in _compiled:
            if reason := why_unavailable():
                raise RuntimeError(f"{name} cannot be compiled: {reason}")
            with _signals_deferred():
                _compiled[key] = make()
        return _compiled[key]


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Call signal handlers at the end, not in between.

    LLVM calls functions of numba.  An exception that a handler raised there, such as
    KeyboardInterrupt, would not reach the caller, and LLVM would crash.
    """
    if threading.current_thread() is not threading.main_thread():  # it calls no handlers
        yield
        return
    with ExitStack() as noted, ExitStack() as restored:  # the noted ones are called last
        for number in signal.valid_signals():
            handler: Any = signal.getsignal(number)
            if callable(handler):
                restored.callback(signal.signal, number, handler)
                signal.signal(number, partial(noted.callback, handler))
        yield


def _closure(py_function: Any) -> tuple[object, ...]:
    return tuple(cell.cell_contents for cell in py_function.__closure__ or ())


def _name(py_function: Any) -> str:
    """Return the name of a function.

    If another function made it, the name has that function's arguments.
    """
    outer, is_inner, _ = py_function.__qualname__.partition(".<locals>")
    given = ", ".join(str(value) for value in _closure(py_function))
    return f"{py_function.__module__}.{outer}" + (f"({given})" if is_inner else "")


def _load_or_compile(compilable: Any, *arguments: object) -> None:
    """Call `compile` of numba's dispatcher or C function, with a locked cache."""
    name = _name(compilable.__wrapped__)
    try:
        compilable.enable_caching()
    except RuntimeError as error:  # there is no directory to which numba can write
        _log_once("compiling %s again in every process: %s", name, error)
        compilable.compile(*arguments)
        return
    compilable._cache = locked = _LockedCache(compilable._cache, name)
    try:
        compilable.compile(*arguments)
    finally:
        locked.release()


def _log_once(message: str, *arguments: object) -> None:
    """Log a message: as a warning the first time, since it explains why the program waits."""
    level = logging.INFO if message in _warned else logging.WARNING
    _warned.add(message)
    _log.log(level, message, *arguments)


class _LockedCache:
    """numba's cache of one function, in which only one process writes at a time.

    When numba compiles it calls `load_overload`, and `save_overload` if that returns None.
    Functions of this library are loaded without the declarations that only compiling needs.
    """

    def __init__(self, numbas: Any, name: str) -> None:
        self.cache_path = numbas.cache_path
        self._numbas = numbas
        self._name = name
        self._is_of_library = name.startswith("collectives.")
        self._lock_file = Path(numbas.cache_path) / LOCK_FILE
        self._held = ExitStack()
        self._is_damaged = False

    def load_overload(self, signature: object, context: object) -> Any:
        if self._is_of_library:
            context = _LoadingContext(context)
        with _locked(self._lock_file, fcntl.LOCK_SH):
            overload = self._load(signature, context)
        if overload is None:
            self._held.enter_context(_locked(self._lock_file, fcntl.LOCK_EX))
            overload = self._load(signature, context)  # another process may have compiled it
            if overload is None:
                _log_once("compiling %s, once for this machine", self._name)
        return overload

    def _load(self, signature: object, context: object) -> Any:
        try:
            return self._numbas.load_overload(signature, context)
        except Exception as error:  # noqa: BLE001 - a damaged file may raise anything
            _log.warning("%s cannot be loaded from %s: %r", self._name, self.cache_path, error)
            self._is_damaged = True
            return None

    def save_overload(self, signature: object, compiled: object) -> None:
        try:
            if self._is_damaged:
                self._numbas.flush()
            self._numbas.save_overload(signature, compiled)
        except OSError as error:  # such as a full disk
            _log.warning("%s cannot be saved in %s: %s", self._name, self.cache_path, error)

    def release(self) -> None:
        """Release the lock, so that other processes load what this one has saved."""
        self._held.close()


class _LoadingContext:
    """numba's context of a compilation, which is made ready to load code and not to compile it.

    numba makes it ready to compile before it loads anything: it imports the declarations of all
    functions that Python and NumPy have, which takes five times as long as to load.  Loaded code
    refers to symbols.  Those of numba's memory management are there after `refresh` of this class,
    and functions of this library refer to no others.  A function of a user may: a symbol that is
    missing ends the process.
    """

    def __init__(self, context: object) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def refresh(self) -> None:
        """Make the context ready to load; numba calls this first."""
        from numba.core.runtime import rtsys  # noqa: PLC0415

        rtsys.initialize(self._context)


@contextmanager
def _locked(path: Path, operation: int) -> Iterator[None]:
    """Hold a lock on a file, if the file system supports locks."""
    with ExitStack() as stack:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            stack.callback(os.close, file)
            fcntl.flock(file, operation)
            # Closing is not enough: a child that was forked meanwhile has the file open too.
            stack.callback(fcntl.flock, file, fcntl.LOCK_UN)
        except OSError as error:
            _log.info("%s cannot be locked: %s", path, error)
        yield
