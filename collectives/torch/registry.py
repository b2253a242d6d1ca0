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
        """The backend of some ranks, which call this.  `limit`: seconds, also of its calls."""

    def cancel_coalescing(self) -> None:
        """End a block of several calls that has raised."""


Made = TypeVar("Made", bound=Registered)

# They stay until they are shut down: PyTorch's wrapper for debugging keeps no reference in Python.
backends: dict[str, Registered] = {}


def backend_of(group: Any = None) -> Registered:
    """The backend of a process group; None: of the default group.

    Raises ValueError if the group has another backend.
    """
    group = distributed.group.WORLD if group is None else group
    found = None if group is None else backends.get(group.group_name)
    if found is None:
        raise ValueError(f'this process group does not have the backend "{NAME}"')
    return found


def communicator(group: Any = None) -> Communicator:
    """Return the communicator that makes the calls of a process group.

        collectives.torch.communicator().explain("all_reduce", x)
        with assert_traffic(collectives.torch.communicator(), bytes=24_000):
            loss.backward()

    - `group`: a process group of this backend.  None: the default group.

    Returns a `collectives.Communicator`.  Its own calls and PyTorch's have one order.  Raises
    ValueError if the group has another backend.
    """
    return backend_of(group).communicator


def default_backend() -> Registered | None:
    """The backend of the default group, if it is this one."""
    world = distributed.group.WORLD
    return None if world is None else backends.get(world.group_name)


def cancel_coalescing(group: Any) -> None:
    """End a block of several calls that has raised, if the group has this backend."""
    found = None if group is None else backends.get(group.group_name)
    if found is not None:
        found.cancel_coalescing()


def add(name: str, backend: Made) -> Made:
    """Note the backend of the group of this name, and return it."""
    backends[name] = backend
    return backend


def remove(backend: Registered) -> None:
    """Forget a backend that is shut down."""
    for name in [name for name, each in backends.items() if each is backend]:
        del backends[name]
