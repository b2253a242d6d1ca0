"""The simulator against SimGrid's replay of the same traces, where `smpirun` is on the path."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from collectives.export import Call, platform, write, write_text
from tests.export import calls
from tests.export.loggopsim import simulated_on

# Nothing takes time but messages: in SimGrid they are received while a rank computes, and in the
# model of LogGOPS, which ours follows, a rank receives or computes.
MACHINE = calls.MACHINE._replace(
    call_seconds=0, copy_seconds_per_byte=0, combine_seconds_per_byte=0
)
EXCHANGES = {
    "all_reduce": ("ring", "recursive_doubling", "rabenseifner"),
    "all_gather": ("ring", "bruck"),
    "all_to_all": ("pairwise",),
    "reduce_scatter": ("ring",),
}
ALONE = "--cfg=network/crosstraffic:0"  # messages in both directions of a link ignore each other


def replayed(call: Call, folder: Path, *options: str) -> float:
    """When the last rank ends in SimGrid, in seconds."""
    (trace,) = write(call.tasks(MACHINE), "smpi", folder / "x.trace")
    write_text([platform(call.size, MACHINE)], folder / "x.xml")
    (folder / "traces").write_text(f"{trace}\n")
    done = subprocess.run(
        [
            "smpirun",
            "-np",
            str(call.size),
            "-platform",
            str(folder / "x.xml"),
            "-replay",
            str(folder / "traces"),
            *options,
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
    )
    match = re.search(r"Simulation time ([0-9.]+)", done.stdout + done.stderr)
    assert match is not None, done.stderr
    return float(match[1])


@pytest.mark.parametrize("collective", EXCHANGES)
def test_large_messages_take_as_long(collective: str, tmp_path: Path) -> None:
    for name in EXCHANGES[collective]:
        call = Call(collective, 8, 1 << 20, name)
        assert replayed(call, tmp_path, ALONE) == pytest.approx(simulated(call), rel=0.01), call


def test_the_congestion_of_exchanges_adds_five_percent(tmp_path: Path) -> None:
    """SimGrid lets a message take 5 % of its rate from the other direction, as acknowledgements."""
    ring, tree = Call("all_reduce", 8, 1 << 20, "ring"), Call("broadcast", 8, 1 << 20, "binomial")
    assert replayed(ring, tmp_path) / simulated(ring) == pytest.approx(1.045, abs=0.005)
    assert replayed(tree, tmp_path) / simulated(tree) == pytest.approx(1, abs=0.001)


def simulated(call: Call) -> float:
    return max(simulated_on(call, MACHINE))
