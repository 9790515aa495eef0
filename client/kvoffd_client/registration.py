"""What a worker tells the daemon about its KV memory."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffd_client.memory import SharedMemory
from kvoffd_proto.handles import PageRef, TensorLayout


@dataclass(frozen=True)
class Registration:
    """A worker's KV tensors. The memory must outlive the client that registers it.

    Attributes:
        rank: this worker's rank, below the namespace's world_size.
        blocks_per_key: engine blocks that one key covers.
        memories: the segments: SharedMemory, or (fd, size_bytes) of a sealed memfd that stays the caller's.
        tensors: KV tensors; ``TensorLayout.segment`` is an index into ``memories``.
        groups: per KV cache group its layers' pages, in slot order.
    """

    rank: int
    blocks_per_key: int
    memories: tuple[SharedMemory | tuple[int, int], ...]
    tensors: tuple[TensorLayout, ...]
    groups: tuple[tuple[PageRef, ...], ...]

    def descriptors(self) -> list[tuple[int, int]]:
        """(fd, size_bytes) of every segment."""
        return [(item.fd, item.size_bytes) if isinstance(item, SharedMemory) else item for item in self.memories]
