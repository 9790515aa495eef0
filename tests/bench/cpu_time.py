"""CPU time of processes: of one, and of all that do not belong to a measurement while it runs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType
from typing import Self

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def process_cpu_s(pid: int) -> float:
    """CPU seconds a process has used, exact to the nanosecond, from its CPU clock (clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)


class OthersShare:
    """Measures during a ``with`` block how much other processes use of the machine's cores: ``share``, 0 to 1.

    Others are all processes but this one and those it started, directly or not.
    """

    def __init__(self) -> None:
        self.share = 0.0
        self._begin = 0.0
        self._at_start: tuple[float, dict[int, float]] = (0.0, {})

    def __enter__(self) -> Self:
        self._begin, self._at_start = time.perf_counter(), _cpu_seconds()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = time.perf_counter() - self._begin
        (machine_before, own_before), (machine, own) = self._at_start, _cpu_seconds()
        own_used = sum(used - own_before.get(pid, 0.0) for pid, used in own.items())
        # The kernel counts the machine's time in ticks: a tick for each core more or less says nothing.
        used = machine - machine_before - own_used - TICK_S * (os.cpu_count() or 1)
        self.share = max(0.0, used) / (seconds * (os.cpu_count() or 1))


def _cpu_seconds() -> tuple[float, dict[int, float]]:
    """Return the CPU seconds that the whole machine has used, and those of this process and of each below it."""
    words = Path("/proc/stat").read_text().split(maxsplit=9)
    user, nice, system, _, _, interrupts, soft, steal = (int(word) for word in words[1:9])
    own = {pid: process_cpu_s(pid) for pid in _descendants(os.getpid())}
    return (user + nice + system + interrupts + soft + steal) * TICK_S, own


def _descendants(pid: int) -> list[int]:
    """This process and all below it. One that ends meanwhile is left out."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [pid, *(found for child in children for found in _descendants(child))]
