"""Combine logical shards along the fixed tree: the common part of the invariant reductions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from collectives.schedule import Block, Copy, CopyReduce, Operation, Recv, Round, Send, fixed_tree


def along_fixed_tree(
    rank: int,
    size: int,
    shards: int,
    blocks: Sequence[Block],
    owned: Callable[[int], Sequence[Block]],
) -> Iterator[Round]:
    """Yield rounds after which every rank has the blocks `owned(rank)` of all shards, combined.

    Blocks are combined along the fixed tree over all shards.  A rank first combines the subtrees
    that lie within its shards, and sends what remains to every rank, which combines the subtrees of
    all ranks.  If `shards` is 0, each rank has one.
    """
    tree, mine = fixed_tree.divided(shards or size, size), owned(rank)

    def sent(shard: int, block: Block) -> Block:
        return (shard, block) if shards else block

    def held(shard: int, block: Block) -> Block:
        return sent(shard, block) if shard == rank else (shard, block)

    def combined(merges: Sequence[fixed_tree.Merge], blocks: Sequence[Block]) -> Operation:
        starts = [held(merge.start, block) for merge in merges for block in blocks]
        middles = [held(merge.middle, block) for merge in merges for block in blocks]
        return CopyReduce(middles, starts, side="right")

    if shards:
        yield tuple(combined([merge], blocks) for merge in tree.within[rank])
    exchange: list[Operation] = []
    for peer in (*range(rank + 1, size), *range(rank)):
        arrivals = [(shard, block) for shard in tree.subtrees[peer] for block in mine]
        exchange += [
            Send(
                peer, [sent(shard, block) for shard in tree.subtrees[rank] for block in owned(peer)]
            ),
            Recv(peer, [sent(shard, block) for shard, block in arrivals], into=arrivals),
        ]
    results = [held(0, block) for block in mine]
    names = [Copy(results, mine)] if results != mine else []
    if shards or size > 1:
        yield (*exchange, *(combined(level, mine) for level in tree.between), *names)
