"""Modules that the user wants imported first: those that register algorithms."""

from __future__ import annotations

import argparse
import importlib

from collectives.console import Group

_imported: list[str] = []  # by this process, in the order of the command line


def add_import(parse: argparse.ArgumentParser, _: Group) -> None:
    """Add the option that stands before a command."""
    _imported.clear()
    about = "import this first: a module that registers algorithms"
    parse.add_argument("--import", action="append", type=imported, metavar="MODULE", help=about)


def imported(name: str) -> str:
    """Import a module, before the next arguments are parsed; return its name; an argument type."""
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a module may raise anything
        what = f"{type(error).__name__}: {error}"
        raise argparse.ArgumentTypeError(f"cannot import {name}: {what}") from None
    _imported.append(name)
    return name


def imports() -> list[str]:
    """Return the options with which the ranks of a job import the same modules."""
    return [word for name in _imported for word in ("--import", name)]
