"""The function that `import torch` calls; see `torch.backends` in pyproject.toml.

Scripts for torchrun read RANK and LOCAL_RANK before they make a process group.  Under mpirun the
function sets these variables.  Elsewhere it does nothing.
"""

from __future__ import annotations

import os
import sys

_OF_MPIRUN = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def load() -> None:
    """Register the backend if mpirun has started this process."""
    if "collectives.torch" in sys.modules:  # it is being imported, and registers itself
        return
    if any(name in os.environ for name in _OF_MPIRUN):
        from collectives.torch import register  # noqa: PLC0415 - only then it is needed

        register()
