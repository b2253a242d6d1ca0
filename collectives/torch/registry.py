"""The backends of this process, by the names of their groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from torch import distributed

if TYPE_CHECKING:
    from collectives.torch.backend import RingBackend

backends: WeakValueDictionary[str, RingBackend] = WeakValueDictionary()


def backend_of(group: Any = None) -> RingBackend:
    """The backend of a process group; None: of the default group.

    Raises ValueError if the group has another backend.
    """
    group = distributed.group.WORLD if group is None else group
    found = None if group is None else backends.get(group.group_name)
    if found is None:
        raise ValueError('this process group does not have the backend "ring"')
    return found


def default_backend() -> RingBackend | None:
    """The backend of the default group, if it is this one."""
    world = distributed.group.WORLD
    return None if world is None else backends.get(world.group_name)
