"""Makes the backends of process groups: of the default group, and of some of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import collectives
from collectives.torch import launched
from collectives.torch.backend import RingBackend
from collectives.torch.options import Options
from collectives.torch.recording import phase_of_call
from collectives.torch.registry import Registered, add, default_backend
from collectives.torch.work import fail, seconds

_num_worlds = 0  # default groups so far, on which all ranks agree
_DELAY = 2e-4  # seconds before the thread advances a call, because most are waited for at once


def make(opts: Any, options: Any) -> Registered:
    """Return the backend of a new group for PyTorch.  All members of the group call this."""
    if not isinstance(options, Options | None):
        raise TypeError(
            f"pg_options must be collectives.torch.Options, not {type(options).__name__}"
        )
    members, timeout = list(opts.global_ranks_in_group), seconds(opts.timeout)
    try:
        if members:
            made = _of_some(members, timeout, options, crc32(opts.group_id.encode()))
        else:
            made = _of_all(opts.group_rank, opts.group_size, timeout, options or Options())
    except collectives.CollectiveError as error:
        fail(error)
    return add(opts.group_id, made)


def _of_all(rank: int, size: int, timeout: float | None, options: Options) -> RingBackend:
    """Return the backend of the default group, which has all ranks of the job."""
    world = launched.world()
    if world.size != size:
        alone = "this process alone" if world.size == 1 else f"{world.size} processes"
        raise RuntimeError(
            f"MPI has started {alone}, but the process group has {size} ranks; start them with "
            "mpirun or `ring launch`: processes that torchrun starts are not "
            "known to MPI"
        )
    global _num_worlds
    are_ordered, numbers = zip(*world.allgather((rank == world.rank, _num_worlds)), strict=True)
    _num_worlds = max(numbers) + 1
    if all(are_ordered):
        return _wrapped(world, timeout, options, _num_worlds)
    ordered: Any = world.Split(0, rank)
    made = _wrapped(ordered, timeout, options, _num_worlds)
    ordered.Free()
    return made


def _of_some(
    members: Sequence[int], timeout: float | None, options: Options | None, number: int
) -> Registered:
    """Return the backend of some ranks, with the number of the group; see `_wrapped`.

    Only these ranks call this.
    """
    default = default_backend()
    if default is not None:
        return default.of_some(members, timeout, options)
    world = launched.world()  # the default group has another backend
    everyone = world.Get_group()
    some = everyone.Incl(members)
    comm: Any = world.Create_group(some)
    made = _wrapped(comm, timeout, options or Options(), number)
    comm.Free()
    some.Free()
    everyone.Free()
    return made


def _wrapped(comm: Any, timeout: float | None, options: Options, number: int) -> RingBackend:
    """Return a backend over a duplicate of `comm`.

    The ranks of a group pass the same `number`.  Groups with different numbers use different tags:
    what a rank has sent before an error of another one stays in MPI when the group ends.
    """
    from collectives.engines import compiled  # noqa: PLC0415 - it imports MPI

    compiled.load_in_background()
    communicator = collectives.wrap(comm, timeout=timeout, progress="thread", check=options.check)
    session = communicator._session
    session.thread_delay, session.phase_of_call = _DELAY, phase_of_call
    session.numbering.mix(number)  # `async_op` is a rank's own choice
    if session.checker is not None:
        session.checker.compares_place = False  # tensors of some ranks may be copied first
    return RingBackend(communicator, options)
