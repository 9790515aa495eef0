"""One engine of a chaos run, in a process of its own.

It serves prompts as an engine does: step after step without waiting for the daemon, each request looked up, loaded,
computed where it must be, stored. It knows what every block of every prompt must hold and compares what was loaded.
It gets the commands ``go`` and ``quiet``, and tells what it did and how long its steps took. After SIGTERM or the end
of its connection it finishes its requests and exits.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffd_client import GroupKeys, GroupTransfer, JobResult, WorkerClient
from kvoffd_client.testing import FakeEngine

RANKS, LAYERS, BLOCKS, PAGE_BYTES = 2, 2, 96, 8192
PROMPTS, LONGEST = 24, 12
MAX_ACTIVE = 4
LOOKUP_DEADLINE_S, FENCE_TIMEOUT_S = 0.2, 2.0
"""The connector's defaults."""
CONNECT_TIMEOUT_S = 60.0
REQUEST_DEADLINE_S = 20.0
"""A request that is not served by then has failed: longer than any stop and restart of a round together."""
REPORT_EVERY_S = 0.05
REPORT_STEPS_FROM_S = 0.002
"""Shorter steps are counted, and not reported one by one."""
PAUSE_S = 0.001
"""The pause between two steps, in which a GPU would compute."""

Words: TypeAlias = npt.NDArray[np.uint64]
_BASE: Words = np.random.default_rng(4).integers(0, 2**64, PAGE_BYTES // 8, dtype=np.uint64)


def key_of(prompt: int, position: int) -> bytes:
    """The key of a block of a prompt: prompts share blocks with their own shorter forms only."""
    return (prompt << 16 | position).to_bytes(32, "big")


def words_of(key: bytes, rank: int) -> Words:
    """What the pages of a block hold, by layer: every word depends on its place, on the key, the rank and the layer."""
    number = int.from_bytes(key, "big") << 8 | rank << 4
    return np.array([_BASE ^ np.uint64((number | layer) * 0x9E3779B97F4A7C15 & 2**64 - 1) for layer in range(LAYERS)])


class ChaosEngine(FakeEngine):
    """The engine: its requests and its scheduler step."""

    def __init__(self, directory: Path, seed: int, connection: Connection[Any, Any]) -> None:
        shape = RANKS, LAYERS, BLOCKS, PAGE_BYTES
        super().__init__(directory, "chaos", *shape, connect_timeout_s=CONNECT_TIMEOUT_S, name="chaos")
        self.rng = random.Random(seed)
        self.words = [pages.view(np.uint64) for pages in self._pages]
        self.free = list(range(BLOCKS))
        self.results: dict[int, list[JobResult]] = {}
        self.counts: Counter[str] = Counter()
        self.model_s = 0.0
        """Time spent in what stands for the model, in this step."""
        self.stopping = False
        self._active: list[tuple[float, Iterator[str]]] = []
        """When each request came, and its stages."""
        self._going = False
        self._reported_at = 0.0
        self._quiet_reported = True
        self._connection = connection
        self._last_job = 0

    # --- what requests ask for -------------------------------------------------------------------

    def new_job(self) -> int:
        self._last_job += 1
        self.results[self._last_job] = []
        return self._last_job

    def finished(self, job_id: int) -> bool | None:
        """Whether the job went well in all ranks; None while a result is missing."""
        if len(self.results[job_id]) < RANKS:
            return None
        return all(result.ok for result in self.results.pop(job_id))

    def model(self, work: Callable[[], None]) -> None:
        """Run ``work``, which stands for the model: its time is not counted as the step's."""
        started = time.monotonic()
        work()
        self.model_s += time.monotonic() - started

    # --- life ------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve prompts until SIGTERM or the end of the connection."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stopping", True))
        self._emit("ready", None)
        while not self.stopping or self._active:
            self._read_commands()
            self._step()
            self._report()
            time.sleep(PAUSE_S)
        for worker in self.workers:
            worker.unregister(1.0)
        self.words.clear()
        self.close()

    def _step(self) -> None:
        self.model_s = 0.0
        started, waited = time.monotonic(), waited_for_cpu_s()
        for worker in self.workers:
            self._take_results(worker)
        self.scheduler.poll()
        if self._going and not self.stopping:
            while len(self._active) < MAX_ACTIVE and self._admit():
                pass
        going_on = []
        for began_at, request in self._active:
            if waits_for := next(request, ""):
                late = time.monotonic() - began_at > REQUEST_DEADLINE_S
                if late:
                    self._emit("failed", f"a request waits for {waits_for}: {self.scheduler.problem}")
                going_on.append((float("inf") if late else began_at, request))
        self._active = going_on
        took = time.monotonic() - started - self.model_s
        self.counts["steps"] += 1
        if took >= REPORT_STEPS_FROM_S:
            self._emit("step", (started, took, min(took, waited_for_cpu_s() - waited)))

    def _take_results(self, worker: WorkerClient) -> None:
        for result in worker.take_results():
            self.results[result.job_id].append(result)

    def _admit(self) -> bool:
        length = self.rng.randint(1, LONGEST)
        if length > len(self.free):
            return False
        prompt = self.rng.randrange(PROMPTS)
        blocks = [self.free.pop(self.rng.randrange(len(self.free))) for _ in range(length)]
        keys = [key_of(prompt, position) for position in range(length)]
        self._active.append((time.monotonic(), self._serve(keys, blocks)))
        return True

    def _serve(self, keys: list[bytes], blocks: list[int]) -> Iterator[str]:
        """One prompt: look up, load, compute, store, free the blocks. Yields what it waits for."""
        began_at, counts = time.monotonic(), self.counts
        lookup = self.scheduler.lookup([GroupKeys(0, b"".join(keys))])
        while not lookup.done and time.monotonic() - began_at < LOOKUP_DEADLINE_S:
            yield "a lookup"
        counts["late lookups"] += not lookup.done
        ready = lookup.leading_ready() if lookup.done and not lookup.failed and lookup.alive else 0
        if ready:
            self.model(lambda: self._overwrite(blocks[:ready]))
            load = self.new_job()
            for worker in self.workers:
                worker.load(load, lookup.lease_id, [GroupTransfer.of(keys[:ready], blocks[:ready])])
            while (loaded := self.finished(load)) is None:
                yield "a load"
            counts["loads" if loaded else "loads recomputed"] += 1
            if loaded:
                self.model(lambda: self._compare(keys[:ready], blocks[:ready]))
            else:
                ready = 0
        if lookup.lease_id:
            self.scheduler.release(lookup.lease_id)
        keys, new_blocks = keys[ready:], blocks[ready:]
        self.model(lambda: self._fill(keys, new_blocks))
        counts["requests"] += 1
        counts["blocks computed"] += len(keys)
        wanted = len(keys) * LAYERS * PAGE_BYTES
        if wanted and all(worker.credit_bytes >= wanted for worker in self.workers):
            store = self.new_job()
            for worker in self.workers:
                worker.store(store, [GroupTransfer.of(keys, new_blocks)])
            while (stored := self.finished(store)) is None:
                if self.rng.random() < 0.01:
                    self._fence(store)
                else:
                    yield "a store"
            counts["stores" if stored else "stores failed"] += 1
        self.free += blocks

    def _fence(self, store: int) -> None:
        """Another request wants these blocks now, as at vLLM's block fence."""
        for worker in self.workers:
            worker.fence([store], FENCE_TIMEOUT_S)
            self._take_results(worker)
        self.counts["fences"] += 1
        if len(self.results[store]) < RANKS:
            self._emit("failed", "a fence came back before its jobs had ended")

    # --- bytes -----------------------------------------------------------------------------------

    def _overwrite(self, blocks: list[int]) -> None:
        """Overwrite the blocks, so that bytes that are right afterwards have come with the load."""
        for words in self.words:
            words[:, blocks] = 0x5A5A

    def _fill(self, keys: list[bytes], blocks: list[int]) -> None:
        for key, block in zip(keys, blocks, strict=True):
            for rank, words in enumerate(self.words):
                words[:, block] = words_of(key, rank)

    def _compare(self, keys: list[bytes], blocks: list[int]) -> None:
        for key, block in zip(keys, blocks, strict=True):
            wrong = sum(np.count_nonzero(words[:, block] != words_of(key, at)) for at, words in enumerate(self.words))
            self.counts["blocks compared"] += 1
            if wrong:
                self._emit("wrong", f"{wrong} words of key {key.hex()} are not what was stored")

    def _read_commands(self) -> None:
        try:
            while self._connection.poll():
                self._quiet_reported = self._going = self._connection.recv() == "go"
        except (EOFError, OSError):
            self.stopping = True

    def _emit(self, kind: str, value: object) -> None:
        with suppress(BrokenPipeError):  # nobody reads it any more
            self._connection.send((kind, value))

    def _report(self) -> None:
        now = time.monotonic()
        quiet = not self._quiet_reported and not self._active and all(client.ready for client in self._clients)
        if quiet or (self.counts and now - self._reported_at > REPORT_EVERY_S):
            self._reported_at = now
            self._emit("did", dict(self.counts))
            self.counts.clear()
        if quiet:
            self._quiet_reported = True
            self._emit("quiet", None)


def waited_for_cpu_s() -> float:
    """How long this thread has been ready to run while others had the CPU, since its start."""
    with open("/proc/thread-self/schedstat", "rb") as file:
        return int(file.read().split()[1]) / 1e9


def serve(directory: Path, seed: int, address: str) -> int:
    """Be an engine; 0 when it has ended."""
    ChaosEngine(directory, seed, Client(address, "AF_UNIX")).run()
    return 0
