"""The command, as it is run."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from collectives.simulate import COMMAND


def test_the_command_compares_algorithms_and_draws_links(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "links.svg"
    arguments = ["all_reduce", "--bytes", "64K", "--topology", "hosts:2x4", "--picture", str(path)]
    assert COMMAND.main([*arguments, "--wide"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("all_reduce of 65536 bytes of float32 on 8 ranks, hosts:2x4\n")
    rows = rows_of(text)
    heads = ["algorithm", "time us", "busiest links", "in use", "same_host kB", "other_host kB"]
    assert rows[0] == heads
    by_name = {row[0]: row for row in rows[1:]}
    assert {"ring", "swing", "hierarchical(per_host=4)"} <= set(by_name)
    # A ring sends 2 (p - 1) n bytes, a quarter of them to another host.
    assert by_name["ring"][4:] == ["688.13", "229.38"]
    times = [float(row[1]) for row in rows[1:]]
    assert times == sorted(times) and len(times) > 10
    assert f"best: {rows[1][0]}; its links:" in text
    cells = ElementTree.fromstring(path.read_text()).findall(".//{*}rect[@stroke]")
    assert len(cells) == 11 + 8 + 2 + 2  # the legend, ports, and NICs in both directions


def test_the_command_takes_named_algorithms_a_straggler_and_folding(
    capsys: pytest.CaptureFixture[str],
) -> None:
    common = ["all_reduce", "--wide", "--bytes", "64K", "--topology", "torus:4x4", "--algorithm"]
    assert COMMAND.main([*common, "ring,circulant_strided(per_host=4)"]) == 0
    plain = capsys.readouterr().out
    assert "ring" in plain and "circulant_strided(per_host=4)" in plain
    assert COMMAND.main([*common, "ring", "--folded"]) == 0
    folded = capsys.readouterr().out
    assert _time("ring", folded) == _time("ring", plain)
    assert COMMAND.main([*common, "ring", "--straggler", "3=9"]) == 0
    unit, late = _time("ring", capsys.readouterr().out)
    assert unit == "time us" and late > _time("ring", plain)[1]


def rows_of(text: str) -> list[list[str]]:
    """The rows of the first table."""
    first = text.partition("best: ")[0]
    lines = [line for line in first.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def _time(name: str, text: str) -> tuple[str, float]:
    """The head of the column with the unit, and the number."""
    heads, *rows = rows_of(text)
    (row,) = [row for row in rows if row[0] == name]
    return heads[1], float(row[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "hosts:2"], "is not like hosts:512x8"),
        (["--bytes", "7"], "7 bytes are not elements of 4 bytes"),
        (["--algorithm", "rings"], "unknown algorithm 'rings'"),
        (["--bytes", "many"], "'many' is not a number of bytes"),
        (["--straggler", "3"], "'3' is not RANK=FACTOR"),
        (["--ranks", "0"], "0 is less than 1"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        COMMAND.main(["all_reduce", *arguments])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_a_machine_of_bench_tune_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "decisions.json"
    path.write_text('{"machine": null, "measured": {}}')
    with pytest.raises(SystemExit):
        COMMAND.main(["all_reduce", "--machine", str(path)])
    assert "`ring bench tune` writes one" in capsys.readouterr().err
