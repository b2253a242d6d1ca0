"""PAT needs memory for a number of blocks that grows with the logarithm of the number of ranks."""

from __future__ import annotations

import pytest

from collectives import algorithms
from collectives.programs.placement import compile_lane
from collectives.schedule import ceil_log2, outgoing


def scratch_blocks(name: str, size: int, **options: int) -> int:
    """The most blocks of scratch that some of the ranks need."""
    entry = algorithms.info("reduce_scatter", name)
    return max(
        compile_lane(entry, rank, size, 0, (1,) * size, tuple(options.items())).num_scratch
        for rank in (0, size // 3, size - 1)
    )


@pytest.mark.parametrize("size", [64, 100, 257, 512])
def test_the_scratch_of_a_reduce_scatter_is_logarithmic(size: int) -> None:
    assert scratch_blocks("pat", size, aggregation=1) <= (ceil_log2(size) + 2) / 2
    assert scratch_blocks("pat", size, aggregation=4) <= 4 * (ceil_log2(size) + 8) / 2
    assert scratch_blocks("circulant", size) > size / 2  # others keep half of the vector


@pytest.mark.parametrize("aggregation", [1, 2, 3, 4, 8, 64])
@pytest.mark.parametrize("size", [2, 5, 16, 33, 64])
def test_no_message_has_more_blocks_than_the_aggregation(size: int, aggregation: int) -> None:
    for collective in ("all_gather", "reduce_scatter"):
        most = max(
            len(op.blocks)
            for rank in range(size)
            for operations in algorithms.schedule(
                collective, "pat", rank=rank, size=size, aggregation=aggregation
            )
            for op in outgoing(operations)
        )
        assert min(aggregation, size // 2) - 1 <= most <= aggregation


def test_every_block_takes_the_way_of_a_binomial_tree() -> None:
    for aggregation in (1, 4, 16):
        hops = {
            (block, rank, op.peer)
            for rank in range(16)
            for operations in algorithms.schedule(
                "all_gather", "pat", rank=rank, size=16, aggregation=aggregation
            )
            for op in outgoing(operations)
            for block in op.blocks
        }
        ways = {(block, (block - rank) % 16, (block - peer) % 16) for block, rank, peer in hops}
        edges = {(way & (way - 1), way) for way in range(1, 16)}  # without its last binary digit 1
        assert len(hops) == 16 * 15
        assert ways == {(block, *edge) for block in range(16) for edge in edges}
