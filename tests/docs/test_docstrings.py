"""The docstrings of public names are complete, and their examples are right."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import collectives
import examples.images
import examples.students
from tests.algorithms.registry import registry_as_it_was
from tests.docs.public_names import documented, everything, is_described, public

ROOT = Path(__file__).parents[2]
FILES = [
    path
    for package in ("collectives", "parallel", "moe", "examples")
    for path in sorted((ROOT / package).rglob("*.py"))
    if ">>> " in path.read_text()
]
# "Returns the bytes", "yields them"; or the docstring names the result: "The bytes of ...".
SAYS_WHAT_IT_GIVES = re.compile(r"\b([Rr]eturns?|[Yy]ields?)\b|^(The|An?|Whether|Every|All) ")
HEADINGS = ["Parameters", "Returns", "Yields", "Raises", "Notes", "Examples"]
HEADING = re.compile(r"^(\w+)\n-+\n", re.MULTILINE)
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def missing(name: str, thing: Any, inherited: str = "") -> list[str]:
    """What the docstring of a function, class or property lacks.

    `inherited`: what the docstrings of overridden methods say.
    """
    text = inspect.getdoc(thing) or ""
    if inspect.isclass(thing) and thing.__init__ is not object.__init__:
        text += f"\n{inspect.getdoc(thing.__init__) or ''}"
    if not text.strip():
        return [f"{name}: no docstring"]
    text = f"{text}\n{inherited}"
    lacking = [f"{name}: {what}" for what in parameters(thing) if not is_named(what, text)]
    if gives_something(thing) and not SAYS_WHAT_IT_GIVES.search(text):
        lacking.append(f"{name}: what it returns")
    return lacking


def parameters(thing: Any) -> list[str]:
    """The names of what a function, or the making of an object, takes."""
    function = thing.__func__ if isinstance(thing, classmethod | staticmethod) else thing
    if isinstance(function, property) or (inspect.isclass(function) and is_plain(function)):
        return []
    takes = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in takes if parameter.kind not in VARIADIC]
    return [name for name in names if name not in ("self", "cls") and name[0] != "_"]


def is_plain(kind: type) -> bool:
    """Whether callers do not make objects of a class themselves: they get them, or catch them."""
    return issubclass(kind, BaseException) or kind.__name__ in MADE_BY_THE_LIBRARY


# What a function of the library returns or yields; its attributes are described instead.
MADE_BY_THE_LIBRARY = {"Communicator", "Plan", "Work", "Ledger", "Algorithm", "Intracomm"}


def is_named(parameter: str, text: str) -> bool:
    """Whether a docstring speaks of a parameter, by its name or by the name's words."""
    words = parameter.removeprefix("num_").replace("_", " ")
    return re.search(rf"\b({parameter}|{words})s?\b", text, re.IGNORECASE) is not None


def gives_something(thing: Any) -> bool:
    """Whether it is a function that returns or yields a value."""
    function = thing.__func__ if isinstance(thing, classmethod | staticmethod) else thing
    if isinstance(function, property) or inspect.isclass(function):
        return False
    return inspect.signature(function).return_annotation not in (
        None,
        "None",
        "NoReturn",
        inspect.Signature.empty,
    )


def described() -> Iterator[tuple[str, Any]]:
    """All public names that docstrings describe, also of examples, and the members of classes."""
    yield from everything()
    for module in (examples.images, examples.students):
        for name, value in public(module):
            yield f"{module.__name__}.{name}", value


def overridden(name: str) -> str:
    """The docstrings of the methods that a method overrides."""
    *_, kind, member = name.rsplit(".", 2)
    bases = [c for c in documented() if c.__name__ == kind for c in c.__mro__[1:]]
    return "\n".join(inspect.getdoc(vars(base).get(member)) or "" for base in bases)


NAMES = {name: value for name, value in described() if is_described(value)}


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_is_complete(name: str) -> None:
    assert missing(name, NAMES[name], overridden(name)) == []


def sections(thing: Any) -> dict[str, str]:
    """The sections of a docstring, by their headings."""
    parts = HEADING.split(inspect.getdoc(thing) or "")[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def described_parameters(thing: Any) -> list[str]:
    """What the section Parameters describes, in its order."""
    names = re.findall(r"^(\w.*?) : ", sections(thing).get("Parameters", ""), re.MULTILINE)
    return [name for line in names for name in line.split(", ")]


CALLS = [
    name
    for name, method in inspect.getmembers(collectives.Communicator, inspect.isfunction)
    if name[0] != "_" and len(inspect.signature(method).parameters) > 1
]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_has_an_example(name: str) -> None:
    assert "Examples" in sections(getattr(collectives.Communicator, name))


@pytest.mark.parametrize("name", CALLS)
def test_a_call_describes_its_parameters_in_their_order(name: str) -> None:
    method = getattr(collectives.Communicator, name)
    assert described_parameters(method) == parameters(method)


@pytest.mark.parametrize("name", CALLS)
def test_the_sections_of_a_call_have_the_order_of_numpy(name: str) -> None:
    headings = list(sections(getattr(collectives.Communicator, name)))
    assert headings == [heading for heading in HEADINGS if heading in headings]


def test_missing_sections_and_parameters_are_noticed() -> None:
    def undescribed(x: int, other: int) -> None:
        """Do nothing.

        Returns
        -------
        None

        Parameters
        ----------
        other : int
            It is not used.
        """

    assert list(sections(undescribed)) == ["Returns", "Parameters"]
    assert described_parameters(undescribed) == ["other"] != parameters(undescribed)
    assert "Examples" not in sections(collectives.Communicator.free)


def test_what_is_missing_is_noticed() -> None:
    def undocumented(x: int) -> None: ...

    def documented_in_part(x: int, other: int) -> int:
        """Add one to `x`."""
        return x + other

    assert missing("f", undocumented) == ["f: no docstring"]
    assert missing("f", documented_in_part) == ["f: other", "f: what it returns"]


def failures(module: ModuleType) -> int:
    """The number of examples in the docstrings of a module that do not give what they say."""
    return doctest.testmod(module, report=False).failed


def module_of(path: Path) -> str:
    """The name of the module in a file, or of the package whose file it is."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("name", [module_of(path) for path in FILES])
def test_examples_give_what_they_say(name: str) -> None:
    with registry_as_it_was():
        assert failures(import_module(name)) == 0


def test_a_wrong_example_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    module = ModuleType("wrong", ">>> 1 + 1\n3\n")
    assert failures(module) == 1
    assert "Expected:\n    3" in capsys.readouterr().out
