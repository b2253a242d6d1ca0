"""Which tiers are collected: MPI's under mpirun only, the GPU's where there is a GPU.

The cluster's is collected where network namespaces can be made.  The comparison with PyTorch is
collected where it is installed (the `torch` extra), and those with other simulators where these are
on the path.

In all of them nothing of the library's is left after a test (`hygiene.py`).
"""

from __future__ import annotations

import functools
import gc
import os
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import pytest

# As in the ranks of a job.  Where ranks are threads and matrices are large, the threads of OpenBLAS
# would spin beside them.  OpenBLAS reads this when NumPy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from tests import hygiene
from tests.cluster.network import why_not
from tests.running import durations, order
from tests.running.budget import Budget, folder_of_places, number_of_places
from tests.running.cores import Cores, number_of
from tests.running.jobs import Jobs
from tests.running.remaining import Remaining

HERE = Path(__file__).parent


def has_gpu() -> bool:
    try:
        import cupy

        return bool(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # noqa: BLE001 - no CuPy, no driver, no device: CuPy has an error for each
        return False


WITH_TORCH = (
    HERE / "parallel" / "nn" / "test_against_pytorch.py",
    HERE / "parallel" / "pipeline" / "test_against_pytorch.py",
    HERE / "moe" / "layers" / "test_against_pytorch.py",
    HERE / "bench" / "torch" / "test_backends.py",
    HERE / "test_torch_tier.py",
    HERE / "test_torch_jobs.py",
)


CHAKRA = HERE / "export" / "test_chakra.py"
# Tests that run other simulators, and the programs that they need.
SIMULATORS = {
    HERE / "export" / "test_run_loggopsim.py": ("txt2bin", "LogGOPSim"),
    HERE / "export" / "test_run_simgrid.py": ("smpirun",),
}


def has_protobuf() -> bool:
    return find_spec("google") is not None and find_spec("google.protobuf") is not None


def has_programs(names: tuple[str, ...]) -> bool:
    return all(map(which, names))


def has_torch() -> bool:
    return find_spec("torch") is not None


@functools.cache
def missing_for_a_cluster() -> str:
    return why_not()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(hygiene)
    # Two tests at a time, and clusters, start more ranks than there are cores, which Open MPI sees
    # only if they are of one job on one host.  A rank that waits then lets others compute.
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    # A process that mpirun does not start would wait for a network for a second, see
    # `leave_out_networks`.
    os.environ.setdefault("OMPI_MCA_btl", "^ofi")
    # Proofs make millions of tuples and no cycles; looking for these took a sixth of the time.
    gc.set_threshold(50_000, 20, 100)
    if is_rank(config):
        return
    config.pluginmanager.register(Jobs(Budget(folder_of_places(), number_of_places())))
    if hasattr(os, "sched_setaffinity"):
        config.pluginmanager.register(Cores(number_of(os.environ.get("PYTEST_XDIST_WORKER", ""))))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Remaining(config))


def is_rank(config: pytest.Config) -> bool:
    """Whether this process is a rank of a job that runs tests."""
    return bool(config.getoption("--with-mpi", default=False))


def pytest_collection_finish() -> None:
    """What was imported stays: no collection need look at it again, in a test or at the end."""
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order.sort(items, durations.of_last_run(config))


def pytest_report_header(config: pytest.Config) -> list[str]:
    # Whether a cluster can be made is tried, which not every rank of a job should do.
    missing = "this is a rank of a job" if is_rank(config) else missing_for_a_cluster()
    return [
        f"cluster tier: {f'NOT RUN, {missing}' if missing else 'run'}",
        f"GPU tier: {'run' if has_gpu() else 'NOT RUN, no CuPy with a CUDA device here'}",
        f"against PyTorch: {'run' if has_torch() else 'NOT RUN, torch is not installed here'}",
        f"GPU kernels as C++: {'run' if which('g++') else 'NOT RUN, no g++ on the path'}",
        f"Chakra traces: {'run' if has_protobuf() else 'NOT RUN, protobuf is not installed here'}",
        *(
            f"against {names[-1]}: "
            + ("run" if has_programs(names) else f"NOT RUN, no {' and '.join(names)} on the path")
            for names in SIMULATORS.values()
        ),
    ]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path == HERE / "mpi":
        return None if is_rank(config) else True
    if collection_path == HERE / "torch":
        return None if has_torch() and is_rank(config) else True
    if collection_path == HERE / "gpu":
        return None if has_gpu() else True
    if collection_path == HERE / "cluster":
        return True if missing_for_a_cluster() else None
    if collection_path in WITH_TORCH:
        return None if has_torch() else True
    if collection_path == CHAKRA:
        return None if has_protobuf() else True
    if collection_path in SIMULATORS:
        return None if has_programs(SIMULATORS[collection_path]) else True
    return None
