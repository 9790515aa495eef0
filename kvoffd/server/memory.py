"""A worker's KV memory as the daemon has mapped it, whatever it is made of."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kvoffd.config import Config
from kvoffd.errors import KvoffdError
from kvoffd.pool.pool import Pool
from kvoffd.system.files import OnError
from kvoffd.system.mappings import MappedSegment
from kvoffd.transfer.cuda.gpus import GpuMemory, Gpus
from kvoffd.transfer.cuda.mappings import IpcExport, VmmExport
from kvoffd.transfer.engine import CopyEngine, CopyStats
from kvoffd.transfer.plan import Direction
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import CudaIpcHandle, Handle, MemfdHandle

logger = logging.getLogger(__name__)

STUCK_AFTER_S = 3.0

Post: TypeAlias = Callable[[Callable[[], None]], None]
"""Has the service's thread call something soon; from any thread."""


class Host(Protocol):
    """Time, threads and memory of the daemon, or of the simulator. The service calls it in its own thread."""

    def now(self) -> float:
        """Seconds of a clock that never goes back."""

    def post(self, call: Callable[[], None]) -> None:
        """Have the service's thread call something soon. May be called in any thread."""

    def map_memfd(self, fd: int, size_bytes: int) -> MappedSegment:
        """Map a client's memfd. Raises KvoffdError where it is not safe to use."""

    def unmap(self, segments: Sequence[MappedSegment], then: Callable[[], None]) -> None:
        """Unmap segments, which takes long, and call ``then``, both in any thread."""

    def random(self, count: int) -> bytes:
        """Random bytes that nobody can guess."""


@dataclass(frozen=True)
class EngineMemory:
    """Mapped segments of one registration, and the engine that copies to and from them."""

    engine: CopyEngine
    spans: list[tuple[int, int]]
    """(address, size in bytes) of each segment, in the order of the handles."""
    node: int | None
    """The NUMA node that slots for it should lie on; None where it does not matter or is not known."""
    close: Callable[[Callable[[], None]], None]
    """Unmaps it, then has its argument called in the service's thread. No copy of it may be running. Once."""
    on_gpu: bool = False


OnMapped: TypeAlias = Callable[[EngineMemory | KvoffdError], None]


class MemoryMapper:
    """Maps what clients register, and knows the engine that copies each kind of memory."""

    def __init__(self, engine: CopyEngine, host: Host, gpus: Gpus) -> None:
        self._engine = engine
        """Copies between memfds and the pool."""
        self._host = host
        self.gpus = gpus

    @property
    def stuck(self) -> bool:
        """A copy in host memory hangs: engines wait for it, and for all behind it, until this process ends.

        Not said at once: a process that was stopped for long finds its copies overdue too when it goes on.
        """
        return self._engine.hangs_s() >= STUCK_AFTER_S

    def map(self, uid: int, handles: Sequence[Handle], fds: Mapping[int, int], on_mapped: OnMapped) -> None:
        """Map the memory of a registration and call ``on_mapped``, now or later, in the service's thread.

        ``uid`` is the user whose process exported it. ``fds`` are the attached descriptors by segment id; they stay the
        caller's, and open until ``on_mapped``. Raises KvoffdError, and then calls nothing, when the handles cannot be
        one registration.
        """
        host = [handle for handle in handles if isinstance(handle, MemfdHandle)]
        if len(host) == len(handles):
            on_mapped(self._map_host(host, fds))
            return
        gpu = [handle for handle in handles if not isinstance(handle, MemfdHandle)]
        if host or len({handle.gpu_uuid for handle in gpu}) > 1:
            why = "A registration names several GPUs, or memory of the host too; register each on its own."
            raise KvoffdError(why, ErrorCode.UNSUPPORTED)
        exports = [
            IpcExport(handle.handle, handle.size_bytes, uid)
            if isinstance(handle, CudaIpcHandle)
            else VmmExport([fds[segment_id] for segment_id in handle.segment_ids], handle.chunk_bytes)
            for handle in gpu
        ]
        post = self._host.post
        self.gpus.map(gpu[0].gpu_uuid, exports, lambda result: post(lambda: on_mapped(self._on_gpu(result))))

    def tick(self) -> None:
        self._engine.tick()
        self.gpus.tick()

    def stats(self, direction: Direction) -> CopyStats:
        return self._engine.stats(direction).plus(self.gpus.stats(direction))

    def _map_host(self, handles: Sequence[MemfdHandle], fds: Mapping[int, int]) -> EngineMemory:
        mapped: list[MappedSegment] = []

        def close(on_closed: Callable[[], None]) -> None:
            self._host.unmap(mapped, lambda: self._host.post(on_closed))

        with OnError(lambda: close(lambda: None)):
            for handle in handles:
                mapped.append(self._host.map_memfd(fds[handle.segment_id], handle.size_bytes))  # noqa: PERF401
        spans = [(segment.address, segment.size_bytes) for segment in mapped]
        return EngineMemory(self._engine, spans, None, close)

    def _on_gpu(self, memory: GpuMemory | KvoffdError) -> EngineMemory | KvoffdError:
        """Memory of a GPU, which that GPU's own thread unmaps."""
        if isinstance(memory, KvoffdError):
            return memory
        spans = [(segment.address, segment.size_bytes) for segment in memory.segments]
        post = self._host.post
        return EngineMemory(
            memory.engine, spans, memory.node, lambda closed: memory.close(lambda: post(closed)), on_gpu=True
        )


def open_gpus(config: Config, pool: Pool) -> Gpus:
    """The GPUs as the settings have them. The pool has been touched."""
    gpus = Gpus(
        pool.mapping.address,
        pool.pool_bytes,
        library=config.cuda_library,
        batches=config.limits.cuda_batches,
        pin_linger_s=config.limits.pin_linger_s,
    )
    if gpus.available:
        logger.info("A CUDA driver is here; GPUs are used when their engines register.")
        if config.pin_pool == "start":
            gpus.pin_pool()
    return gpus
