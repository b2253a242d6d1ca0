"""What was found: a sentence, and whether it is a fact, makes calls slow, or prevents them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple


class Level(Enum):
    """How serious a finding is."""

    GOOD = "ok"
    SLOW = "slow"
    WRONG = "WRONG"


class Finding(NamedTuple):
    """A sentence about one thing that was looked at."""

    level: Level
    sentence: str

    def __str__(self) -> str:
        return f"{self.level.value:5}  {self.sentence}"


def good(sentence: str) -> Finding:
    """Return a fact."""
    return Finding(Level.GOOD, sentence)


def slow(sentence: str) -> Finding:
    """Return a finding that works, but takes longer than necessary; it says what helps."""
    return Finding(Level.SLOW, sentence)


def wrong(sentence: str) -> Finding:
    """Return a finding that prevents jobs or makes them wrong; it says what to do."""
    return Finding(Level.WRONG, sentence)


def verdict(findings: Iterable[Finding]) -> str:
    """Return the last line of a report."""
    levels = [finding.level for finding in findings]
    if Level.WRONG in levels:
        return "It would not work: see WRONG."
    if Level.SLOW in levels:
        return "It would work, but not as fast as it could: see slow."
    return "It would work."
