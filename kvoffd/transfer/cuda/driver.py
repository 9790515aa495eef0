"""The calls of the CUDA driver that the daemon makes: it maps engines' memory, pins the pool and copies."""

from __future__ import annotations

import ctypes
import logging
from functools import partialmethod
from typing import NamedTuple

from kvoffd.errors import KvoffdError
from kvoffd_proto import cuda
from kvoffd_proto.errors import ErrorCode

_log = logging.getLogger(__name__)

_ADVICE = {
    ("cuDevicePrimaryCtxRetain", cuda.ERROR_OUT_OF_MEMORY): (
        "The GPU has no memory left for the daemon, which needs some hundred MiB: start engines with a lower "
        "gpu_memory_utilization, or the daemon before them."
    )
}


class CudaError(cuda.CudaCallFailed, KvoffdError):
    """A call of the driver failed."""

    code = ErrorCode.COPY_FAILED


class CudaMissing(KvoffdError):
    """There is no CUDA driver here, or it is too old."""

    code = ErrorCode.UNSUPPORTED


class CudaDriver(cuda.CudaLibrary):
    """The driver library at a path, the system's when it is empty, as the daemon uses it. See CudaLibrary.

    Args:
        batches: whether ``batch_copy`` looks for the call at all.

    Attributes:
        lost: why this process must end, as a call has found first; else None. See ``cuda.RELAUNCH_ERRORS``.
    """

    call_failed = CudaError
    library_missing = CudaMissing
    setting = "cuda_library"

    def __init__(self, library: str = "", *, batches: bool = True) -> None:
        super().__init__(library or cuda.DEFAULT_LIBRARY)
        self.lost: CudaError | None = None
        self._batches = batches

    def error(self, call: str, status: int, advice: str = "") -> CudaError:
        error = super().error(call, status, advice or _ADVICE.get((call, status), ""))
        assert isinstance(error, CudaError)
        if status in cuda.RELAUNCH_ERRORS:
            self.lose(error)
        return error

    def lose(self, error: CudaError) -> None:
        """Take note that a context is lost, and this process's use of the GPUs with it. From any thread."""
        if self.lost is None:
            self.lost = error

    def whole_uuid(self, device: int) -> bytes:
        """Return 16 bytes: the UUID of the whole GPU, also where the device is a MIG instance of it.

        Drivers that do not tell any more give the device's own.
        """
        call = "cuDeviceGetUuid"
        return self.device_uuid(device, call) if hasattr(self._library, call) else self.device_uuid(device)

    def leave_context(self, device: int) -> None:
        """Have no context in this thread, and give one ``retain_context`` back. What fails is logged."""
        for call, argument in ((self.set_context, 0), (self.release_context, device)):
            try:
                call(argument)
            except CudaError as error:  # as where the context is lost
                _log.warning("A context of GPU %d could not be given back: %s", device, error.message)

    def pci_bus_id(self, device: int) -> str:
        """Return ``domain:bus:device.function``, as in sysfs but in upper case."""
        return self._text("cuDeviceGetPCIBusId", device)

    def create_stream(self, *, urgent: bool) -> int:
        """Return a stream that waits for no other: of the highest priority if ``urgent``, else of the lowest."""
        least, greatest = ctypes.c_int(), ctypes.c_int()
        self._call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
        priority = greatest.value if urgent else least.value
        return self._number("cuStreamCreateWithPriority", cuda.STREAM_NON_BLOCKING, priority)

    destroy_event = partialmethod(cuda.CudaLibrary._call, "cuEventDestroy_v2")

    def create_event(self) -> int:
        """Return an event whose waiter sleeps."""
        flags = cuda.EVENT_BLOCKING_SYNC | cuda.EVENT_DISABLE_TIMING
        return self._number("cuEventCreate", flags)

    def copy_calls(self, batch: BatchCopy | None) -> CopyCalls:
        """Return the functions that the copy loop in C calls."""
        calls = CopyCalls(
            **{field: ctypes.cast(getattr(self._library, name), ctypes.c_void_p) for field, name in _COPY_CALLS.items()}
        )
        if batch is not None:
            calls.batch, calls.attributes = batch.function, ctypes.addressof(_BATCH_ATTRIBUTES)
            calls.has_fail_index = batch.form == min(cuda.BATCH_FORMS)
        return calls

    def has_host_addresses(self) -> bool:
        """Return whether the current context's GPU has registered host memory at the addresses that this process has.

        Where not (Windows' subsystem for Linux, some virtual GPUs), only single copies translate them: a batch would
        lose the context (sgl-project/sglang#40232).
        """
        attribute = cuda.DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        device = self._number("cuCtxGetDevice")
        return bool(self._number("cuDeviceGetAttribute", attribute, device))

    def batch_copy(self) -> BatchCopy | None:
        """Return the call for many copies at once; None where it may not be used, or the driver has none.

        Drivers have it from CUDA 12.8 on. See also ``has_host_addresses``.
        """
        version = self.version()
        # Asked for a newer version than its own, a driver may answer with the older call, which takes other arguments.
        if not self._batches or version < min(cuda.BATCH_FORMS) or not self.has_host_addresses():
            return None
        form = max(known for known in cuda.BATCH_FORMS if known <= version)
        function, status = ctypes.c_void_p(), ctypes.c_uint()
        error = self._library.cuGetProcAddress_v2(
            cuda.BATCH_SYMBOL.encode(),
            ctypes.byref(function),
            form,
            cuda.GET_PROC_ADDRESS_DEFAULT,
            ctypes.byref(status),
        )
        if error or not function.value:
            return None
        return BatchCopy(function.value, form)

    def register_host(self, address: int, size: int) -> None:
        self._call("cuMemHostRegister_v2", address, size, cuda.MEMHOSTREGISTER_PORTABLE)

    unregister_host = partialmethod(cuda.CudaLibrary._call, "cuMemHostUnregister")

    def open_ipc(self, handle: bytes) -> int:
        """Map another process's allocation; return its address here."""
        copied = cuda.IpcMemHandle.from_buffer_copy(handle)
        return self._number("cuIpcOpenMemHandle_v2", copied, cuda.IPC_MEM_LAZY_ENABLE_PEER_ACCESS)

    def import_size(self, address: int) -> int:
        """Return how many bytes of an opened allocation begin at ``address``."""
        try:
            base, size = self.address_range(address)
        except CudaError:
            # cuda.h promises the range of the process's own allocations only; the attributes are of any address.
            base = self.pointer_attribute(cuda.POINTER_ATTRIBUTE_RANGE_START_ADDR, address)
            size = self.pointer_attribute(cuda.POINTER_ATTRIBUTE_RANGE_SIZE, address)
        return base + size - address

    close_ipc = partialmethod(cuda.CudaLibrary._call, "cuIpcCloseMemHandle")

    def reserve(self, size: int) -> int:
        """Return the beginning of ``size`` bytes of addresses, with nothing mapped."""
        return self._number("cuMemAddressReserve", size, 0, 0, 0)

    free_reservation = partialmethod(cuda.CudaLibrary._call, "cuMemAddressFree")

    def import_descriptor(self, fd: int) -> int:
        """Return an allocation made of a descriptor, which stays the caller's. To be released."""
        kind = cuda.MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return self._number("cuMemImportFromShareableHandle", fd, kind)

    release = partialmethod(cuda.CudaLibrary._call, "cuMemRelease")
    """Release an imported allocation; a mapping keeps it allocated."""

    def map(self, address: int, size: int, allocation: int) -> None:
        self._call("cuMemMap", address, size, 0, allocation, 0)

    unmap = partialmethod(cuda.CudaLibrary._call, "cuMemUnmap")

    def allow_access(self, address: int, size: int, device: int) -> None:
        location = cuda.MemLocation(cuda.MEM_LOCATION_TYPE_DEVICE, device)
        description = cuda.MemAccessDesc(location, cuda.MEM_ACCESS_FLAGS_PROT_READWRITE)
        self._call("cuMemSetAccess", address, size, ctypes.byref(description), 1)


_COPY_CALLS = {
    "copy": "cuMemcpyAsync",
    "record": "cuEventRecord",
    "wait": "cuEventSynchronize",
    "sync": "cuStreamSynchronize",
}


class CopyCalls(ctypes.Structure):
    """The first members of ``struct gpu_copying`` of gpu_copy.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("copy", "batch", "record", "wait", "sync", "attributes")),
        ("has_fail_index", ctypes.c_uint64),
    )


class BatchCopy(NamedTuple):
    """``cuMemcpyBatchAsync`` of a driver: its address, and which of its forms that is; see ``cuda.BATCH_FORMS``.

    The copies of one batch run in any order, the batch itself in the stream's.
    """

    function: int
    form: int


# Of all copies of every batch.
_BATCH_ATTRIBUTES = cuda.MemcpyAttributes(
    srcAccessOrder=cuda.MEMCPY_SRC_ACCESS_ORDER_STREAM, flags=cuda.MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
)
