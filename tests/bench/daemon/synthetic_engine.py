"""An engine without a model: a scheduler and one worker with one KV cache group, through the public clients."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvoffd_client.errors import DaemonUnavailable
from kvoffd_client.jobs import GroupTransfer, Job
from kvoffd_client.memory import Memory, Registration, SharedMemory
from kvoffd_client.namespace import NamespaceSpec
from kvoffd_client.scheduler_client import Lookup, SchedulerClient
from kvoffd_client.session import ClientOptions, Closing
from kvoffd_client.worker_client import WorkerClient
from kvoffd_proto.messages import GroupKeys, JobResult
from tests.bench.daemon.results import BenchFailed

KEY_BYTES = 32
CONNECT_TIMEOUT_S = 10.0
WAIT_S = 30.0
"""Longest wait for any answer; a daemon that takes longer does not work."""


class BlocksGone(BenchFailed):
    """Others' blocks took the place of the bench's."""


BlockIds = npt.NDArray[np.int32]


def random_keys(count: int) -> bytes:
    """Return ``count`` keys that nobody else has, concatenated."""
    return os.urandom(count * KEY_BYTES)


@dataclass(frozen=True)
class EngineMemory:
    """The memory of an engine's KV cache.

    Attributes:
        registered: the memory as it is registered with the daemon.
        offset_bytes: where in it the engine's memory begins.
        close: frees it; the daemon must have unmapped it before.
    """

    registered: Memory
    offset_bytes: int
    close: Callable[[], None]


def host_memory(size_bytes: int) -> EngineMemory:
    """Return host memory, each page touched."""
    memory = SharedMemory(size_bytes, "kvoffd-bench")
    memory.view.fill(0x5A)
    return EngineMemory(memory, 0, memory.close)


class SyntheticEngine(Closing):
    """A worker with ``layers`` x ``blocks`` pages of ``page_bytes``, and a scheduler.

    The namespace is this process's own. The daemon treats it as any engine's, so that what the policy costs is in the
    times; the daemon should be one that serves nobody else.

    Args:
        memory: memory for these pages, which the engine closes; host memory when None.
        rank: of the worker; other engines may be those of the other ranks.

    Raises:
        DaemonUnavailable: there is no daemon, or it refuses.
    """

    def __init__(
        self,
        directory: Path,
        label: str,
        layers: int,
        blocks: int,
        page_bytes: int,
        memory: EngineMemory | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.block_bytes = layers * page_bytes
        """Bytes that one key names."""
        # The ranks of one engine are processes of one parent.
        process = os.getpid() if world_size == 1 else os.getppid()
        namespace = NamespaceSpec.named(
            f"measured {label}", world_size, layers=layers, page_bytes=page_bytes, process=process
        )
        self.namespace = namespace
        self._memory = memory if memory is not None else host_memory(layers * blocks * page_bytes)
        where = self._memory.registered, layers, blocks, page_bytes, self._memory.offset_bytes
        registration = Registration.flat(rank, *where)
        # A bench waits for slow answers instead of calling them misses.
        options = ClientOptions(request_timeout_s=WAIT_S)
        self._job_ids = itertools.count(1)
        self.scheduler = SchedulerClient(directory, namespace, name="bench scheduler", options=options)
        self.worker = WorkerClient(directory, namespace, registration, name="bench worker", options=options)
        try:
            self._wait_ready(CONNECT_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def _wait_ready(self, timeout_s: float) -> None:
        if not self.worker.wait_ready(timeout_s):
            raise DaemonUnavailable(self.worker.problem or "The daemon did not register the bench's memory in time.")
        if not self.scheduler.wait_ready(timeout_s):
            raise DaemonUnavailable(self.scheduler.problem or "The daemon did not open the bench's namespace in time.")

    def lookup(self, keys: bytes) -> tuple[Lookup, float]:
        """Look ``keys`` up; return the future with the answer, and the seconds it took."""
        groups = (GroupKeys(group=0, keys=keys),)
        begin = time.perf_counter()
        future = self.scheduler.lookup(groups)
        future.wait(WAIT_S)
        seconds = time.perf_counter() - begin
        if not future.done or future.failed:
            raise BenchFailed(f"A lookup was not answered. {self.scheduler.problem or 'See the log of the daemon.'}")
        return future, seconds

    def lease(self, keys: bytes) -> int:
        """Look keys up that were stored, for a load; return the lease. Raises BlocksGone."""
        future, _ = self.lookup(keys)
        if future.pinned == len(keys) // KEY_BYTES:
            return future.lease_id
        if future.pinned:
            self.scheduler.release(future.lease_id)
        raise BlocksGone(
            "Blocks of the bench were evicted, or could not be leased, before they were loaded: the pool is too small "
            "for it beside the engines' traffic. Run it while they rest, or on a larger pool."
        )

    def release_and_wait(self, future: Lookup) -> None:
        """Release a lookup's pins and wait until the daemon has done so: what is measured next finds it idle."""
        if future.pinned:
            self.scheduler.release(future.lease_id)
        self.lookup(random_keys(1))

    def begin_store(self, keys: bytes, block_ids: BlockIds) -> int:
        """Send a store; return its job id."""
        job_id = next(self._job_ids)
        self.worker.store(job_id, (GroupTransfer(group=0, keys=keys, block_ids=block_ids.tobytes()),))
        return job_id

    def begin_load(self, lease_id: int, keys: bytes, block_ids: BlockIds, *, keep_lease: bool = False) -> int:
        """Send a load of keys that a lookup pinned under ``lease_id``, which it ends; return its job id."""
        job_id = next(self._job_ids)
        parts = (GroupTransfer(group=0, keys=keys, block_ids=block_ids.tobytes()),)
        self.worker.load(job_id, lease_id, parts, keep_lease=keep_lease)
        return job_id

    def store(self, keys: bytes, block_ids: BlockIds) -> float:
        """Store and wait; return the seconds. Raises BenchFailed unless all bytes were copied."""
        begin = time.perf_counter()
        self.begin_store(keys, block_ids)
        return self._finish_job("store", len(block_ids), begin)

    def store_step(self, keys: bytes) -> float:
        """Store each of ``keys`` by a job of its own, all in one message, and wait; return the seconds.

        Their blocks are the engine's first ones. Raises BenchFailed unless all bytes were copied.
        """
        stores = self._step(keys)
        begin = time.perf_counter()
        self.worker.submit(stores)
        results = self.wait_results(len(stores))
        seconds = time.perf_counter() - begin
        self.check("step", results, len(stores))
        return seconds

    def fence_step(self, keys: bytes) -> tuple[float, int]:
        """As ``store_step``, with a fence for the stores right after; return its seconds, and how many were stored."""
        stores = self._step(keys)
        self.worker.submit(stores)
        begin = time.perf_counter()
        self.worker.fence([store.job_id for store in stores], WAIT_S)
        seconds = time.perf_counter() - begin
        results = self.wait_results(len(stores))
        self.check("step", [result for result in results if result.ok], sum(result.ok for result in results))
        return seconds, sum(result.ok for result in results)

    def _step(self, keys: bytes) -> list[Job]:
        return [
            Job(
                next(self._job_ids),
                [GroupTransfer(0, keys[at * KEY_BYTES : (at + 1) * KEY_BYTES], at.to_bytes(4, "little"))],
            )
            for at in range(len(keys) // KEY_BYTES)
        ]

    def load(self, keys: bytes, block_ids: BlockIds) -> float:
        """Look up, load and wait; return the seconds of the load. Raises BenchFailed unless all bytes were copied."""
        lease_id = self.lease(keys)
        begin = time.perf_counter()
        self.begin_load(lease_id, keys, block_ids)
        return self._finish_job("load", len(block_ids), begin)

    def _finish_job(self, job: str, blocks: int, begin: float) -> float:
        results = self.wait_results(1)
        seconds = time.perf_counter() - begin
        self.check(job, results, blocks)
        return seconds

    def wait_results(self, at_least: int) -> list[JobResult]:
        """Wait until ``at_least`` jobs have ended; return the results of all that have. Raises BenchFailed."""
        found: list[JobResult] = []
        deadline = time.monotonic() + WAIT_S
        while len(found) < at_least:
            found += self.worker.wait_results(max(0.0, deadline - time.monotonic()))
            if len(found) < at_least and time.monotonic() >= deadline:
                raise BenchFailed(f"A job did not end in {WAIT_S:g} seconds; see the log of the daemon.")
        return found

    def check(self, job: str, results: Sequence[JobResult], blocks: int, size: str = "") -> None:
        """Raise BenchFailed unless the jobs (each a ``job``: store or load) together copied ``blocks`` blocks."""
        wanted = blocks * self.block_bytes
        copied = sum(result.bytes for result in results)
        failed = [result for result in results if not result.ok]
        if not failed and copied == wanted:
            return
        error = failed[0].error if failed else None
        reason = error.sentence if error is not None else f"{copied} of {wanted} bytes were copied."
        raise BenchFailed(f"A {job} of {size or f'{wanted / 2**20:.1f} MiB'} failed: {reason}")

    def drop_blocks(self) -> None:
        if not self.scheduler.reset(WAIT_S):
            raise BenchFailed("The daemon did not drop the bench's blocks; `kvoffd-cli clear --namespace` does.")

    def close(self) -> None:
        """End the sessions and free the memory; drop the blocks where the daemon still answers."""
        if self.scheduler.ready:
            self.scheduler.reset()
        # GPU memory must not be freed while the daemon has it mapped; what is not freed here goes with this process.
        unregistered = self.worker.unregister(WAIT_S)
        self.worker.close()
        self.scheduler.close()
        if unregistered:
            self._memory.close()
