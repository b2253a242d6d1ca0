"""What Griffe, which reads the packages for the API pages without importing them, must be told."""

from __future__ import annotations

from typing import Any

import griffe


class PublicNames(griffe.Extension):
    """Show functions that have the name of their file."""

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
