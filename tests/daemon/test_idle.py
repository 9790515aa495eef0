"""A daemon that nobody asks anything sleeps, and has little memory."""

from __future__ import annotations

import time
from pathlib import Path

from kvoffd_client.testing import FakeEngine
from tests.kit.daemon import DaemonProcess
from tests.kit.wire import books

WATCHED_S = 3.0
WAKES_PER_S = 12
"""Of all threads: the loop's ticks and beats, and its watch, four a second each."""
MAX_RESIDENT_KIB = 86 * 1024
"""Without the pool and the engine's memory."""


def wakes(pid: int) -> int:
    """How often threads of a process have gone to sleep."""
    files = Path("/proc", str(pid), "task").glob("*/status")
    lines = (line for file in files for line in file.read_text().splitlines())
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


def test_an_idle_daemon_sleeps_and_has_little_memory() -> None:
    with DaemonProcess() as daemon, FakeEngine(daemon.directory) as engine:
        engine.fill([0], seed=1)
        assert engine.store([bytes(32)], [0]).ok
        before, began = wakes(daemon.pid), time.monotonic()
        time.sleep(WATCHED_S)  # the time that is looked at, not a wait for something
        assert wakes(daemon.pid) - before < 5 * WAKES_PER_S * (time.monotonic() - began)
        status = Path("/proc", str(daemon.pid), "status").read_text()
        kib = {
            line.split()[0]: int(line.split()[1]) for line in status.splitlines() if line.startswith(("VmRSS", "Rss"))
        }
        pool_kib = books(daemon.directory).pool.size_bytes // 1024
        assert kib["VmRSS:"] - kib["RssShmem:"] - pool_kib < MAX_RESIDENT_KIB
