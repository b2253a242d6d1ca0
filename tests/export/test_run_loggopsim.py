"""The simulator against LogGOPSim itself, where it is on the path."""

from __future__ import annotations

from pathlib import Path

import pytest

from collectives.export import Call
from tests.export.loggopsim import PARAMETERS, exported, run, simulated

# LogGOPSim sorts the operations that become ready together with `std::sort`, which keeps their
# order only up to 16 of them.  So algorithms that post more messages at once are not here.
ALGORITHMS = {
    "all_reduce": ("ring", "recursive_doubling", "rabenseifner", "double_binary_tree", "swing"),
    "all_gather": ("ring", "bruck"),
    "broadcast": ("binomial", "pipeline"),
    "reduce_scatter": ("ring",),
    "all_to_all": ("bruck", "pairwise"),
}


@pytest.mark.parametrize("collective", ALGORITHMS)
def test_times_are_equal_within_one_percent(collective: str, tmp_path: Path) -> None:
    for name in ALGORITHMS[collective]:
        for size, num_bytes in ((4, 65536), (16, 4096), (64, 65536)):
            call = Call(collective, size, num_bytes, name)
            for parameters in PARAMETERS:
                path = exported(call, parameters, tmp_path / "x.goal")
                time = max(run(path, parameters))
                assert max(simulated(call, parameters)) == pytest.approx(time, rel=0.01), call
