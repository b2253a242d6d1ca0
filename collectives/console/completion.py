"""Completion in shells: a parser of all commands of a group, from which shtab makes a script."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from collectives.console.command import Command, Group

SHELLS = ("bash", "zsh")


def add_completion(parse: argparse.ArgumentParser, group: Group) -> None:
    """Add --print-completion, which prints the script for a shell and exits."""

    class PrintCompletion(argparse.Action):
        def __call__(
            self,
            parser: argparse.ArgumentParser,
            namespace: argparse.Namespace,
            values: str | Sequence[Any] | None,
            option_string: str | None = None,
        ) -> None:
            import shtab  # noqa: PLC0415 - only completion needs it

            sys.stdout.write(shtab.complete(completed_parser(group, parser.prog), str(values)))
            parser.exit()

    parse.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=SHELLS,
        help='print a script for a shell, such as: eval "$(ring --print-completion bash)"',
    )


def completed_parser(group: Group, prog: str) -> argparse.ArgumentParser:
    """Return a parser of all commands of a group with all their options."""
    parse = argparse.ArgumentParser(prog)
    add_commands(parse, group)
    return parse


def add_commands(parse: argparse.ArgumentParser, group: Group) -> None:
    """Add the commands of a group to a parser, and the commands in these.

    The second word of a command is completed where the first word is not a command itself.
    """
    added = parse.add_subparsers()
    inner: dict[str, Any] = {}
    for name in group.commands:  # shtab leaves out parsers without a help
        first, _, second = name.partition(" ")
        if not second:
            fill(added.add_parser(first, help=first), group.command(first))
        elif first not in group.commands:
            if first not in inner:
                inner[first] = added.add_parser(first, help=first).add_subparsers()
            fill(inner[first].add_parser(second, help=second), group.command(name))


def fill(parse: argparse.ArgumentParser, command: Command | Group) -> None:
    """Add what a command takes to a parser."""
    if isinstance(command, Group):
        add_commands(parse, command)
    else:
        command.add_options(parse)
