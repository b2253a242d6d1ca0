"""What differs between versions of PyTorch; everything else in this folder is the same for all.

From 2.14 a backend in Python is a `Backend`, which PyTorch puts into a process group of its own.
Before, it is the process group itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch import distributed
from torch._C import _distributed_c10d as c10d
from torch._C._dynamo import eval_frame
from torch.distributed import distributed_c10d

AllgatherOptions = c10d.AllgatherOptions
OLDEST = (2, 11)
VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
HAS_BACKENDS = VERSION >= (2, 14)


class _Group(distributed.ProcessGroup):  # type: ignore[misc]
    """A process group in Python, with what groups have that are made of backends.

    C++ calls the methods with names like `getGroupName`, Python the others.
    """

    _name = _description = ""

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def _get_backend(self, device: torch.device) -> Any:
        return self


Base: Any = c10d.Backend if HAS_BACKENDS else _Group

# The names of methods that PyTorch 2.11 calls, by those that it calls since.  Each is a method of
# every version before 2.14; later ones refuse a class that has both names.
_OLD_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "end_coalescing": "_end_coalescing",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "start_coalescing": "_start_coalescing",
}


def for_this_version(backend: Any) -> Any:
    """Give a class the names of methods that this version of PyTorch calls."""
    untraced(backend)
    if not HAS_BACKENDS:
        for name, old_name in _OLD_NAMES.items():
            setattr(backend, old_name, getattr(backend, name))
    return backend


def untraced(called: Any) -> Any:
    """Decorate a class whose public methods PyTorch calls, so that `torch.compile` skips them.

    Otherwise it would compile what they do, when a compiled program comes to them.
    `torch.compiler.disable` would do the same, but it takes seconds to import.
    """
    skip = eval_frame._FrameAction.SKIP
    skip_all = eval_frame._FrameExecStrategy(skip, skip)  # also what the method calls
    for name, method in vars(called).items():
        if isinstance(method, FunctionType) and not name.startswith("_"):
            eval_frame.set_code_exec_strategy(method.__code__, skip_all)
    return called


def options_with(name: str, timeout: float | None) -> Any:
    """Return PyTorch's options of a backend of this name, with a time limit in seconds."""
    longest = timedelta(days=365)
    limit = longest if timeout is None else min(longest, timedelta(seconds=timeout))
    return c10d.Backend.Options(name, limit)


def complete_works(source_of_last: Callable[[], int]) -> None:
    """Let works answer `is_completed`, `result` and `_source_rank`.

    From 2.14 on callers get a work in Python inside a holder, which forwards only `wait` and
    `get_future`.  `source_of_last` returns the rank that sent the message from any rank that this
    thread has waited for last.
    """
    if not HAS_BACKENDS:
        return
    work = distributed.Work
    is_completed, result, source_rank = work.is_completed, work.result, work._source_rank

    @wraps(is_completed)
    def is_completed_or_done(work: Any) -> bool:
        return bool(is_completed(work)) or _is_done(work)

    @wraps(result)
    def result_of_future(work: Any) -> Any:
        try:
            return result(work)
        except RuntimeError as error:
            if "not implemented" not in str(error):
                raise
            work.wait()  # which raises its error
            return work.get_future().wait()

    @wraps(source_rank)
    def source_rank_or_last(work: Any) -> int:
        try:
            return int(source_rank(work))
        except RuntimeError:
            return source_of_last()

    work.is_completed, work.result = is_completed_or_done, result_of_future
    work._source_rank = source_rank_or_last


def end_blocks_that_raise(cancel: Callable[[Any], None]) -> None:
    """Let PyTorch's coalescing manager end its block also when that raises.

    PyTorch's own manager does not: until the group is destroyed, PyTorch takes every all-reduce of
    the group as one of the block, and never makes it.  This holds for groups of all backends.
    `cancel` is called with the group of a block that has raised.
    """
    manager, state = distributed._coalescing_manager, distributed_c10d._world.pg_coalesce_state

    @contextmanager
    @wraps(manager)
    def ending(group: Any = None, *args: Any, **named: Any) -> Iterator[Any]:
        group = group or distributed.group.WORLD
        try:
            with manager(group, *args, **named) as block:
                yield block
        except BaseException:
            state.pop(group, None)
            cancel(group)
            raise

    distributed._coalescing_manager = distributed_c10d._coalescing_manager = ending


def follow_groups(note: Callable[[str], None]) -> None:
    """Call `note` with the backends of each new group, such as "gloo" or "cpu:gloo,cuda:ring"."""
    make = distributed_c10d._new_process_group_helper

    @wraps(make)
    def make_and_note(*args: Any, **named: Any) -> Any:
        made = make(*args, **named)
        if config := distributed_c10d._world.pg_backend_config.get(made[0]):
            note(str(config))
        return made

    distributed_c10d._new_process_group_helper = make_and_note


def _is_done(work: Any) -> bool:
    """Return whether a work is complete, on a device too, as far as its future can tell."""
    try:
        future = work.get_future()
    except RuntimeError:  # it has none
        return False
    if not future.done():
        return False
    try:
        made = getattr(future.value(), "work", None)
    except Exception:  # noqa: BLE001 - it has failed, and `wait` raises this
        return True
    in_python = None if made is None else made()
    return in_python is None or bool(in_python.is_completed())


def check() -> None:
    """Raise ImportError for a version that is too old."""
    if VERSION < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise ImportError(
            f"collectives.torch needs PyTorch {needed} or newer, this is {torch.__version__}"
        )
