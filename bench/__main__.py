"""Benchmarks, the demo, and the generator of the documents.

    python -m bench all_reduce -g 2 -b 8 -e 64M -f 8 --native
    mpirun -n 2 python -m bench all --algorithm all
    python -m bench pingpong -g 2
    python -m bench compare before.json after.json
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
from bench.names import ALL
from collectives import algorithms
from collectives.__main__ import about as first_sentence

COMMANDS = {
    "balance": "bench.balance",
    "check": "bench.check",
    "combine": "bench.combine",
    "compare": "bench.compare",
    "demo": "bench.demo",
    "docs": "bench.docs.command",
    "fit": "bench.fit.command",
    "moe": "bench.moe",
    "overlap": "bench.overlap",
    "pingpong": "bench.pingpong",
    "plot": "bench.plot",
    "speed": "bench.speed",
    "strategies": "bench.strategies",
    "torch": "bench.torch.command",
    "torch_traffic": "bench.torch.traffic",
    "tune": "bench.tune",
    "turns": "bench.turns",
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command line; return the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    chosen = parsed(words)
    if getattr(chosen, "ngpus", None) is not None:
        from bench import own_job  # noqa: PLC0415 - the launcher, which few commands need

        return own_job.run(words, chosen)
    return int(chosen.run(chosen))


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The options of a command line; their `run` runs the command."""
    return parser(words).parse_args(words)


def parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The command line: a command for each collective, and others.

    Only the module of the command in `words` is imported: some of them start MPI.
    """
    parse = argparse.ArgumentParser("python -m bench", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    parse.add_argument(
        "--import",
        action="append",
        type=imported,
        metavar="MODULE",
        help="import this first: a module that registers algorithms",
    )
    commands = parse.add_subparsers(metavar="COMMAND", required=True)
    for collective in (*algorithms.collectives(), ALL):
        about = f"measure {collective if collective != ALL else 'all collectives'}"
        command = commands.add_parser(collective, help=about, description=about)
        if collective == name_of(words):
            options.add_options(command, collective)
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=first_sentence(module))
        if name == name_of(words):
            found = importlib.import_module(module)
            command.description = found.__doc__
            found.add_options(command)
    return parse


def name_of(words: Sequence[str]) -> str | None:
    """The command among them: the first word that is none of --import or its value."""
    place = 0
    while place < len(words) and words[place].startswith("-"):
        place += 2 if words[place] == "--import" else 1
    return words[place] if place < len(words) else None


def imported(name: str) -> ModuleType:
    """An argument's type: a module, which is imported before the next arguments are parsed."""
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a module may raise anything
        what = f"{type(error).__name__}: {error}"
        raise argparse.ArgumentTypeError(f"cannot import {name}: {what}") from None


if __name__ == "__main__":
    sys.exit(main())
