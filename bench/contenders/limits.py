"""What limits every algorithm: a copy in memory, and the least exchange of messages."""

from __future__ import annotations

from functools import partial

import numpy as np

from bench.contenders.contender import Contender, nothing
from bench.workloads.collective import Buffers, Case
from bench.workloads.expected import Array
from collectives import Communicator, Plan
from collectives.schedule.contracts import SPECS
from collectives.selection.cost import lower_bound


def memcpy(case: Case, buffers: Buffers) -> Contender:
    """Return a copy of n bytes on every rank at once: the least possible work, without a result.

    It copies the input to the output where they are apart and of one size.
    """
    x, y = buffers.x, buffers.y
    if x is None or y is None or buffers.is_in_place or x.size != y.size:
        x, y = (case.backend.empty((case.num_elements,), case.dtype) for _ in range(2))
        x.fill(0)  # or all its pages would be one page of zeros
    if case.backend.is_host:
        return Contender(partial(np.copyto, y, x), nothing, None)

    def run() -> None:
        case.backend.copy(x, y)
        case.backend.synchronize()

    return Contender(run, nothing, None)


def bound(comm: Communicator, case: Case) -> Contender:
    """Return one exchange of the fewest bytes that some rank must send or receive.

    Ranks exchange messages in pairs, 0 with 1 and 2 with 3 and so on; with a root, the root sends
    to the next rank.  They use this library's plans.  Nothing is combined.
    """
    num_bytes = int(lower_bound(case.collective, case.size, case.num_bytes).bytes)
    group = comm.split(_color(case))
    if group is None or group.size == 1:
        return Contender(nothing, nothing if group is None else group.free, None)
    plan = _plan(group, case, np.zeros(num_bytes, np.uint8))

    def free() -> None:
        plan.free()
        group.free()

    return Contender(plan.run, free, None)


def _color(case: Case) -> int | None:
    """Return the number of this rank's pair; None: it is in no pair."""
    if not SPECS[case.collective].is_rooted:
        return case.rank // 2
    return 0 if case.rank in (case.root, (case.root + 1) % case.size) else None


def _plan(pair: Communicator, case: Case, x: Array) -> Plan:
    """Return a message from each to the other, or from the root."""
    if SPECS[case.collective].is_rooted:
        root = 0 if case.root < (case.root + 1) % case.size else 1
        return pair.plan.broadcast(x, root, out=x, algorithm="linear")
    counts = [[0, x.size], [x.size, 0]]
    return pair.plan.all_to_all(x, out=np.empty_like(x), counts=counts, algorithm="linear")
