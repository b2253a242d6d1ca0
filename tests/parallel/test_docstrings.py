"""The docstrings of the public names: complete, and with examples that are right."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import parallel
from parallel import checkpoint, text

ROOT = Path(parallel.__file__).parent
MODULES = [
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
    for path in sorted(ROOT.rglob("[!_]*.py"))
]


def failures(module: ModuleType) -> int:
    """The number of examples in the docstrings of a module that do not give what they say."""
    return doctest.testmod(module, report=False).failed


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_say(name: str) -> None:
    assert failures(__import__(name, fromlist=["_"])) == 0


def test_a_wrong_example_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    module = ModuleType("wrong", ">>> 1 + 1\n3\n")
    assert failures(module) == 1
    assert "Expected:\n    3" in capsys.readouterr().out


def public(thing: Any, name: str) -> Iterator[tuple[str, Any]]:
    """A public class or function, with the public methods and properties of the class."""
    yield name, thing
    if inspect.isclass(thing):
        for key in vars(thing):
            if not key.startswith("_") and (
                callable(getattr(thing, key)) or isinstance(vars(thing)[key], property)
            ):
                yield f"{name}.{key}", getattr(thing, key)


def all_public() -> Iterator[tuple[str, Any]]:
    for name in parallel.__all__:
        yield from public(getattr(parallel, name), name)
    for module in (checkpoint, text):
        for name, thing in vars(module).items():
            if inspect.isfunction(thing) and thing.__module__ == module.__name__:
                yield from public(thing, f"{module.__name__}.{name}")


def without_docstring(things: Iterator[tuple[str, Any]]) -> list[str]:
    """The names without a docstring of their own or of the method they replace."""
    return [name for name, thing in things if not inspect.getdoc(thing)]


def test_every_public_name_has_a_docstring() -> None:
    assert without_docstring(all_public()) == []


def test_a_name_without_docstring_is_noticed() -> None:
    class Documented:
        """It has one."""

        def undocumented(self) -> None:
            pass

    assert without_docstring(public(Documented, "Documented")) == ["Documented.undocumented"]
