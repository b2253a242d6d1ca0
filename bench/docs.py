"""Write docs/algorithms.md, and the tables in README.md.

The tables of algorithms come from the registry.  Those of speed come from files that
`python -m bench speed --json FILE` wrote, one for each MPI; they stay as they are without files.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench import published
from bench.published import markdown
from collectives import algorithms
from collectives.algorithms import Algorithm
from collectives.algorithms.sources import SOURCES
from collectives.schedule.contracts import SPECS
from collectives.selection.cost import bounds_met

ROOT = Path(__file__).resolve().parent.parent
COMMAND = "python -m bench docs"
POWERS_OF_TWO = [1 << k for k in range(7)]
OVERVIEW = "algorithms"  # the section of README.md

INTRODUCTION = f"""\
# Algorithms

Generated from the registry by `{COMMAND}`; do not edit.

Every algorithm here is proved: for 1 to 40 ranks from all roots (a sample of them above 16), those
without a root for 64, 100, 127, 128, 129 and 257 ranks as well, with several values of its options,
and once more through the plans that run, element by element (`tests/pure/test_verify.py`,
`tests/inproc/test_plan_proof.py`). The formulas are counted for all numbers of ranks up to 64, with
other options than the default for a part of them.

In the formulas p is the number of ranks, f = (p - 1) / p, q = ceil(log2 p), k = floor(log2 p) and
P = 2^k; n is the size in bytes of the whole vector: for scatter and gather that of the root's
buffer, for all-gather that of the result, for all-to-all that of one rank's input. Of the options,
N is `segments`, r `radix`, m `outstanding`, c `chains` and g `per_host`; defaults stand with the
names. `log(p, r)` rounds up, `power(p, r)` is the greatest power of r up to p. `children(p, r)` are
those of the root of a k-nomial tree, `hops(p, r)` the edges on the ways from it to all ranks.
`depth(m)` and `fill(p)` are the rounds in which a first piece reaches all m nodes of a one-ported
binary tree, and all ranks in both of two trees (at most 2q); `turn(p)` is the least j with
(2^j - 1) 2^(q - j) >= p - 1.

- **start-ups**: the sum over rounds of the most messages that one rank sends or receives; where a
  rank has one message at a time that is the number of rounds.
- **busiest**: the most bytes that one rank sends or receives. **critical**: the sum over rounds of
  the most bytes that one rank sends or receives in the round, which is what a clock sees.
  **total**: what all ranks together send. **work**: the most bytes that one rank combines.
- **scratch**: at most so many bytes per rank beyond input and output, out of place. Bytes are those
  of blocks of equal size. A large reduction runs in lanes, pieces of the vector whose messages
  have half a MiB: then n is what three lanes have, and a ring needs at most 4 MiB. Not cut are
  algorithms with segments of their own, and reduce-scatters that send several blocks at once.
- **bound met**: which lower bounds of `collectives.selection.cost` it meets exactly, by its
  default options, for every number of ranks it serves (2^k: for powers of two).

The grids show what every rank does in every round: `>3:0,1` sends blocks 0 and 1 to rank 3, `<`
receives, `+` receives and combines, `=0:x.0` copies block 0 to the name x.0, `+=x.0:0` combines
x.0 into block 0, `.` rests. A name after a second colon is what the receiver calls the block; `0.1`
is the block from rank 0 to rank 1.
"""

EXAMPLE = {"segments": 2, "radix": 3, "outstanding": 2, "chains": 2, "per_host": 4}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of docs."""
    parser.set_defaults(run=run)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if files are stale")
    parser.add_argument("--root", type=Path, default=ROOT, metavar="DIR",
        help="where README.md and docs/ are; default: this repository")  # fmt: skip
    parser.add_argument("--speed", nargs="+", type=published.result, default=[], metavar="FILE",
        help="what bench speed --json wrote, for each MPI: its tables in README.md")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Write what is not up to date, or with --check say so; the exit status.

    2 if it is impossible, or if the files of speed do not go together.
    """
    try:
        if options.root == ROOT and not (ROOT / "pyproject.toml").exists():
            raise ValueError("docs needs a checkout of the project, or --root DIR")
        if not options.root.is_dir():
            raise ValueError(f"there is no folder {options.root}")
        files = list(wanted(options.root, options.speed))
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


def wanted(root: Path, speed: Sequence[published.Result] = ()) -> Iterator[tuple[Path, str]]:
    """The files as they should be: path and text.  `speed`: runs of the speed command."""
    yield root / "docs" / "algorithms.md", document()
    readme, sections = root / "README.md", {OVERVIEW: overview()}
    if speed:
        sections |= published.sections(speed)
    text = read(readme)
    for name, section in sections.items():
        if markers(name)[0] in text:
            text = with_section(text, name, section)
    if text:
        yield readme, text


def markers(name: str) -> tuple[str, str]:
    """What stands before and after a generated section."""
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def read(path: Path) -> str:
    """The text of a file, nothing if there is none."""
    return path.read_text() if path.exists() else ""


def with_section(text: str, name: str, section: str) -> str:
    """`text` with what stands between the markers replaced.  ValueError if the end is missing."""
    begin, end = markers(name)
    marked = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not marked.search(text):
        raise ValueError(f"{begin} is not followed by {end}")
    return marked.sub(lambda _: f"{begin}\n{section}\n{end}", text)


def overview() -> str:
    """All algorithms in one small table."""
    rows = [(collective, ", ".join(f"`{name}`" for name in algorithms.names(collective)))
            for collective in algorithms.collectives()]  # fmt: skip
    return markdown(["collective", "algorithms"], [], [(f"`{c}`", names) for c, names in rows])


def document() -> str:
    """docs/algorithms.md."""
    chapters = map(chapter, algorithms.collectives())
    references = [f"- **{short}**: {full}" for short, full in sorted(SOURCES.items())]
    return "\n".join([INTRODUCTION, *chapters, "## Sources", "", *references, ""])


def chapter(collective: str) -> str:
    """One collective: its file's first line, the table, and every algorithm's grid."""
    entries = [algorithms.info(collective, name) for name in algorithms.names(collective)]
    about = first_line(sys.modules[entries[0].function.__module__].__doc__)
    head = [f"## {collective}", "", about, "", costs(entries), ""]
    return "\n".join([*head, *map(section, entries)])


def costs(entries: list[Algorithm]) -> str:
    """The formulas of the algorithms of one collective."""
    formulas = [
        "rounds",
        "startups",
        "max_bytes_per_rank",
        "critical_bytes",
        "total_bytes",
        "reduction_bytes",
        "scratch_bytes",
    ]
    head = ["name", *formulas, "restrictions", "bound met", "source"]
    head[head.index("startups")] = "start-ups"
    rows = [
        [f"`{signature(entry)}`", *(code(getattr(entry, formula)) for formula in formulas),
         entry.restrictions, met(entry), entry.source]
        for entry in entries
    ]  # fmt: skip
    return markdown(head, [], rows)


def signature(entry: Algorithm, options: Mapping[str, int] | None = None) -> str:
    """The name, with the options' values or their defaults, as a caller writes it."""
    chosen = entry.options if options is None else options
    values = ", ".join(f"{name}={value}" for name, value in chosen.items())
    return f"{entry.name}({values})" if values else entry.name


def met(entry: Algorithm) -> str:
    """The lower bounds that it meets."""
    always, at_powers = bounds_met(entry), bounds_met(entry, POWERS_OF_TWO)
    more = [bound for bound in at_powers if bound not in always]
    return ", ".join([*always, *(f"{bound} (2^k)" for bound in more)]) or "-"


def section(entry: Algorithm) -> str:
    """One algorithm: its first line, and what every rank does."""
    options = {name: EXAMPLE[name] for name in entry.options}
    size = 5 if entry.serves(5, **options) else 8
    root = 1 if SPECS[entry.collective].is_rooted else None
    entry.verify(size, root, **options)
    picture = algorithms.grid(entry.collective, entry.name, size, root, **options)
    what = [f"`{signature(entry, options)}`"] * bool(options) + ["root 1"] * (root is not None)
    return "\n".join([
        f"### {entry.collective}.{entry.name}", "", first_line(entry.function.__doc__), "",
        ", ".join([f"{size} ranks", *what]) + ":", "", "```text", picture, "```", "",
    ])  # fmt: skip


def first_line(docstring: str | None) -> str:
    """The first line of a docstring."""
    return (docstring or "").strip().partition("\n")[0]


def code(formula: object) -> str:
    """A formula as Markdown code, in which a bar would end the cell; a dash if there is none."""
    return "-" if formula is None else f"`{formula}`".replace("|", "\\|")
