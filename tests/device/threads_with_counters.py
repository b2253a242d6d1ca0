"""By what the streams of ranks that are threads are in order with each other."""

from __future__ import annotations

from typing import Any

import pytest

from collectives.devices import links, placed
from collectives.lowering import DeviceProgram


def use_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let threads use counters in place of events, as ranks of different processes do."""
    right, init = placed.table_of, links.Links.__init__

    def table_of(program: DeviceProgram, rank: int, _: object, rises: Any) -> Any:
        return right(program, rank, frozenset(), rises)

    def with_page_locked_counters(self: Any, board: Any, backend: Any, driver: Any) -> None:
        init(self, board, backend, driver)
        links._page_lock(driver, board)

    monkeypatch.setattr(placed, "table_of", table_of)
    monkeypatch.setattr(links.Links, "__init__", with_page_locked_counters)
