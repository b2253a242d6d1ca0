"""Show what the ranks of a job were doing, side by side.

    ring flight DIRECTORY

DIRECTORY has the files that ranks wrote when a wait failed, at SIGUSR1, or at the time limit; see
`ring launch --flight`.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

from collectives.console import Command, Refused
from collectives.diagnostics import hang_report


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parse.add_argument("directory", type=Path, help="the directory of the files")


def run(options: argparse.Namespace) -> int:
    """Print the report; return the exit status."""
    try:
        paths = hang_report.files(options.directory)
    except OSError as error:
        raise Refused(
            f"{options.directory} cannot be read as a directory ({error.strerror})"
        ) from error
    dumps, faults = hang_report.read(paths)
    sys.stderr.writelines(f"{fault}\n" for fault in faults)
    if not paths:
        raise Refused(f"{options.directory} has no dumps: flight.<rank>.json")
    if not dumps:
        raise Refused(f"no dump in {options.directory} can be read")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may not be writable as text
    sys.stdout.writelines(f"{line}\n" for line in hang_report.lines(dumps))
    return 0


COMMAND = Command("collectives.flight", __doc__, add_options, run)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
