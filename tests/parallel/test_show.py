"""A training step, printed as the list of actions that it is."""

from __future__ import annotations

import pytest

from parallel.show import COMMAND, SHOWN


def rows(capsys: pytest.CaptureFixture[str], *words: str) -> list[list[str]]:
    assert COMMAND.main(list(words)) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("strategy", SHOWN)
def test_every_strategy_can_be_shown(capsys: pytest.CaptureFixture[str], strategy: str) -> None:
    found = rows(capsys, strategy, "--ranks", "1" if strategy == "serial" else "4")
    assert "0UPDATE" in [row[0] for row in found]
    assert any(row[4] for row in found) == (strategy != "serial")


def test_a_step_of_zero3_gathers_before_and_frees_after_each_layer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = [row[0] for row in rows(capsys, "zero3", "--layers", "0", "--micro-batches", "2")]
    first = [
        "0UNSHARD[embedding]@data",
        "0UNSHARD[head]@data",
        "0F0[embedding]",
        "0RESHARD[embedding]",
        "0F0[head]",
        "0RESHARD[head]",
        "0F0[loss]",
        "0B0[loss]",
        "0UNSHARD[head]@data",
    ]
    assert [name for name in names[: len(first)] if name not in first] == []
    assert names.count("0UNSHARD[head]@data") == 4 and names.count("0REDUCE[head]@data") == 2


def test_what_does_not_fit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        COMMAND.main(["serial", "--ranks", "2"])
    assert ended.value.code == 2 and "runs on one rank, not on 2" in capsys.readouterr().err
