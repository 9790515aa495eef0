"""Memory that a client shares with the daemon, and the registration that describes a worker's KV tensors in it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffd_client.cuda_export import GpuSegment
from kvoffd_client.session import Closing
from kvoffd_proto.messages import CudaIpcHandle, CudaVmmHandle, Handle, MemfdHandle, PageRef, TensorLayout

MADV_POPULATE_WRITE = 23  # include/uapi/asm-generic/mman-common.h, Linux 5.14; not in Python's mmap
PAGE_BYTES = 4096


class SharedMemory(Closing):
    """A sealed memfd and this process's mapping of it, initially zero.

    It is resident from the start: the kernel charges a page to the cgroup that touches it first, which must not be the
    daemon's, and copies into absent pages run at a tenth of the speed. /proc/<pid>/fd shows its name.

    Attributes:
        fd: the descriptor, close-on-exec; owned by this object.
        size_bytes: size of file and mapping.
        view: uint8 array [size_bytes] over the mapping.

    Raises:
        ValueError: size_bytes is not positive.
        OSError: the kernel refuses the memory.
    """

    def __init__(self, size_bytes: int, name: str = "kvoffd-client") -> None:
        if isinstance(size_bytes, bool) or size_bytes < 1:
            raise ValueError(f"Shared memory needs at least one byte, not {size_bytes}.")
        self.size_bytes = size_bytes
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size_bytes)
            # The daemon maps it too and requires the seal: a shrunk file would kill it with SIGBUS.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._map = mmap.mmap(self.fd, size_bytes)
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE)
            _make_resident(self._map, size_bytes)
        except BaseException:
            os.close(self.fd)
            self.fd = -1  # else __del__ would close the number again, which may be reused by then
            raise
        self.view: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)

    def close(self) -> None:
        """Close the descriptor and unmap, at the latest with the last array made from ``view``. Repeatable."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self.view = np.empty(0, dtype=np.uint8)
        with contextlib.suppress(BufferError):  # arrays of the caller's keep the mapping
            self._map.close()

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            os.close(self.fd)
            self.fd = -1


def _make_resident(mapping: mmap.mmap, size_bytes: int) -> None:
    try:
        mapping.madvise(MADV_POPULATE_WRITE)
    except OSError as error:
        # Linux before 5.14, and seccomp filters, as the daemon's pool meets them.
        if error.errno not in (errno.EINVAL, errno.EPERM, errno.ENOSYS):
            raise
        np.frombuffer(mapping, dtype=np.uint8)[:size_bytes:PAGE_BYTES] = 0


Memory: TypeAlias = SharedMemory | tuple[int, int] | GpuSegment


@dataclass(frozen=True)
class Registration:
    """A worker's KV tensors. The memory must outlive the client that registers it.

    Attributes:
        rank: this worker's rank, below the namespace's world_size.
        blocks_per_key: engine blocks that one key covers.
        memories: segments: SharedMemory or (fd, size_bytes) of a sealed memfd, both owned by the caller; or exported
            GPU memory, whose descriptors the client closes at its end.
        tensors: KV tensors; ``TensorLayout.segment`` is an index into ``memories``.
        groups: for each KV cache group its layers' pages, in slot order.
    """

    rank: int
    blocks_per_key: int
    memories: tuple[Memory, ...]
    tensors: tuple[TensorLayout, ...]
    groups: tuple[tuple[PageRef, ...], ...]

    @classmethod
    def flat(cls, rank: int, memory: Memory, layers: int, blocks: int, page_bytes: int) -> Registration:
        """Return the registration of one group of ``layers`` x ``blocks`` pages, in this order."""
        tensors = tuple(TensorLayout(0, layer * blocks * page_bytes, page_bytes, blocks) for layer in range(layers))
        return cls(rank, 1, (memory,), tensors, (tuple(PageRef(layer, page_bytes) for layer in range(layers)),))

    def handles(self) -> tuple[list[Handle], list[int]]:
        """Return the segments for Register, and the descriptors to attach; a descriptor's id is its index."""
        handles: list[Handle] = []
        fds: list[int] = []
        for memory in self.memories:
            first = len(fds)
            if isinstance(memory, GpuSegment):
                fds += memory.fds
                if memory.handle is not None:
                    handles.append(CudaIpcHandle(memory.handle, memory.size_bytes, memory.gpu_uuid))
                else:
                    ids = list(range(first, len(fds)))
                    handles.append(CudaVmmHandle(ids, list(memory.chunk_bytes), memory.gpu_uuid))
            else:
                fd, size_bytes = (memory.fd, memory.size_bytes) if isinstance(memory, SharedMemory) else memory
                fds.append(fd)
                handles.append(MemfdHandle(first, size_bytes))
        return handles, fds

    @property
    def on_gpu(self) -> bool:
        return any(isinstance(memory, GpuSegment) for memory in self.memories)
