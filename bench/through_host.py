"""What a program does with arrays on a device, and an MPI that knows nothing of devices."""

from __future__ import annotations

from bench.case import Buffers, Case
from bench.native import native
from bench.ways import Contender, nothing
from collectives.arrays.backends import HOST


def through_host(case: Case, buffers: Buffers) -> Contender:
    """Copy to page-locked memory of the host, call mpi4py, and copy back.

    The memory is kept from call to call.  On the host input and output are apart, except of a
    broadcast.
    """
    backend, (x, y, _) = case.backend, buffers
    is_broadcast = case.collective == "broadcast"
    source = None if x is None else backend.host_buffer(x)
    is_ready = is_broadcast and source is not None  # the root has the result already
    target = source if is_ready else None if y is None else backend.host_buffer(y)
    seen = [None if memory is None else memory.view(case.dtype) for memory in (source, target)]
    on_host = native(case._replace(backend=HOST), Buffers(seen[0], seen[1], is_broadcast))

    def run() -> None:
        if source is not None:
            backend.to_host([(x, source)])
            backend.synchronize()
        on_host.run()
        if target is not None and not is_ready:
            backend.to_device([(y, target)])
            backend.synchronize()

    return Contender(run, nothing, y)
