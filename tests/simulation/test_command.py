"""The command, as it is run."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from collectives.simulate import main


def test_the_command_compares_algorithms_and_draws_links(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "links.svg"
    arguments = ["all_reduce", "--bytes", "64K", "--topology", "hosts:2x4", "--picture", str(path)]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "all_reduce of 65536 bytes of float32 on 8 ranks, hosts:2x4"
    rows = [re.split(r"\s{2,}", line) for line in lines[2 : lines.index("", 2)]]
    assert rows[0] == ["algorithm", "time", "busiest links", "in use", "same_host", "other_host"]
    by_name = {row[0]: row for row in rows[1:]}
    assert {"ring", "swing", "hierarchical(per_host=4)"} <= set(by_name)
    # A ring sends 2 (p - 1) n bytes, a quarter of them to another host.
    assert by_name["ring"][4:] == ["688.1 kB", "229.4 kB"]
    times = [float(t) * {"us": 1, "ms": 1e3}[unit] for t, unit in (r[1].split() for r in rows[1:])]
    assert times == sorted(times)
    assert f"best: {rows[1][0]}; its links:" in lines
    cells = ElementTree.fromstring(path.read_text()).findall(".//{*}rect[@stroke]")
    assert len(cells) == 11 + 8 + 2 + 2  # the legend, ports, and NICs in both directions


def test_named_algorithms_a_straggler_and_folding(capsys: pytest.CaptureFixture[str]) -> None:
    common = ["all_reduce", "--bytes", "64K", "--topology", "torus:4x4", "--algorithm"]
    assert main([*common, "ring,circulant_strided(per_host=4)"]) == 0
    plain = capsys.readouterr().out
    assert "ring" in plain and "circulant_strided(per_host=4)" in plain
    assert main([*common, "ring", "--folded"]) == 0
    folded = capsys.readouterr().out
    assert _time("ring", folded) == _time("ring", plain)
    assert main([*common, "ring", "--straggler", "3=9"]) == 0
    assert _time("ring", capsys.readouterr().out) > _time("ring", plain)


def _time(name: str, text: str) -> float:
    found = re.search(rf"^{name} +([\d.]+) (us|ms)", text, re.MULTILINE)
    assert found is not None
    return float(found[1]) * {"us": 1, "ms": 1000}[found[2]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "hosts:2"], "is not like hosts:512x8"),
        (["--bytes", "7"], "7 bytes are not elements of 4 bytes"),
        (["--algorithm", "rings"], "unknown algorithm 'rings'"),
        (["--bytes", "many"], "'many' is not a number of bytes"),
        (["--straggler", "3"], "'3' is not RANK=FACTOR"),
        (["--ranks", "0"], "'0' is not a number of at least 1"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main(["all_reduce", *arguments])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_a_machine_of_bench_fit_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "decisions.json"
    path.write_text('{"machine": null, "measured": {}}')
    with pytest.raises(SystemExit):
        main(["all_reduce", "--machine", str(path)])
    assert "`python -m bench fit` writes one" in capsys.readouterr().err
