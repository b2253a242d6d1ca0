"""Pictures of schedules: a grid of ranks and time, as text and as SVG."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fractions import Fraction
from html import escape
from itertools import zip_longest
from math import gcd, lcm
from typing import TypeAlias

from parallel.pipeline.actions import Action, Computation
from parallel.pipeline.schedule import Lists, computations
from parallel.pipeline.simulation import Simulation

Cell: TypeAlias = tuple[int, int]  # rank, place in its list

MOST_COLUMNS = 24  # of a grid with faulty cells
UNIT, HEIGHT, LEFT = 26, 30, 60  # pixels of a unit of time and of a rank, and left of the grid
FILLS = {"F": "#dbe9ff", "B": "#ffd9b0", "I": "#ffe9c9", "W": "#d7f0d2"}


def grid(lists: Lists, faulty: Collection[Cell] = ()) -> str:
    """Return the actions of each rank, one row for each rank; `faulty` cells in ``><``.

    A cell is a rank and a place in its list, or the place after the last.  A wide grid with faulty
    cells is cut to the `MOST_COLUMNS` around the first of them.
    """
    rows = [
        [f">{action}<" if (rank, i) in faulty else str(action) for i, action in enumerate(row)]
        for rank, row in enumerate(lists)
    ]
    for rank, i in faulty:
        if i >= len(lists[rank]):
            rows[rank].append("><")  # something is missing at the end
    num_columns, first = max(map(len, rows)), 0
    if faulty and num_columns > MOST_COLUMNS:
        middle = next(iter(faulty))[1] - MOST_COLUMNS // 2
        first = max(0, min(middle, num_columns - MOST_COLUMNS))
        rows = [row[first : first + MOST_COLUMNS] for row in rows]
    shown = [("... " if first else "") + line for line in aligned(rows)]
    return "\n".join(f"rank {rank}: {line}".rstrip() for rank, line in enumerate(shown))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, whose cells are below the cells of the row before."""
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    return [" ".join(map(str.ljust, row, widths)) for row in rows]


def in_time(simulation: Simulation) -> str:
    """Return the actions of each rank in time: a column is a unit, and a dot is idle.

    Small letters stand for a rank's second stage.  The unit is the `column_of` the simulation.
    """
    unit = column_of(simulation)
    rows = [["."] * int(simulation.makespan / unit) for _ in simulation.spans]
    for rank, row in enumerate(simulation.spans):
        for action, begin, stop in row:
            first, last = int(begin / unit), int(stop / unit)
            cells = [short(action, rank), *["-"] * (last - first - 1)]
            rows[rank][first:last] = cells[: last - first]
    width = max((len(cell) for cells in rows for cell in cells), default=1)
    lines = (" ".join(cell.rjust(width) for cell in cells) for cells in rows)
    return "\n".join(f"rank {rank}: {line}" for rank, line in enumerate(lines))


def column_of(simulation: Simulation) -> Fraction:
    """Return the longest time of which all times of a simulation are multiples."""
    times = [Fraction(span.end) for row in simulation.spans for span in row]
    denominator = lcm(*(time.denominator for time in times))
    return Fraction(gcd(*(int(time * denominator) for time in times)), denominator)


def short(action: Action, rank: int) -> str:
    """Return an action as people write it in a grid, without its stage; see `is_second`."""
    parts = computations((action,))
    letters = ((x.letter.lower() if is_second(x, rank) else x.letter, x.micro_batch) for x in parts)
    return "/".join(f"{letter}{number}" for letter, number in letters) or "U"


def is_second(action: Action, rank: int) -> bool:
    """Return whether the stage of an action is not the first that its rank has.

    With micro-batches from both ends, the micro-batches that enter at rank 0 are in the first.
    """
    return action.stage != rank


def svg(simulation: Simulation, title: str) -> str:
    """Return a drawing of a schedule in time.

    A rank's second stage has thick outlines and small letters.  Letters say what fills say, so that
    the drawing can be read in black and white.  The shortest action is `UNIT` wide.
    """
    durations = [float(span.end - span.begin) for row in simulation.spans for span in row]
    scale = UNIT / min((seconds for seconds in durations if seconds), default=1.0)
    width = LEFT + scale * float(simulation.makespan) + 10
    height = HEIGHT * (len(simulation.spans) + 2)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}"'
        f' width="{width:g}" height="{height:g}" font-family="sans-serif" font-size="11">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
        f'<text x="{LEFT}" y="16">{escape(title)}</text>',
    ]
    for rank, row in enumerate(simulation.spans):
        lines.append(f'<text x="4" y="{HEIGHT * (rank + 1) + HEIGHT // 2 + 3}">rank {rank}</text>')
        for action, begin, stop in row:
            lines += _cell(action, rank, LEFT + scale * float(begin), scale * float(stop - begin))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _cell(action: Action, rank: int, x: float, width: float) -> list[str]:
    """Return the rectangles and texts of one action: two halves if two overlap."""
    parts: Sequence[Computation] = list(computations((action,)))
    marks = []
    for i, part in enumerate(parts):
        height = (HEIGHT - 2) / len(parts)
        top = HEIGHT * (rank + 1) + i * height
        marks.append(
            f'<rect x="{x:g}" y="{top:g}" width="{width:g}" height="{height:g}"'
            f' fill="{FILLS[part.letter]}" stroke="black"'
            f' stroke-width="{2 if is_second(part, rank) else 0.7}"/>'
        )
        marks.append(
            f'<text x="{x + width / 2:g}" y="{top + height / 2 + 4:g}" text-anchor="middle">'
            f"{short(part, rank)}</text>"
        )
    return marks
