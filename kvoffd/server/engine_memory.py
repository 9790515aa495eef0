"""Maps the KV memory that workers register, on the host or a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kvoffd.config import Config
from kvoffd.errors import KvoffdError
from kvoffd.pool.pool import Pool
from kvoffd.server.host import Host
from kvoffd.system.files import OnError
from kvoffd.system.mappings import HostMapping
from kvoffd.transfer.cuda.gpus import Gpus
from kvoffd.transfer.cuda.mappings import IpcExport, VmmExport
from kvoffd.transfer.engine import CopyEngine, EngineMemory, OnMapped, WorkByDirection
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import CudaIpcHandle, Handle, MemfdHandle

logger = logging.getLogger(__name__)

STUCK_AFTER_S = 3.0


class MemoryMapper:
    """Maps the memory that clients register, and chooses the copy engine for it.

    The memory that it gives out, once closed, calls back in the service's thread.
    """

    def __init__(self, engine: CopyEngine, host: Host, gpus: Gpus) -> None:
        self._engine = engine
        """The engine for memfds."""
        self._host = host
        self.gpus = gpus

    @property
    def copy_hangs(self) -> bool:
        """Whether a copy in host memory hangs: engines wait for it, and for all queued copies, until the process ends.

        STUCK_AFTER_S excludes a process that was stopped, whose copies are overdue too when it continues.
        """
        return self._engine.hangs_s() >= STUCK_AFTER_S

    def map(self, uid: int, handles: Sequence[Handle], fds: Mapping[int, int], on_mapped: OnMapped) -> None:
        """Map the memory of a registration and call ``on_mapped``, now or later, in the service's thread.

        ``uid`` is the user whose process exported it. ``fds`` are the attached descriptors by segment id; the caller
        closes them after ``on_mapped``. Raises KvoffdError, without calling it, if the handles cannot be one
        registration.
        """
        host = [handle for handle in handles if isinstance(handle, MemfdHandle)]
        if len(host) == len(handles):
            on_mapped(self._map_host(host, fds))
            return
        gpu = [handle for handle in handles if not isinstance(handle, MemfdHandle)]
        if host or len({handle.gpu_uuid for handle in gpu}) > 1:
            why = "A registration has memory of several GPUs, or of a GPU and the host; register each separately."
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

    def _map_host(self, handles: Sequence[MemfdHandle], fds: Mapping[int, int]) -> EngineMemory:
        mapped: list[HostMapping] = []

        def close(on_closed: Callable[[], None]) -> None:
            self._host.unmap(mapped, lambda: self._host.post(on_closed))

        with OnError(lambda: close(lambda: None)):
            for handle in handles:
                mapped.append(self._host.map_memfd(fds[handle.segment_id], handle.size_bytes))  # noqa: PERF401
        spans = [(segment.address, segment.size_bytes) for segment in mapped]
        return EngineMemory(self._engine, spans, None, close)

    def _on_gpu(self, memory: EngineMemory | KvoffdError) -> EngineMemory | KvoffdError:
        if isinstance(memory, KvoffdError):
            return memory
        close, post = memory.close, self._host.post
        return replace(memory, close=lambda closed: close(lambda: post(closed)))


def open_gpus(config: Config, pool: Pool, work: WorkByDirection) -> Gpus:
    """Return the GPUs, by the settings. The pool must be touched."""
    gpus = Gpus(
        pool.mapping.address,
        pool.pool_bytes,
        work,
        library=config.cuda_library,
        pin_linger_s=config.limits.pin_linger_s,
    )
    if gpus.available:
        logger.info("Found a CUDA driver; GPUs are used when their engines register.")
        if config.pin_pool == "start":
            gpus.pin_pool()
    return gpus
