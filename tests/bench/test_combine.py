"""The table of combination speeds."""

from __future__ import annotations

import numpy as np

from bench import combine
from bench.__main__ import main


def test_two_byte_floats_stand_beside_numpys_and_the_others_are_the_same(capsys):
    assert main(["combine", "-b", "16K", "-e", "32K", "-n", "1"]) == 0
    cells = [line.strip("| ").split("|") for line in capsys.readouterr().out.splitlines()]
    rows = [[cell.strip() for cell in row] for row in cells if len(row) == 6][1:]
    assert [row[2] for row in rows] == ["16384"] * 8 + ["32768"] * 8
    assert all(float(cell) > 0 for row in rows for cell in row[3:5])
    same = {(row[0], row[1]) for row in rows if row[5] == "the same"}
    assert same == {("bfloat16", "max")} | {(d, op) for d in ("float32", "float64")
                                            for op in ("sum", "max")}  # fmt: skip


def test_every_sample_has_the_same_operands():
    seen = []

    def add(left, right, out, /):
        seen.append((left.copy(), out is left))
        np.add(left, right, out)

    found = combine.times([add, add], np.ones(3), np.ones(3), samples=2)
    assert len(found) == 2
    assert all(is_in_place and left.tolist() == [1, 1, 1] for left, is_in_place in seen)
    assert len(seen) == 4
