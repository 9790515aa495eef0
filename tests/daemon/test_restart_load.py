"""Killed under load, again and again: what was ready is back, and every byte of it is right.

RESTART_KILLS=200 in the environment makes it a long run.
"""

from __future__ import annotations

import os
import random
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvoffd_client import AdminClient
from kvoffd_client.testing import FakeEngine
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until

KILLS = int(os.environ.get("RESTART_KILLS", "3"))
ENGINES = 2
BATCH = 16
LAYERS, PAGE_BYTES = 4, 16384
MOST_BATCHES = 60
"""Stores of one engine in one life; the pool holds those of several lives, so that nothing is evicted."""
LIVES_IN_POOL = 4


def keys_of(engine: int, batch: int) -> list[bytes]:
    return [(engine << 48 | batch << 8 | number).to_bytes(32, "big") for number in range(BATCH)]


@dataclass
class Loader:
    """One engine that stores batches of new keys and loads old ones, as fast as it can, until its daemon dies."""

    number: int
    engine: FakeEngine
    stored: list[int] = field(default_factory=list)
    """Batches whose store was reported as done."""
    doubtful: list[int] = field(default_factory=list)
    """Batches whose store failed, or was under way when the daemon died."""
    loads: int = 0
    problem: str = ""
    _next: int = 0

    def run(self, dead: threading.Event) -> None:
        rng = random.Random(self._next)
        begun = self._next
        while not dead.is_set() and not self.problem:
            if self._next - begun < MOST_BATCHES and (not self.stored or rng.random() < 0.6):
                batch, self._next = self._next, self._next + 1
                self.engine.fill(range(BATCH), seed=self.number << 32 | batch)
                result = self.engine.store(keys_of(self.number, batch), range(BATCH), timeout_s=5)
                (self.stored if result.ok else self.doubtful).append(batch)
            else:
                ready, wrong = self.check(rng.choice(self.stored), timeout_s=5)
                self.loads += ready == BATCH
                if wrong:
                    self.problem = f"{wrong} blocks differ while the daemon lives"

    def check(self, batch: int, timeout_s: float = 20) -> tuple[int, int]:
        """Number of leading keys that are ready, and of blocks among them whose bytes are not those stored."""
        keys = keys_of(self.number, batch)
        ready = self.engine.lookup(keys, timeout_s)
        into = range(BATCH, BATCH + ready)
        if not ready or not self.engine.load(keys[:ready], into, timeout_s).ok:
            self.engine.release()
            return 0, 0
        self.engine.fill(range(BATCH), seed=self.number << 32 | batch)
        pairs = zip(self.engine.checksums(into), self.engine.checksums(range(ready)), strict=True)
        return ready, sum(found != wanted for found, wanted in pairs)


def one_life(daemon: DaemonProcess, loaders: list[Loader], rng: random.Random) -> None:
    """Let the engines work, and kill the daemon at some time after a number of stores."""
    dead = threading.Event()
    threads = [threading.Thread(target=loader.run, args=(dead,)) for loader in loaders]
    enough = sum(len(loader.stored) for loader in loaders) + rng.randrange(8, MOST_BATCHES)

    def stored() -> bool:
        return sum(len(loader.stored) for loader in loaders) >= enough or any(loader.problem for loader in loaders)

    for thread in threads:
        thread.start()
    try:
        wait_until(stored, interval_s=rng.uniform(0.001, 0.02))
    finally:
        daemon.kill()
        dead.set()
        for thread in threads:
            thread.join(30)
    assert not any(thread.is_alive() for thread in threads), "an engine is stuck after the daemon's death"


@pytest.mark.timeout(120 + 10 * KILLS)
def test_restart_after_kills_under_load_loses_no_ready_block(pool_file: Path) -> None:
    block_bytes = LAYERS * PAGE_BYTES
    pool_bytes = int(ENGINES * MOST_BATCHES * BATCH * block_bytes * LIVES_IN_POOL * 1.2)
    rng = random.Random(KILLS)
    ready_before = back = loads = 0
    with DaemonProcess(str(pool_bytes), pool_file=str(pool_file)) as daemon:
        engines = [
            FakeEngine(daemon.directory, layers=LAYERS, blocks=2 * BATCH, page_bytes=PAGE_BYTES) for _ in range(ENGINES)
        ]
        try:
            loaders = [Loader(number, engine) for number, engine in enumerate(engines)]
            for life in range(KILLS):
                one_life(daemon, loaders, rng)
                daemon.start()
                for loader in loaders:
                    assert not loader.problem, loader.problem
                    assert loader.engine.wait_ready(20)
                    for batch in loader.stored:
                        ready, wrong = loader.check(batch)
                        assert not wrong, f"{wrong} blocks of batch {batch} are not what was stored"
                        ready_before += BATCH
                        back += ready
                    for batch in loader.doubtful:  # may be there or not, but never wrong
                        assert not loader.check(batch)[1], f"a block of the broken batch {batch} is wrong"
                if life % LIVES_IN_POOL == LIVES_IN_POOL - 1:
                    with AdminClient(daemon.directory) as admin:
                        admin.clear()
                    for loader in loaders:
                        loader.stored.clear()
                        loader.doubtful.clear()
            loads = sum(loader.loads for loader in loaders)
            assert "Traceback" not in daemon.log
        finally:
            for engine in engines:
                engine.close()
    print(f"{KILLS} kills: {back} of {ready_before} ready blocks were back, {loads} loads of {BATCH} under load")
    assert ready_before > 100 * KILLS
    assert back >= 0.999 * ready_before
