"""Says how many device programs the tests have proved."""

from __future__ import annotations

import pytest

PROVED = "device_programs_proved"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.stats.get("passed", [])
    properties = [pair for report in reports for pair in report.user_properties]
    number = sum(value for name, value in properties if name == PROVED)
    if number:
        terminalreporter.write_line(f"device programs proved: {number:,}")
