"""The built wheel, installed into an empty environment, does what the README promises.

Nothing of this checkout is on its path: programs run in another folder.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from collectives.launch.mpirun import find_mpirun
from tests.docs.test_documents import EXAMPLE

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.xdist_group("wheel"),
    pytest.mark.ranks(n=2),
    pytest.mark.slow,
]

ROOT = Path(__file__).parent.parent
PACKAGES = ["collectives", "parallel", "moe", "bench"]
FILES = ["pyproject.toml", "setup.py", "README.md", "LICENSE"]
SMALL = ["--steps", "2", "--layers", "1", "--hidden", "16", "--heads", "2"]


def run(*words: str | Path, cwd: Path, **more_env: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**env, **more_env},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: building leaves files behind."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    for package in (*PACKAGES, "examples", "docs"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, sources / package, ignore=ignore)
    for name in FILES:
        shutil.copy(ROOT / name, sources)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, sources]
    done = run(*build, cwd=folder)
    if "Could not find a version" in done.stderr:
        pytest.skip("NOT RUN: no package index to get setuptools from")
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


def installed(wheel: Path, folder: Path, extras: str = "") -> Path:
    """The Python of an empty environment in which the wheel was installed."""
    done = run(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
    assert done.returncode == 0, done.stderr
    python = folder / "env" / "bin" / "python"
    # What is not imported need not be compiled, which takes longer than the rest.
    install = ["--python", python, "install", "--quiet", "--no-compile", f"{wheel}{extras}"]
    done = run(sys.executable, "-m", "pip", *install, cwd=folder)
    if "Could not find a version" in done.stderr:
        pytest.skip("NOT RUN: no package index to install from")
    assert done.returncode == 0, done.stderr
    return python


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment that has an MPI, too."""
    return installed(wheel, tmp_path_factory.mktemp("installed"), f"[{find_mpirun().vendor}]")


@pytest.fixture
def job(python: Path, tmp_path: Path) -> list[str | Path]:
    """The words that start two ranks."""
    return [python, "-m", "collectives.launch", "-n", "2", "--timeout", "200"]


def test_the_wheel_has_the_packages_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as whole:
        folders = {name.partition("/")[0] for name in whole.namelist()}
    assert {name for name in folders if not name.endswith(".dist-info")} == set(PACKAGES)


def test_the_example_of_the_readme_runs(job: list[str | Path], tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(EXAMPLE)
    done = run(*job, "example.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "0 1.0 example all_reduce 8 4000000" in done.stdout.splitlines()


@pytest.mark.on_open_mpi
def test_a_model_is_trained_with_its_traffic(job: list[str | Path], tmp_path: Path) -> None:
    done = run(*job, "-m", "parallel.train", "--strategy", "zero2", *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "predicted = recorded, to the byte" in done.stdout


@pytest.mark.on_open_mpi
def test_the_benchmark_measures(job: list[str | Path], tmp_path: Path) -> None:
    sizes = ["-b", "8", "-e", "64", "-f", "8"]
    done = run(*job, "-m", "bench", "all_reduce", "--algorithm", "ring", *sizes, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^ +(?:8|64) .* ring$", done.stdout, re.MULTILINE)) == 2


def test_the_commands_are_listed(python: Path, tmp_path: Path) -> None:
    done = run(python, "-m", "collectives", cwd=tmp_path)
    assert done.returncode == 0 and "Train a small GPT" in done.stdout, done.stderr


@pytest.mark.on_open_mpi
def test_a_dependency_that_is_not_declared_is_noticed(wheel: Path, tmp_path: Path) -> None:
    poorer = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(poorer, "w") as part:
        for name in whole.namelist():
            data = whole.read(name)
            if name.endswith("METADATA"):
                data = re.sub(rb"Requires-Dist: rich[^\n]*\n", b"", data)
            part.writestr(name, data)
    python = installed(poorer, tmp_path)
    done = run(python, "-m", "parallel.train", "--strategy", "serial", *SMALL, cwd=tmp_path)
    assert done.returncode != 0 and "No module named 'rich'" in done.stderr
