"""The honest engine beside an attack, in a process of its own: ``python -m tests.hostile.honest DIRECTORY``.

Until its input ends it stores blocks, looks them up, loads them and compares every byte. It writes one JSON list a
line to standard output: ``["did", [end, seconds, seconds...]]`` of a round's store, lookup and load, ``["missed", n]``
for blocks that were evicted before they could be looked up, and ``["failed", sentence]``. ``pause`` on a line of its
input lets it hold nothing, which it says with ``["paused", 0]``; ``go`` lets it go on.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import sys
import time

from kvoffd_client.testing import FakeEngine
from tests.kit.steal import waited_for_cpu_s

KEYS, LAYERS, PAGE_BYTES = 4, 2, 16384
ROUNDS_KEPT = 8
"""Rounds before the same keys come again: the engine takes at most so many times a round's bytes of the pool."""
PAUSE_S = 0.002
NAMESPACE = "honest"


def emit(kind: str, value: object) -> None:
    """Write one line in one write."""
    os.write(1, json.dumps([kind, value]).encode() + b"\n")


class HonestEngine:
    """Rounds of a store, a lookup and a load."""

    def __init__(self, directory: str) -> None:
        self.engine = FakeEngine(directory, NAMESPACE, layers=LAYERS, blocks=2 * KEYS, page_bytes=PAGE_BYTES)
        self.stored_from, self.loaded_to = list(range(KEYS)), list(range(KEYS, 2 * KEYS))
        self.paused = False
        self._input = b""

    def run(self) -> None:
        """Serve until the input ends."""
        emit("ready", os.getpid())
        for number in itertools.count():
            if not self._read_commands():
                break
            if not self.paused:
                self._round(number)
            time.sleep(PAUSE_S)
        self.engine.close()

    def _round(self, number: int) -> None:
        engine = self.engine
        keys = [(number % ROUNDS_KEPT << 16 | at).to_bytes(32, "big") for at in range(KEYS)]
        # The same keys always hold the same bytes: a key that is there already is not stored again.
        engine.fill(self.stored_from, seed=number % ROUNDS_KEPT)
        sums = engine.checksums(self.stored_from)
        engine.fill(self.loaded_to, seed=2**32)
        took: list[float] = []

        def timed(began: float, waited: float) -> None:
            took.append(max(0.0, time.monotonic() - began - (waited_for_cpu_s() - waited)))

        began, waited = time.monotonic(), waited_for_cpu_s()
        stored = engine.store(keys, self.stored_from)
        timed(began, waited)
        if not stored.ok:
            emit("failed", f"a store failed with {stored.error}: {engine.workers[0].problem}")
        began, waited = time.monotonic(), waited_for_cpu_s()
        found = engine.lookup(keys)
        timed(began, waited)
        if found < KEYS:
            emit("missed", KEYS - found)
        began, waited = time.monotonic(), waited_for_cpu_s()
        if found:
            loaded = engine.load(keys[:found], self.loaded_to[:found])
            timed(began, waited)
            if not loaded.ok:
                emit("failed", f"a load failed with {loaded.error}: {engine.workers[0].problem}")
            elif engine.checksums(self.loaded_to[:found]) != sums[:found]:
                emit("failed", "a load brought wrong bytes")
        emit("did", [time.monotonic(), *took])

    def _read_commands(self) -> bool:
        """False at the end of the input."""
        while select.select([0], [], [], 0)[0]:
            data = os.read(0, 4096)
            if not data:
                return False
            *lines, self._input = (self._input + data).split(b"\n")
            for line in lines:
                self.paused = line == b"pause"
                if self.paused:
                    self.engine.release()
                    emit("paused", 0)
        return True


if __name__ == "__main__":
    HonestEngine(sys.argv[1]).run()
