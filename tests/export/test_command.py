"""`python -m collectives.export`."""

from __future__ import annotations

from pathlib import Path

import pytest

from collectives.export import Call, chakra, goal, machine_in
from collectives.export.__main__ import COMMAND
from collectives.selection import Decisions
from collectives.selection.machine_file import Fitted
from tests.export import calls

RING = ["all_reduce", "ring", "--ranks", "4"]


def test_text_is_written_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert COMMAND.main([*RING, "--bytes", "1K", "--format", "goal"]) == 0
    expected = goal.lines(Call("all_reduce", 4, 1024, "ring", itemsize=4).tasks(machine_in(None)))
    assert capsys.readouterr().out.splitlines() == list(expected)


def test_chakra_has_a_file_for_each_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ring"
    assert COMMAND.main([*RING, "--bytes", "1K", "--format", "chakra", "-o", str(path)]) == 0
    assert capsys.readouterr().err == f"wrote 4 files, {path}.0.et to {path}.3.et\n"
    tasks = Call("all_reduce", 4, 1024, "ring", itemsize=4).tasks(machine_in(None))
    for rank, of_rank in enumerate(tasks):
        assert path.with_name(f"ring.{rank}.et").read_bytes() == b"".join(chakra.trace(of_rank))


def test_a_platform_is_written_beside_a_trace(tmp_path: Path) -> None:
    trace, xml = tmp_path / "trace", tmp_path / "platform.xml"
    words = [*RING, "--bytes", "1K", "--format", "smpi", "-o", str(trace), "--platform", str(xml)]
    assert COMMAND.main(words) == 0
    assert trace.read_text().startswith("0 init\n") and 'radical="0-3"' in xml.read_text()


def test_costs_are_those_of_a_machine_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.json"
    path.write_text(Decisions({}, Fitted({}, calls.MACHINE)).to_json())
    assert COMMAND.main([*RING, "--bytes", "400", "--format", "goal", "--machine", str(path)]) == 0
    assert "l3: calc 200 cpu 0" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("all_reduce ring --ranks 4 --bytes 1K --format chakra", "needs a path"),
        ("all_reduce none --ranks 4 --bytes 1K --format goal", "unknown algorithm 'none'"),
        ("all_reduce ring --ranks 4 --bytes 1X --format goal", "'1X' is not a number of bytes"),
        ("all_reduce ring --ranks 4 --bytes 6 --format goal", "not elements of 4"),
        ("all_reduce ring --ranks 0 --bytes 4 --format msccl", "0 is less than 1"),
        ("all_reduce ring --ranks 4 --bytes 4 --dtype real --format goal", "real"),
        ("broadcast binomial --ranks 4 --root 9 --bytes 4 --format goal", "no root 9"),
        ("gather linear --ranks 4 --bytes 4 --format msccl", "MSCCL has no gather"),
        ("all_reduce ring --ranks 4 --bytes 4 --format goal --machine none.json", "none.json"),
        ("all_reduce ring --ranks 4 --bytes 4 --format goal -o no/folder", "no/folder"),
    ],
)
def test_what_is_impossible_is_refused(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        COMMAND.main(words.split())
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


def test_a_file_without_a_machine_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "decisions.json"
    path.write_text(Decisions({}).to_json())
    with pytest.raises(SystemExit):
        COMMAND.main([*RING, "--bytes", "4", "--format", "goal", "--machine", str(path)])
    assert "`ring bench tune` writes one" in capsys.readouterr().err
