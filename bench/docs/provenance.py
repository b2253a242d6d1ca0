"""When, where and with which code a table was measured, and whether the code has changed."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from collectives import __version__

ROOT = Path(__file__).resolve().parents[2]
CHANGED = " The code has changed since."
_NOTE = re.compile(
    rf"\(code of ([\w ,]+): (\w+)\)([^\n]*?\.)({re.escape(CHANGED)})?$", re.MULTILINE
)


def provenance(packages: Sequence[str]) -> dict[str, str]:
    """What a measurement of these packages writes beside its results."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "packages": ", ".join(packages),
        "code": digest(packages),
        "machine": f"{os.cpu_count()} cores of {processor()}",
        "python": platform.python_version(),
        "numpy": version("numpy"),
    }


def commit() -> str:
    """The commit of the checkout, or the version where there is none."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or f"version {__version__}"


def digest(packages: Sequence[str], root: Path = ROOT) -> str:
    """Twelve digits that change with every file of these packages."""
    found = hashlib.sha256()
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            found.update(f"{path.relative_to(root)}\n".encode())
            found.update(path.read_bytes())
    return found.hexdigest()[:12]


def processor() -> str:
    """The model of the processor, as Linux names it."""
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else ""
    models = re.findall(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return models[0].strip() if models else platform.machine()


def note(facts: Mapping[str, Any], mpis: Sequence[str]) -> str:
    """The line under a table."""
    return (
        f"Measured on {facts['date']} at commit {facts['commit']} "
        f"(code of {facts['packages']}: {facts['code']}) on {facts['machine']}, "
        f"with Python {facts['python']}, NumPy {facts['numpy']}, {' and '.join(mpis)}."
    )


def aged(text: str, root: Path = ROOT) -> str:
    """A document in which every note says whether the code has changed since."""

    def said(match: re.Match[str]) -> str:
        packages, then, rest, _ = match.groups()
        is_same = digest(packages.split(", "), root) == then
        return f"(code of {packages}: {then}){rest}{'' if is_same else CHANGED}"

    return _NOTE.sub(said, text)
