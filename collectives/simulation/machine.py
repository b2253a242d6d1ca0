"""A machine: what messages, copies and combining cost on it, by the LogGOPS model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from collectives.schedule import Topology

SAME_HOST, OTHER_HOST, ISLAND = LINK_CLASSES = "same_host", "other_host", "island"


class Link(NamedTuple):
    """What a message of up to `up_to_bytes` bytes costs between two ranks.

    The letters are the letters of the LogGOPS model (Hoefler, Schneider and Lumsdaine 2010).

    Attributes
    ----------
    up_to_bytes : float
        The largest message to which the costs apply.
    overhead_seconds, overhead_seconds_per_byte : float
        o and O: how long the message, and each further byte, occupies the processor at each end.
    latency_seconds : float
        L, from one end to the other.
    gap_seconds : float
        g, the least time between two messages that a rank sends, or receives.
    seconds_per_byte : float
        G, the time of each further byte on the link.
    is_rendezvous : bool
        Whether the sender waits until the receive is posted (messages above S).
    """

    up_to_bytes: float = math.inf
    overhead_seconds: float = 0.0
    overhead_seconds_per_byte: float = 0.0
    latency_seconds: float = 0.0
    gap_seconds: float = 0.0
    seconds_per_byte: float = 0.0
    is_rendezvous: bool = False

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds from the beginning of a send to the end of its receive.

        Nothing else happens at the same time.
        """
        per_byte = max(self.seconds_per_byte, self.overhead_seconds_per_byte)
        return 2 * self.overhead_seconds + self.latency_seconds + per_byte * max(num_bytes - 1, 0)


class Machine(NamedTuple):
    """What everything costs.

    Attributes
    ----------
    links : mapping of str to tuple of Link
        By class ("same_host", "other_host", or "island" for ranks that faster links connect), the
        links in the order of their sizes.  The last has no limit.
    call_seconds : float
        The time of a call in addition to its operations.
    copy_seconds_per_byte, combine_seconds_per_byte : float
        The time of a copy and of a combination within a rank.
    """

    links: Mapping[str, tuple[Link, ...]]
    call_seconds: float = 0.0
    copy_seconds_per_byte: float = 0.0
    combine_seconds_per_byte: float = 0.0

    def bytes_per_second(self, link_class: str) -> float:
        """Return the rate of the fastest link of a class, as a single large message sees it."""
        rates = [link.seconds_per_byte for link in self.links.get(link_class, ())]
        fastest = min(rates, default=0.0)
        return 1 / fastest if fastest else math.inf

    def link(self, link_class: str, num_bytes: float) -> Link:
        """Return the link that carries a message of this size."""
        return next(link for link in self.links[link_class] if num_bytes <= link.up_to_bytes)

    def connects(self, topology: Topology | None) -> bool:
        """Return whether there are links between all ranks on these hosts, or on one if None."""
        needed = {OTHER_HOST} if topology is not None and topology.num_hosts > 1 else set()
        if topology is None or topology.max_per_host > 1:
            needed.add(SAME_HOST)
        return needed <= self.links.keys()


def _link(rate: float, latency: float) -> tuple[Link, ...]:
    """Return the costs of a link on which messages of more than 64 KiB wait for their receives."""
    eager = Link(
        up_to_bytes=65536,
        overhead_seconds=1e-6,
        latency_seconds=latency,
        gap_seconds=1e-6,
        seconds_per_byte=1 / rate,
    )
    return eager, eager._replace(up_to_bytes=math.inf, is_rendezvous=True)


# Not measured: NICs of 400 Gbit/s, PCIe within a host, NVLink within an island.
DEFAULT = Machine(
    {SAME_HOST: _link(50e9, 2e-6), OTHER_HOST: _link(50e9, 5e-6), ISLAND: _link(400e9, 2e-6)},
    call_seconds=5e-6,
    copy_seconds_per_byte=1 / 1e12,
    combine_seconds_per_byte=1 / 7e11,
)
