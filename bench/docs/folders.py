"""The folders of `collectives/` in their order, for CONTRIBUTING.md."""

from __future__ import annotations

import ast
from pathlib import Path

from bench.docs.sections import table

# A file imports from its own folder and from those named before it; `tests/test_imports.py` sees
# to that.
ORDER = [
    "errors",
    "schedule",
    "algorithms",
    "diagnostics",
    "arrays",
    "programs",
    "lowering",
    "simulation",
    "selection",
    "export",
    "engines",
    "devices",
    "runtime",
    "communicator",
    "mpi4py_compat",
    "torch",
    "launch",
    "doctor",
]


def folders(package: Path) -> str:
    """A table: each folder, what its `__init__` says that it knows, and its files."""
    rows = [[f"`{name}`", about(package / name), files(package / name)] for name in ORDER]
    return table(["folder", "what it knows", "files"], [], rows)


def about(folder: Path) -> str:
    """The first sentence of the docstring of a folder or a file."""
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(docstring.partition("\n\n")[0].split()).rstrip(".")


def files(folder: Path) -> str:
    """The names of its files."""
    paths = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py"))
    names = sorted(str(path) for path in paths if not path.name.startswith("__"))
    return " ".join(f"`{name}`" for name in names) or "(one file)"
