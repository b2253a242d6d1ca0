"""The options of a command line of ``python -m bench``, without running it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from bench.__main__ import COMMAND
from collectives.console import Command


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The options; SystemExit if the words are wrong, or there is no command."""
    parse = COMMAND.parser()
    name, *rest = parse.parse_args(words).words or parse.error("there is no command")
    command = COMMAND.command(name)
    assert isinstance(command, Command)
    return command.parser(f"{parse.prog} {name}").parse_args(rest)
