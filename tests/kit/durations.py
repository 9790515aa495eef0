"""How long each file of tests took, the slowest first."""

from __future__ import annotations

from collections import defaultdict

import pytest

SHOWN = 25


class Durations:
    """Plugin of pytest: adds up set-up, call and teardown of a file's tests, over all workers."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        slowest = sorted(self._seconds.items(), key=lambda item: -item[1])[:SHOWN]
        if len(slowest) > 1:
            terminalreporter.section("slowest files, in seconds of a worker")
            for file, seconds in slowest:
                terminalreporter.write_line(f"{seconds:8.1f}  {file}")
