"""Tests that assert on times say nothing of kvoffd while others have the CPUs: other machines, or other tests."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import pytest

STOLEN, WAITED, REPEATS = 0.05, 0.2, 2
PRESSURE = Path("/proc/pressure/cpu")


class TooSlow(AssertionError):
    """A bound of time was broken, in a test that asserts on other things too: it is marked ``timing(only=TooSlow)``."""


class Steal:
    """Plugin of pytest: a test that is marked ``timing`` and fails is run again, at most ``REPEATS`` times, where the
    host took more than ``STOLEN`` of the CPUs meanwhile (the column ``st`` of vmstat), or some process waited for a CPU
    for more than ``WAITED`` of the time (pressure stall information, where the kernel tells it)."""

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
        return isinstance(error, kind) and self._cpus_were_short()

    def _cpus_were_short(self) -> bool:
        (began, stolen_s, waited_s), (ended, stolen_then_s, waited_then_s) = self._began, _now()
        seconds = max(ended - began, 1e-6)
        stolen = (stolen_then_s - stolen_s) / seconds / (os.cpu_count() or 1)
        return stolen > STOLEN or (waited_then_s - waited_s) / seconds > WAITED


def _now() -> tuple[float, float, float]:
    """The clock; seconds since the machine's start that the host took, of all CPUs, and that some process waited."""
    stolen = int(Path("/proc/stat").read_text().split(maxsplit=9)[8])
    try:
        waited_us = int(PRESSURE.read_text().split(maxsplit=5)[4].removeprefix("total="))
    except OSError:  # not there, or not supported, as where the kernel has it but was not booted with psi=1
        waited_us = 0
    return time.monotonic(), stolen / os.sysconf("SC_CLK_TCK"), waited_us / 1e6


def waited_for_cpu_s() -> float:
    """How long this thread has been ready to run while others had the CPU, since its start."""
    with open("/proc/thread-self/schedstat", "rb") as file:
        return int(file.read().split()[1]) / 1e9
