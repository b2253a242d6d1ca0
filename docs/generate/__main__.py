"""Generate the documents: algorithms, API reference, commands, and tables of measurements.

    python -m docs.generate
    python -m docs.generate --check
    python -m docs.generate --strategies strategies.json

The pages of algorithms come from the registry.  Tables of measurements come from files that `bench
speed` and `bench moe`, once under each MPI, `bench strategies` and `bench balance` wrote with
--json, and `make gpu`; `make tables` measures and writes all but the last.  Without its file a
table stays as it is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from collectives.console import Command, Refused, refusing
from docs.generate import activation_memory, algorithms, experts, measured
from docs.generate.folders import PACKAGES, ROOT, folders
from docs.generate.sections import has_section, read, with_section


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parse.add_argument("--check", action="store_true", help="write nothing; 1 if files are stale")
    parse.add_argument(
        "--root",
        type=Path,
        default=ROOT,
        metavar="DIR",
        help="where README.md and docs/ are; default: this checkout",
    )
    parse.add_argument(
        "--speed",
        nargs="+",
        type=measured.result,
        default=[],
        metavar="FILE",
        help="what bench speed --json wrote, for each MPI",
    )
    parse.add_argument(
        "--strategies",
        type=measured.strategies_section,
        metavar="FILE",
        help="what bench strategies --json wrote",
    )
    parse.add_argument(
        "--moe",
        nargs="+",
        type=experts.moe_result,
        default=[],
        metavar="FILE",
        help="what bench moe --json wrote, for each MPI",
    )
    parse.add_argument(
        "--balance",
        type=experts.balance_section,
        metavar="FILE",
        help="what bench balance --json wrote",
    )
    parse.add_argument(
        "--gpu", type=measured.gpu_section, metavar="FILE", help="gpu.json, which make gpu wrote"
    )


def run(options: argparse.Namespace) -> int:
    """Write files that are out of date, or with --check name them; return the exit status.

    Refused if the files of a table do not go together.
    """
    if not options.root.is_dir():
        raise Refused(f"there is no folder {options.root}")
    with refusing():
        files = list(wanted(options))
    stale = [(path, text) for path, text in files if read(path) != text]
    for path, text in stale:
        if options.check:
            print(f"{path} is out of date; run make docs", file=sys.stderr)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    return 1 if options.check and stale else 0


def wanted(options: argparse.Namespace) -> Iterator[tuple[Path, str]]:
    """Yield the files as they should be, with path and text."""
    generated = list(algorithms.pages(options.root / "docs"))
    yield from generated
    sections = {"algorithms": algorithms.overview()}
    sections |= {f"folders of {package}": folders(package) for package in PACKAGES}
    sections |= {"activation-memory": activation_memory.section()}
    sections |= measured.sections(options.speed) if options.speed else {}
    sections |= {"moe": experts.moe_section(options.moe)} if options.moe else {}
    for name in ("strategies", "balance", "gpu"):
        sections |= {name: section} if (section := getattr(options, name)) else {}
    for path in sorted([*options.root.glob("*.md"), *options.root.glob("docs/**/*.md")]):
        if path not in dict(generated):
            yield path, document(read(path), sections)


def document(text: str, sections: dict[str, str]) -> str:
    """Return a hand-written document with its generated sections."""
    for name, section in sections.items():
        if has_section(text, name):
            text = with_section(text, name, section)
    return text


COMMAND = Command("docs.generate", __doc__, add_options, run)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
