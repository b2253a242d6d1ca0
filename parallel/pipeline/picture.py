"""Pictures of schedules: a grid of ranks and time, as text and as SVG."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape
from itertools import zip_longest
from typing import TypeAlias

from parallel.actions import Action
from parallel.pipeline.schedule import Lists, computations
from parallel.pipeline.simulation import Simulation

Cell: TypeAlias = tuple[int, int]  # rank, place in its list

MOST_COLUMNS = 24  # of a grid with faulty cells
UNIT, HEIGHT, LEFT = 26, 26, 60  # pixels of a unit of time and of a rank, and left of the grid
FILLS = {"F": "#dbe9ff", "B": "#ffd9b0", "I": "#ffe9c9", "W": "#d7f0d2"}


def grid(lists: Lists, faulty: Collection[Cell] = ()) -> str:
    """Return the actions of each rank, one row for each; `faulty` cells in ``><``.

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
    """Return a line for each row, whose cells are below those of the row before."""
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    return [" ".join(map(str.ljust, row, widths)) for row in rows]


def in_time(simulation: Simulation) -> str:
    """Return the actions of each rank in time: a column is a unit, and a dot is idle.

    Small letters are of a rank's second stage.  Times must be integers.
    """
    end, ranks = int(simulation.makespan), simulation.schedule.num_ranks
    width = max((len(short(s.action, ranks)) for row in simulation.spans for s in row), default=1)
    rows = []
    for rank, row in enumerate(simulation.spans):
        cells = ["."] * end
        for action, begin, stop in row:
            for time in range(int(begin), int(stop)):
                cells[time] = short(action, ranks) if time == begin else "-"
        rows.append(f"rank {rank}: " + " ".join(cell.rjust(width) for cell in cells))
    return "\n".join(rows)


def short(action: Action, num_ranks: int) -> str:
    """Return an action as people write it in a grid, without its stage."""
    parts = computations((action,))
    kinds = ((x.kind.lower() if x.stage >= num_ranks else x.kind, x.micro_batch) for x in parts)
    return "/".join(f"{kind}{number}" for kind, number in kinds) or "U"


def svg(simulation: Simulation, title: str) -> str:
    """Return a drawing of a schedule in time; stages of one rank have different outlines.

    Letters say what fills say, so that it can be read in black and white.
    """
    ranks, end = simulation.schedule.num_ranks, simulation.makespan
    width, height = LEFT + UNIT * float(end) + 10, HEIGHT * (ranks + 2)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}"'
        f' width="{width:g}" height="{height:g}" font-family="sans-serif" font-size="11">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
        f'<text x="{LEFT}" y="16">{escape(title)}</text>',
    ]
    for rank, row in enumerate(simulation.spans):
        y = HEIGHT * (rank + 1)
        lines.append(f'<text x="4" y="{y + 17}">rank {rank}</text>')
        for action, begin, stop in row:
            x = LEFT + UNIT * float(begin)
            lines += _cell(action, x, y, UNIT * float(stop - begin), simulation)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _cell(action: Action, x: float, y: int, width: float, simulation: Simulation) -> list[str]:
    """Return the rectangles and texts of one action: two halves if it is of two."""
    parts: Sequence[Action] = list(computations((action,)))
    found, ranks = [], simulation.schedule.num_ranks
    for i, part in enumerate(parts):
        height = (HEIGHT - 2) / len(parts)
        top, stroke = y + i * height, 2 if part.stage >= ranks else 0.7
        found.append(
            f'<rect x="{x:g}" y="{top:g}" width="{width:g}" height="{height:g}"'
            f' fill="{FILLS[part.kind]}" stroke="black" stroke-width="{stroke}"/>'
        )
        found.append(
            f'<text x="{x + width / 2:g}" y="{top + height / 2 + 4:g}" text-anchor="middle">'
            f"{part.kind}{part.micro_batch}</text>"
        )
    return found
