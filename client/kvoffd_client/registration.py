"""What a worker tells the daemon about its KV memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kvoffd_client.cuda.export import GpuSegment
from kvoffd_client.memory import SharedMemory
from kvoffd_proto.handles import CudaIpcHandle, CudaVmmHandle, Handle, MemfdHandle, PageRef, TensorLayout

Memory: TypeAlias = SharedMemory | tuple[int, int] | GpuSegment


@dataclass(frozen=True)
class Registration:
    """A worker's KV tensors. The memory must outlive the client that registers it.

    Attributes:
        rank: this worker's rank, below the namespace's world_size.
        blocks_per_key: engine blocks that one key covers.
        memories: the segments: SharedMemory, or (fd, size_bytes) of a sealed memfd, which stay the caller's; or
            exported memory of one GPU, whose export the client closes when it is closed itself.
        tensors: KV tensors; ``TensorLayout.segment`` is an index into ``memories``.
        groups: per KV cache group its layers' pages, in slot order.
    """

    rank: int
    blocks_per_key: int
    memories: tuple[Memory, ...]
    tensors: tuple[TensorLayout, ...]
    groups: tuple[tuple[PageRef, ...], ...]

    def handles(self) -> tuple[list[Handle], list[int]]:
        """The segments as the wire has them, and the descriptors they name: the id of each is its index."""
        handles: list[Handle] = []
        fds: list[int] = []
        for memory in self.memories:
            first = len(fds)
            if isinstance(memory, GpuSegment):
                if memory.handle is not None:
                    handles.append(CudaIpcHandle(memory.handle, memory.size_bytes, memory.gpu_uuid))
                    continue
                fds += memory.fds
                ids = list(range(first, len(fds)))
                handles.append(CudaVmmHandle(ids, list(memory.chunk_bytes), memory.gpu_uuid))
            else:
                fd, size_bytes = (memory.fd, memory.size_bytes) if isinstance(memory, SharedMemory) else memory
                fds.append(fd)
                handles.append(MemfdHandle(first, size_bytes))
        return handles, fds

    def close_exports(self) -> None:
        """Close the descriptors of exported GPU memory, which keep it allocated."""
        for memory in self.memories:
            if isinstance(memory, GpuSegment):
                memory.close()

    @property
    def on_gpu(self) -> bool:
        """The memory is a GPU's."""
        return any(isinstance(memory, GpuSegment) for memory in self.memories)
