"""The options of a process group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from collectives.communicator import mode_of
from collectives.selection import parse_default


@dataclass(frozen=True)
class Options:
    """Options of `dist.init_process_group("ring", pg_options=...)` and of `dist.new_group`.

        dist.init_process_group("ring", pg_options=Options(algorithms={"all_reduce": "ring"}))

    - `algorithms`: the algorithm of each collective, as in the calls of a communicator; those that
      are missing are chosen by size.  A group of `new_group` has those of the default group unless
      it is given its own.
    - `check`: None, False, True or "finite", see `collectives.wrap`.  It holds for all groups that
      are made later, so only the options of the default group take it.

    Raises ValueError for an unknown collective, algorithm or check.
    """

    algorithms: Mapping[str, str] = field(default_factory=dict)
    check: bool | Literal["finite"] | None = None

    def __post_init__(self) -> None:
        mode_of(self.check)
        for collective, label in self.algorithms.items():
            parse_default(collective, label)
