"""Who imports whom: folders in the order of the story, no circles, and public names only."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import parallel
from bench.docs.folders import ORDER

ROOT = Path(__file__).parent.parent

# Other folders import the names that a folder hands on, not its files; but these import MPI or
# numba, and are imported where they are needed.
IMPORTED_LATE = {"engines.mpi", "engines.mpi_errors", "engines.compiled", "engines.executor"}
PACKAGES = ["collectives", "parallel", "moe", "bench"]
MAY_USE = {"collectives": set(), "parallel": {"collectives"}, "moe": {"collectives", "parallel"}}
# Of `collectives`, for the other packages.
PUBLIC = {"collectives", "collectives.export", "collectives.simulation"}
PROGRAMS = {"parallel.train": {"moe"}}  # commands, which may use what is built on their package
USERS_OF_MPI = {
    *("engines.mpi", "engines.mpi_errors", "engines.compiled"),
    *("communicator.entry", "torch.launched", "doctor.exchange", "doctor.job"),
}


def name_of(path: Path, root: Path = ROOT) -> str:
    """The dotted name of a file: "collectives.arrays.kernels"."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def files(package: str, root: Path = ROOT) -> dict[str, Path]:
    """All modules of a package by their names."""
    return {name_of(path, root): path for path in sorted((root / package).rglob("*.py"))}


def is_module(name: str, root: Path = ROOT) -> bool:
    path = root.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def imports(path: Path, root: Path = ROOT) -> Iterator[str]:
    """Every module that a file imports, for types too: `from a import b` imports a.b or a."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            inner = (f"{base}.{alias.name}" for alias in node.names)
            yield from {name if is_module(name, root) else base for name in inner}


def folder_of(module: str) -> str:
    """The folder of a module of `collectives`; "" for the files above all folders."""
    name = module.removeprefix("collectives").removeprefix(".").partition(".")[0]
    return name if name in ORDER else ""


def breaches(module: str, path: Path, root: Path = ROOT) -> list[str]:
    """What is wrong with the imports of a file of `collectives`, in sentences."""
    own, found = folder_of(module), []
    for imported in imports(path, root):
        other = folder_of(imported)
        if not own or not other or other == own:
            continue
        if ORDER.index(other) > ORDER.index(own):
            found.append(f"{module} imports {imported}, whose folder comes after its own")
        inner = imported.removeprefix("collectives.")
        is_file_of_folder = (root / "collectives" / other).is_dir() and inner.count(".") == 1
        names = names_imported(path, imported)
        if is_file_of_folder and names and inner not in IMPORTED_LATE and other != "algorithms":
            found.append(f"{module} reaches into {imported}; import from collectives.{other}")
    return found


def names_imported(path: Path, module: str) -> list[str]:
    """The names in `from module import names`."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.ImportFrom) and node.module == module]  # fmt: skip
    return [alias.name for node in nodes for alias in node.names]


def circle(modules: Mapping[str, Path], root: Path = ROOT) -> list[str]:
    """Modules that import each other in a circle; none if there is none.

    What a folder's `__init__` imports does not count: whoever imports a name of the folder means
    the file that defines it.
    """
    plain = {name: path for name, path in modules.items() if path.name != "__init__.py"}
    graph = {name: {m for m in imports(path, root) if m in plain and m != name}
             for name, path in plain.items()}  # fmt: skip
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


CORE = files("collectives")


@pytest.mark.parametrize("module", CORE)
def test_a_file_imports_from_folders_before_its_own_by_their_public_names(module: str) -> None:
    assert breaches(module, CORE[module]) == []


def test_every_folder_has_its_place() -> None:
    folders = [path.name for path in (ROOT / "collectives").iterdir() if any(path.glob("*.py"))]
    assert sorted([*folders, "errors"]) == sorted(ORDER)
    assert len(list((ROOT / "collectives").glob("*.py"))) <= 12


@pytest.mark.parametrize("package", PACKAGES)
def test_no_files_import_each_other_in_a_circle(package: str) -> None:
    assert circle(files(package)) == []


@pytest.fixture
def other_root(tmp_path: Path) -> Path:
    for name, text in {
        "schedule/rounds.py": "from collectives.runtime.plan import Plan",
        "runtime/plan.py": "from collectives.schedule.rounds import Send",
        "runtime/__init__.py": "",
    }.items():
        path = tmp_path / "collectives" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_breaches_are_noticed(other_root: Path) -> None:
    modules = files("collectives", other_root)
    found = {name: breaches(name, path, other_root) for name, path in modules.items()}
    assert [len(found[f"collectives.{name}"]) for name in ("schedule.rounds", "runtime.plan")] == [
        2,  # upwards, and into a file
        1,  # into a file
    ]


def test_a_circle_is_noticed_even_if_only_types_make_it(other_root: Path) -> None:
    path = other_root / "collectives/schedule/rounds.py"
    path.write_text(f"if TYPE_CHECKING:\n    {path.read_text()}")
    assert len(circle(files("collectives", other_root), other_root)) == 3


@pytest.mark.parametrize("package", ["parallel", "moe"])
def test_strategies_use_the_public_face_only(package: str) -> None:
    for module, path in files(package).items():
        for imported in imports(path):
            top = imported.partition(".")[0]
            if top in MAY_USE and top != package:
                may_use = MAY_USE[package] | PROGRAMS.get(module, set())
                assert top in may_use, f"{path} imports {imported}"
            if top == "collectives":
                assert imported in PUBLIC, f"{path} reaches into {imported}"


def private_names(path: Path) -> list[str]:
    """What a file imports of `parallel` that is not public."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("parallel"):
            base, _, module = (node.module or "").partition(".")
            names = [module] if module else [alias.name for alias in node.names]
            found += [f"{base}.{name}" for name in names if name not in parallel.__all__]
    return found


def test_benchmarks_use_public_names_of_the_strategies_only(tmp_path: Path) -> None:
    assert [name for path in files("bench").values() for name in private_names(path)] == []
    other = tmp_path / "other.py"
    other.write_text("from parallel.cli import at_least\nfrom parallel.mesh import Mesh\n")
    assert private_names(other) == ["parallel.mesh"]


@pytest.mark.parametrize("package", ["collectives", "parallel", "moe"])
def test_the_library_imports_neither_tests_nor_benchmarks(package: str) -> None:
    for path in files(package).values():
        assert not {name.partition(".")[0] for name in imports(path)} & {"tests", "bench"}


def test_few_files_import_mpi4py() -> None:
    users = {
        module.removeprefix("collectives.")
        for module, path in CORE.items()
        if any(name.startswith("mpi4py") for name in imports(path))
    }
    # `communicator.entry` only asks whether there is an MPI.
    assert {name for name in users if not name.startswith("mpi4py_compat.")} == USERS_OF_MPI


def test_importing_the_library_imports_no_mpi_and_no_gpu() -> None:
    program = """
import sys, collectives
collectives.run(lambda comm: comm.barrier(), size=2)
print(sorted({"mpi4py", "cupy", "torch", "numba"} & set(sys.modules)))
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
    kinds = {x for name in modules for x in vars(importlib.import_module(name)).values()
             if isinstance(x, type)}  # fmt: skip
    return sorted(kind.__name__ for kind in kinds if ancestors(kind, package) > MOST_ANCESTORS)


def test_no_inheritance_in_parallel_is_deeper_than_two() -> None:
    files = (ROOT / "parallel").rglob("*.py")
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    modules = [name.removesuffix(".__init__") for name in names]
    assert deep_classes("parallel", modules) == []


def test_a_deeper_one_is_noticed() -> None:
    from parallel import Elastic

    deeper = type("Deeper", (Elastic,), {"__module__": "parallel.elastic"})
    assert ancestors(deeper, "parallel") == MOST_ANCESTORS + 1
