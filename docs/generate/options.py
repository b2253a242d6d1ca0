"""The arguments of every command, as its parser has them, for the page of commands of the site."""

from __future__ import annotations

import argparse
from functools import cache
from importlib import import_module

from bench.workloads.datatypes import ALL
from collectives import algorithms
from collectives.__main__ import COMMAND as RING
from collectives.console import Command, Group
from docs.generate.sections import table

# The programs of a checkout, which are not in the wheel, and an example of their arguments.
CHECKOUT = {
    "docs.generate": "--check",
    "examples.images": "--model swin --mesh data=2,expert=2 --threads 4",
    "examples.students": "--teacher FOLDER --teacher-layers 4 --layers 2",
}


def sections() -> str:
    """Return what the page says about every command; those of a collective have one section."""
    collectives = {f"ring bench {name}" for name in algorithms.collectives()}
    shown = (parse for name, parse in parsers().items() if name not in collectives)
    return "\n".join(map(section, shown))


def section(parse: argparse.ArgumentParser) -> str:
    """Return what a command is called, and a table of its arguments."""
    name = parse.prog.replace(f"bench {ALL}", "bench COLLECTIVE")
    rows = [[spelled(action), meaning(action, parse.prog)] for action in arguments(parse)]
    listed = table(["argument", "meaning"], [], rows) if rows else "It takes no arguments."
    return "\n\n".join([f"## `{name}`", listed, *epilog(parse)]) + "\n"


def epilog(parse: argparse.ArgumentParser) -> list[str]:
    """Return what a command says below its arguments: a sentence, or lines as they are."""
    parse.format_help()  # in which a group lists its commands
    said = parse.epilog or ""
    return [f"```text\n{said.rstrip()}\n```" if "\n" in said else said][: bool(said)]


def spelled(action: argparse.Action) -> str:
    """Return the names of an argument and the value it takes, such as `-J FILE, --json FILE`."""
    names = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    takes_value = action.option_strings and action.nargs != 0
    value = (
        f" {action.metavar or action.dest.upper()}" if takes_value and not action.choices else ""
    )
    return in_cell(f"`{names}{value}`")


def meaning(action: argparse.Action, prog: str) -> str:
    """Return the choices of an argument, unless its help lists them, and its help."""
    said = (action.help or "") % (vars(action) | {"prog": prog})
    choices = [str(choice) for choice in action.choices or ()]
    is_listed = ", ".join(choices) in said
    listed = "" if is_listed else ", ".join(f"`{choice}`" for choice in choices)
    must = "required" if action.required and action.option_strings else ""
    return in_cell("; ".join(filter(None, [listed, said, must])))


def in_cell(text: str) -> str:
    """Return a text for a cell of a table."""
    return text.replace("|", "\\|")


def arguments(parse: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the arguments of a command, without --help and without the commands in it."""
    left_out = argparse._HelpAction, argparse._SubParsersAction
    return [
        action
        for action in parse._actions
        if not isinstance(action, left_out) and action.help != argparse.SUPPRESS
    ]


def leaves(group: Group, prog: str) -> dict[str, Command | Group]:
    """Return the commands of a group, and the groups in it and their commands, by all words."""
    by_words: dict[str, Command | Group] = {}
    for name in group.commands:
        command = group.command(name)
        by_words[f"{prog} {name}"] = command
        if isinstance(command, Group):
            by_words |= leaves(command, f"{prog} {name}")
    return by_words


@cache
def commands() -> dict[str, Command | Group]:
    """Return every command by what a user types, such as "ring bench tune"."""
    modules = {f"python -m {name}": import_module(f"{name}.__main__") for name in CHECKOUT}
    of_checkout = {name: module.COMMAND for name, module in modules.items()}
    return leaves(RING, "ring") | of_checkout


@cache
def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of all commands, and of the commands in them, by what a user types."""
    return {
        parse.prog: parse
        for name, command in commands().items()
        for parse in with_inner(command.parser(name))
    }


def with_inner(parse: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Return a parser and those of the commands in it; a parser that has only these is left out."""
    return [*([parse] if arguments(parse) or not inner(parse) else []), *inner(parse).values()]


def inner(parse: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of the commands in a parser, by name."""
    for action in parse._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}
