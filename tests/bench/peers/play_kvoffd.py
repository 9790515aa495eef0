"""kvoffd's client in the comparison: ``python -m tests.bench.peers.play_kvoffd DIRECTORY SERVER_PID``."""

from __future__ import annotations

import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import zmq

from kvoffd_client import Lookup
from kvoffd_proto.messages import GroupKeys
from tests.bench.daemon.synthetic_engine import WAIT_S, SyntheticEngine, host_memory, random_keys
from tests.bench.peers.player import Copy, Geometry, Player, Prompt, play


class KvoffdPlayer(Player):
    """A scheduler and a worker of one engine, through the public clients that the vLLM connector uses too."""

    def __init__(self, directory: Path, server_pid: int) -> None:
        super().__init__(server_pid)
        self._directory = directory
        self._engine: SyntheticEngine | None = None
        self._filled = b""

    @property
    def _open_engine(self) -> SyntheticEngine:
        assert self._engine is not None, "open() comes first"
        return self._engine

    def open(self, geometry: Geometry) -> None:
        self.close()
        self._geometry = geometry
        layers, blocks, page_bytes = geometry.layers, geometry.blocks, geometry.page_bytes
        memory = host_memory(layers * blocks * page_bytes)
        self._view = memory.registered.view
        label = f"peers {layers} x {page_bytes}"
        self._engine = SyntheticEngine(self._directory, label, layers, blocks, page_bytes, memory)

    def fill(self, prompt: Prompt) -> None:
        self._filled = random_keys(prompt.keys)
        self._copy("store", self._filled, np.arange(1, prompt.keys + 1, dtype=np.int32))

    def warm(self, order: list[int], jobs: int) -> None:
        for _ in range(jobs):
            self._copy("store", random_keys(len(order)), np.array(order, dtype=np.int32))
        self._open_engine.drop_blocks()

    def lookup(self, prompt: Prompt, hit: bool) -> float:
        engine = self._open_engine
        future, seconds = engine.lookup(self._filled if hit else random_keys(prompt.keys))
        _check(future, prompt.keys if hit else 0)
        engine.release_and_wait(future)
        return seconds

    def copies(self, order: list[int]) -> tuple[Copy, Copy]:
        engine, keys = self._open_engine, random_keys(len(order))
        stored = self.measured(lambda: self._copy("store", keys, np.array(order, dtype=np.int32)))
        future, _ = engine.lookup(keys)
        _check(future, len(order))
        targets = np.array(order[::-1], dtype=np.int32)
        loaded = self.measured(lambda: self._copy("load", keys, targets, future.lease_id))
        engine.drop_blocks()
        return stored, loaded

    def verify(self, blocks: int) -> None:
        engine, keys = self._open_engine, random_keys(blocks)
        random = np.random.default_rng(2)
        memory = self._view.reshape(self._geometry.layers, self._geometry.blocks, self._geometry.page_bytes)
        memory[:] = random.integers(0, 256, memory.shape, np.uint8)
        before = memory.copy()
        ids = (1 + random.permutation(blocks)).astype(np.int32)
        self._copy("store", keys, ids)
        memory.fill(0)
        future, _ = engine.lookup(keys)
        self._copy("load", keys, ids[::-1].copy(), future.lease_id)
        if not np.array_equal(memory[:, ids[::-1]], before[:, ids]):
            raise AssertionError("What was loaded is not what was stored.")
        engine.drop_blocks()

    def flood(self, prompt: Prompt, seconds: float, in_flight: int) -> int:
        scheduler = self._open_engine.scheduler
        groups = (GroupKeys(group=0, keys=self._filled),)
        futures = [scheduler.lookup(groups) for _ in range(in_flight)]
        answered = 0
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for index, future in enumerate(futures):
                future.wait(WAIT_S)
                _check(future, prompt.keys)
                scheduler.release(future.lease_id)
                futures[index] = scheduler.lookup(groups)
                answered += 1
        for future in futures:
            future.wait(WAIT_S)
            scheduler.release(future.lease_id)
        return answered

    def facts(self) -> dict[str, str]:
        return {"version": version("kvoffd"), "libzmq": zmq.zmq_version(), "numpy": np.__version__}

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _copy(self, what: str, keys: bytes, block_ids: np.ndarray, lease_id: int = 0) -> None:
        engine = self._open_engine
        if what == "store":
            engine.begin_store(keys, block_ids)
        else:
            engine.begin_load(lease_id, keys, block_ids)
        engine.check(what, engine.wait_results(1), len(block_ids))


def _check(future: Lookup, ready: int) -> None:
    if not future.done or future.failed or future.leading_ready() != ready:
        raise AssertionError(f"A lookup must find {ready} blocks and found {future.leading_ready()}.")


if __name__ == "__main__":
    play(KvoffdPlayer(Path(sys.argv[1]), int(sys.argv[2])))
