"""Killed under load, again and again: what was ready is back, and every byte of it is right.

RESTART_KILLS=200 in the environment makes it a long run.
"""

from __future__ import annotations

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvoffd_client import AdminClient
from tests.kit.checked import STEP, CheckedEngine, Truth
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until

KILLS = int(os.environ.get("RESTART_KILLS", "2"))
ENGINES = 2
MOST_BATCHES = 24
"""Stores of one engine in one life; the pool holds those of several lives, so that nothing is evicted."""
LIVES_IN_POOL = 4


class Loader:
    """One engine that stores batches of new keys and loads old ones, as fast as it can, until its daemon dies."""

    def __init__(self, daemon: DaemonProcess, number: int) -> None:
        self.engine = CheckedEngine(daemon, Truth(), page_bytes=16384, layers=4)
        self.stored: list[range] = []
        """Batches whose store was reported as done."""
        self._next = number << 32
        self.loads = 0

    def run(self, dead: threading.Event) -> None:
        rng, most = random.Random(self._next), len(self.stored) + MOST_BATCHES
        try:
            while not dead.is_set():
                if len(self.stored) < most and (not self.stored or rng.random() < 0.6):
                    batch = range(self._next, self._next + STEP)
                    self._next += STEP
                    self.engine.put(batch)
                    self.stored.append(batch)
                else:
                    self.engine.get(rng.choice(self.stored), 5.0)
                    self.loads += 1
        except AssertionError as error:
            # What was under way when the daemon died has failed, and may be there or not, but must never be wrong.
            if "served" in str(error) or not dead.is_set():
                raise

    def back(self) -> int:
        """How many blocks are there. All of them are right, those of stores that failed too."""
        self.engine.get(self.engine.truth.keys() - {number for batch in self.stored for number in batch})
        return sum(len(self.engine.get(batch)) for batch in self.stored)


def one_life(daemon: DaemonProcess, loaders: list[Loader], rng: random.Random) -> None:
    """Let the engines work, and kill the daemon at some time after a number of stores."""
    dead = threading.Event()
    enough = sum(len(loader.stored) for loader in loaders) + rng.randrange(8, MOST_BATCHES)
    with ThreadPoolExecutor(ENGINES) as threads:
        running = [threads.submit(loader.run, dead) for loader in loaders]
        try:
            wait_until(
                lambda: sum(len(loader.stored) for loader in loaders) >= enough or any(one.done() for one in running),
                interval_s=rng.uniform(0.001, 0.02),
            )
        finally:
            dead.set()
            daemon.kill()
    for one in running:
        one.result()


@pytest.mark.timeout(120 + 10 * KILLS)
def test_restart_after_kills_under_load_loses_no_ready_block(pool_file: Path) -> None:
    block_bytes = 4 * 16384
    pool_bytes = int(ENGINES * MOST_BATCHES * STEP * block_bytes * LIVES_IN_POOL * 1.2)
    rng = random.Random(KILLS)
    ready_before = back = 0
    with DaemonProcess(str(pool_bytes), pool_file=str(pool_file)) as daemon:
        loaders = [Loader(daemon, number) for number in range(ENGINES)]
        for life in range(KILLS):
            one_life(daemon, loaders, rng)
            daemon.start()
            for loader in loaders:
                assert loader.engine.wait_ready(20)
                back += loader.back()
                ready_before += sum(map(len, loader.stored))
            if life % LIVES_IN_POOL == LIVES_IN_POOL - 1:
                with AdminClient(daemon.directory) as admin:
                    admin.clear()
                for loader in loaders:
                    loader.stored.clear()
                    loader.engine.truth.clear()
        assert "Traceback" not in daemon.log
        for loader in loaders:
            loader.engine.close()
    loads = sum(loader.loads for loader in loaders)
    print(f"{KILLS} kills: {back} of {ready_before} ready blocks were back, {loads} loads of {STEP} under load")
    assert ready_before > 100 * KILLS
    assert back >= 0.999 * ready_before
