"""The house: a file imports what lies below it, never what lies above."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Within a floor, a file may import those named before it.
FLOORS = [
    ["errors", "schedule", "layout", "trees", "two_trees", "circulant"],
    [
        "spec",
        "transform",
        "verify",
        "count",
        "algorithms.registry",
        "algorithms.sources",
        "algorithms.scatter",
        "algorithms.gather",
        "algorithms.reduce_scatter",
        "algorithms.all_gather",
        "algorithms.broadcast",
        "algorithms.reduce",
        "algorithms.scan",
        "algorithms.windows",
        "algorithms.exscan",
        "algorithms.all_reduce",
        "algorithms.all_to_all",
        "algorithms.barrier",
        "algorithms.extending",
        "algorithms",
    ],
    ["cost", "ledger"],
    [
        "jit",
        "loops",
        "kernels",
        "half_precision",
        "arrays",
        "reduction",
        "placement",
        "lanes",
        "labels",
        "decisions",
        "select",
        "explanation",
        "program",
        "fingerprint",
        "header",
        "arguments",
        "scratch",
        "flight_recorder",
        "transport",
        "progress",
        "runs",
        "run_pool",
        "work",
        "checked",
    ],
    ["interpreter", "staging", "inproc", "executor"],
    ["monitor", "mpi_errors", "compiled", "warm", "mpi"],
    ["plan", "call_cache", "session", "calls", "communicator", "entry"],
    [
        "flight",
        "mpirun",
        "rank",
        "ranks",
        "launch",
        "dropin.buffers",
        "dropin.memory",
        "dropin.ops",
        "dropin.requests",
        "dropin.calls",
        "dropin.objects",
        "dropin",
        "intracomm",
    ],
]
STRATEGY_FLOORS = [
    ["nn", "gpt", "precision", "shards", "text", "optim", "quantization"],
    ["traffic", "agreement", "gather"],
    [
        "memory.tracker",
        "memory.formulas",
        "memory",
        "offload",
        "strategy",
        "predictions",
        "data_parallel",
        "comm_hooks",
        "zero",
        "hsdp",
        "zero_plus_plus",
        "parameter_server",
        "elastic",
    ],
    [
        "checkpoint",
        "rank_report",
        "timeline",
        "console",
        "registry",
        "train",
        "memory.__main__",
    ],
]
HOUSES = {"collectives": FLOORS, "parallel": STRATEGY_FLOORS}
DROP_IN = {"intracomm", *(name for floor in FLOORS for name in floor if name[:7] == "dropin.")}
MAY_USE = {"collectives": set(), "parallel": {"collectives"}, "moe": {"collectives", "parallel"}}
PUBLIC = {"collectives"}  # `parallel` and `moe` see the package's own names and no module of it


def name_of(path: Path) -> str:
    _, *parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def house_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def places(house: str) -> dict[str, tuple[int, int]]:
    """The floor of each module, and its place in the order of all."""
    named = [(number, name) for number, floor in enumerate(HOUSES[house]) for name in floor]
    return {name: (number, place) for place, (number, name) in enumerate(named)}


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(module, whether only for type checking) of everything that a file imports."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in typing_only
        elif isinstance(node, ast.ImportFrom):
            for module in modules_of(node):
                yield module, id(node) in typing_only


def modules_of(node: ast.ImportFrom) -> list[str]:
    """`from collectives import trees` imports a module; `from collectives import run` a name."""
    base = node.module or ""
    inner = [f"{base}.{alias.name}" for alias in node.names]
    files = [name for name in inner if is_module(name)]
    return files or [base]


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def breaches(path: Path) -> list[str]:
    """Sentences on the imports of a file that break the order of its house."""
    module, house, found = name_of(path), house_of(path), []
    known = places(house)
    floor, place = known[module]
    for imported, is_typing_only in imports(path):
        top, _, other = imported.partition(".")
        if top != house:
            continue
        if other not in known:
            found.append(f"{module} imports {imported}, which is on no floor")
        elif known[other][0] > floor or (not is_typing_only and known[other][1] >= place):
            found.append(f"{module} imports {other}, which is not below it")
    return found


def files(house: str) -> list[Path]:
    """Its modules, but what the house itself hands out."""
    return [path for path in sorted((ROOT / house).rglob("*.py")) if name_of(path)]


CORE = files("collectives")


@pytest.mark.parametrize(
    "path", [*CORE, *files("parallel")], ids=lambda path: f"{house_of(path)}/{name_of(path)}"
)
def test_a_file_imports_only_what_lies_below_it(path: Path) -> None:
    assert name_of(path) in places(house_of(path)), f"{path.name} has no floor; give it one"
    assert breaches(path) == []


def test_a_breach_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "collectives" / "schedule.py"
    module.parent.mkdir()
    module.write_text("import collectives.layout\nfrom collectives.communicator import plan")
    (module.parent / "communicator.py").touch()
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert len(breaches(module)) == 2


@pytest.mark.parametrize("package", ["parallel", "moe"])
def test_strategies_use_the_public_face_only(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        for imported, _ in imports(path):
            top = imported.partition(".")[0]
            if top in MAY_USE and top != package:
                assert top in MAY_USE[package], f"{path} imports {imported}"
            if top == "collectives":
                assert imported in PUBLIC, f"{path} reaches into {imported}"


@pytest.mark.parametrize("package", ["collectives", "parallel", "moe"])
def test_the_installed_packages_import_neither_tests_nor_bench(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        assert not {name.partition(".")[0] for name, _ in imports(path)} & {"tests", "bench"}


def test_only_one_file_of_the_core_imports_mpi4py_and_the_drop_in_for_it() -> None:
    users = {
        name_of(path)
        for path in CORE
        for name, is_typing_only in imports(path)
        if name.startswith("mpi4py") and not is_typing_only
    }
    assert users - DROP_IN == {
        "mpi",
        "mpi_errors",
        "compiled",
        "entry",
    }  # entry only asks whether there is an MPI to be had


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
