"""Benchmarks, the demo, and the generated documentation.

    mpirun -n 2 python -m bench all_reduce -b 8 -e 64M -f 8 --native
    mpirun -n 2 python -m bench tune
    python -m bench demo
    python -m bench speed
    python -m bench docs --check
    python -m bench --import my_algorithms all_reduce --algorithm mine

Every command explains itself with --help.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from types import ModuleType

from bench import check, combine, demo, options, overlap, speed, strategies, tune
from bench.docs import command as docs
from collectives import algorithms


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line says; the exit status."""
    chosen = parser().parse_args(arguments)
    return int(chosen.run(chosen))


def parser() -> argparse.ArgumentParser:
    """The command line: one command for each collective, and demo and docs."""
    parse = argparse.ArgumentParser("python -m bench", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    parse.add_argument("--import", action="append", type=imported, metavar="MODULE",
        help="import this first: a module that registers algorithms")  # fmt: skip
    commands = parse.add_subparsers(metavar="COMMAND", required=True)
    for collective in algorithms.collectives():
        about = f"measure {collective}, every algorithm"
        command = commands.add_parser(collective, help=about, description=about)
        options.add_options(command, collective)
    others = {
        "check": check,
        "combine": combine,
        "demo": demo,
        "docs": docs,
        "overlap": overlap,
        "speed": speed,
        "strategies": strategies,
        "tune": tune,
    }
    for name, module in others.items():
        about = (module.__doc__ or "").partition("\n")[0]
        module.add_options(commands.add_parser(name, help=about, description=module.__doc__))
    return parse


def imported(name: str) -> ModuleType:
    """An argument's type: a module, which is imported at once, before what follows is read."""
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a module may raise anything
        what = f"{type(error).__name__}: {error}"
        raise argparse.ArgumentTypeError(f"cannot import {name}: {what}") from None


if __name__ == "__main__":
    sys.exit(main())
