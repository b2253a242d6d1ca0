"""Generate the documents: algorithms, API reference, commands, and tables of measurements.

The pages of algorithms come from the registry, the API from signatures and docstrings, the
arguments of commands from their parsers.  Tables of measurements come from files that `bench speed`
and `bench moe`, once under each MPI, `bench strategies` and `bench balance` wrote with --json, and
`make gpu`.  Without files the tables do not change, but a note says so if the measured code has
changed since.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from bench.docs import activation_memory, algorithms, api, experts, measured
from bench.docs import options as of_commands
from bench.docs.folders import PACKAGES, folders
from bench.docs.provenance import ROOT, aged
from bench.docs.sections import has_section, read, with_section

COMMAND = "make docs"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.set_defaults(run=run)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if files are stale")
    parser.add_argument(
        "--root",
        type=Path,
        default=ROOT,
        metavar="DIR",
        help="where README.md and docs/ are; default: this checkout",
    )
    parser.add_argument(
        "--speed",
        nargs="+",
        type=measured.result,
        default=[],
        metavar="FILE",
        help="what bench speed --json wrote, for each MPI",
    )
    parser.add_argument(
        "--strategies",
        type=measured.strategies_section,
        metavar="FILE",
        help="what bench strategies --json wrote",
    )
    parser.add_argument(
        "--moe",
        nargs="+",
        type=experts.moe_result,
        default=[],
        metavar="FILE",
        help="what bench moe --json wrote, for each MPI",
    )
    parser.add_argument(
        "--balance",
        type=experts.balance_section,
        metavar="FILE",
        help="what bench balance --json wrote",
    )
    parser.add_argument(
        "--gpu", type=measured.gpu_section, metavar="FILE", help="gpu.json, which make gpu wrote"
    )


def run(options: argparse.Namespace) -> int:
    """Write files that are out of date, or with --check name them; return the exit status.

    2 if it is impossible, or if the files of speed do not go together.
    """
    try:
        refuse(options.root)
        files = list(wanted(options))
        stale = [(path, text) for path, text in files if read(path) != text]
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    for path, text in stale:
        if options.check:
            print(f"{path} is out of date; run {COMMAND}", file=sys.stderr)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    return 1 if options.check and stale else 0


def refuse(root: Path) -> None:
    """Raise ValueError if the examples, or the folder of the documents, are missing."""
    spec = find_spec("examples")
    if spec is None or spec.origin != str(ROOT / "examples" / "__init__.py"):
        raise ValueError("docs needs a checkout of the project, and is run from its root")
    if not root.is_dir():
        raise ValueError(f"there is no folder {root}")


def wanted(options: argparse.Namespace) -> Iterator[tuple[Path, str]]:
    """The files as they should be, with path and text."""
    writers = algorithms.pages, api.pages, of_commands.pages
    generated = [page for pages in writers for page in pages(options.root / "docs")]
    yield from generated
    sections = {"algorithms": algorithms.overview()}
    sections |= {f"folders of {package}": folders(package) for package in PACKAGES}
    sections |= {"activation-memory": activation_memory.section()}
    sections |= measured.sections(options.speed) if options.speed else {}
    sections |= {"moe": experts.moe_section(options.moe)} if options.moe else {}
    for name in ("strategies", "balance", "gpu"):
        sections |= {name: section} if (section := getattr(options, name)) else {}
    for path in sorted([*options.root.glob("*.md"), *options.root.glob("docs/*.md")]):
        if path not in dict(generated):
            yield path, document(read(path), sections)


def document(text: str, sections: dict[str, str]) -> str:
    """A hand-written document with its generated sections."""
    for name, section in sections.items():
        if has_section(text, name):
            text = with_section(text, name, section)
    return aged(text)
