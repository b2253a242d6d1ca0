"""Who imports whom, as the contracts in pyproject.toml say; and a breach of each is noticed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ["collectives", "parallel", "moe", "bench", "examples", "docs"]
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"

# The contract that is broken if a line is added to a file.
BREACHES = {
    ("parallel/mesh/mesh.py", "from moe import GATES"): "packages",
    ("moe/__init__.py", "from bench import measure"): "packages",
    ("collectives/schedule/rounds.py", "from collectives.runtime import Plan"): "collectives",
    ("collectives/errors.py", "from collectives.schedule import Send"): "collectives",
    ("parallel/layout/view.py", "from parallel.run import Trainer"): "parallel",
    ("parallel/nn/plain/gelu.py", "from parallel.nn.tensor import Whole"): "nn",
    ("moe/gates/scores.py", "from moe.layers import AXIS"): "moe",
    ("parallel/step/kept.py", "if 0: from parallel.step.units import Reduce"): "circles",
    ("parallel/run/arrays.py", "from parallel.optim.offload import Offload"): "names",
    ("moe/__init__.py", "from parallel.run import by_rank"): "names",
    ("examples/images/shapes.py", "from parallel.run import by_rank"): "names",
    ("bench/speed/goals.py", "from parallel.mesh.placement import span"): "bench",
    ("bench/calls/pingpong.py", "from bench.speed.goals import PAIR"): "benchmarks",
    ("parallel/text.py", "import mpi4py"): "mpi4py",
    ("moe/__init__.py", "import tests"): "tests",
    ("docs/generate/sections.py", "import tests"): "tests",
    ("bench/provenance.py", "from docs.generate import sections"): "packages",
    ("docs/generate/sections.py", "from parallel.mesh.placement import span"): "bench",
}


def lint(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Check the packages in a folder."""
    command = [sys.executable, "-c", LINT, "--no-cache", *words]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, root / package, ignore=ignored)
    (root / "tests").mkdir()
    shutil.copy(ROOT / "tests/contracts.py", root / "tests")
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


def test_every_contract_is_kept() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("breach", BREACHES, ids=str)
@pytest.mark.slow
def test_a_breach_is_noticed(copied: Path, breach: tuple[str, str]) -> None:
    (name, line), contract = breach, BREACHES[breach]
    path = copied / name
    text = path.read_text()
    path.write_text(f"{text}\n{line}\n")
    done = lint(copied, "--contract", contract)
    path.write_text(text)
    assert done.returncode == 1 and "1 broken" in done.stdout, done.stdout + done.stderr
