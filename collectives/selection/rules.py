"""The built-in rules: which algorithm runs where nothing was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from collectives.selection.decisions import size_range

_NO_LIMIT = float("inf")


class Rule(NamedTuple):
    """An algorithm for up to `largest` bytes (n) and `max_ranks` ranks.

    `powers_of_two_only`: only if p is a power of two.  `shares_hosts`: only if some host has
    several ranks.
    """

    largest: float
    name: str
    powers_of_two_only: bool = False
    max_ranks: float = _NO_LIMIT
    shares_hosts: bool = False


class Hosts(NamedTuple):
    """How many hosts there are, and how many ranks the largest one has.

    `have_devices`: whether the ranks of the only host read each other's arrays on devices.
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
# segments: they make messages overlap, and here each costs one more call of the driver.
#
# Where n is small, the hops decide: a rank raises a counter, and the device of another one awaits
# it.  One takes 3.5 us, a copy 4 us more (measured on an H100).  Where n is large, the bytes that
# cross the link of the busiest rank decide.  Both were counted in the device programs of 2, 4 and 8
# ranks.  The limits of all_reduce on 2 and 4 ranks lie between sizes that were measured on one H100
# that the ranks share; the other limits were not measured.  They follow from the counts, these
# times, and a link of 450 GB/s.  `bench tune --device cuda` measures.
DEVICE_RULES: dict[str, Sequence[Rule]] = {
    # To 8 ranks, one root sends 7 n over its link, and after a scatter 1.75 n, in 5 to 9 more hops.
    "broadcast": (
        Rule(_NO_LIMIT, "linear", max_ranks=2),
        Rule(8 * 1024**2, "linear"),
        Rule(_NO_LIMIT, "scatter_ring_all_gather"),
    ),
    # A node of knomial combines its children at once.  The root receives 4 n on 8 ranks; after a
    # reduce-scatter it is 1.75 n, in 4 more hops.
    "reduce": (
        Rule(_NO_LIMIT, "knomial", max_ranks=2),
        Rule(8 * 1024**2, "knomial"),
        Rule(_NO_LIMIT, "reduce_scatter_gather"),
        Rule(_NO_LIMIT, "linear"),
    ),
    # one_shot: 2 hops and one kernel, which reads (p - 1) n.  two_shot: 3 hops, 2 n (p - 1) / p; on
    # 2 ranks it does what ring does.  Beyond 8 ranks, one kernel cannot combine all operands of
    # one_shot, and recursive_doubling reads log2(p) n.
    "all_reduce": (
        Rule(8 * 1024**2, "one_shot", max_ranks=2),
        Rule(1024**2, "one_shot", max_ranks=4),
        Rule(512 * 1024, "one_shot", max_ranks=8),
        Rule(64 * 1024, "recursive_doubling"),
        Rule(_NO_LIMIT, "two_shot"),
    ),
    # These have the fewest hops (2), and no algorithm moves fewer bytes.
    "scatter": (Rule(_NO_LIMIT, "linear"),),
    "gather": (Rule(_NO_LIMIT, "linear"),),
    "all_gather": (Rule(_NO_LIMIT, "direct"),),
    "reduce_scatter": (Rule(_NO_LIMIT, "direct"),),
    "all_to_all": (Rule(_NO_LIMIT, "linear"),),
    # In a chain, all ranks wait for one another: the fewest hops are the shortest at every size.
    "scan": (Rule(_NO_LIMIT, "doubling"),),
    "exscan": (
        Rule(_NO_LIMIT, "linear", max_ranks=2),
        Rule(_NO_LIMIT, "one_two_three"),
    ),
    "barrier": RULES["barrier"],  # it has no arrays
}


def rules(collective: str, hosts: Hosts) -> Sequence[Rule]:
    """The rules of a collective on these hosts, in their order."""
    if hosts.have_devices:
        return DEVICE_RULES[collective]
    between = HOST_RULES.get(collective, ()) if hosts.number > 1 else ()
    return (*between, *RULES[collective])


def by_rules(
    collective: str, size: int, num_bytes: float, hosts: Hosts
) -> Iterator[tuple[str, str]]:
    """The algorithms of the built-in rules that fit, best first, each with a text for its rule."""
    is_power, between = size.bit_count() == 1, f" on {hosts.number} hosts" * (hosts.number > 1)
    between += " for devices" * hosts.have_devices
    applicable = [
        rule
        for rule in rules(collective, hosts)
        if size <= rule.max_ranks
        and (is_power or not rule.powers_of_two_only)
        and (hosts.max_ranks > 1 or not rule.shares_hosts)
    ]
    for number, rule in enumerate(applicable):
        if num_bytes <= rule.largest:
            before = [rule.largest for rule in applicable[:number]]
            sizes = size_range(rule.largest, num_bytes, before)
            yield rule.name, f"built-in rule{between}: {sizes}"
