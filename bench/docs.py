"""Write docs/algorithms.md, and the table in README.md, from the registry of algorithms."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from collectives import algorithms
from collectives.algorithms import Algorithm
from collectives.schedule import grid
from collectives.spec import SPECS

ROOT = Path(__file__).resolve().parent.parent
COMMAND = "python -m bench docs"
BEGIN, END = "<!-- algorithms:begin -->", "<!-- algorithms:end -->"

INTRODUCTION = f"""\
# Algorithms

Generated from the registry by `{COMMAND}`; do not edit.

In the formulas p is the number of ranks, q = ceil(log2 p), k = floor(log2 p), P = 2^k, and N the
number of segments of a pipeline.  n is the size in bytes of the whole vector: for scatter and
gather that of the root's buffer, for all-gather that of the result, for all-to-all that of one
rank's input.  "Busiest port" is the most that one rank sends or receives, "total" what all ranks
send together, both in bytes.  The tests run every algorithm and count against these formulas.

The grids show what every rank does in every round: `>3:0,1` sends blocks 0 and 1 to rank 3, `<`
receives, `+` receives and combines, `=` copies, `.` rests.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of docs."""
    parser.set_defaults(run=run)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if files are stale")
    parser.add_argument("--root", type=Path, default=ROOT, metavar="DIR",
        help="where README.md and docs/ are; default: this repository")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Write what is not up to date, or with --check say so; the exit status."""
    stale = [(path, text) for path, text in wanted(options.root) if read(path) != text]
    for path, text in stale:
        if options.check:
            print(f"{path} is out of date; run {COMMAND}", file=sys.stderr)
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    return 1 if options.check and stale else 0


def wanted(root: Path) -> Iterator[tuple[Path, str]]:
    """The files as they should be: path and text."""
    yield root / "docs" / "algorithms.md", document()
    readme = root / "README.md"
    if BEGIN in read(readme):
        yield readme, with_section(read(readme), overview())


def read(path: Path) -> str:
    """The text of a file, nothing if there is none."""
    return path.read_text() if path.exists() else ""


def with_section(text: str, section: str) -> str:
    """`text` with what stands between the markers replaced.  ValueError if the end is missing."""
    marked = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if not marked.search(text):
        raise ValueError(f"{BEGIN} is not followed by {END}")
    return marked.sub(lambda _: f"{BEGIN}\n{section}\n{END}", text)


def overview() -> str:
    """All algorithms in one small table."""
    rows = [(collective, ", ".join(f"`{name}`" for name in algorithms.names(collective)))
            for collective in algorithms.collectives()]  # fmt: skip
    return table(["collective", "algorithms"], [(f"`{c}`", names) for c, names in rows])


def document() -> str:
    """docs/algorithms.md."""
    return "\n".join([INTRODUCTION, *map(chapter, algorithms.collectives())])


def chapter(collective: str) -> str:
    """One collective: its file's first line, the table, and every algorithm's grid."""
    entries = [algorithms.info(collective, name) for name in algorithms.names(collective)]
    about = first_line(sys.modules[entries[0].function.__module__].__doc__)
    head = [f"## {collective}", "", about, "", costs(entries), ""]
    return "\n".join([*head, *map(section, entries)])


def costs(entries: list[Algorithm]) -> str:
    """The formulas of the algorithms of one collective."""
    head = ["name", "rounds", "messages", "busiest port", "total", "restrictions", "source"]
    rows = [
        (f"`{e.name}`", code(e.rounds), code(e.messages), code(e.busiest), code(e.total),
         e.restrictions, e.source)
        for e in entries
    ]  # fmt: skip
    return table(head, rows)


def section(entry: Algorithm) -> str:
    """One algorithm: its first line, and what every rank does."""
    size = 5 if entry.serves(5) else 4
    return "\n".join([
        f"### {entry.collective}.{entry.name}", "", first_line(entry.function.__doc__), "",
        f"{size} ranks{example(entry)}:", "", "```text", picture(entry, size), "```", "",
    ])  # fmt: skip


def example(entry: Algorithm) -> str:
    """What else was chosen for the picture."""
    root = ", root 1" * SPECS[entry.collective].is_rooted
    return root + ", 3 segments" * ("segments" in entry.options)


def picture(entry: Algorithm, size: int) -> str:
    """The grid of all ranks' rounds, from root 1 where there is a root."""
    root = 1 if SPECS[entry.collective].is_rooted else None
    options = {"segments": 3} if "segments" in entry.options else {}
    return grid([entry.schedule(rank, size, root, **options) for rank in range(size)])


def first_line(docstring: str | None) -> str:
    """The first line of a docstring."""
    return (docstring or "").strip().partition("\n")[0]


def code(formula: object) -> str:
    """A formula as Markdown code, in which a bar would end the cell."""
    return f"`{formula}`".replace("|", "\\|")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
