"""How long each file of tests took: the slowest on the screen, all of them in ``.pytest_cache/v/durations``."""

from __future__ import annotations

from collections import defaultdict

import pytest

SHOWN = 25


class Durations:
    """Plugin of pytest: adds up set-up, call and teardown of a file's tests, over all workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._tests: defaultdict[str, int] = defaultdict(int)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self._seconds[file] += report.duration
        self._tests[file] += report.when == "call"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        slowest = sorted(self._seconds, key=self._seconds.__getitem__, reverse=True)
        table = {file: {"seconds": round(self._seconds[file], 1), "tests": self._tests[file]} for file in slowest}
        if hasattr(self._config, "cache"):  # not with -p no:cacheprovider
            # `make test` runs pytest twice: each run renews the files that it ran.
            before = self._config.cache.get("durations", {})
            self._config.cache.set("durations", before | table)
        if len(slowest) > 1:
            terminalreporter.section("slowest files, in seconds of a worker")
            for file in slowest[:SHOWN]:
                terminalreporter.write_line(f"{self._seconds[file]:8.1f}  {self._tests[file]:5}  {file}")
