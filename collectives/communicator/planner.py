"""`comm.plan`: the calls of a communicator, each of which returns a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, cast

from collectives.communicator.calls import Calls
from collectives.communicator.collectives import Collectives
from collectives.communicator.point_to_point import PointToPoint
from collectives.runtime import Plan

Parameters = ParamSpec("Parameters")


def _planned(
    method: Callable[Concatenate[Any, Parameters], object],
) -> Callable[Concatenate[Planner, Parameters], Plan]:
    """Return the method with another return type: a plan."""
    return cast("Callable[Concatenate[Planner, Parameters], Plan]", method)


class Planner(Calls):
    """The calls of a communicator, each of which returns a `Plan`; see `Communicator.plan`.

    The arguments are those of the calls, without `async_op` and `timeout`.  `x` must be
    C-contiguous, because every run reads it without a copy.
    """

    is_planning = True

    broadcast = _planned(Collectives.broadcast)
    scatter = _planned(Collectives.scatter)
    gather = _planned(Collectives.gather)
    reduce = _planned(Collectives.reduce)
    all_reduce = _planned(Collectives.all_reduce)
    reduce_scatter = _planned(Collectives.reduce_scatter)
    all_gather = _planned(Collectives.all_gather)
    all_to_all = _planned(Collectives.all_to_all)
    scan = _planned(Collectives.scan)
    exscan = _planned(Collectives.exscan)
    barrier = _planned(Collectives.barrier)
    _barrier = Collectives._barrier
    send = _planned(PointToPoint.send)
    recv = _planned(PointToPoint.recv)
    send_recv = _planned(PointToPoint.send_recv)
    _message, _peer = PointToPoint._message, PointToPoint._peer
