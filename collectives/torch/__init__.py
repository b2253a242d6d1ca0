"""A backend of torch.distributed, whose messages are those of this library.

import torch.distributed as dist

import collectives.torch            # not needed from PyTorch 2.14 on, or under mpirun

dist.init_process_group("ring")     # under mpirun or python -m collectives.launch
"""

from __future__ import annotations

from torch import distributed

from collectives.torch import groups, launched, versions
from collectives.torch.any_source import source_of_last
from collectives.torch.options import Options
from collectives.torch.recording import record

__all__ = ["Options", "record", "register"]

NAME = "ring"


def register() -> None:
    """Register the backend "ring".  PyTorch calls this by itself from 2.14 on."""
    versions.check()
    if NAME.upper() not in distributed.Backend._plugins:
        distributed.Backend.register_backend(
            NAME, groups.make, extended_api=True, devices=["cpu", "cuda"]
        )
        versions.complete_works(source_of_last)
        launched.set_variables()
        launched.use_mpi_for_rendezvous()


register()
