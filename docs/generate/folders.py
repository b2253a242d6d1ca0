"""The folders of a package in their order, for CONTRIBUTING.md."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

from docs.generate.sections import table

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ["collectives", "parallel", "moe", "bench"]


def order(package: str) -> list[str]:
    """Return the folders of a package, and the files beside them, in the order of their imports.

    It is that of the contract in pyproject.toml, by which each imports only what is before it; by
    the alphabet if there is none.
    """
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for contract in settings["tool"]["importlinter"]["contracts"]:
        if contract.get("containers") == [package]:
            layers = reversed(contract["layers"])
            return [name.strip() for layer in layers for name in layer.split("|")]
    return sorted(path.parent.name for path in (ROOT / package).glob("*/__init__.py"))


def folders(package: str) -> str:
    """Return a table: each folder, what its `__init__` says that it knows, and its files."""
    paths = [(name, ROOT / package / name) for name in order(package)]
    rows = [[f"`{name}`", about(path), files(path)] for name, path in paths]
    return table(["folder", "what it knows", "files"], [], rows)


def about(folder: Path) -> str:
    """Return the first sentence of the docstring of a folder or a file."""
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    first = " ".join(docstring.partition("\n\n")[0].split()).rstrip(".")
    return first.replace("``", "`")


def files(folder: Path) -> str:
    """Return the names of its files."""
    paths = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py"))
    names = sorted(str(path) for path in paths if not path.name.startswith("__"))
    return " ".join(f"`{name}`" for name in names) or "(one file)"
