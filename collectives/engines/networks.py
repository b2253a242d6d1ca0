"""Which networks MPI need not look for."""

from __future__ import annotations

import os


def leave_out_networks() -> None:
    """Let Open MPI leave out its component for libfabric's networks if all ranks share this host.

    Where this component finds no network, it waits for one second, in MPI_Init.  Call this before
    MPI is initialized.  A choice of components (`--mca btl`) of the user stays.
    """
    size = os.environ.get("OMPI_COMM_WORLD_SIZE")
    if size is not None and size == os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE"):
        os.environ.setdefault("OMPI_MCA_btl", "^ofi")
