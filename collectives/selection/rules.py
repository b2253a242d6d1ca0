"""The built-in rules: which algorithm runs where nothing was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from collectives.selection.decisions import size_range

_NO_LIMIT = float("inf")


class Rule(NamedTuple):
    """An algorithm, perhaps with options, for up to `largest` bytes (n) and `max_ranks` ranks.

    Attributes
    ----------
    largest : float
    name : str
    powers_of_two_only : bool
        Whether it needs a power of two of ranks.
    max_ranks : float
    shares_hosts : bool
        Whether some host must have several ranks.
    """

    largest: float
    name: str
    powers_of_two_only: bool = False
    max_ranks: float = _NO_LIMIT
    shares_hosts: bool = False


class Hosts(NamedTuple):
    """How many hosts there are, and how many ranks the largest one has.

    Attributes
    ----------
    have_devices : bool
        Whether the ranks of the only host read each other's arrays on devices.
    """

    number: int
    max_ranks: int
    have_devices: bool = False


# Open MPI sends messages of up to this many bytes eagerly; for longer ones it needs a rendezvous.
_EAGER_BYTES = 4000

# The first algorithm that fits and serves is taken.  Operators that do not commute need one that
# combines in rank order; the last rule always has one.  The rules for few ranks were measured on 2
# and 4 ranks, on two cores, with Open MPI and MPICH.
RULES: dict[str, Sequence[Rule]] = {
    "broadcast": (
        Rule(_NO_LIMIT, "binomial", max_ranks=2),
        Rule(_NO_LIMIT, "knomial", max_ranks=4),
        Rule(512 * 1024, "binomial"),
        Rule(_NO_LIMIT, "pipeline"),
    ),
    "reduce": (
        Rule(8 * 1024**2, "binomial", max_ranks=2),
        Rule(_NO_LIMIT, "reduce_scatter_gather", max_ranks=2),
        Rule(_NO_LIMIT, "binary", max_ranks=4),
        Rule(_NO_LIMIT, "binomial"),
        Rule(_NO_LIMIT, "in_order_binary"),
    ),
    "all_reduce": (
        Rule(_EAGER_BYTES, "recursive_doubling", max_ranks=2),
        Rule(2 * _EAGER_BYTES, "ring", max_ranks=2),  # its messages are half as long
        Rule(96 * 1024, "recursive_doubling", max_ranks=2),
        Rule(_NO_LIMIT, "ring", max_ranks=2),
        Rule(48 * 1024, "recursive_doubling"),
        Rule(512 * 1024, "rabenseifner", powers_of_two_only=True),
        Rule(96 * 1024, "recursive_doubling"),
        Rule(_NO_LIMIT, "ring"),
        Rule(_NO_LIMIT, "two_shot"),
    ),
    "scatter": (
        Rule(_NO_LIMIT, "linear_bounded", max_ranks=4),
        Rule(32 * 1024, "binomial"),
        Rule(_NO_LIMIT, "linear"),
    ),
    "gather": (
        Rule(32 * 1024, "linear_bounded", max_ranks=4),
        Rule(32 * 1024, "binomial"),
        Rule(_NO_LIMIT, "linear"),
    ),
    "all_gather": (
        Rule(1024**2, "recursive_doubling", powers_of_two_only=True),
        Rule(32 * 1024, "bruck"),
        Rule(_NO_LIMIT, "ring"),
    ),
    "reduce_scatter": (
        Rule(256 * 1024, "recursive_halving", powers_of_two_only=True),
        Rule(32 * 1024, "circulant"),
        Rule(_NO_LIMIT, "ring"),
        Rule(_NO_LIMIT, "butterfly"),
    ),
    "all_to_all": (
        Rule(_NO_LIMIT, "linear", max_ranks=4),
        Rule(1024, "bruck"),
        Rule(_NO_LIMIT, "linear"),
    ),
    "scan": (Rule(_NO_LIMIT, "linear", max_ranks=4), Rule(_NO_LIMIT, "doubling")),
    "exscan": (Rule(_NO_LIMIT, "linear", max_ranks=4), Rule(_NO_LIMIT, "min_round")),
    "barrier": (Rule(_NO_LIMIT, "dissemination"),),
}


# The rules for several hosts, which come before those above.  Where n is large, what a host sends
# to others decides: a hierarchical algorithm sends the least, and so does a line of neighbours.
# Where n is small, the number of messages between hosts decides.
HOST_RULES: dict[str, Sequence[Rule]] = {
    "broadcast": (
        Rule(64 * 1024, "hierarchical"),
        Rule(_NO_LIMIT, "pipeline", max_ranks=64),
        Rule(_NO_LIMIT, "scatter_ring_all_gather"),
    ),
    "reduce": (
        Rule(64 * 1024, "hierarchical"),
        Rule(_NO_LIMIT, "pipeline", max_ranks=64),
        Rule(_NO_LIMIT, "reduce_scatter_gather"),
        Rule(_NO_LIMIT, "in_order_binary"),
    ),
    "all_reduce": (
        Rule(16 * 1024, "recursive_doubling"),
        Rule(1024**2, "hierarchical"),
        Rule(_NO_LIMIT, "hierarchical", shares_hosts=True),
        Rule(_NO_LIMIT, "segmented_ring"),  # one neighbour at a time fills a link best
    ),
    "all_gather": (
        Rule(1024**2, "hierarchical"),
        Rule(_NO_LIMIT, "hierarchical", shares_hosts=True),
        Rule(_NO_LIMIT, "ring"),
    ),
    "reduce_scatter": (
        Rule(1024**2, "hierarchical"),
        Rule(_NO_LIMIT, "hierarchical", shares_hosts=True),
        Rule(_NO_LIMIT, "ring"),
    ),
    "all_to_all": (
        Rule(32 * 1024, "hierarchical", shares_hosts=True),
        Rule(1024, "bruck"),
        Rule(32 * 1024, "linear"),
        Rule(_NO_LIMIT, "segmented_linear", max_ranks=16),
        Rule(_NO_LIMIT, "pairwise"),
    ),
}

# The rules for ranks of one host that read each other's arrays on devices.  No algorithm has
# segments: they let messages overlap, and here each costs calls of the driver.
#
# Where n is small, the fewest hops are the fastest: a rank raises a counter, and the device of
# another one awaits it.  A hop takes 3.5 us, and 142 us if ranks take turns on one device; a copy
# takes 4 us more (measured on one H100).  Where n is large, the bytes on the link of the busiest
# rank decide.  Hops and bytes are counted in the device programs of 2, 4 and 8 ranks, as
# `tests/selection/test_device_rules.py` does.  The limits are not measured: there a link of
# 450 GB/s saves what `simulate_devices` predicts that more hops and calls cost, or somewhat less,
# because an executor with fewer calls loses less.  `bench tune --device cuda` measures.
DEVICE_RULES: dict[str, Sequence[Rule]] = {
    # All read the memory of the root at once.  On 8 ranks it sends 7 n over its link, and after a
    # scatter 1.75 n, in 9 more hops.
    "broadcast": (
        Rule(_NO_LIMIT, "knomial(radix=16)", max_ranks=2),
        Rule(8 * 1024**2, "knomial(radix=16)"),
        Rule(_NO_LIMIT, "scatter_ring_all_gather"),
    ),
    # The root combines up to 8 vectors at once, as many as a kernel reads.  On 8 ranks it receives
    # 7 n, and after a reduce-scatter 1.75 n, in 5 more hops.
    "reduce": (
        Rule(_NO_LIMIT, "knomial(radix=8)", max_ranks=2),
        Rule(8 * 1024**2, "knomial(radix=8)"),
        Rule(_NO_LIMIT, "reduce_scatter_gather"),
        Rule(_NO_LIMIT, "linear"),
    ),
    # one_shot: 2 hops and one kernel, which reads (p - 1) n from others; two_shot: 3 hops, and
    # 2 n (p - 1) / p.  On 2 ranks one_shot does what recursive_doubling does, and two_shot what
    # ring does, which was the fastest of 16 MiB there; two_shot was the fastest of 16 and 64 MiB on
    # 4 ranks, and one_shot of 1 KiB on both (measured on one H100, by an interpreting kernel).
    "all_reduce": (
        Rule(8 * 1024**2, "one_shot", max_ranks=2),
        Rule(2 * 1024**2, "one_shot", max_ranks=4),
        Rule(1024**2, "one_shot", max_ranks=8),
        Rule(256 * 1024, "one_shot"),
        Rule(_NO_LIMIT, "two_shot"),
    ),
    # These have the fewest hops (2), and no algorithm moves fewer bytes.
    "scatter": (Rule(_NO_LIMIT, "knomial(radix=16)"),),
    "gather": (Rule(_NO_LIMIT, "linear"),),
    "all_gather": (Rule(_NO_LIMIT, "direct"),),
    "reduce_scatter": (Rule(_NO_LIMIT, "direct"),),
    "all_to_all": (Rule(_NO_LIMIT, "linear"),),
    # A chain sends the least bytes, but in p - 1 steps one after another.
    "scan": (Rule(_NO_LIMIT, "doubling"),),
    "exscan": (Rule(_NO_LIMIT, "linear", max_ranks=2), Rule(_NO_LIMIT, "one_two_three")),
    "barrier": RULES["barrier"],  # it has no arrays
}


def rules(collective: str, hosts: Hosts) -> Sequence[Rule]:
    """Return the rules of a collective on these hosts, in their order."""
    if hosts.have_devices:
        return DEVICE_RULES[collective]
    between = HOST_RULES.get(collective, ()) if hosts.number > 1 else ()
    return (*between, *RULES[collective])


def by_rules(
    collective: str, size: int, num_bytes: float, hosts: Hosts
) -> Iterator[tuple[str, str]]:
    """Yield the algorithms of the built-in rules that fit, best first.

    Each comes with a text for its rule.
    """
    is_power, between = size.bit_count() == 1, f" on {hosts.number} hosts" * (hosts.number > 1)
    between += " for devices" * hosts.have_devices
    before: list[float] = []  # the limits of the rules before
    for rule in rules(collective, hosts):
        is_for_ranks = size <= rule.max_ranks and (is_power or not rule.powers_of_two_only)
        if not is_for_ranks or (rule.shares_hosts and hosts.max_ranks == 1):
            continue
        if num_bytes <= rule.largest:
            sizes = size_range(rule.largest, num_bytes, before)
            yield rule.name, f"built-in rule{between}: {sizes}"
        before.append(rule.largest)
