"""Programs that use mpi4py run unchanged on our collectives, and what they send is printed."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from collectives import algorithms
from collectives.launch import launch
from collectives.launch.command import COMMAND

pytestmark = pytest.mark.ranks(n=3)

PROGRAM = Path(__file__).parent / "unmodified_program.py"
SOURCE = PROGRAM.read_text().splitlines()


class Sent(NamedTuple):
    """The numbers in a row of the table."""

    ranks: int
    calls: int
    messages: int
    bytes: int


def run(*command: str, check: bool = False) -> subprocess.CompletedProcess[str]:
    return launch(
        3,
        [str(word) for word in command],
        timeout=60,
        capture=True,
        drop_in=True,
        traffic=True,
        check=check,
    )


def rows(
    output: str, source: list[str] = SOURCE, file: str = PROGRAM.name
) -> dict[tuple[str, str], tuple[str, Sent]]:
    """The algorithm and the numbers by (comment on the calling line, collective)."""
    found = {}
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if cells and cells[0] != "site" and not line.startswith("|-"):
            name, _, number = cells[0].rpartition(":")
            comment = source[int(number) - 1].partition("  # ")[2] if number.isdecimal() else ""
            assert not number.isdecimal() or name == file
            key = comment or cells[0], cells[1]
            assert key not in found, "several algorithms in one line"
            found[key] = cells[2], Sent(*map(int, cells[3:]))
    return found


def predicted(collective: str, algorithm: str, p: int, n: int, calls: int) -> Sent:
    """What `calls` of p ranks send, by the formulas; n: bytes of the vector or of all blocks."""
    info = algorithms.info(collective, algorithm)
    return Sent(p, p * calls, calls * info.messages(p=p, n=n), calls * info.total_bytes(p=p, n=n))


def test_the_table_shows_what_every_line_sent() -> None:
    done = run(str(PROGRAM), "end")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("What ranks 0-2 sent by this library, by call site")
    found = rows(done.stdout)
    expected = {
        ("allreduce", "all_reduce"): (3, 2400, 5),
        ("allgather of two", "all_gather"): (2, 112, 1),
        ("iallgather", "all_gather"): (3, 120, 1),
        ("start", "all_reduce"): (3, 2400, 2),
        ("mismatch", "all_reduce"): (3, 2400, 1),  # without checked mode nobody notices
    }
    for (line, collective), sizes in expected.items():
        algorithm, sent = found.pop((line, collective))
        assert sent == predicted(collective, algorithm, *sizes), line
    total = found.pop(("total", ""))[1]
    assert found.keys() == {("bcast of two", "counts"), ("bcast of two", "broadcast")}
    others = [sent for key, (_, sent) in rows(done.stdout).items() if key[0] != "total"]
    assert total[1:] == tuple(map(sum, zip(*others, strict=True)))[1:]
    assert "lacks" not in done.stdout


BESIDE = """
import numpy as np
from mpi4py import MPI

import collectives

own = collectives.wrap(MPI.COMM_WORLD)
own.all_reduce(np.ones(1000), algorithm="ring")  # wrap
part = own.split(0)
part.all_gather(np.ones(5))  # part
own.send_recv(np.ones(7), (own.rank + 1) % 3, (own.rank - 1) % 3)  # send_recv
"""


def test_the_table_has_the_calls_of_other_communicators_of_this_library(tmp_path: Path) -> None:
    program = tmp_path / "beside.py"
    program.write_text(BESIDE)
    done = run(program)
    assert done.returncode == 0, done.stderr
    found = rows(done.stdout, BESIDE.splitlines(), program.name)
    assert found["wrap", "all_reduce"][1] == predicted("all_reduce", "ring", 3, 8000, 1)
    algorithm, sent = found["part", "all_gather"]
    assert sent == predicted("all_gather", algorithm, 3, 120, 1)
    assert found["send_recv", "send_recv"][1] == Sent(3, 3, 3, 3 * 56)


RECORDED = """
import numpy as np
from mpi4py import MPI

import collectives

x, world = np.ones(1000), MPI.COMM_WORLD
own = collectives.wrap(world)
with world.record() as of_world, own.record() as of_own:
    own.all_reduce(x)  # outside
    with collectives.phase("outer"):
        part = own.split(0)
        work = part.all_gather(x, counts=None, async_op=True)
        with collectives.phase("inner"):
            part.broadcast(x if part.rank == 0 else None)  # inner
            world.Allreduce(MPI.IN_PLACE, x)
    work.wait()
for ledger in (of_world, of_own):
    whole = ledger.gather()
    for row in [] if whole is None else whole.rows():
        print(*row)
"""


def test_what_a_program_records_does_not_change(tmp_path: Path) -> None:
    program = tmp_path / "recorded.py"
    program.write_text(RECORDED)
    plain, shown = (
        launch(3, [str(program)], timeout=60, capture=True, drop_in=True, traffic=traffic)
        for traffic in (False, True)
    )
    assert (plain.returncode, shown.returncode) == (0, 0), plain.stderr + shown.stderr
    ledgers, table = shown.stdout.split("What ranks", 1)
    assert ledgers == plain.stdout
    assert {line.split()[0] for line in ledgers.splitlines()} == {
        "all_reduce",
        "outer",
        "outer/inner",
    }
    lines = RECORDED.splitlines()
    outside, inner = (
        next(k for k, text in enumerate(lines, 1) if text.endswith(f"# {name}"))
        for name in ("outside", "inner")
    )
    assert f"| recorded.py:{outside} " in table
    assert f"| outer/inner/recorded.py:{inner} " in table


def test_a_program_without_mpi_gets_a_sentence_and_no_table(tmp_path: Path) -> None:
    program = tmp_path / "alone.py"
    program.write_text("print('done')")
    done = run(program)
    sentence = "No table of what was sent: rank 0 has not used MPI by mpi4py."
    assert sorted(done.stdout.splitlines()) == [sentence, *3 * ["done"]], done.stderr


def test_checked_mode_tells_how_the_calls_of_the_ranks_differ() -> None:
    done = run(str(PROGRAM), "end", check=True)
    assert done.returncode == 1
    line = next(k for k, text in enumerate(SOURCE, 1) if text.endswith("# mismatch"))
    sentence = "CollectiveMismatch: rank 0 called all_reduce(op=sum), ranks 1, 2 op=prod"
    assert sentence in done.stderr and f"{PROGRAM.name}:{line}" in done.stderr
    assert "What ranks 0-2 sent" in done.stdout and "lacks" not in done.stdout
    found = rows(done.stdout)
    assert ("mismatch", "all_reduce") not in found
    assert found["allreduce", "check"][1].calls == found["allreduce", "all_reduce"][1].calls == 15


def test_a_program_that_initializes_mpi_and_exits_keeps_its_status_and_prints_the_table() -> None:
    done = run("-m", "tests.launch.unmodified_program", "exit")
    assert done.returncode == 7, done.stderr
    assert "What ranks 0-2 sent" in done.stdout
    assert "| tests/launch/unmodified_program.py:" in done.stdout


def test_a_rank_that_fails_alone_prints_what_it_sent() -> None:
    done = run(str(PROGRAM), "one")
    assert done.returncode == 1
    assert "RuntimeError: rank 1 fails" in done.stderr
    assert "What rank 1 sent" in done.stdout
    assert "The table lacks ranks 0, 2: no answer in time." in done.stdout
    assert rows(done.stdout)["allreduce", "all_reduce"][1].ranks == 1


def test_traffic_is_refused_without_a_drop_in(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        COMMAND.main(["-n", "2", "--traffic", str(PROGRAM)])
    assert ended.value.code == 2
    assert "--traffic needs --drop-in" in capsys.readouterr().err
    with pytest.raises(ValueError, match="traffic needs drop_in"):
        launch(2, [str(PROGRAM)], traffic=True)
