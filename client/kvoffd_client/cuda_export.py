"""Turns GPU tensors' addresses into handles that the daemon can map: whole allocations, each once."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from kvoffd_client.errors import KvoffdClientError
from kvoffd_proto import cuda
from kvoffd_proto.cuda import missing_descriptors

LIBRARY_VARIABLE = "KVOFFD_CUDA_LIBRARY"

_NO_HANDLE = (
    "CUDA's sharing between processes is missing in some virtual machines and sandboxes, and MIG instances of "
    "different GPUs cannot share."
)


class CudaError(cuda.CudaCallFailed, KvoffdClientError):
    """A call of the driver failed."""


class ExportDriver(cuda.CudaLibrary):
    """The driver library at a path, KVOFFD_CUDA_LIBRARY or the system's when None, as an exporter uses it.

    See CudaLibrary. Raises KvoffdClientError when it is not there, or is too old.
    """

    call_failed = CudaError
    library_missing = KvoffdClientError
    setting = LIBRARY_VARIABLE

    def __init__(self, library: str | None = None) -> None:
        super().__init__(library or os.environ.get(LIBRARY_VARIABLE) or cuda.DEFAULT_LIBRARY)
        self.init()

    def device_of(self, address: int) -> int:
        """Return the device whose memory it is. Raises CudaError where it is no device's."""
        return self.pointer_attribute(cuda.POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)

    def has_ipc_handle(self, address: int) -> bool:
        """Return whether the memory has an IPC handle. Memory of the virtual memory API has none."""
        return bool(self.pointer_attribute(cuda.POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, address))

    def is_pooled(self, address: int) -> bool:
        """Return whether the memory is of a memory pool, as cudaMallocAsync gives it out."""
        return bool(self.pointer_attribute(cuda.POINTER_ATTRIBUTE_MEMPOOL_HANDLE, address))

    def ipc_handle(self, base: int) -> bytes:
        handle = cuda.IpcMemHandle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return bytes(handle)

    def export_chunk(self, address: int) -> tuple[int, int]:
        """Export the chunk mapped at ``address``: (fd, handle types); fd is -1 where its types have no descriptors."""
        allocation = self._number("cuMemRetainAllocationHandle", address)
        try:
            properties = cuda.MemAllocationProp()
            self._call("cuMemGetAllocationPropertiesFromHandle", ctypes.byref(properties), allocation)
            types, wanted = int(properties.requestedHandleTypes), cuda.MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            if not types & wanted:
                return -1, types
            fd = self._number(
                "cuMemExportToShareableHandle", allocation, wanted, 0, written=cuda.EXPORTED_HANDLES[wanted]
            )
            return fd, types
        finally:
            self._call("cuMemRelease", allocation)

    def current_context(self) -> int:
        """Return this thread's current context; 0 for none."""
        return self._number("cuCtxGetCurrent")

    def _is_used(self, device: int) -> bool:
        flags, active = ctypes.c_uint(), ctypes.c_int()
        self._call("cuDevicePrimaryCtxGetState", device, ctypes.byref(flags), ctypes.byref(active))
        return active.value != 0

    @contextmanager
    def context(self, device: int | None = None) -> Iterator[None]:
        """Have a context of the device in this thread, which the calls need; torch made one, maybe in another thread.

        Without ``device`` it is that of any GPU that this process uses; where it uses none, there is none.
        """
        before = self.current_context()
        if device is None and not before:
            device = next(filter(self._is_used, map(self.device, range(self.device_count()))), None)
        if device is None or (before and self._number("cuCtxGetDevice") == device):
            yield
            return
        self.set_context(self.retain_context(device))
        try:
            yield
        finally:
            self.set_context(before)
            self.release_context(device)


class NotExportable(KvoffdClientError):
    """The memory cannot be handed to another process; the sentence says why and what to change."""


@dataclass(eq=False)
class GpuSegment:
    """Exported GPU memory of this process, contiguous in its addresses.

    Attributes:
        gpu_uuid: 16 bytes; a MIG instance has its own.
        chunk_bytes: sizes of its allocations, in the order of their addresses; just one for ordinary memory.
        handle: the 64-byte IPC handle of ordinary memory; None for memory of the virtual memory API.
        fds: descriptors of that memory, one a chunk, owned by this object; empty for ordinary memory.
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
        """Close the descriptors, which keep the memory allocated as long as they are open. Repeatable."""
        fds, self.fds = self.fds, ()
        for fd in fds:
            os.close(fd)


def export_segments(spans: Sequence[tuple[int, int]], driver: ExportDriver | None = None) -> list[GpuSegment]:
    """Export the allocations that ``spans``, (address, size in bytes) of tensors, lie in, each once.

    All lie on one GPU. A span of the virtual memory API may lie in many chunks; chunks that follow each other are one
    segment. The segments are in the order of their addresses; they export whole allocations, so that they may hold more
    than the spans. Raises NotExportable, and KvoffdClientError when there is no driver.
    """
    if not spans:
        return []
    driver = driver if driver is not None else ExportDriver()
    devices = set()
    with driver.context():
        for address, _ in spans:
            with _explained(f"Address {address:#x} is not memory of a GPU."):
                devices.add(driver.device_of(address))
    if len(devices) > 1:
        raise NotExportable(f"The tensors lie on {len(devices)} GPUs; register those of one GPU at a time.")
    (device,) = devices
    ordinary: dict[int, int] = {}
    chunks: dict[int, int] = {}
    with driver.context(device):
        for address, size in spans:
            with _explained("The driver does not say whether the memory can be shared."):
                found = ordinary if driver.has_ipc_handle(address) else chunks
                if found is chunks and driver.is_pooled(address):
                    raise NotExportable(
                        f"The memory at {address:#x} is of cudaMallocAsync, and such memory cannot be shared. Start "
                        "the engine without backend:cudaMallocAsync in PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF."
                    )
            end = address + size
            while address < end:
                base, length = driver.address_range(address)
                found[base] = length
                address = base + length
        uuid = driver.device_uuid(device)
        segments = []
        for base, size in ordinary.items():
            with _explained(f"The driver gives no handle for the memory at {base:#x}.", _NO_HANDLE):
                segments.append(GpuSegment(base, uuid, (size,), handle=driver.ipc_handle(base)))
        with ExitStack() as undo:
            for run in _runs(chunks):
                segments.append(_virtual_segment(driver, run, uuid))
                undo.callback(segments[-1].close)
            undo.pop_all()
    return sorted(segments, key=lambda segment: segment.address)


@contextmanager
def _explained(sentence: str, advice: str = "") -> Iterator[None]:
    """Raise what the driver refuses inside as NotExportable: the sentence, the driver's error, the advice."""
    try:
        yield
    except CudaError as error:
        sentences = (sentence, str(error), advice, missing_descriptors())
        raise NotExportable(" ".join(filter(None, sentences))) from error


def _virtual_segment(driver: ExportDriver, run: Sequence[tuple[int, int]], uuid: bytes) -> GpuSegment:
    fds: list[int] = []
    with ExitStack() as undo:
        for address, _ in run:
            with _explained(f"Chunk {len(fds)} of {len(run)} of the memory cannot be exported."):
                fd, types = driver.export_chunk(address)
            if fd < 0:
                raise NotExportable(_no_descriptor(types))
            fds.append(fd)
            undo.callback(os.close, fd)
        undo.pop_all()
    return GpuSegment(run[0][0], uuid, tuple(size for _, size in run), fds=tuple(fds))


def _no_descriptor(types: int) -> str:
    if types & cuda.MEM_HANDLE_TYPE_FABRIC:
        return (
            "The memory was made for fabric handles only, which need NVIDIA's IMEX service. Have the engine allocate "
            "it with descriptors too (vLLM's cumem allocator does so where fabric handles are not permitted, and so do "
            "torch's expandable_segments), or start it without sleep mode and without expandable_segments."
        )
    return (
        "The memory is of CUDA's virtual memory API and was not made to be shared; start the engine without "
        "expandable_segments and without sleep mode."
    )


def _runs(chunks: dict[int, int]) -> Iterator[list[tuple[int, int]]]:
    """Yield runs of chunks, (address, size), that follow each other without a gap."""
    run: list[tuple[int, int]] = []
    for address, size in sorted(chunks.items()):
        if run and run[-1][0] + run[-1][1] != address:
            yield run
            run = []
        run.append((address, size))
    if run:
        yield run
