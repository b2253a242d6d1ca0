"""Two-level algorithms send the least possible from host to host."""

from __future__ import annotations

from fractions import Fraction

import pytest

from collectives import algorithms
from collectives.schedule import original, outgoing
from collectives.schedule.count import even_sizes

SHAPES = [(2, 8), (3, 8), (4, 8), (8, 8), (3, 4), (5, 2)]  # hosts, ranks per host


def off_host(collective: str, name: str, size: int, per_host: int) -> Fraction:
    """The most that one host sends to others, in n.  Who can be told of hosts is told."""
    options = {"per_host": per_host} if name in ("hierarchical", "circulant_strided") else {}
    entry = algorithms.info(collective, name)
    sizes = even_sizes(collective, entry.case(size, **options), size)
    leaving = [Fraction(0)] * (size // per_host)
    for rank in range(size):
        for operations in entry.schedule(rank, size, **options):
            for op in outgoing(operations):
                if op.peer // per_host != rank // per_host:
                    names = (original(block, sizes) for block in op.blocks)
                    leaving[rank // per_host] += sum(sizes[name] for name in names)
    return max(leaving) / size


@pytest.mark.parametrize(("num_hosts", "per_host"), SHAPES)
def test_two_level_algorithms_send_the_least_between_hosts(num_hosts: int, per_host: int) -> None:
    size, least = num_hosts * per_host, Fraction(num_hosts - 1, num_hosts)
    for collective in ("reduce_scatter", "all_gather"):
        assert off_host(collective, "hierarchical", size, per_host) == least
    for name in ("hierarchical", "circulant_strided"):
        assert off_host("all_reduce", name, size, per_host) == 2 * least
    sent = off_host("all_to_all", "hierarchical", size, per_host)
    assert sent == least * per_host  # nothing is saved but messages: everybody's blocks must go


def test_ranks_in_their_natural_order_send_far_more() -> None:
    assert off_host("all_reduce", "circulant", 32, 8) > 13
    assert off_host("all_reduce", "ring", 32, 8) == Fraction(2 * 31, 32)


def test_the_strided_order_needs_a_power_of_two_per_host() -> None:
    assert off_host("all_reduce", "circulant_strided", 15, 3) > 5
    assert off_host("all_reduce", "hierarchical", 15, 3) == Fraction(8, 5)
