"""Whether the machine was ours: what everybody else's processes used while something was measured."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.bench.peers.player import process_cpu_s

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class OthersShare:
    """``with OthersShare() as others: ...``; then ``others.share`` of the machine's cores was used by others, 0 to 1.

    Others are all processes but this one and those it started, directly or not.
    """

    def __init__(self) -> None:
        self.share = 0.0
        self._begin = 0.0
        self._used: tuple[float, dict[int, float]] = (0.0, {})

    def __enter__(self) -> Self:
        self._begin, self._used = time.perf_counter(), _used()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = time.perf_counter() - self._begin
        (machine_before, ours_before), (machine, ours) = self._used, _used()
        own = sum(used - ours_before.get(pid, 0.0) for pid, used in ours.items())
        # The kernel counts the machine's time in ticks: a tick for each core more or less says nothing.
        used = machine - machine_before - own - TICK_S * (os.cpu_count() or 1)
        self.share = max(0.0, used) / (seconds * (os.cpu_count() or 1))


def _used() -> tuple[float, dict[int, float]]:
    """CPU seconds that the whole machine has used, and each process of ours."""
    words = Path("/proc/stat").read_text().split(maxsplit=9)
    user, nice, system, _, _, interrupts, soft, steal = (int(word) for word in words[1:9])
    ours = {pid: process_cpu_s(pid) for pid in _family(os.getpid())}
    return (user + nice + system + interrupts + soft + steal) * TICK_S, ours


def _family(pid: int) -> list[int]:
    """This process and all below it. One that ends meanwhile is left out."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [pid, *(found for child in children for found in _family(child))]
