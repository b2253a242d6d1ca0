"""The backends of this process, by the names of their groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from torch import distributed

from collectives.communicator import Communicator
from collectives.torch.options import Options

NAME = "ring"  # of the backend, as PyTorch knows it


class Registered(Protocol):
    """A backend of this package."""

    communicator: Communicator
    settings: Options

    def of_some(
        self, ranks: Sequence[int], limit: float | None, settings: Options | None = None
    ) -> Registered:
        """Return the backend of some ranks, which call this.

        Making it, and each of its calls, takes at most `limit` seconds.
        """

    def cancel_coalescing(self) -> None:
        """End a block of several calls that has raised."""


Made = TypeVar("Made", bound=Registered)

# They stay until they are shut down: PyTorch's wrapper for debugging keeps no reference in Python.
backends: dict[str, Registered] = {}


def backend_of(group: Any = None) -> Registered:
    """Return the backend of a process group, by default of the default group.

    Raises ValueError if the group has another backend.
    """
    group = distributed.group.WORLD if group is None else group
    backend = None if group is None else backends.get(group.group_name)
    if backend is None:
        raise ValueError(f'this process group does not have the backend "{NAME}"')
    return backend


def communicator(group: Any = None) -> Communicator:
    """Return the communicator that makes the calls of a process group.

        collectives.torch.communicator().explain("all_reduce", x)
        with assert_traffic(collectives.torch.communicator(), bytes=24_000):
            loss.backward()

    Parameters
    ----------
    group : ProcessGroup, optional
        A process group of this backend.  The default is the default group.

    Returns
    -------
    collectives.Communicator
        Its own calls and PyTorch's have one order.

    Raises
    ------
    ValueError
        If the group has another backend.
    """
    return backend_of(group).communicator


def default_backend() -> Registered | None:
    """Return the backend of the default group, if it is this one."""
    world = distributed.group.WORLD
    return None if world is None else backends.get(world.group_name)


def cancel_coalescing(group: Any) -> None:
    """End a block of several calls that has raised, if the group has this backend."""
    backend = None if group is None else backends.get(group.group_name)
    if backend is not None:
        backend.cancel_coalescing()


def add(name: str, backend: Made) -> Made:
    """Note the backend of the group of this name, and return it."""
    backends[name] = backend
    return backend


def remove(backend: Registered) -> None:
    """Forget a backend that is shut down."""
    for name in [name for name, other in backends.items() if other is backend]:
        del backends[name]
