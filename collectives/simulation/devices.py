"""Simulates device programs: a clock for the host of each rank, and one for its device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.lowering import SYNCHRONIZING, DeviceKind, DeviceOperation, DeviceProgram, in_order


class DeviceLink(NamedTuple):
    """What operations of devices of one host cost, in seconds and bytes per second.

    The defaults were measured on one H100 that several ranks share.

    Attributes
    ----------
    synchronize, copy, kernel : float
        The seconds that the host takes to enqueue a batch of signals and awaits, a copy, or a
        combination or division.
    hop : float
        The seconds from a signal until the device of another rank has seen it.
    start : float
        The seconds that the device takes to begin a copy or a kernel.
    rate : float
        The bytes per second that the device of a rank reads and writes; ranks that share a device
        have a part of its rate each.
    staging, staging_rate : float
        The seconds that the host takes for a staged message, and the rate of its bytes.
    """

    synchronize: float = 2.4e-6
    copy: float = 4.7e-6
    kernel: float = 3.3e-6
    hop: float = 3.5e-6
    start: float = 2e-6
    rate: float = 3e12
    staging: float = 2e-5
    staging_rate: float = 1e10


def simulate_devices(
    programs: Sequence[DeviceProgram], link: DeviceLink | None = None
) -> NDArray[np.float64]:
    """Return the seconds from the call until the device of each rank has completed its program.

    An operation begins when the host has enqueued it, the one before it is complete, and what it
    waits for has arrived.  Raises ScheduleError if ranks wait for each other forever.
    """
    link = link or DeviceLink()
    hosts, devices = np.zeros(len(programs)), np.zeros(len(programs))
    caused: dict[tuple[int, int], float] = {}
    ranks = [program.operations for program in programs]
    for rank, at, operation, cause in in_order(ranks):
        continues_batch = (
            at > 0 and operation.kind in SYNCHRONIZING and ranks[rank][at - 1].kind in SYNCHRONIZING
        )
        hosts[rank] += 0 if continues_batch else _host_seconds(operation, link)
        arrival = 0.0 if cause is None else caused[cause] + link.hop
        start = max(hosts[rank], devices[rank], arrival)
        devices[rank] = start + _device_seconds(operation, link)
        if operation.kind in (DeviceKind.SEND, DeviceKind.RECEIVE):  # the host waits for it
            hosts[rank] = devices[rank]
        caused[rank, at] = float(devices[rank])
    return devices


def _host_seconds(operation: DeviceOperation, link: DeviceLink) -> float:
    """Return what the host takes to enqueue an operation."""
    if operation.kind in SYNCHRONIZING:
        return link.synchronize
    return link.kernel if operation.kind in (DeviceKind.COMBINE, DeviceKind.DIVIDE) else link.copy


def _device_seconds(operation: DeviceOperation, link: DeviceLink) -> float:
    """Return what the device takes for an operation."""
    if operation.kind in SYNCHRONIZING:
        return 0.0
    if operation.kind in (DeviceKind.SEND, DeviceKind.RECEIVE):
        return link.staging + operation.size / link.staging_rate
    num_places = 1 + max(len(operation.operands), 1)  # that are read or written
    return link.start + num_places * operation.size / link.rate
