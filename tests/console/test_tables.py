"""Tables fit the console, are continued below, lose no digit, and are JSON."""

from __future__ import annotations

import io
from random import Random

import pytest
from rich.console import Console

from collectives.console import Number, Table, in_units

HEADS = [f"{what} {column}" for what in ("calls", "messages", "bytes") for column in "pro"]


def drawn(table: Table, width: int, *, is_terminal: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=is_terminal)
    table.print(console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def cells(text: str) -> list[list[str]]:
    """The rows of all parts, without their heads."""
    parts = [part for part in text.split("+\n+") if "|" in part]
    lines = [line for part in parts for line in part.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def wide_table() -> Table:
    table = Table("phase", "collective", *map(Number, HEADS))
    for number, phase in enumerate(("start/check", "forward/block0", "update")):
        table.add(phase, "all_gather", *(10**k + number for k in range(len(HEADS))))
    return table


def test_a_table_that_fits_is_in_one_piece() -> None:
    text = drawn(wide_table(), 200)
    assert cells(text)[1][:3] == ["start/check", "all_gather", "1"]
    assert len(cells(text)) == 4 and "100000002" in text


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_wide_table_is_continued_below_beside_the_same_words(width: int) -> None:
    text = drawn(wide_table(), width)
    assert max(map(len, text.splitlines())) <= width
    heads = [row for row in cells(text) if row[0] == "phase"]
    assert len(heads) > 1 and all(row[1] == "collective" for row in heads)
    assert [head for row in heads for head in row[2:]] == HEADS
    assert [row[0] for row in cells(text)].count("update") == len(heads)


def test_words_behind_numbers_are_folded_where_there_is_room() -> None:
    table = Table("check", Number("n"), "found")
    table.add("a", 7, "several words " * 10)
    text = drawn(table, 60)
    assert [row[0] for row in cells(text)] == ["check", "a", "", "", ""]
    assert max(map(len, text.splitlines())) <= 60


def test_no_digit_is_cut_off_in_any_width() -> None:
    """Nor any character of a word, which may be folded."""
    random = Random(0)
    for _ in range(200):
        columns = [
            random.choice(
                [f"words {i}", Number(f"n{i}"), Number(f"a long head of numbers {i}", ".3f")]
            )
            for i in range(random.randint(1, 9))
        ]
        table = Table(*columns)
        for _ in range(random.randint(0, 4)):
            table.add(
                *(
                    random.choice(["a", "several words in a cell", "x" * random.randint(1, 40)])
                    if isinstance(column, str)
                    else random.choice([0, 7, 10 ** random.randint(0, 20), None, "-"])
                    for column in columns
                )
            )
        text = drawn(table, random.randint(20, 120))
        for row in table.rows:
            for cell, column in zip(row, columns, strict=True):
                if isinstance(cell, int):
                    assert f"{cell:{column.form}}" in text  # type: ignore[union-attr]
        count = sum(str(cell).count("x") for row in table.rows for cell in row)
        assert text.count("x") >= count


def test_numbers_of_one_column_have_one_precision() -> None:
    table = Table("what", Number("ms", ".2f"), Number("share", ".0%"))
    for value in (1, 2.3456, 1e5):
        table.add("x", value, value / 1e5)
    shown = [row[1] for row in cells(drawn(table, 80))[1:]]
    assert shown == ["1.00", "2.35", "100000.00"]


def test_none_is_an_empty_cell_and_a_word_stays() -> None:
    table = Table("what", Number("ms", ".2f"))
    table.add("a", None)
    table.add("b", "-")
    assert cells(drawn(table, 80))[1:] == [["a", ""], ["b", "-"]]


def test_characters_of_two_columns_keep_their_row_in_one_line() -> None:
    table = Table("phase", Number("bytes"))
    table.add("前向" * 8, 7)
    assert cells(drawn(table, 80))[1:] == [["前向" * 8, "7"]]


def test_markup_in_a_cell_is_text() -> None:
    table = Table("what [bold]")
    table.add("[red]name[/red]")
    assert "[red]name[/red]" in drawn(table, 80) and "what [bold]" in drawn(table, 80)


def test_a_wrong_row_is_red_on_a_terminal() -> None:
    table = Table("what")
    table.add("right")
    table.add("wrong", is_wrong=True)
    red = [line for line in drawn(table, 80, is_terminal=True).splitlines() if "\x1b[1;31m" in line]
    assert len(red) == 1 and "wrong" in red[0]


def test_rows_are_json_with_their_numbers() -> None:
    table = Table("what", Number("ms", ".1f"))
    table.add("a", 1.23456)
    assert table.as_dicts() == [{"what": "a", "ms": 1.23456}]


def test_two_columns_with_the_same_head_are_a_mistake_of_the_program() -> None:
    with pytest.raises(AssertionError, match="different heads"):
        Table("a", Number("a"))


def test_a_row_with_too_few_cells_is_a_mistake_of_the_program() -> None:
    with pytest.raises(AssertionError, match="1 cells, 2 columns"):
        Table("what", "why").add("x")


@pytest.mark.parametrize(
    ("values", "head"),
    [
        ([2e-6, 3e-6, 1.0], "time us"),
        ([0.02, 0.5, 0.7], "time ms"),
        ([5.0], "time s"),
        ([4096.0, 8192.0], "time ks"),
        ([0.0], "time s"),
        ([], "time s"),
    ],
)
def test_a_column_has_one_multiple_of_its_unit(values: list[float], head: str) -> None:
    column, multiple = in_units("time", "s", values)
    assert column.head == head
    assert not values or f"{values[0] / multiple:{column.form}}".partition(".")[2].isdigit()
