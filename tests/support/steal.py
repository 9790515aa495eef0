"""Tests that assert on times say nothing of kvoffd while the host gives this machine's CPUs to others."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import pytest

SHARE, REPEATS = 0.05, 2


class TooSlow(AssertionError):
    """A bound of time was broken, in a test that asserts on other things too: it is marked ``timing(only=TooSlow)``."""


class Steal:
    """Plugin of pytest: a test that is marked ``timing`` and fails is run again, at most ``REPEATS`` times, where the
    host took more than ``SHARE`` of the CPUs meanwhile (the column ``st`` of vmstat)."""

    def __init__(self) -> None:
        self._began = _now()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if (mark := item.get_closest_marker("timing")) is not None:
                condition = partial(self._says_nothing, mark.kwargs.get("only", AssertionError))
                item.add_marker(pytest.mark.flaky(reruns=REPEATS, condition=condition))

    def pytest_runtest_logstart(self) -> None:
        self._began = _now()

    def _says_nothing(self, kind: type[BaseException], error: object) -> bool:
        return isinstance(error, kind) and self._share() > SHARE

    def _share(self) -> float:
        """What the host has taken since the test's start, of all CPUs."""
        (began, taken), (ended, taken_then) = self._began, _now()
        return (taken_then - taken) / max(ended - began, 1e-6) / (os.cpu_count() or 1)


def _now() -> tuple[float, float]:
    """The clock, and the CPU seconds that the host has taken since the machine's start."""
    stolen = int(Path("/proc/stat").read_text().split(maxsplit=9)[8])
    return time.monotonic(), stolen / os.sysconf("SC_CLK_TCK")


def waited_for_cpu_s() -> float:
    """How long this thread has been ready to run while others had the CPU, since its start."""
    with open("/proc/thread-self/schedstat", "rb") as file:
        return int(file.read().split()[1]) / 1e9
