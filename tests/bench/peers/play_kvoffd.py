"""kvoffd's client in the comparison: ``python -m tests.bench.peers.play_kvoffd DIRECTORY SERVER_PID``."""

from __future__ import annotations

import os
import random
import sys
import time
from importlib.metadata import version
from pathlib import Path

import zmq

from kvoffd_client import ClientOptions, NamespaceSpec
from kvoffd_client.testing import KEY_BYTES, FakeEngine
from kvoffd_proto.messages import GroupKeys
from tests.bench.peers.player import Copy, Geometry, Player, Prompt, play

WAIT_S = 30.0


class KvoffdPlayer(Player):
    """A scheduler and a worker of one engine, through the public clients that the vLLM connector uses too."""

    def __init__(self, directory: Path, server_pid: int) -> None:
        super().__init__(server_pid)
        self._directory = directory
        self._engine: FakeEngine | None = None
        self._filled: list[bytes] = []

    @property
    def _open_engine(self) -> FakeEngine:
        assert self._engine is not None, "open() comes first"
        return self._engine

    def open(self, geometry: Geometry) -> None:
        self.close()
        shape = geometry.layers, geometry.blocks, geometry.page_bytes
        process = os.getpid()
        namespace = NamespaceSpec.named("peers", layers=shape[0], page_bytes=shape[2], process=process)
        options = ClientOptions(request_timeout_s=WAIT_S)
        self._engine = FakeEngine(self._directory, namespace, 1, *shape, options=options)
        self._engine.fill(range(geometry.blocks), seed=0)

    def fill(self, prompt: Prompt) -> None:
        self._filled = _new_keys(prompt.keys)
        self._store(self._filled, list(range(1, prompt.keys + 1)))

    def warm(self, order: list[int], jobs: int) -> None:
        for _ in range(jobs):
            self._store(_new_keys(len(order)), order)
        self._drop()

    def lookup(self, prompt: Prompt, hit: bool) -> float:
        seconds = self._look_up(self._filled if hit else _new_keys(prompt.keys), prompt.keys if hit else 0)
        self._open_engine.lookup(_new_keys(1))  # what is measured next finds the daemon idle
        return seconds

    def copies(self, order: list[int]) -> tuple[Copy, Copy]:
        keys = _new_keys(len(order))
        stored = self.measured(lambda: self._store(keys, order))
        self._find(keys)
        loaded = self.measured(lambda: self._load(keys, order[::-1]))
        self._drop()
        return stored, loaded

    def verify(self, blocks: int) -> None:
        engine, keys = self._open_engine, _new_keys(blocks)
        ids = random.sample(range(1, blocks + 1), blocks)
        engine.fill(ids, seed=2)
        before = engine.checksums(ids)
        self._store(keys, ids)
        engine.fill(ids, seed=3)
        self._find(keys)
        self._load(keys, ids[::-1])
        if engine.checksums(ids[::-1]) != before:
            raise AssertionError("What was loaded is not what was stored.")
        self._drop()

    def facts(self) -> dict[str, str]:
        return {"version": version("kvoffd"), "libzmq": zmq.zmq_version()}

    def close(self) -> None:
        if self._engine is not None:
            self._drop()
            self._engine.close()
            self._engine = None

    def _look_up(self, keys: list[bytes], ready: int) -> float:
        """Seconds until the answer; its pins are released after."""
        scheduler, groups = self._open_engine.scheduler, [GroupKeys(0, b"".join(keys))]
        began = time.perf_counter()
        future = scheduler.lookup(groups)
        future.wait(WAIT_S)
        seconds = time.perf_counter() - began
        _check(future.leading_ready(), ready)
        scheduler.release(future.lease_id)
        return seconds

    def _find(self, keys: list[bytes]) -> None:
        """Look keys up for a load."""
        _check(self._open_engine.lookup(keys, WAIT_S), len(keys))

    def _store(self, keys: list[bytes], block_ids: list[int]) -> None:
        result = self._open_engine.store(keys, block_ids, WAIT_S)
        assert result.ok, result.error

    def _load(self, keys: list[bytes], block_ids: list[int]) -> None:
        result = self._open_engine.load(keys, block_ids, WAIT_S)
        assert result.ok, result.error

    def _drop(self) -> None:
        assert self._open_engine.scheduler.reset(WAIT_S)


def _new_keys(count: int) -> list[bytes]:
    return [os.urandom(KEY_BYTES) for _ in range(count)]


def _check(found: int, ready: int) -> None:
    if found != ready:
        raise AssertionError(f"A lookup must find {ready} blocks and found {found}.")


if __name__ == "__main__":
    play(KvoffdPlayer(Path(sys.argv[1]), int(sys.argv[2])))
