"""Maps engines' memory on a GPU from handles. For the GPU's control thread."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from kvoffd.errors import KvoffdError, OutOfBounds
from kvoffd_proto import cuda
from kvoffd_proto.cuda import Cuda, CudaError, missing_descriptors, wsl_hint
from kvoffd_proto.errors import ErrorCode

# GPU addresses have at most 57 bits; a larger size is an attempt to cause an overflow.
_MAX_SEGMENT_BYTES = 1 << 56

_ADVICE = {
    cuda.ERROR_INVALID_VALUE: (
        "This GPU cannot map the memory of the handle; it may be of another driver, container runtime or GPU, or only "
        "one of engine and daemon is a client of MPS."
    ),
    cuda.ERROR_MAP_FAILED: (
        "The driver cannot map the memory: container runtimes that split GPUs between containers forbid that."
    ),
    cuda.ERROR_PEER_ACCESS_UNSUPPORTED: (
        "The memory is on another GPU, which this one cannot access; the engine must export memory of its own GPU."
    ),
    cuda.ERROR_INVALID_HANDLE: "The handle is stale: the engine has freed the memory, or has ended.",
    cuda.ERROR_TOO_MANY_PEERS: "The GPU's limit of peers is reached.",
    cuda.ERROR_NOT_SUPPORTED: ("CUDA IPC does not work on this machine, as in some virtual machines and sandboxes."),
}


class UnmappableHandle(KvoffdError):
    """The driver does not map the engine's memory; the sentence says why, if known."""

    code = ErrorCode.UNSUPPORTED


@dataclass(frozen=True)
class IpcExport:
    """An ordinary allocation of an engine, see CudaIpcHandle; ``uid`` is the engine's user, if known."""

    handle: bytes
    size_bytes: int
    uid: int | None = None


@dataclass(frozen=True)
class VmmExport:
    """Memory of the virtual memory API, see CudaVmmHandle. Its descriptors stay the caller's."""

    fds: Sequence[int]
    chunk_bytes: Sequence[int]


@dataclass(eq=False)
class GpuMapping:
    """``size_bytes`` of engine memory, mapped at ``address``."""

    address: int
    size_bytes: int
    _undo: ExitStack

    def close(self) -> None:
        """Unmap the memory, so that it is freed when the engine is gone. Idempotent. No copy of it may be running.

        Raises CudaError if a part could not be unmapped; the other parts are.
        """
        self._undo.close()


class OpenHandles:
    """Maps the memory that engines export, on one device, each IPC handle once at a time.

    The driver maps a handle once and returns the same address when it is opened again. Memory that is freed and
    allocated again can get the same handle, so an open handle may be of the wrong memory. Therefore a second
    registration is refused until the first has released the handle.
    """

    def __init__(self, driver: Cuda, device: int) -> None:
        self._driver = driver
        self._device = device
        self._open: dict[bytes, int] = {}
        """Addresses by handle."""
        self._unclosed: set[bytes] = set()
        """Released handles that the driver failed to close."""

    def open(self, exports: Sequence[IpcExport | VmmExport]) -> list[GpuMapping]:
        """Map all segments of a registration, or none.

        Raises UnmappableHandle; OutOfBounds if an allocation is smaller than declared; KvoffdError if a handle is still
        open.
        """
        with ExitStack() as undo:
            segments = []
            for export in exports:
                segment = self._open_ipc(export) if isinstance(export, IpcExport) else self._import(export)
                undo.callback(segment.close)
                segments.append(segment)
            undo.pop_all()
        return segments

    def _open_ipc(self, export: IpcExport) -> GpuMapping:
        handle = export.handle
        try:
            if handle in self._unclosed:
                self._close(handle)  # while it is open the driver returns the old mapping
            if handle in self._open:
                raise KvoffdError(
                    "The memory is mapped already; use it once, and unregister the other registration that has it, or "
                    "end its session.",
                    ErrorCode.TOO_MANY,
                )
            address = self._open[handle] = self._driver.open_ipc(handle)
        except CudaError as error:
            raise _unmappable(error, export.uid) from error
        with ExitStack() as undo:
            undo.callback(self._close, handle)
            size = self._driver.import_size(address)
            if export.size_bytes > size:
                raise OutOfBounds(f"The allocation has {size} bytes but was declared with {export.size_bytes}.")
            mapped = undo.pop_all()
        return GpuMapping(address, export.size_bytes, mapped)

    def _close(self, handle: bytes) -> None:
        self._unclosed.add(handle)
        self._driver.close_ipc(self._open[handle])
        del self._open[handle]
        self._unclosed.remove(handle)

    def _import(self, export: VmmExport) -> GpuMapping:
        driver, total = self._driver, sum(export.chunk_bytes)
        if len(export.fds) != len(export.chunk_bytes) or not 0 < total <= _MAX_SEGMENT_BYTES:
            raise UnmappableHandle(
                f"The engine sent {len(export.fds)} descriptors for {len(export.chunk_bytes)} chunks of {total} bytes."
            )
        with ExitStack() as undo:
            try:
                start = address = driver.reserve(total)
                undo.callback(driver.free_reservation, start, total)
                for fd, size in zip(export.fds, export.chunk_bytes, strict=True):
                    allocation = driver.import_descriptor(fd)
                    try:
                        driver.map(address, size, allocation)
                        undo.callback(driver.unmap, address, size)
                    finally:
                        driver.release(allocation)  # the mapping keeps it
                    address += size
                driver.allow_access(start, total, self._device)
            except CudaError as error:
                raise _unmappable(error) from error
            mapped = undo.pop_all()
        return GpuMapping(start, total, mapped)


def _unmappable(error: CudaError, uid: int | None = None) -> UnmappableHandle:
    users, advice = "", _ADVICE.get(error.status, "The engine may have ended; otherwise see the driver's log (dmesg).")
    if error.call == "cuIpcOpenMemHandle_v2" and error.status == cuda.ERROR_INVALID_CONTEXT:
        advice = (
            f"Most likely engine and daemon have the same process id ({os.getpid()}) in two pid namespaces, so CUDA "
            "takes them for one process: run the daemon under an init or with hostPID."
        )
    if uid is not None and uid != os.geteuid():
        # A rule of NVIDIA's kernel module (osValidateClientTokens); it is not documented whether libcuda lifts it.
        users = (
            f"The engine runs as user {uid} and the daemon as {os.geteuid()}; the driver may share ordinary memory "
            "only between processes of one user: run both as one user."
        )
    sentences = "The engine's GPU memory cannot be mapped.", error.message, users, advice
    return UnmappableHandle(" ".join(filter(None, (*sentences, wsl_hint(), missing_descriptors()))))
