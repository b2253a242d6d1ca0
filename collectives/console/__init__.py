"""What the commands of all packages share: arguments, tables, progress, files and exit statuses.

A command is a module with a `Command`: its docstring, a function that adds its options to a parser,
and a function that runs it.  A command raises `Refused` for what cannot be done, which ends it with
one sentence and status 2; it prints `Table`s, which fit the terminal, and writes the same numbers
as JSON.
"""

from collectives.console.arguments import (
    at_least,
    num_bytes,
    number,
    output_file,
    positive_number,
    seconds,
    unwritable,
)
from collectives.console.command import Command, Group, Refused, refusing, summary
from collectives.console.completion import add_completion
from collectives.console.output import (
    add_json,
    add_output_options,
    console_for,
    is_quiet,
    write_json,
)
from collectives.console.progress import Show, progress
from collectives.console.tables import Cell, Number, Table, in_units

__all__ = [
    "Cell",
    "Command",
    "Group",
    "Number",
    "Refused",
    "Show",
    "Table",
    "add_completion",
    "add_json",
    "add_output_options",
    "at_least",
    "console_for",
    "in_units",
    "is_quiet",
    "num_bytes",
    "number",
    "output_file",
    "positive_number",
    "progress",
    "refusing",
    "seconds",
    "summary",
    "unwritable",
    "write_json",
]
