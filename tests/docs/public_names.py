"""The public names of the packages, whose docstrings are the reference of the site (docs/api)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any

import collectives
import collectives.export
import collectives.testing
import moe.gates.named
import parallel
from parallel import pipeline, plan

PACKAGES = ("collectives", "parallel", "moe")
MODULES = [
    collectives,
    collectives.algorithms,
    sys.modules["collectives.schedule"],
    collectives.export,
    collectives.testing,
    parallel,
    pipeline,
    plan,
    parallel.checkpoint,
    parallel.text,
    parallel.commands,
    moe,
    moe.gates,
    moe.gates.named,
]
# Of a module that hands on more than callers need.
NAMES = {
    "collectives.schedule": [
        *("Send", "Recv", "RecvReduce", "Copy", "CopyReduce", "Operation", "Piece", "grid"),
        *("rooted", "dual", "folded", "nested", "relabelled", "within_hosts", "among_hosts"),
    ],
    "collectives.export": ["Call", "Task", "machine_in", "platform", "write"],
    "parallel.pipeline": [  # without the table of formulas, which is functions
        *("Schedule", "make", "read_csv", "write_csv", "parse", "with_messages"),
        *("InvalidSchedule", "validate", "Times", "Simulation", "simulate"),
    ],
}
WITHOUT_MEMBERS = (BaseException, collectives.Intracomm)  # mpi4py describes its calls


def public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The public names of a module that are defined for callers, but for whole modules."""
    names = NAMES.get(module.__name__) or getattr(module, "__all__", None)
    if names is None:
        names = [name for name, value in vars(module).items() if is_own(module, name, value)]
    for name in names:
        value = getattr(module, name)
        if not inspect.ismodule(value):
            yield name, value


def is_own(module: ModuleType, name: str, value: object) -> bool:
    """Whether a module without `__all__` defines a function or class for callers."""
    is_defined = inspect.isfunction(value) or inspect.isclass(value)
    return not name.startswith("_") and is_defined and value.__module__ == module.__name__


@cache
def documented() -> frozenset[type]:
    """The classes among the public names."""
    values = (value for module in MODULES for _, value in public(module))
    return frozenset(value for value in values if inspect.isclass(value))


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class, but for those of a base that is public too."""
    if issubclass(kind, WITHOUT_MEMBERS):
        return
    bases = [base for base in kind.__mro__[1:] if base in documented()]
    for name in dict.fromkeys(name for base in reversed(kind.__mro__) for name in vars(base)):
        owner = next(base for base in kind.__mro__ if name in vars(base))
        is_ours = owner.__module__.partition(".")[0] in PACKAGES
        is_new = owner is kind or not any(hasattr(base, name) for base in bases)
        is_field = name in inspect.get_annotations(owner)
        value = inspect.getattr_static(kind, name)
        if name[0] != "_" and is_ours and is_new and not is_field and is_described(value):
            yield name, value


def is_described(value: object) -> bool:
    """Whether it is a function, a class, a method or a property, and not a mere value."""
    return callable(value) or isinstance(value, property | classmethod | staticmethod)


def everything() -> Iterator[tuple[str, Any]]:
    """All public names with their values, and those of the members of classes."""
    for module in MODULES:
        for name, value in public(module):
            yield f"{module.__name__}.{name}", value
            if inspect.isclass(value):
                for member, method in members(value):
                    yield f"{module.__name__}.{name}.{member}", method
