"""What Griffe, which reads the files of the packages for the API pages, must be told."""

from __future__ import annotations

import inspect
from typing import Any

import griffe

import collectives


class PublicNames(griffe.Extension):
    """Show functions that have the name of their file, and whole docstrings of collectives."""

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """Let a collective have the docstring to which its decorator adds the shared options."""
        names = [decorator.callable_path for decorator in func.decorators]
        if func.docstring is not None and "collectives.communicator.calls.collective" in names:
            method = getattr(collectives.Communicator, func.name)
            func.docstring.value = inspect.getdoc(method) or ""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Let an exported name be the function, as in Python, and not the file of that name."""
        folders = [pkg]
        while folders:
            folder = folders.pop()
            files = [file for file in folder.modules.values() if not file.is_alias]
            folders += files
            for file in files:
                if file.name in (folder.exports or ()) and file.name in file.members:
                    folder.members[file.name] = file.members[file.name]
                    for alias in file.aliases.values():
                        alias.resolve_target()
