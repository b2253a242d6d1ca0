"""When, where and with what a measurement was made; it is written beside the numbers."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from collectives import __version__

ROOT = Path(__file__).resolve().parents[1]


def provenance() -> dict[str, str]:
    """The date, the commit, the machine, and the versions of Python and NumPy."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "machine": f"{os.cpu_count()} cores of {processor()}",
        "python": platform.python_version(),
        "numpy": version("numpy"),
    }


def commit() -> str:
    """The commit of the checkout, or the version where there is none."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or f"version {__version__}"


def processor() -> str:
    """The model of the processor, as Linux names it."""
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else ""
    models = re.findall(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return models[0].strip() if models else platform.machine()
