"""The table of combination speeds."""

from __future__ import annotations

import numpy as np
import pytest

from bench.__main__ import main
from bench.calls import combine
from collectives.arrays import kernels


def rows(capsys):
    assert main(["combine", "-b", "16K", "-e", "32K", "-n", "1"]) == 0
    cells = [line.strip("| ").split("|") for line in capsys.readouterr().out.splitlines()]
    table = [[cell.strip() for cell in row] for row in cells if len(row) == 6][1:]
    assert [row[2] for row in table] == ["16384"] * 8 + ["32768"] * 8
    return table


def test_kernels_stand_beside_numpys(capsys):
    assert all(float(cell) > 0 for row in rows(capsys) for cell in row[3:])


def test_numpy_stands_alone_where_there_are_no_kernels(capsys, monkeypatch):
    monkeypatch.setattr(kernels, "combine", lambda function, dtype: None)
    assert all(float(row[3]) > 0 and row[4:] == ["-", "-"] for row in rows(capsys))


def test_sizes_in_the_wrong_order_are_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["combine", "-b", "64K", "-e", "8"])
    assert "the least size, 65536, is greater than the greatest, 8" in capsys.readouterr().err


def test_every_sample_has_the_same_operands():
    seen = []

    def add(left, right):
        seen.append(left.copy())
        return lambda: np.add(left, right, left)

    seconds = combine.times([add, add], np.ones(3), np.ones(3), samples=2)
    assert len(seconds) == 2
    assert [left.tolist() for left in seen] == [[1, 1, 1]] * 4
