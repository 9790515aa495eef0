"""Exports GPU tensors' memory as handles that the daemon can map: whole allocations, each once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from kvoffd_client.errors import KvoffdClientError
from kvoffd_proto import cuda
from kvoffd_proto.cuda import Cuda, CudaError, missing_descriptors, wsl_hint

_NO_HANDLE = (
    "CUDA cannot share memory between processes in some virtual machines and sandboxes, nor between MIG instances of "
    "different GPUs."
)


class NotExportable(KvoffdClientError):
    """The memory cannot be shared with another process. The message says why and what to change."""


@dataclass(eq=False)
class GpuSegment:
    """Exported GPU memory of this process, contiguous in its addresses.

    Attributes:
        gpu_uuid: 16 bytes; a MIG instance has its own.
        chunk_bytes: sizes of its allocations by address; one for ordinary memory.
        handle: the 64-byte IPC handle of ordinary memory; None for memory of the virtual memory API.
        fds: descriptors of that memory, one per chunk, owned by this object; empty for ordinary memory.
    """

    address: int
    gpu_uuid: bytes
    chunk_bytes: tuple[int, ...]
    handle: bytes | None = None
    fds: tuple[int, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(self.chunk_bytes)

    def close(self) -> None:
        """Close the descriptors, which keep the memory allocated while open. Repeatable."""
        fds, self.fds = self.fds, ()
        for fd in fds:
            os.close(fd)


def export_segments(spans: Sequence[tuple[int, int]], driver: Cuda | None = None) -> list[GpuSegment]:
    """Export the allocations that contain ``spans``, each once. A span is (address, size in bytes) of a tensor.

    All spans must be on one GPU. A span of the virtual memory API may cover many chunks; adjacent chunks are one
    segment. Segments are whole allocations, sorted by address. Raises NotExportable, also if there is no driver.
    """
    if not spans:
        return []
    with _explained("The engine's GPU memory cannot be shared."):
        driver = driver if driver is not None else Cuda()
        driver.init()
        gpus = set()
        with driver.context():
            for address, _ in spans:
                with _explained(f"Address {address:#x} is not GPU memory."):
                    gpus.add(driver.pointer_attribute(cuda.POINTER_ATTRIBUTE_DEVICE_ORDINAL, address))
        if len(gpus) > 1:
            raise NotExportable(f"The tensors are on {len(gpus)} GPUs; register those of one GPU at a time.")
        gpu = gpus.pop()
        with driver.context(gpu):
            return _export(driver, spans, driver.device_uuid(gpu))


def _export(driver: Cuda, spans: Sequence[tuple[int, int]], uuid: bytes) -> list[GpuSegment]:
    ordinary: dict[int, int] = {}
    """Sizes of ordinary allocations by address."""
    chunks: dict[int, int] = {}
    """The same of the virtual memory API's."""
    for address, size in spans:
        # Memory of the virtual memory API has no IPC handle.
        has_handle = driver.pointer_attribute(cuda.POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, address)
        if not has_handle and driver.pointer_attribute(cuda.POINTER_ATTRIBUTE_MEMPOOL_HANDLE, address):
            raise NotExportable(
                f"The memory at {address:#x} was allocated by cudaMallocAsync and cannot be shared. Start the engine "
                "without backend:cudaMallocAsync in PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF."
            )
        end = address + size
        while address < end:
            base, length = driver.address_range(address)
            (ordinary if has_handle else chunks)[base] = length
            address = base + length
    segments = []
    for base, size in ordinary.items():
        with _explained(f"The driver cannot export the memory at {base:#x}.", _NO_HANDLE):
            segments.append(GpuSegment(base, uuid, (size,), handle=driver.ipc_handle(base)))
    with ExitStack() as undo:
        for run in _runs(chunks):
            fds: list[int] = []
            for address, _ in run:
                with _explained(f"Chunk {len(fds)} of {len(run)} of the memory cannot be exported."):
                    fd, types = driver.export_chunk(address)
                if fd < 0:
                    raise NotExportable(_no_descriptor(types))
                fds.append(fd)
                undo.callback(os.close, fd)
            segments.append(GpuSegment(run[0][0], uuid, tuple(size for _, size in run), fds=tuple(fds)))
        undo.pop_all()
    return sorted(segments, key=lambda segment: segment.address)


@contextmanager
def _explained(sentence: str, advice: str = "") -> Iterator[None]:
    """Raise CudaError from the block as NotExportable: the sentence, the driver's error, the advice."""
    try:
        yield
    except CudaError as error:
        sentences = (sentence, str(error), advice, wsl_hint(), missing_descriptors())
        raise NotExportable(" ".join(filter(None, sentences))) from error


def _no_descriptor(types: int) -> str:
    if types & cuda.MEM_HANDLE_TYPE_FABRIC:
        return (
            "The memory has fabric handles only, which need NVIDIA's IMEX service. Have the engine allocate it with "
            "descriptors too (as vLLM's cumem allocator does if fabric handles are not permitted, and torch's "
            "expandable_segments), or start it without sleep mode and without expandable_segments."
        )
    return (
        "The memory was allocated by CUDA's virtual memory API without sharing; start the engine without "
        "expandable_segments and without sleep mode."
    )


def _runs(chunks: dict[int, int]) -> Iterator[list[tuple[int, int]]]:
    """Yield runs of adjacent chunks, (address, size)."""
    run: list[tuple[int, int]] = []
    for address, size in sorted(chunks.items()):
        if run and run[-1][0] + run[-1][1] != address:
            yield run
            run = []
        run.append((address, size))
    if run:
        yield run
