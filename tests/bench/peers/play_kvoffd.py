"""kvoffd's client in the comparison: ``python -m tests.bench.peers.play_kvoffd SERVER_PID DIRECTORY``."""

from __future__ import annotations

import os
import random
import sys
import time
from importlib.metadata import version
from pathlib import Path

from kvoffd_client import ClientOptions, GroupKeys, NamespaceSpec
from kvoffd_client.fake_engine import KEY_BYTES, FakeEngine
from tests.bench.peers.player import measured, play

WAIT_S = 30.0


class KvoffdPlayer:
    """A scheduler and a worker of one engine, through the public clients that the vLLM connector uses too."""

    engine: FakeEngine | None = None

    def __init__(self, server_pid: int, directory: Path) -> None:
        self._server_pid, self._directory = server_pid, directory
        self._filled: list[bytes] = []

    def open(self, layers: int, blocks: int, page_bytes: int) -> None:
        self.close()
        namespace = NamespaceSpec.named("peers", layers=layers, page_bytes=page_bytes, process=os.getpid())
        options = ClientOptions(request_timeout_s=WAIT_S)
        self.engine = FakeEngine(self._directory, namespace, 1, layers, blocks, page_bytes, options=options)
        self.engine.fill(range(blocks), seed=0)

    @property
    def _open(self) -> FakeEngine:
        assert self.engine is not None, "open() comes first"
        return self.engine

    def fill(self, tokens: int, keys: int) -> None:
        self._filled = new_keys(keys)
        self._store(self._filled, list(range(1, keys + 1)))

    def lookups(self, tokens: int, keys: int, hit: bool, samples: int) -> list[float]:
        return [self._look_up(self._filled if hit else new_keys(keys), keys * hit) for _ in range(samples)]

    def _look_up(self, keys: list[bytes], ready: int) -> float:
        scheduler, groups = self._open.scheduler, [GroupKeys(0, b"".join(keys))]
        began = time.perf_counter()
        answer = scheduler.lookup(groups)
        answer.wait(WAIT_S)
        seconds = time.perf_counter() - began
        assert answer.leading_ready() == ready
        scheduler.release(answer.lease_id)
        self._open.lookup(new_keys(1))  # what is measured next finds the daemon idle
        return seconds

    def warm(self, order: list[int], jobs: int) -> None:
        for _ in range(jobs):
            self._store(new_keys(len(order)), order)
        assert self._open.scheduler.reset(WAIT_S)

    def copies(self, order: list[int]) -> list[dict[str, float]]:
        keys = new_keys(len(order))
        stored = measured(self._server_pid, lambda: self._store(keys, order))
        assert self._open.lookup(keys, WAIT_S) == len(keys)
        loaded = measured(self._server_pid, lambda: self._load(keys, order[::-1]))
        assert self._open.scheduler.reset(WAIT_S)
        return [stored, loaded]

    def verify(self, blocks: int) -> None:
        keys, ids = new_keys(blocks), random.sample(range(1, blocks + 1), blocks)
        self._open.fill(ids, seed=2)
        before = self._open.checksums(ids)
        self._store(keys, ids)
        self._open.fill(ids, seed=3)
        assert self._open.lookup(keys, WAIT_S) == blocks
        self._load(keys, ids[::-1])
        assert self._open.checksums(ids[::-1]) == before, "What was loaded is not what was stored."
        assert self._open.scheduler.reset(WAIT_S)

    def facts(self) -> str:
        return f"kvoffd {version('kvoffd')}"

    def close(self) -> None:
        if self.engine is not None:
            self.engine.scheduler.reset(WAIT_S)
            self.engine.close()

    def _store(self, keys: list[bytes], block_ids: list[int]) -> None:
        result = self._open.store(keys, block_ids, WAIT_S)
        assert result.ok, result.error

    def _load(self, keys: list[bytes], block_ids: list[int]) -> None:
        result = self._open.load(keys, block_ids, WAIT_S)
        assert result.ok, result.error


def new_keys(count: int) -> list[bytes]:
    return [os.urandom(KEY_BYTES) for _ in range(count)]


if __name__ == "__main__":
    play(KvoffdPlayer(int(sys.argv[1]), Path(sys.argv[2])))
