"""Lets ranks of one host not read each other's memory, as ranks of several hosts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest

from collectives.devices.links import Proposal


def stage_pairs(
    monkeypatch: pytest.MonkeyPatch, is_staged: Callable[[int, int], bool] = lambda *_: True
) -> None:
    """Let the messages of some pairs of ranks, or of all, go through host memory."""

    def staged_pairs(_: Proposal, verdicts: dict[int, int]) -> Any:
        return [pair for pair in combinations(verdicts, 2) if is_staged(*pair)]

    monkeypatch.setattr(Proposal, "staged_pairs", staged_pairs)
