"""A daemon that nobody asks anything costs next to nothing."""

from __future__ import annotations

import time

from kvoffd_client import AdminClient
from kvoffd_client.testing import FakeEngine
from tests.kit.daemon import DaemonProcess

WATCHED_S = 4.0
MAX_SHARE = 0.005
WAKES = 80
MAX_BARE_LOOPS = 8
"""Where the host is busy: the daemon may take so many times what this thread takes to wake 20 times a second."""
MIB = 2**20


def share_of_waking() -> float:
    """Wake ``WAKES`` times in ``WATCHED_S``; the share of a core that this takes."""
    used, began = time.thread_time(), time.monotonic()
    for _ in range(WAKES):
        time.sleep(WATCHED_S / WAKES)  # the stretch that is measured, not a wait for something
    return (time.thread_time() - used) / (time.monotonic() - began)


def test_an_idle_daemon_with_an_engine_takes_under_half_a_percent_of_a_core_and_150_mb(daemon: DaemonProcess) -> None:
    with FakeEngine(daemon.directory) as engine, AdminClient(daemon.directory) as admin:
        engine.fill([0], seed=1)
        assert engine.store([bytes(32)], [0]).ok
        # Other work on the host makes the same wake-ups cost up to three times as much: a bare loop says how much.
        before = admin.stats()
        excess: list[float] = []
        while not excess or (min(excess) > 0 and len(excess) < 3):
            bare_share = share_of_waking()
            after = admin.stats()
            share = (after.cpu_seconds - before.cpu_seconds) / (after.uptime_seconds - before.uptime_seconds)
            excess.append(share - max(MAX_SHARE, MAX_BARE_LOOPS * bare_share))
            before = after
    assert min(excess) <= 0
    assert after.resident_bytes < 150 * MIB
