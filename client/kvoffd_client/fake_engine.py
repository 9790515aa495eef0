"""An engine with real memory and sockets but no model: for tests, benches and the self-test of doctor."""

from __future__ import annotations

import builtins
import itertools
import os
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvoffd_client.errors import DaemonUnavailable
from kvoffd_client.memory import Registration, SharedMemory
from kvoffd_client.namespace import NamespaceSpec
from kvoffd_client.repeated_lookup import RepeatedLookup
from kvoffd_client.scheduler_client import SchedulerClient
from kvoffd_client.session import DEFAULT_OPTIONS, ClientOptions, Closing
from kvoffd_client.worker_client import WorkerClient
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import GroupKeys, GroupTransfer, JobResult

KEY_BYTES = 32
CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class EngineResult:
    """Result of a store or load on all ranks.

    Attributes:
        ok: every rank's job was ok.
        bytes: bytes copied, over all ranks.
        seconds: of the slowest rank, from the daemon's acceptance to the end.
        failed_keys: keys that failed on any rank, in the order given.
        error: the first rank's error, None when ok.
    """

    ok: bool
    bytes: int
    seconds: float
    failed_keys: list[builtins.bytes] = field(default_factory=list)
    error: ErrorCode | None = None


class FakeEngine(Closing):
    """An engine without a model: ``world_size`` workers of ``layers`` x ``blocks`` pages, and a scheduler.

    >>> with FakeEngine("/run/kvoffd") as engine:                                          # doctest: +SKIP
    ...     engine.fill([0, 1], seed=7)
    ...     engine.store([key_a, key_b], [0, 1])
    ...     engine.lookup([key_a, key_b])      # 2
    ...     engine.load([key_a, key_b], [8, 9])

    Args:
        directory: where the daemon's sockets are.
        namespace: engines of the same name and geometry share blocks; or the whole of what they agree on, with keys of
            32 bytes and one group.
        world_size: workers; every operation goes to all of them.
        layers: pages per block and worker.
        blocks: engine blocks.
        page_bytes: bytes of one layer's page of one block.
        options: timeouts of the clients.
        connect_timeout_s: bounds the constructor.
        name: of its sessions, as ``kvoffd-cli clients`` shows it.

    Raises:
        DaemonUnavailable: no daemon in time; the sentence names the directory.
        RequestRefused: the daemon refuses the namespace or the memory.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        namespace: str | NamespaceSpec = "demo",
        world_size: int = 1,
        layers: int = 4,
        blocks: int = 512,
        page_bytes: int = 16384,
        *,
        options: ClientOptions = DEFAULT_OPTIONS,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        name: str = "fake engine",
    ) -> None:
        if min(world_size, layers, blocks, page_bytes) < 1:
            raise ValueError("world_size, layers, blocks and page_bytes must all be at least 1.")
        self.world_size, self.layers, self.blocks, self.page_bytes = world_size, layers, blocks, page_bytes
        if isinstance(namespace, str):
            namespace = NamespaceSpec.named(namespace, world_size, KEY_BYTES, layers=layers, page_bytes=page_bytes)
        self.namespace = namespace
        self._job_ids = itertools.count(1)
        self._memories: list[SharedMemory] = []
        self._pages: list[npt.NDArray[np.uint8]] = []
        self.workers: list[WorkerClient] = []
        self.scheduler = SchedulerClient(directory, self.namespace, name=f"{name} scheduler", options=options)
        self._lookup = RepeatedLookup(self.scheduler)
        try:
            for rank in range(world_size):
                memory = SharedMemory(layers * blocks * page_bytes, f"kvoffd-fake-engine-{rank}")
                self._memories.append(memory)
                self._pages.append(memory.view.reshape(layers, blocks, page_bytes))
                registration = Registration.flat(rank, memory, layers, blocks, page_bytes)
                worker = WorkerClient(directory, namespace, registration, name=f"{name} worker {rank}", options=options)
                self.workers.append(worker)
            deadline = time.monotonic() + connect_timeout_s
            for client in self._clients:
                if not client.wait_settled(max(0.0, deadline - time.monotonic())):
                    sentence = f"No kvoffd daemon took this engine in {directory} within {connect_timeout_s:g} s"
                    raise client.refusal or DaemonUnavailable(f"{sentence}: {client.problem}")
        except BaseException:
            self.close()
            raise

    @property
    def _clients(self) -> list[SchedulerClient | WorkerClient]:
        return [self.scheduler, *self.workers]

    def fill(self, block_ids: Sequence[int], seed: int) -> None:
        """Write pseudo-random bytes that depend only on (seed, block, layer, rank)."""
        self._check_blocks(block_ids)
        for rank, pages in enumerate(self._pages):
            for layer in range(self.layers):
                for block in block_ids:
                    source = np.random.Generator(np.random.PCG64([seed & 0xFFFFFFFFFFFFFFFF, block, layer, rank]))
                    pages[layer, block] = np.frombuffer(source.bytes(self.page_bytes), np.uint8)

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        """Return one CRC-32 per block, over all layers and ranks."""
        self._check_blocks(block_ids)
        return [zlib.crc32(b"".join(pages[:, block].tobytes() for pages in self._pages)) for block in block_ids]

    def store(self, keys: Sequence[bytes], block_ids: Sequence[int], timeout_s: float = 10.0) -> EngineResult:
        """Copy block ``block_ids[i]`` into the pool under ``keys[i]``, on all ranks.

        After ``timeout_s`` seconds the store is abandoned (error DEADLINE), and its blocks may be reused.

        Raises:
            ValueError: a key is not 32 bytes, the lengths differ, or a block id is not a block of this engine.
        """
        transfer = self._transfer(keys, block_ids)
        if not keys:
            return EngineResult(True, 0, 0.0)
        job_id = next(self._job_ids)
        for worker in self.workers:
            worker.store(job_id, [transfer])
        result = self._result(job_id, keys, timeout_s)
        for worker in self.workers:
            worker.fence([job_id], 0.0)  # abandons what is too late
        return result

    def lookup(self, keys: Sequence[bytes], timeout_s: float = 10.0, peer: str = "") -> int:
        """Return the number of leading keys that are ready, pinned until load(), release() or the next lookup().

        Waits up to ``timeout_s`` seconds, also for keys that are being promoted from disk. 0 if the daemon does not
        answer in time. ``peer``: see ``SchedulerClient.lookup``. Raises as store().
        """
        self._check_keys(keys)
        self.release()
        if not keys:
            return 0
        asked = [GroupKeys(0, b"".join(keys))]
        found = self._lookup.wait(lambda again: self.scheduler.lookup(asked, again, peer=peer), timeout_s)
        if found is None:
            self.release()
            return 0
        return found.leading_ready()

    def load(self, keys: Sequence[bytes], block_ids: Sequence[int], timeout_s: float = 10.0) -> EngineResult:
        """Copy ``keys[i]``, pinned by the last lookup, into block ``block_ids[i]``, on all ranks. Raises as store().

        After ``timeout_s`` seconds the result is a failure (error DEADLINE), but bytes may still arrive in the blocks.
        """
        transfer = self._transfer(keys, block_ids)
        if not keys:
            return EngineResult(True, 0, 0.0)
        found = self._lookup.last
        if found is None or not found.pinned:
            return EngineResult(False, 0, 0.0, list(keys), ErrorCode.UNKNOWN_LEASE)
        job_id = next(self._job_ids)
        for worker in self.workers:
            worker.load(job_id, found.lease_id, [transfer])
        result = self._result(job_id, keys, timeout_s)
        self.release()
        return result

    def release(self) -> None:
        """Release the lease of the last lookup."""
        self._lookup.release()

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until all clients are connected, as after a restart of the daemon."""
        deadline = time.monotonic() + timeout_s
        return all(client.wait_ready(max(0.0, deadline - time.monotonic())) for client in self._clients)

    def close(self) -> None:
        """End all sessions and free the memory. Repeatable."""
        self._pages.clear()
        closing: list[Closing] = [*self._clients, *self._memories]
        for item in closing:
            item.close()

    def _result(self, job_id: int, keys: Sequence[bytes], timeout_s: float) -> EngineResult:
        """Wait for the results of all ranks; return their sum."""
        deadline = time.monotonic() + timeout_s
        nbytes, seconds = 0, 0.0
        failed: set[bytes] = set()
        error: ErrorCode | None = None
        for worker in self.workers:
            result: JobResult | None = None
            while result is None and (left := deadline - time.monotonic()) > 0:
                # Late results of earlier jobs are dropped here.
                result = next((item for item in worker.wait_results(left) if item.job_id == job_id), None)
            if result is None:
                failed.update(keys)
                error = error or ErrorCode.DEADLINE
                continue
            nbytes += result.bytes
            seconds = max(seconds, result.seconds)
            if not result.ok:
                error = error or result.error or ErrorCode.INTERNAL
                for item in result.failed:
                    failed.update(item.keys[at : at + KEY_BYTES] for at in range(0, len(item.keys), KEY_BYTES))
        return EngineResult(error is None, nbytes, seconds, [key for key in keys if key in failed], error)

    def _transfer(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> GroupTransfer:
        self._check_keys(keys)
        self._check_blocks(block_ids)
        if len(keys) != len(block_ids):
            raise ValueError(f"There are {len(keys)} keys and {len(block_ids)} block ids; give one block id per key.")
        return GroupTransfer.of(keys, block_ids)

    def _check_keys(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if not isinstance(key, bytes):
                raise ValueError(f"A key is bytes, not {type(key).__name__}.")
            if len(key) != KEY_BYTES:
                raise ValueError(f"A key has {KEY_BYTES} bytes; {key[:40]!r} has {len(key)}.")

    def _check_blocks(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            if not 0 <= block < self.blocks:
                raise ValueError(f"This engine has blocks 0 to {self.blocks - 1}, but not {block}.")
