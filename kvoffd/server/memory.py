"""A worker's KV memory as the daemon has mapped it, whatever it is made of."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvoffd.config import Config
from kvoffd.errors import BadGeometry, KvoffdError
from kvoffd.pool.pool import Pool
from kvoffd.server.host import Host
from kvoffd.system.mappings import MappedSegment
from kvoffd.transfer.cuda.gpus import GpuMemory, Gpus
from kvoffd.transfer.cuda.handles import IpcExport, VmmExport
from kvoffd.transfer.cuda.pinning import PinProgress
from kvoffd.transfer.engine import DirectionLoad, TransferEngine
from kvoffd.transfer.plan import Direction
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import CudaIpcHandle, CudaVmmHandle, Handle, MemfdHandle

logger = logging.getLogger(__name__)

STUCK_AFTER_S = 3.0

Post: TypeAlias = Callable[[Callable[[], None]], None]
"""Has the service's thread call something soon; from any thread."""


@dataclass(frozen=True)
class EngineMemory:
    """Mapped segments of one registration, and the engine that copies to and from them."""

    engine: TransferEngine
    spans: list[tuple[int, int]]
    """(address, size in bytes) of each segment, in the order of the handles."""
    node: int | None
    """The NUMA node that slots for it should lie on; None where it does not matter or is not known."""
    close: Callable[[Callable[[], None]], None]
    """Unmaps it, then has its argument called in the service's thread. No copy of it may be running. Once."""
    segments: Sequence[MappedSegment] = ()
    """The mappings of memory of the host."""
    descriptors: int = 0
    """Open for these."""


OnMapped: TypeAlias = Callable[[EngineMemory | KvoffdError], None]


@dataclass(frozen=True)
class MemoryMapper:
    """Maps what clients register, and knows the engine that copies each kind of memory."""

    _engine: TransferEngine
    """Copies between memfds and the pool."""
    _process: Host
    _gpus: Gpus

    @property
    def kinds(self) -> list[str]:
        """Kinds of handles that can be mapped, as Welcome names them."""
        return ["memfd", "cuda_ipc", "cuda_vmm"] if self._gpus.available else ["memfd"]

    @property
    def stuck(self) -> bool:
        """A copy in host memory hangs: engines wait for it, and for all behind it, until this process ends.

        Not said at once: a process that was stopped for long finds its copies overdue too when it goes on.
        """
        return any(self._engine.hangs_s(direction) >= STUCK_AFTER_S for direction in Direction)

    @property
    def lost(self) -> str | None:
        """Why GPUs can be used again only when this process has ended; else None."""
        return self._gpus.lost

    @property
    def problems(self) -> list[str]:
        return self._gpus.problems

    def map(
        self, owner: bytes, uid: int, handles: Sequence[Handle], fds: Mapping[int, int], on_mapped: OnMapped
    ) -> None:
        """Map the memory of registration ``owner`` and call ``on_mapped``, now or later, in the service's thread.

        ``uid`` is the user whose process exported it. ``fds`` are the attached descriptors by segment id; they stay the
        caller's, and open until ``on_mapped``. Raises KvoffdError, and then calls nothing, when the handles cannot be
        one registration.
        """
        if all(isinstance(handle, MemfdHandle) for handle in handles):
            on_mapped(self._map_host(handles, fds))
        else:
            uuid, exports = _exports(handles, fds, uid)
            post = self._process.post
            self._gpus.map(uuid, owner, exports, lambda result: post(lambda: on_mapped(self._on_gpu(result))))

    def expire(self) -> None:
        self._engine.expire()
        self._gpus.expire()

    def load_of(self, direction: Direction) -> DirectionLoad:
        return self._engine.load_of(direction).plus(self._gpus.load_of(direction))

    @property
    def pinning(self) -> PinProgress:
        return self._gpus.pinning

    def _map_host(self, handles: Sequence[Handle], fds: Mapping[int, int]) -> EngineMemory:
        mapped: list[MappedSegment] = []

        def close(on_closed: Callable[[], None]) -> None:
            self._process.unmap(mapped, lambda: self._process.post(on_closed))

        try:
            for handle in handles:
                assert isinstance(handle, MemfdHandle)
                mapped.append(self._process.map_memfd(fds[handle.segment_id], handle.size_bytes))
        except BaseException:
            close(lambda: None)
            raise
        spans = [(segment.address, segment.size_bytes) for segment in mapped]
        return EngineMemory(self._engine, spans, None, close, mapped, sum(one.descriptors for one in mapped))

    def _on_gpu(self, memory: GpuMemory | KvoffdError) -> EngineMemory | KvoffdError:
        """Memory of a GPU, which that GPU's own thread unmaps."""
        if isinstance(memory, KvoffdError):
            return memory
        spans = [(segment.address, segment.size_bytes) for segment in memory.segments]
        post = self._process.post
        return EngineMemory(memory.engine, spans, memory.node, lambda closed: memory.close(lambda: post(closed)))


def open_gpus(config: Config, pool: Pool) -> Gpus:
    """The GPUs as the settings have them. The pool has been touched."""
    gpus = Gpus(
        pool.address,
        pool.pool_bytes,
        library=config.cuda_library,
        batches=config.limits.cuda_batches,
        gather=config.limits.cuda_gather,
        pin_linger_s=config.limits.pin_linger_s,
    )
    if gpus.available:
        logger.info("A CUDA driver is here; GPUs are used when their engines register.")
        if config.pin_pool == "start":
            gpus.pin_pool()
    return gpus


def segment_ids(handles: Sequence[Handle]) -> list[int]:
    """The attached segments that handles name, in their order. Raises BadGeometry when one is named twice."""
    ids: list[int] = []
    for handle in handles:
        if isinstance(handle, MemfdHandle):
            ids.append(handle.segment_id)
        elif isinstance(handle, CudaVmmHandle):
            ids += handle.segment_ids
    if len(set(ids)) < len(ids):
        raise BadGeometry("A segment is named twice; name it once and let tensors share it.")
    return ids


def _exports(handles: Sequence[Handle], fds: Mapping[int, int], uid: int) -> tuple[bytes, list[IpcExport | VmmExport]]:
    exports: list[IpcExport | VmmExport] = []
    uuids: set[bytes] = set()
    for handle in handles:
        if isinstance(handle, MemfdHandle):
            raise KvoffdError(
                "A registration names memory of the host and of a GPU; register each on its own.", ErrorCode.UNSUPPORTED
            )
        uuids.add(handle.gpu_uuid)
        if isinstance(handle, CudaIpcHandle):
            exports.append(IpcExport(handle.handle, handle.size_bytes, uid))
        else:
            exports.append(VmmExport([fds[segment_id] for segment_id in handle.segment_ids], handle.chunk_bytes))
    if len(uuids) > 1:
        raise KvoffdError("A registration names several GPUs; register each on its own.", ErrorCode.UNSUPPORTED)
    return uuids.pop(), exports
