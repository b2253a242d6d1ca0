"""Benchmarks, the demo, and the generator of the documents.

    mpirun -n 2 python -m bench all_reduce -b 8 -e 64M -f 8 --native
    mpirun -n 2 python -m bench tune
    python -m bench demo
    python -m bench speed
    python -m bench docs --check
    python -m bench --import my_algorithms all_reduce --algorithm mine

Every command has --help.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

from bench import options
from collectives import algorithms
from collectives.__main__ import about as first_sentence

COMMANDS = {
    "balance": "bench.balance",
    "check": "bench.check",
    "combine": "bench.combine",
    "demo": "bench.demo",
    "docs": "bench.docs.command",
    "fit": "bench.fit.command",
    "moe": "bench.moe",
    "overlap": "bench.overlap",
    "speed": "bench.speed",
    "strategies": "bench.strategies",
    "tune": "bench.tune",
    "turns": "bench.turns",
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command line; return the exit status."""
    chosen = parsed(sys.argv[1:] if arguments is None else arguments)
    return int(chosen.run(chosen))


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The options of a command line; their `run` runs the command."""
    return parser(words).parse_args(words)


def parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The command line: a command for each collective, and others.

    Only the module of the command that is among `words` is imported: some of them start MPI.
    """
    parse = argparse.ArgumentParser("python -m bench", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    parse.add_argument("--import", action="append", type=imported, metavar="MODULE",
        help="import this first: a module that registers algorithms")  # fmt: skip
    commands = parse.add_subparsers(metavar="COMMAND", required=True)
    for collective in algorithms.collectives():
        about = f"measure {collective}, every algorithm"
        command = commands.add_parser(collective, help=about, description=about)
        if collective in words:
            options.add_options(command, collective)
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=first_sentence(module))
        if name in words:
            found = importlib.import_module(module)
            command.description = found.__doc__
            found.add_options(command)
    return parse


def imported(name: str) -> ModuleType:
    """An argument's type: a module, which is imported before the next arguments are parsed."""
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a module may raise anything
        what = f"{type(error).__name__}: {error}"
        raise argparse.ArgumentTypeError(f"cannot import {name}: {what}") from None


if __name__ == "__main__":
    sys.exit(main())
