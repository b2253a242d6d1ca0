"""All-to-all: rank d gets block (s, d) of rank s, for every pair of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any

from collectives.algorithms.registry import BY_HOST, algorithm
from collectives.schedule import (
    Block,
    Piece,
    Recv,
    Round,
    Send,
    Topology,
    among_hosts,
    negabinary,
    nested,
    trees,
    within_hosts,
)


@algorithm(
    rounds="ceil((p - 1) / m)",
    startups="p - 1",
    messages="p * (p - 1)",
    max_bytes_per_rank="f * n",
    total_bytes="n * (p - 1)",
    scratch_bytes="0",
    is_local=True,
    options={"outstanding": 4},
    source="Thakur, Rabenseifner and Gropp 2005",
    use="Use it for large blocks on many ranks, where too many messages at once would disturb "
    "each other.",
)
def linear_sync(rank: int, size: int, outstanding: int = 4) -> Iterator[Round]:
    """Send the blocks directly, to the nearest ranks first, a few at a time."""
    for start in range(1, size, outstanding):
        distances = range(start, min(start + outstanding, size))
        ahead, behind = ([(rank + sign * d) % size for d in distances] for sign in (1, -1))
        yield (
            *(Recv(source, [(source, rank)]) for source in behind),
            *(Send(destination, [(rank, destination)]) for destination in ahead),
        )


@algorithm(
    rounds="1",
    startups="p - 1",
    messages="p * (p - 1)",
    max_bytes_per_rank="f * n",
    total_bytes="n * (p - 1)",
    scratch_bytes="0",
    is_local=True,
    source="Thakur, Rabenseifner and Gropp 2005",
    use="Use it for blocks of any size on few ranks: all messages are in flight at once.",
)
def linear(rank: int, size: int) -> Iterator[Round]:
    """Send all blocks directly at once, to the nearest ranks first."""
    return linear_sync(rank, size, outstanding=size)


@algorithm(
    rounds="1",
    startups="(p - 1) * N",
    messages="p * (p - 1) * N",
    max_bytes_per_rank="f * n",
    total_bytes="n * (p - 1)",
    scratch_bytes="0",
    pieces="N",
    options={"segments": 4},
    source="Thakur, Rabenseifner and Gropp 2005",
    use="Use it for large blocks on few hosts: two hosts that send to each other over one "
    "connection do so at the same time, as a segment of one never waits for a whole block of the "
    "other.",
)
def segmented_linear(rank: int, size: int, segments: int = 4) -> Iterator[Round]:
    """Send a segment of the block to each rank, nearest first, then the next segments.

    All messages are in flight at once.
    """

    def part(source: int, destination: int, number: int) -> Block:
        block = source, destination
        return block if segments == 1 else Piece(block, number)

    places = list(product(range(segments), range(1, size)))
    behind = (((rank - d) % size, number) for number, d in places)
    ahead = (((rank + d) % size, number) for number, d in places)
    if size > 1:
        yield (
            *(Recv(source, [part(source, rank, number)]) for source, number in behind),
            *(Send(peer, [part(rank, peer, number)]) for peer, number in ahead),
        )


@algorithm(
    rounds="p - 1",
    messages="p * (p - 1)",
    max_bytes_per_rank="f * n",
    total_bytes="n * (p - 1)",
    scratch_bytes="0",
    is_local=True,
    source="Thakur, Rabenseifner and Gropp 2005",
    use="Use it for large blocks on many ranks: one message out and one in at a time.",
)
def pairwise(rank: int, size: int) -> Iterator[Round]:
    """Send to the k-th rank ahead, and receive from the k-th behind, in round k."""
    return linear_sync(rank, size, outstanding=1)


@algorithm(
    rounds="p - 1 + p % 2",
    messages="p * (p - 1)",
    max_bytes_per_rank="f * n",
    total_bytes="n * (p - 1)",
    critical_bytes="n * (p - 1 + p % 2) / p",
    scratch_bytes="0",
    is_local=True,
    source="Sanders and Traff 2002",
    use="Use it for large blocks where exchanges in both directions with one partner are fastest.",
)
def one_factor(rank: int, size: int) -> Iterator[Round]:
    """Exchange blocks with one partner in every round; with odd p one rank is idle."""
    num_rounds = size - 1 + size % 2 if size > 1 else 0
    for number in range(num_rounds):
        partner = (number - rank) % num_rounds
        if size % 2 == 0 and rank == size - 1:
            partner = number * (size // 2) % num_rounds  # the rank that would be its own partner
        elif partner == rank:
            partner = size - 1 if size % 2 == 0 else rank
        exchange = Send(partner, [(rank, partner)]), Recv(partner, [(partner, rank)])
        yield exchange if partner != rank else ()


@algorithm(
    rounds="children(p, r)",
    messages="p * children(p, r)",
    max_bytes_per_rank="n / p * hops(p, r)",
    total_bytes="n * hops(p, r)",
    scratch_bytes="3 * n",
    options={"radix": 2},
    source="Bruck et al. 1997",
    use="Use it for blocks of a few bytes: few messages, each of many blocks.",
)
def bruck(rank: int, size: int, radix: int = 2) -> Iterator[Round]:
    """Move a block for the i-th rank ahead by z * radix**x ranks for each digit z, at x, of i."""
    for unit in trees.powers(size, radix):
        for hop in range(unit, min(radix * unit, size), unit):

            def travelling(holder: int, hop: int = hop, unit: int = unit) -> list[Block]:
                # A block with i to go that reached `holder` has made the hops of i's lower digits.
                ways = (i for i in range(size) if i % (radix * unit) - i % unit == hop)
                sources = ((i, (holder - i % unit) % size) for i in ways)
                return [(source, (source + i) % size) for i, source in sources]

            ahead, behind = (rank + hop) % size, (rank - hop) % size
            yield Send(ahead, travelling(rank)), Recv(behind, travelling(behind))


@algorithm(
    rounds="q",
    messages="p * q",
    max_bytes_per_rank="n / p * bine_hops(p)",
    total_bytes="n * bine_hops(p)",
    scratch_bytes="3 * n",
    ranks="even",
    source="De Sensi et al. 2025",
    use="Use it for blocks of a few bytes instead of Bruck's on networks where far messages share "
    "few links, best on a power of two of ranks: partners are a third nearer.",
)
def bine(rank: int, size: int) -> Iterator[Round]:
    """Exchange, at distances ..., 11, 5, 3, 1, 1, the blocks that cannot arrive without it.

    Blocks of even ranks take the ways of those of rank 0, blocks of odd ranks the mirrored ways.
    """
    routes = negabinary.routes(size)
    for step in reversed(range(trees.ceil_log2(size))):

        def travelling(holder: int, step: int = step) -> Iterator[Block]:
            for offset, route in enumerate(routes):
                if step in route:
                    sign = 1 if (holder - route[step]) % 2 == 0 else -1
                    source = (holder - sign * route[step]) % size
                    yield source, (source + sign * offset) % size

        partner = negabinary.partner(rank, size, step)
        yield Send(partner, travelling(rank)), Recv(partner, travelling(partner))


@algorithm(
    rounds="g - 1 + H - 1",
    messages="p * (g - 1 + H - 1)",
    max_bytes_per_rank="n / p * ((g - 1) * H + (H - 1) * g)",
    total_bytes="n * ((g - 1) * H + (H - 1) * g)",
    scratch_bytes="3 * n",
    options={"per_host": 2},
    for_even_hosts=(*BY_HOST, "total_bytes"),
    source="Traff and Rougier 2014",
    use="Use it on several hosts with many ranks each, for small blocks: one message between "
    "two hosts instead of many.",
)
def hierarchical(rank: int, size: int, hosts: Topology) -> Iterator[Round]:
    """Exchange blocks within each host first, then between hosts.

    A rank sends one message to each of its counterparts on other hosts, with the blocks of all
    ranks of its own host for that rank.
    """
    host, mates = hosts.host_of[rank], hosts.mates(rank)

    def holder(block: tuple[int, int], host: int) -> int:
        return hosts.counterpart(block[1], host)

    parts = [[r for r in range(size) if hosts.counterpart(r, host) == mate] for mate in mates]
    yield from within_hosts(
        pairwise, rank, hosts, lambda pair: [(mates[pair[0]], r) for r in parts[pair[1]]]
    )
    between = pairwise(host, hosts.num_hosts)
    yield from among_hosts(between, rank, hosts, partial(_between, hosts), holder)


def _between(hosts: Topology, pair: tuple[int, int]) -> Iterator[tuple[int, ...]]:
    """Return all blocks from the ranks of one host to those of another."""
    return product(*(hosts.hosts[host] for host in pair))


@algorithm(
    rounds="2 * (g - 1) + H - 1 if H > 1 else g - 1",
    messages="p * (2 * (g - 1) + H - 1) if H > 1 else p * (g - 1)",
    max_bytes_per_rank="n / p * (g - 1 + (p - g) * (3 - 2 / g))",
    total_bytes="n * (g - 1 + (p - g) * (3 - 2 / g))",
    scratch_bytes="4 * n",
    pieces="g",
    options={"per_host": 2},
    for_even_hosts=(*BY_HOST, "total_bytes"),
    source="Lei et al. 2025",
    use="Use it on several hosts where ranks send unequal amounts and each rank has a network "
    "adapter of its own: the ranks of a host share what it sends to each other host.",
)
def fast(rank: int, size: int, hosts: Topology) -> Iterator[Round]:
    """Balance what each rank of a host sends to every other host, then exchange between hosts.

    A block between hosts is cut into as many pieces as the largest host has ranks.  Each piece has
    a column, and is sent by the rank of its host that has the column to the one that has it on the
    other host, which passes it on.
    """
    mates = hosts.mates(rank)
    others = [r for r in range(size) if r not in mates]

    def balanced(pair: tuple[int, int]) -> Iterator[Block]:
        source, target = (mates[place] for place in pair)
        yield from _pieces(hosts, [source], [target], range(hosts.max_per_host))
        yield from _pieces(hosts, [source], others, hosts.columns(target))

    def of_hosts(pair: tuple[int, int]) -> Iterator[Block]:
        sources, destinations = (hosts.hosts[host] for host in pair)
        return _pieces(hosts, sources, destinations, hosts.columns(rank))

    def passed_on(pair: tuple[int, int]) -> Iterator[Block]:
        source, target = (mates[place] for place in pair)
        return _pieces(hosts, others, [target], hosts.columns(source))

    between = pairwise(hosts.host_of[rank], hosts.num_hosts)
    yield from within_hosts(pairwise, rank, hosts, balanced)
    yield from among_hosts(between, rank, hosts, of_hosts, partial(_carrier, hosts))
    if others:
        yield from within_hosts(pairwise, rank, hosts, passed_on)


def _pieces(
    hosts: Topology, sources: Iterable[int], destinations: Iterable[int], columns: Iterable[int]
) -> Iterator[Block]:
    """Yield the pieces in some columns of all blocks from some ranks to some ranks.

    If a block is not a multiple of the number of columns, its first pieces are larger.  The first
    pieces of different blocks have different columns.
    """
    num_pieces = hosts.max_per_host
    for block in product(sources, destinations):
        first = hosts.place(block[0]) + hosts.place(block[1])
        for column in columns:
            yield block if num_pieces == 1 else Piece(block, (column - first) % num_pieces)


def _carrier(hosts: Topology, piece: Any, host: int) -> int:
    """Return the rank of a host that sends or receives a piece between hosts."""
    if hosts.max_per_host == 1:
        return hosts.hosts[host][0]
    (source, destination), number = piece
    column = number + hosts.place(source) + hosts.place(destination)
    return hosts.in_column(column % hosts.max_per_host, host)


@algorithm(
    rounds="x + y + p // (x * y) - 3",
    messages="p * (x + y + p // (x * y) - 3)",
    max_bytes_per_rank="n * (3 - 1 / x - 1 / y - x * y / p)",
    total_bytes="p * n * (3 - 1 / x - 1 / y - x * y / p)",
    scratch_bytes="3 * n",
    ranks="multiple of x * y",
    options={"x": 2, "y": 1},
    source="Thakur and Choudhary 1994",
    use="Use it on a torus or mesh of two (x) or three (x and y) dimensions for small blocks: "
    "messages stay in a line of the torus, and there are few of them.",
)
def torus(rank: int, size: int, x: int = 2, y: int = 1) -> Iterator[Round]:
    """Exchange blocks along one dimension of a torus after the other.

    Rank (k * y + j) * x + i is at place i, j, k of a torus of x, y and p / (x * y) ranks.  A block
    moves in each dimension to the place of its destination; a message has all blocks that go there.
    """
    for stride, length in ((1, x), (x, y), (x * y, size // (x * y))):
        place, period = rank // stride % length, stride * length
        line = range(rank - place * stride, rank - place * stride + period, stride)

        def passing(
            pair: tuple[int, int], line: range = line, stride: int = stride, period: int = period
        ) -> list[Block]:
            # So far blocks have reached their destination's place in the dimensions before.
            start, end = line[pair[0]], line[pair[1]]
            sources = range(start - start % stride, start - start % stride + stride)
            return [(s, d) for s in sources for d in range(end % period, size, period)]

        yield from nested(pairwise, rank, line, passing)
