"""A backend of torch.distributed, which sends its messages by this library.

    import torch.distributed as dist

    import collectives.torch            # not needed under mpirun, or from PyTorch 2.14 on

    dist.init_process_group("ring")     # under mpirun or ring launch

It needs PyTorch 2.11 or newer and MPI.  Importing it registers the backend.
"""

from __future__ import annotations

import contextlib
import os

import torch
from torch import distributed

from collectives.runtime import add_library
from collectives.torch import groups, launched, versions
from collectives.torch.any_source import source_of_last
from collectives.torch.options import Options
from collectives.torch.recording import note_backends, record
from collectives.torch.registry import NAME, cancel_coalescing, communicator

__all__ = ["Options", "communicator", "record", "register"]


def register() -> None:
    """Register the backend "ring".  PyTorch calls this by itself from 2.14 on."""
    versions.check()
    if NAME.upper() not in distributed.Backend._plugins:
        distributed.Backend.register_backend(
            NAME, groups.make, extended_api=True, devices=["cpu", "cuda"]
        )
        versions.complete_works(source_of_last)
        versions.end_blocks_that_raise(cancel_coalescing)
        versions.follow_groups(note_backends)
        add_library(os.path.dirname(torch.__file__))
        add_library(contextlib.__file__)  # between PyTorch's blocks and their callers
        launched.set_variables()
        launched.use_mpi_for_rendezvous()


register()
