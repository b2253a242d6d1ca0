"""What commands print and write: consoles as wide as the terminal, and files of JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from textwrap import TextWrapper
from typing import Any

from rich.console import Console

from collectives.console.arguments import STANDARD_OUTPUT, output_file
from collectives.console.tables import UNLIMITED

WIDTH = 80  # characters where there is no terminal


class TextConsole(Console):
    """A console that breaks the lines of texts between words, and never within a word."""

    def print(self, *objects: Any, soft_wrap: bool | None = None, **how: Any) -> None:
        """Print as `rich.console.Console.print`; with `soft_wrap` the lines of texts stay whole."""
        if not soft_wrap and len(objects) == 1 and isinstance(objects[0], str):
            objects, soft_wrap = (filled(objects[0], self.width),), True
        super().print(*objects, soft_wrap=soft_wrap, **how)


def filled(text: str, width: int) -> str:
    """Return a text with line breaks instead of blanks where lines are longer than the width."""
    wrapper = TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    return "\n".join("\n".join(wrapper.wrap(line)) for line in text.split("\n"))


def add_output_options(parse: argparse.ArgumentParser, *, is_local: bool = True) -> None:
    """Add --json and --wide, the options of all commands that print tables.

    A command that is not local runs on ranks, of which only rank 0 finds out if it can write.
    """
    group = parse.add_argument_group("output")
    add_json(group, is_local=is_local)
    group.add_argument("--wide", action="store_true", help="print tables in one piece")


def add_json(parse: argparse._ActionsContainer, *, is_local: bool = True) -> None:
    """Add --json, for a command that prints no table."""
    parse.add_argument(
        "--json",
        type=output_file if is_local else Path,
        metavar="FILE",
        help="write all numbers to FILE; - is standard output, and then nothing else is printed",
    )


def console_for(
    rank: int = 0, options: argparse.Namespace | None = None, *, is_terminal: bool = False
) -> Console:
    """Return the console on which a command prints: on rank 0 only.

    Its width is the width of the terminal, 80 where there is none, and without a limit with --wide.
    `is_terminal` says that rank 0 prints on a terminal, which a rank of a job cannot find out.
    """
    # Open MPI makes standard output a terminal on every rank, wherever the launcher writes to;
    # standard error is a terminal only if the launcher's is.
    is_terminal = is_terminal or (sys.stdout.isatty() and sys.stderr.isatty())
    console = TextConsole(
        quiet=is_quiet(rank, options), highlight=False, markup=False, force_terminal=is_terminal
    )
    if getattr(options, "wide", False):
        console.width = UNLIMITED
    elif not is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH
    return console


def is_quiet(rank: int, options: argparse.Namespace | None) -> bool:
    """Return whether a rank prints nothing: it is not the first, or standard output has JSON."""
    return rank != 0 or getattr(options, "json", None) == STANDARD_OUTPUT


def write_json(value: Any, path: Path | None) -> None:
    """Write a value to a file, or to standard output; to nowhere if the path is None.

    Numbers that are not finite, which JSON does not have, become null.
    """
    if path is None:
        return
    words = json.dumps(value, default=os.fspath)
    finite = json.loads(words, parse_constant=lambda name: None)
    text = json.dumps(finite, indent=1) + "\n"
    if path == STANDARD_OUTPUT:
        sys.stdout.write(text)
    else:
        path.write_text(text)
