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

    Parameters
    ----------
    algorithms : mapping of str to str
        The algorithm of each collective, as in the calls of a communicator.  The algorithms of
        other collectives are chosen by size.  A group of `new_group` without options has the
        algorithms of the default group.
    check : bool or "finite", optional
        See `collectives.wrap`.  It holds for all groups that are made later, so only the options of
        the default group take it.

    Raises
    ------
    ValueError
        For an unknown collective, algorithm or check.
    """

    algorithms: Mapping[str, str] = field(default_factory=dict)
    check: bool | Literal["finite"] | None = None

    def __post_init__(self) -> None:
        mode_of(self.check)
        for collective, label in self.algorithms.items():
            parse_default(collective, label)
