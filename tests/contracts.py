"""A contract for import-linter, which pyproject.toml uses: folders are imported by their names.

Whoever imports from another folder imports what the folder hands on, not from one of its files; and
whoever imports from another package imports what is in the ``__all__`` of a folder.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class PublicNames(Contract):
    """The contract of the files of `packages`, for what they import from the packages `of`.

    By default `of` are all packages.  Files that are `late` may be imported by all.  Imports of
    modules, as in ``from collectives.arrays import jit``, are not imports of names.
    """

    type_name = "public_names"

    packages = fields.ListField(subfield=fields.StringField())
    of = fields.ListField(subfield=fields.StringField(), required=False, default=[])
    late = fields.ListField(subfield=fields.StringField(), required=False, default=[])

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Return whether no file reaches into a folder that is not its own."""
        importers = [x for x in graph.modules if x.partition(".")[0] in self.packages]
        breaches = [
            breach for importer in sorted(importers) for breach in self._breaches(importer, graph)
        ]
        return ContractCheck(kept=not breaches, metadata={"breaches": breaches})

    def _breaches(self, importer: str, graph: ImportGraph) -> Iterator[str]:
        checked = self.of or self.session_options["root_packages"]
        for base, names in imported_names(importer):
            folder = base.rpartition(".")[0]
            is_checked = base.partition(".")[0] in checked and base in graph.modules
            if not is_checked or base in self.late:
                continue
            if "." in folder and not graph.find_children(base) and not is_within(importer, folder):
                yield f"{importer} reaches into {base}: import from {folder}"
            elif base.partition(".")[0] != importer.partition(".")[0]:
                hidden = sorted(name for name in names if is_hidden(name, base))
                yield from (f"{importer} imports {base}.{name}, which is hidden" for name in hidden)

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print the breaches."""
        for breach in check.metadata["breaches"]:
            output.print_error(breach)


def is_within(module: str, folder: str) -> bool:
    """Return whether a module is a folder, or in it."""
    return f"{module}.".startswith(f"{folder}.")


def imported_names(module: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the module and the names of each ``from module import names``, for types too."""
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            yield node.module, [alias.name for alias in node.names]


def is_hidden(name: str, module: str) -> bool:
    """Return whether a name has an underscore, or is not in the ``__all__`` of a module."""
    public = handed_on(module)
    return name.startswith("_") if public is None else name not in public


def handed_on(module: str) -> set[str] | None:
    """Return the names in the ``__all__`` of a module, if it has one."""
    for node in parsed(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            constants = (x for x in ast.walk(node.value) if isinstance(x, ast.Constant))
            return {constant.value for constant in constants}
    return None


@cache
def parsed(module: str) -> Any:
    """Return the syntax tree of a module; the working directory is the root of the project."""
    path = Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())
