"""Over TCP between hosts, on links of a known rate, everything works as on one computer."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

from bench.commands.jobs import environment
from collectives.diagnostics.mpi_counters import MPIRUN_ARGS
from collectives.launch.mpirun import find_mpirun
from tests.cluster.network import Cluster, cluster, namespaces
from tests.test_mpi_tier import SUITE

pytestmark = pytest.mark.ranks(n=8)

ROOT = Path(__file__).parent.parent.parent
IS_OPEN_MPI = find_mpirun().vendor == "openmpi"
ENV = {"PYTHONPATH": str(ROOT)}
CORE = {
    "four_hosts": ["test_checked.py"],
    "three_times_two": ["test_collectives.py", "-k", "every_algorithm"],
}
FEW = ["-n", "3", "-w", "1"]
TCP_OVERHEAD = 0.06  # headers and acknowledgements, as a share of the payload
TRAINING = ["--mesh", "pipe=2,data=2,tensor=2", "--schedule", "1f1b", "--micro-batches", "4"]
SMALL = ["--zero", "1", "--steps", "2", "--layers", "2", "--hidden", "32", "--context", "16"]


def agree(recorded: list[int], observed: list[int]) -> bool:
    """Whether each interface counted what its host recorded, with no more than TCP's overhead."""
    pairs = zip(recorded, observed, strict=True)
    return all(told <= seen <= told * (1 + TCP_OVERHEAD) for told, seen in pairs)


@cache
def traffic(made: Cluster) -> dict[float, tuple[list[int], list[int]]]:
    """What was recorded and observed; on hosts of one rank also where fewer calls are recorded."""
    shares = [1.0, 0.8] if made.per_host == 1 else [1.0]
    done = made.run(["-m", "tests.cluster.traffic_program", *map(str, shares)], env=ENV)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    hosts = [each["hosts"] for each in found]
    assert hosts == [f"{made.num_hosts}x{made.per_host}"] * len(shares), "as MPI sees them"
    both = [(each["recorded"], each["observed"]) for each in found]
    return dict(zip(shares, both, strict=True))


@pytest.mark.parametrize("shape", ["four_hosts", "four_times_two", "three_times_two"])
def test_interfaces_of_hosts_count_what_the_ledger_records(
    shape: str, request: pytest.FixtureRequest
) -> None:
    recorded, observed = traffic(request.getfixturevalue(shape))[1.0]
    assert min(recorded) > 2**21 and agree(recorded, observed), (recorded, observed)


@pytest.mark.on_open_mpi
def test_interfaces_notice_a_call_that_was_not_recorded(four_hosts: Cluster) -> None:
    recorded, observed = traffic(four_hosts)[0.8]
    assert not agree(recorded, observed), (recorded, observed)


@pytest.mark.parametrize(
    "shape", ["four_hosts", pytest.param("three_times_two", marks=pytest.mark.on_open_mpi)]
)
def test_the_core_of_the_suite_passes(shape: str, request: pytest.FixtureRequest) -> None:
    file, *only = CORE[shape]
    path = str(ROOT / "tests" / "mpi" / file)
    done = request.getfixturevalue(shape).run([*SUITE, path, *only], env=ENV)
    nothing_skipped = r"^(\d+) passed(?:, \d+ deselected)? in"
    summary = re.search(nothing_skipped, done.stdout, re.MULTILINE)
    output = done.stdout + done.stderr
    assert done.returncode == 0 and summary is not None and int(summary[1]) > 20, output


@pytest.mark.on_open_mpi
def test_the_benchmark_finds_no_wrong_element(four_times_two: Cluster) -> None:
    sizes = ["-b", "64K", "-e", "64K", "--algorithm", "ring", "--native"]
    done = four_times_two.run(["-m", "bench", "all_reduce", *sizes, *FEW], env=ENV)
    assert done.returncode == 0 and "ring" in done.stdout, done.stdout + done.stderr


@pytest.mark.on_open_mpi
def test_training_on_three_axes_sends_what_was_predicted(four_times_two: Cluster) -> None:
    done = four_times_two.run(
        ["-m", "parallel.train", *TRAINING, *SMALL],
        mpi_args=MPIRUN_ARGS if IS_OPEN_MPI else (),
        env={**environment(), **ENV},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    columns = "predicted = recorded = observed by MPI" if IS_OPEN_MPI else "predicted = recorded"
    assert f"{columns}, to the byte" in done.stdout, done.stdout


def test_links_that_let_no_packet_through_are_refused() -> None:
    with pytest.raises(ValueError, match="1000 bytes holds no packet"), cluster(2, 1, 400, 1000):
        pass


def test_nothing_of_a_cluster_is_left(tmp_path: Path) -> None:
    program = tmp_path / "waits.py"
    program.write_text("import time; time.sleep(60)")
    with cluster(2) as made:
        assert made.host(1) in namespaces()
        done = made.run([str(program)], timeout=2)
    assert done.returncode == 124, done.stdout + done.stderr
    assert not [name for name in namespaces() if name.startswith(f"{made.name}-")]
