"""Which experts a token goes to, or which tokens an expert takes: the choice within one group.

A selection is a function of a `SelectionInput`, and returns what is `Chosen`.  Equal scores go to
the expert, or to the token, with the lower index.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moe.routing import Flags, Integers, Values
from parallel.nn import mix64


class SelectionInput(NamedTuple):
    """What a selection may know of one group of S tokens.

    Attributes
    ----------
    scores : array
        The scores by which to choose, (S, experts): the scores of the gate, plus its bias if it has
        one.
    k : int
        Experts for each token.
    capacity : int, optional
        How many tokens an expert takes; None: all.
    uniform : array
        Random numbers from 0 to 1, one for each token, float64 (S,).
    token_ids : array, optional
        The tokens of the text, int64 (S,).
    """

    scores: Values
    k: int
    capacity: int | None
    uniform: Values
    token_ids: Integers | None = None


class Chosen(NamedTuple):
    """Entries in the order in which experts take them.

    `token`, `expert`: int64 (entries,).  `is_queued`: whether the entry enters the queue of its
    expert.  `is_first`: whether the expert is the token's first choice.
    """

    token: Integers
    expert: Integers
    is_queued: Flags
    is_first: Flags


Selection = Callable[[SelectionInput], Chosen]


def best(scores: Values, k: int) -> Integers:
    """Return the indices of the `k` largest of the last axis, the largest first."""
    order: Integers = np.argsort(-scores, axis=-1, kind="stable")[..., :k]
    return order


def by_choice(experts: Integers, tokens: Integers | None = None) -> Chosen:
    """Return the first choices of all tokens, then the second ones, and so on.

    `experts` (S, k) are the choices of the tokens 0 to S - 1.  Within a choice, `tokens` go in this
    order, by default in the order of the text.
    """
    size, k = experts.shape
    order = np.arange(size) if tokens is None else tokens
    queued = np.ones(size * k, bool)
    return Chosen(np.tile(order, k), experts[order].T.ravel(), queued, np.arange(size * k) < size)


def top_k(group: SelectionInput) -> Chosen:
    """Choose the k experts with the largest scores.  Shazeer et al. 2017; Fedus et al. 2021."""
    return by_choice(best(group.scores, group.k))


def random_second(group: SelectionInput) -> Chosen:
    """Choose the best two; keep the second with probability min(1, 2 g), g its share of both.

    Lepikhin et al. 2020 (GShard), algorithm 1.
    """
    chosen = top_k(group)
    pair = np.take_along_axis(group.scores, best(group.scores, 2), axis=-1)
    is_kept = 2 * pair[:, 1] > group.uniform * pair.sum(axis=-1)
    queued = np.concatenate([np.ones(len(is_kept), bool), is_kept])
    return chosen._replace(is_queued=queued)


def batch_priority(group: SelectionInput) -> Chosen:
    """Choose the best k; tokens with larger best scores go first.  Riquelme et al. 2021 (V-MoE)."""
    return by_choice(
        best(group.scores, group.k), np.argsort(-group.scores.max(axis=-1), kind="stable")
    )


@dataclass(frozen=True)
class NodeLimited:
    """Choose the best k of the experts of the `most_nodes` best nodes.  DeepSeek-AI 2024 (V3).

    Consecutive experts form `num_nodes` equal nodes, such as hosts; the score of a node is the sum
    of its `per_node` best scores.
    """

    num_nodes: int
    most_nodes: int
    per_node: int = 2

    def __call__(self, group: SelectionInput) -> Chosen:
        """Choose in a group."""
        size, num_experts = group.scores.shape
        by_node = group.scores.reshape(size, self.num_nodes, num_experts // self.num_nodes)
        of_node = -np.sort(-by_node, axis=-1)[..., : self.per_node].sum(axis=-1)
        is_open = np.zeros((size, self.num_nodes), bool)
        np.put_along_axis(is_open, best(of_node, self.most_nodes), np.True_, axis=-1)
        limited = np.where(is_open[..., None], by_node, -np.inf).reshape(size, num_experts)
        return by_choice(best(limited, group.k))


def expert_choice(group: SelectionInput) -> Chosen:
    """Let each expert choose the tokens with its largest scores, up to its capacity.

    Zhou et al. 2022.  A token may be chosen by any number of experts; the first of them, by index,
    counts as its first choice.
    """
    assert group.capacity is not None, "expert choice has a capacity"
    tokens = best(group.scores.T, group.capacity)  # (experts, capacity)
    num_experts, capacity = tokens.shape
    token, expert = tokens.ravel(), np.repeat(np.arange(num_experts), capacity)
    is_first = np.zeros(len(token), bool)
    is_first[np.unique(token, return_index=True)[1]] = True
    return Chosen(token, expert, np.ones(len(token), bool), is_first)


WEYL = np.uint64(0x9E3779B97F4A7C15)


def hashed(group: SelectionInput) -> Chosen:
    """Choose by a hash of the token, whatever the scores.  Roller et al. 2021 (Hash Layers).

    The hash is SplitMix64 (Steele et al. 2014) of the token's number in the vocabulary; the k
    experts from there on are chosen.
    """
    if group.token_ids is None:
        raise ValueError("hash routing needs the tokens of the text, in Step.tokens")
    num_experts = group.scores.shape[-1]
    hashes = mix64(group.token_ids.astype(np.uint64) + WEYL)
    first = (hashes % np.uint64(num_experts)).astype(np.int64)
    return by_choice((first[:, None] + np.arange(group.k)) % num_experts)
