"""Which experts compute which tokens: a table of choices, which a gate makes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

Values: TypeAlias = np.ndarray[Any, Any]  # floating-point numbers in host memory
Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Flags: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class Routing:
    """The choices of some tokens, one entry for each pair of a token and an expert.

    Tokens are routed in groups of equally many consecutive tokens: what a token gets depends on the
    tokens of its group alone, and not on the ranks that compute them.

    Attributes
    ----------
    token, expert, group : array
        The token, the expert and the group of each entry, int64 (entries,).  The entries of a group
        follow each other, and the entries of an expert are in the order in which it takes them.
    slot : array
        The position of each entry in the queue of its expert in its group, int64 (entries,); -1 for
        a choice that did not enter the queue, such as a second expert that was not sampled.
    num_tokens, num_experts, num_groups : int
    capacity : int, optional
        How many entries of a group an expert takes; None: all.
    """

    token: Integers
    expert: Integers
    group: Integers
    slot: Integers
    num_tokens: int
    num_experts: int
    num_groups: int
    capacity: int | None = None

    @classmethod
    def empty(cls, num_experts: int) -> Routing:
        """Return the routing of no tokens to `num_experts`."""
        none = np.empty(0, np.int64)
        return cls(none, none, none, none, 0, num_experts, 0)

    @cached_property
    def is_dropped(self) -> Flags:
        """Which entries no expert computes: entries past the capacity, and with slot -1."""
        limit = np.iinfo(np.int64).max if self.capacity is None else self.capacity
        dropped: Flags = (self.slot < 0) | (self.slot >= limit)
        return dropped

    @cached_property
    def load(self) -> Integers:
        """The number of entries that each expert computes, int64 (experts,)."""
        kept = self.expert[~self.is_dropped]
        return np.bincount(kept, minlength=self.num_experts).astype(np.int64)

    @property
    def choices(self) -> Integers:
        """How often tokens chose each expert, dropped or not, int64 (experts,)."""
        return np.bincount(self.expert, minlength=self.num_experts).astype(np.int64)

    @property
    def most_slots(self) -> int:
        """The most slots that an expert needs for a group."""
        return int(self.slot[~self.is_dropped].max(initial=-1)) + 1

    @property
    def drop_rate(self) -> float:
        """The fraction of the entries that no expert computes."""
        return float(np.mean(self.is_dropped)) if len(self.token) else 0.0

    @property
    def imbalance(self) -> float:
        """The largest load over the mean load; 1 if all are equal, 0 without tokens."""
        load = self.load
        return float(load.max() / load.mean()) if load.any() else 0.0

    def table(self, first_token: int = 0) -> Integers:
        """Return rows (token, expert, slot, is dropped), int64 (entries, 4), sorted.

        Tokens are counted from `first_token`, the first of this routing in the whole batch.
        """
        columns = (self.token + first_token, self.expert, self.slot, self.is_dropped)
        rows = np.stack([np.asarray(column, np.int64) for column in columns], axis=1)
        return rows[np.lexsort(rows.T[::-1])]

    def entries_of(self, tokens: Integers) -> Integers:
        """Return which entries are of these `tokens`, int64 (n,)."""
        is_wanted = np.zeros(self.num_tokens, bool)
        is_wanted[tokens] = True
        return np.flatnonzero(is_wanted[self.token])

    def of_tokens(self, tokens: Integers) -> Routing:
        """Return the routing of some `tokens`, int64 (n,), which it numbers from 0."""
        if len(tokens) == self.num_tokens:
            return self
        number = np.full(self.num_tokens, -1, np.int64)
        number[tokens] = np.arange(len(tokens))
        kept = self.entries_of(tokens)
        return Routing(
            number[self.token[kept]],
            self.expert[kept],
            self.group[kept],
            self.slot[kept],
            len(tokens),
            self.num_experts,
            self.num_groups,
            self.capacity,
        )

    def of_groups(self, start: int, stop: int) -> Routing:
        """Return the routing of groups `start` to `stop`, as if there were no others."""
        size = self.num_tokens // max(1, self.num_groups)
        part = self.of_tokens(np.arange(start * size, stop * size))
        return replace(part, group=part.group - start, num_groups=stop - start)


def joined(parts: Iterable[Routing]) -> Routing:
    """Return the routing of consecutive groups of tokens, in several parts, as one."""
    parts = list(parts)
    tokens = np.cumsum([0, *(part.num_tokens for part in parts)]).tolist()
    groups = np.cumsum([0, *(part.num_groups for part in parts)]).tolist()
    return Routing(
        np.concatenate([part.token + n for part, n in zip(parts, tokens, strict=False)]),
        np.concatenate([part.expert for part in parts]),
        np.concatenate([part.group + n for part, n in zip(parts, groups, strict=False)]),
        np.concatenate([part.slot for part in parts]),
        tokens[-1],
        parts[0].num_experts,
        groups[-1],
        next((part.capacity for part in parts if part.num_tokens), None),
    )


def slots_of(expert: Integers, is_queued: Flags, num_experts: int) -> Integers:
    """Return the position of each entry in the queue of its expert, in the order of the entries.

    Entries that are not `is_queued` have -1, and nothing in the queue.
    """
    slot = np.full(len(expert), -1, np.int64)
    queued = np.flatnonzero(is_queued)
    by_expert = queued[np.argsort(expert[queued], kind="stable")]
    counts = np.bincount(expert[queued], minlength=num_experts)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    slot[by_expert] = np.arange(len(by_expert)) - starts
    return slot
