"""Tables of words and numbers that fit the terminal, and are JSON as well."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any, Literal, TypeAlias

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

Cell: TypeAlias = str | int | float | None
WRONG = "bold red"  # the style of a row whose numbers differ
BORDER = 3  # characters between two columns
PREFIXES = {-9: "n", -6: "u", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T"}
UNLIMITED = 1 << 16  # the width of a console that cuts off nothing
FOLDED = 20  # characters for which words are folded rather than continued below
NARROW = 12  # characters below which words are not folded


@dataclass(frozen=True)
class Number:
    """A column of numbers, all in one precision.

    Parameters
    ----------
    head : str
        The head of the column, with its unit.
    form : str
        How Python formats the numbers, such as ``".2f"``.  None is an empty cell; a word, such as
        ``"-"``, stays as it is.
    """

    head: str
    form: str = ""


class Table:
    """Rows of cells below columns; the leading words name a row.

    Parameters
    ----------
    *columns : str or Number
        A str is the head of a column of words.
    """

    def __init__(self, *columns: str | Number) -> None:
        self.columns = columns
        self.heads = [column if isinstance(column, str) else column.head for column in columns]
        assert len({*self.heads}) == len(columns), "rows as dictionaries need different heads"
        self.rows: list[tuple[Cell, ...]] = []
        self._wrong: list[bool] = []

    def add(self, *cells: Cell, is_wrong: bool = False) -> None:
        """Add a row, with a cell for each column; red if it `is_wrong`."""
        assert len(cells) == len(self.columns), f"{len(cells)} cells, {len(self.columns)} columns"
        self.rows.append(cells)
        self._wrong.append(is_wrong)

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return the rows for JSON: the cells by the heads of their columns."""
        return [dict(zip(self.heads, row, strict=True)) for row in self.rows]

    def fits(self, console: Console) -> bool:
        """Return whether the console is as wide as the table."""
        return drawn_width(map(max_length, self._texts())) <= console.width

    def print(self, console: Console) -> None:
        """Print the table; what is wider than the console is continued below.

        Every part begins with the leading columns of words.  Words are folded where a part would
        still be too wide; no digit is ever cut off.
        """
        texts = self._texts()
        widths = [*map(max_length, texts)]
        for part in self._parts(widths, console.width):
            drawn = RichTable(box=box.SIMPLE_HEAD if console.is_terminal else box.ASCII)
            for i, width in part.items():
                side: Literal["left", "right"] = (
                    "right" if isinstance(self.columns[i], Number) else "left"
                )
                drawn.add_column(Text(texts[i][0]), justify=side, width=width, overflow="fold")
            for number, is_wrong in enumerate(self._wrong, start=1):
                cells = (Text(texts[i][number]) for i in part)
                drawn.add_row(*cells, style=WRONG if is_wrong else None)
            drawn.width = drawn_width(part.values())
            console.print(drawn, crop=False)

    def lines(self) -> list[str]:
        """Return the lines that are printed where there is no terminal, as wide as they must be."""
        text = StringIO()
        self.print(Console(file=text, width=UNLIMITED, force_terminal=False))
        return text.getvalue().splitlines()

    def _texts(self) -> list[list[str]]:
        """Return the head and the cells of each column as text."""
        return [
            [head, *(text(row[i], column) for row in self.rows)]
            for i, (head, column) in enumerate(zip(self.heads, self.columns, strict=True))
        ]

    def _parts(self, widths: Sequence[int], most: int) -> list[dict[int, int]]:
        """Return the parts of the table, each with the widths of its columns by their numbers."""
        if drawn_width(widths) <= most:
            return [dict(enumerate(widths))]
        is_number = [isinstance(column, Number) for column in self.columns]
        num_words = is_number.index(True) if any(is_number) else 1
        num_keys = max(1, num_words)
        keys = dict(enumerate(folded(widths[:num_words], most) or widths[:1]))
        parts = [dict(keys)]
        for i in range(num_keys, len(widths)):
            room, least = room_in(parts[-1], most), widths[i] if is_number[i] else FOLDED
            if room < min(widths[i], least) and len(parts[-1]) > num_keys:
                parts.append(dict(keys))
            room = max(room_in(parts[-1], most), NARROW)
            parts[-1][i] = widths[i] if is_number[i] else min(widths[i], room)
        return parts


def in_units(
    head: str, unit: str, values: Sequence[float], digits: int = 2
) -> tuple[Number, float]:
    """Return a column for values in one multiple of a unit, and the multiple, to divide by.

    The multiple, such as ms, is the one in which the median value has one to three digits before
    the point.
    """
    middle = sorted(values)[len(values) // 2] if values else 0.0
    exponents = [exponent for exponent in PREFIXES if middle >= 10.0**exponent]
    exponent = max(exponents, default=0 if not middle else min(PREFIXES))
    return Number(f"{head} {PREFIXES[exponent]}{unit}".strip(), f".{digits}f"), 10.0**exponent


def text(cell: Cell, column: str | Number) -> str:
    """Return a cell of a column as text."""
    if cell is None or isinstance(cell, str):
        return cell or ""
    return f"{cell:{column.form}}" if isinstance(column, Number) else str(cell)


def max_length(words: Iterable[str]) -> int:
    """Return the length of the longest word, in columns of a terminal."""
    return max(map(cell_len, words))


def drawn_width(widths: Iterable[int]) -> int:
    """Return the width of a drawn table whose columns have these widths."""
    widths = list(widths)
    return sum(widths) + BORDER * len(widths) + 1


def room_in(part: Mapping[int, int], most: int) -> int:
    """Return the width that is left for another column of a part."""
    return most - drawn_width(part.values()) - BORDER


def folded(widths: Sequence[int], most: int) -> list[int]:
    """Return widths for the leading words with which they take about half of `most` at most."""
    if drawn_width(widths) <= most // 2:
        return list(widths)
    room = most // 2 - drawn_width([]) - BORDER * len(widths)
    share = max(room // len(widths), NARROW)
    narrow = sum(min(width, share) for width in widths)
    spare = max(room - narrow, 0)
    kept = []
    for width in widths:  # what narrow columns leave goes to the wide ones
        more = min(max(width - share, 0), spare)
        spare -= more
        kept.append(min(width, share) + more)
    return kept
