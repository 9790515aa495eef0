"""Large copies beside small ones."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

from kvoffd_client.testing import FakeEngine
from tests.kit.faulty_daemon import FaultyDaemon
from tests.kit.steal import TooSlow
from tests.kit.struct_wire import stats
from tests.kit.waiting import wait_until

STEPS, STEP_S = 12, 0.05
"""8 MiB of the large load are a step; each is slow."""
PAGE_BYTES = 4 << 20
LARGE = 2 * STEPS
KEYS = [number.to_bytes(32, "big") for number in range(LARGE)]


def flood(directory: Path) -> None:
    """Load very much in one job after the other until this process is killed."""
    with FakeEngine(directory, "flood", layers=1, blocks=2 * LARGE, page_bytes=PAGE_BYTES) as engine:
        assert engine.store(KEYS, range(LARGE)).ok
        while True:
            assert engine.lookup(KEYS) == LARGE
            assert engine.load(KEYS, range(LARGE, 2 * LARGE), timeout_s=30).ok


def test_a_small_load_waits_for_a_slice_of_a_large_one_and_not_for_all_of_it() -> None:
    with FaultyDaemon("256MiB") as daemon:
        attacker = multiprocessing.get_context("fork").Process(target=flood, args=(daemon.directory,))
        attacker.start()
        try:
            with FakeEngine(daemon.directory, "polite", blocks=8) as engine, daemon.fault(f"load slow {STEP_S}"):
                engine.fill(range(4), seed=1)
                assert engine.store(KEYS[:4], range(4)).ok
                for _ in range(2):
                    assert engine.lookup(KEYS[:4]) == 4
                    ended = stats(daemon.directory).load.jobs
                    wait_until(lambda ended=ended: stats(daemon.directory).load.jobs > ended)
                    wait_until(lambda: stats(daemon.directory).load.running_jobs == 1)
                    began = time.monotonic()
                    assert engine.load(KEYS[:4], range(4, 8)).ok
                    took_s = time.monotonic() - began
                    if took_s >= STEPS * STEP_S / 2:
                        raise TooSlow(f"{took_s:.1f} s: it waited for more than a slice of the other")
                    assert engine.checksums(range(4)) == engine.checksums(range(4, 8))
        finally:
            attacker.kill()
            attacker.join()
