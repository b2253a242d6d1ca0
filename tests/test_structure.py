"""The shape of the packages: what an import brings with it, small folders, and few base classes.

The tests have the folders of what they test.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_importing_the_library_imports_no_mpi_and_no_gpu() -> None:
    program = """
import sys, collectives
collectives.run(lambda comm: comm.barrier(), size=2)
print(sorted({"mpi4py", "cupy", "torch", "numba", "rich", "shtab"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr


MOST_ANCESTORS = 2  # of a class, in the same package


def ancestors(kind: type, package: str) -> int:
    """The longest chain of base classes within a package."""
    own = [base for base in kind.__bases__ if base.__module__.partition(".")[0] == package]
    return max((1 + ancestors(base, package) for base in own), default=0)


def deep_classes(package: str, modules: list[str]) -> list[str]:
    """The classes of these modules with more ancestors than `MOST_ANCESTORS`."""
    kinds = {
        x
        for name in modules
        for x in vars(importlib.import_module(name)).values()
        if isinstance(x, type)
    }
    return sorted(kind.__name__ for kind in kinds if ancestors(kind, package) > MOST_ANCESTORS)


def test_no_inheritance_in_parallel_is_deeper_than_two() -> None:
    files = (ROOT / "parallel").rglob("*.py")
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    modules = [name.removesuffix(".__init__") for name in names]
    assert deep_classes("parallel", modules) == []


def test_a_deeper_one_is_noticed() -> None:
    from parallel import Elastic

    deeper = type("Deeper", (Elastic,), {"__module__": "parallel.strategies.elastic"})
    assert ancestors(deeper, "parallel") == MOST_ANCESTORS + 1


MOST_FILES = 8  # beside each other
MOST_ABOVE = 12  # above the folders of collectives


def crowded(package: Path) -> list[str]:
    """The folders with more files than `MOST_FILES`, without `__init__` and `__main__`."""
    folders = [package, *(path for path in package.rglob("*") if path.is_dir())]
    counts = {folder: len(list(folder.glob("[!_]*.py"))) for folder in folders}
    return [folder.name for folder, count in counts.items() if count > MOST_FILES]


@pytest.mark.parametrize("package", ["parallel", "moe", "examples", "bench"])
def test_a_folder_has_few_files(package: str) -> None:
    assert set(crowded(ROOT / package)) <= {"docs"}


def test_few_files_are_above_the_folders_of_the_library() -> None:
    assert len(list((ROOT / "collectives").glob("*.py"))) <= MOST_ABOVE


def test_a_crowded_folder_is_noticed(tmp_path: Path) -> None:
    for number in range(MOST_FILES + 1):
        (tmp_path / f"file{number}.py").touch()
    assert crowded(tmp_path) == [tmp_path.name]


# Folders of tests that test no single folder of the product: whole jobs, and what tests use.
OF_THEIR_OWN = {"chaos", "cluster", "fakes", "gpu", "mpi", "running", "site"}


def without_counterpart(tests: Path) -> list[str]:
    """The folders with tests that no folder of the product has the name of."""
    folders = {path.parent.relative_to(tests) for path in tests.rglob("*/test_*.py")}
    places = ROOT, ROOT / "collectives"
    return sorted(
        str(folder)
        for folder in folders
        if folder.parts[0] not in OF_THEIR_OWN
        and not any((place / folder).is_dir() for place in places)
    )


def test_the_folders_of_tests_have_the_names_of_folders_of_the_product() -> None:
    assert without_counterpart(ROOT / "tests") == []


def test_a_folder_of_tests_that_nothing_in_the_product_has_the_name_of_is_noticed(
    tmp_path: Path,
) -> None:
    for folder in ("arrays", "parallel/nn", "chaos", "parallel/layers", "array"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "test_something.py").touch()
    assert without_counterpart(tmp_path) == ["array", "parallel/layers"]


def test_a_folder_says_what_it_is_in_its_docstring() -> None:
    """Two lines or more in parallel, moe and bench; `docs/` shows the first."""
    for package in ("parallel", "moe", "bench"):
        for path in (ROOT / package).rglob("__init__.py"):
            if path.parent.name == "fit":
                continue
            module = importlib.import_module(".".join(path.parent.relative_to(ROOT).parts))
            assert len((module.__doc__ or "").split("\n")) >= 2, module


def loaded_by(module: str) -> set[str]:
    """The packages of this project that an import of a module loads."""
    program = f"import sys, {module}; print(*(name.partition('.')[0] for name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split()) & {"parallel", "moe"}


@pytest.mark.parametrize("module", ["pingpong", "collective", "checked_mode", "combine"])
def test_a_benchmark_of_calls_loads_nothing_that_trains(module: str) -> None:
    assert loaded_by(f"bench.calls.{module}") == set()


def test_what_a_benchmark_of_training_loads_is_noticed() -> None:
    assert loaded_by("bench.training.strategies") == {"parallel"}
    assert loaded_by("bench.experts.balance") == {"parallel", "moe"}
