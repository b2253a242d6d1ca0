"""By what the streams of ranks that are threads are in order with each other."""

from __future__ import annotations

from typing import Any

import pytest

from collectives.devices import links, placed
from collectives.devices.messages.boxes import Boxes
from collectives.lowering import DeviceProgram


def use_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let threads use counters in place of events, as ranks of different processes do."""
    right, init, init_boxes = placed.table_of, links.Links.__init__, Boxes.__init__

    def table_of(program: DeviceProgram, rank: int, _: object, rises: Any) -> Any:
        return right(program, rank, frozenset(), rises)

    def with_page_locked_counters(
        self: Any, board: Any, backend: Any, driver: Any, by: str
    ) -> None:
        init(self, board, backend, driver, by)
        links._page_lock(driver, board)

    def boxes_with_counters(self: Any, links: Any) -> None:
        init_boxes(self, links)
        self.memory.are_by_events = False

    monkeypatch.setattr(placed, "table_of", table_of)
    monkeypatch.setattr(Boxes, "__init__", boxes_with_counters)
    monkeypatch.setattr(links.Links, "__init__", with_page_locked_counters)
