"""Which tiers are collected: MPI's under mpirun only, the GPU's where there is a GPU.

In all of them nothing of the library's is left after a test (`hygiene.py`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import hygiene

HERE = Path(__file__).parent


def has_gpu() -> bool:
    try:
        import cupy

        return bool(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # noqa: BLE001 - no CuPy, no driver, no device: CuPy has an error for each
        return False


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(hygiene)


def pytest_report_header() -> str:
    return f"GPU tier: {'run' if has_gpu() else 'NOT RUN, no CuPy with a CUDA device here'}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path == HERE / "mpi":
        return None if config.getoption("--with-mpi") else True
    if collection_path == HERE / "gpu":
        return None if has_gpu() else True
    return None
