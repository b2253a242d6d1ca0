"""Records what process groups send, by module, bucket and dimension of the mesh."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed

from collectives.diagnostics import Ledger, add_unseen, current_phase
from collectives.torch.registry import NAME, backend_of, backends
from collectives.torch.scopes import Scopes

_OF_MESH = "mesh_"
_in_progress: list[Scopes] = []  # of the recordings, the innermost last


@contextmanager
def record(*models: torch.nn.Module, group: Any = None) -> Iterator[Ledger]:
    """Record what a process group and its subgroups send in a `with` block.

        with collectives.torch.record(model) as ledger:
            model(x).sum().backward()
            optimizer.step()
        print(ledger.summary(by=("phase", "axis", "collective")))

    The column ``axis`` is the name of the dimension of a `DeviceMesh` to which a group belongs, if
    the group exists when the recording begins.  Tensors that PyTorch sends by another backend, such
    as tensors on the CPU in a group of "cpu:gloo,cuda:ring", are not seen.

    Parameters
    ----------
    *models : torch.nn.Module
        Modules, whose calls have the phase "forward" or "backward" and the name of the innermost
        module, such as "forward/layers.3".  FSDP's calls have the name of the module whose
        parameters are gathered or reduced, and DDP's the number of the bucket ("backward/bucket
        0").  Calls in an optimizer's step have the phase "optimizer", also without models.
    group : ProcessGroup, optional
        A process group of this backend.  The default is the default group.

    Yields
    ------
    collectives.Ledger
        The ledger of this rank.  Other ranks need not record.

    Raises
    ------
    ValueError
        If the group has another backend.
    """
    backend, scopes = backend_of(group), Scopes()
    _name_axes()
    _in_progress.append(scopes)
    try:
        with backend.communicator.record() as ledger, scopes.following(*models):
            yield ledger
    finally:
        _in_progress.remove(scopes)


def phase_of_call() -> str:
    """Return the phase of a call that a process group makes now."""
    return _in_progress[-1].phase() if _in_progress else current_phase()


def note_backends(config: str) -> None:
    """Note the other backends of a new group, such as "cpu:gloo,cuda:ring", as not recorded."""
    names = dict.fromkeys(part.rpartition(":")[2] for part in config.split(","))
    names.pop(NAME, None)
    for name in names:
        add_unseen(
            f"Not seen: what torch.distributed sent by the backend {name}, without this library."
        )


def _name_axes() -> None:
    """Name the communicators of the dimensions of meshes."""
    for group in distributed.distributed_c10d._world.pg_names:
        backend = backends.get(group.group_name)
        if backend is not None and group.group_desc.startswith(_OF_MESH):
            backend.communicator.name = group.group_desc.removeprefix(_OF_MESH)
