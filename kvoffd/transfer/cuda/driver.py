"""The few calls of the CUDA driver that the daemon makes, by ctypes. Every call lets go of the GIL.

Prototypes and constants are those of ``cuda.h`` (NVIDIA's CUDA driver API, 12.0 to 13.x).
"""

from __future__ import annotations

import ctypes

from kvoffd.errors import KvoffdError
from kvoffd_proto.errors import ErrorCode

DEFAULT_LIBRARY = "libcuda.so.1"

IPC_HANDLE_BYTES = 64
UUID_BYTES = 16

INVALID_CONTEXT = 201

_STREAM_NON_BLOCKING = 1
_EVENT_BLOCKING_SYNC = 1
_EVENT_DISABLE_TIMING = 2
_MEMHOSTREGISTER_PORTABLE = 1
_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1
_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1
_LOCATION_TYPE_DEVICE = 1
_ACCESS_FLAGS_PROT_READWRITE = 3
# The only order that is right for memory that kernels write.
_SRC_ACCESS_ORDER_STREAM = 1
_MEMCPY_PREFER_OVERLAP_WITH_COMPUTE = 1

_BATCH_SYMBOL = b"cuMemcpyBatchAsync"


class CudaError(KvoffdError):
    """A call of the driver failed: ``call``, its ``status`` and the status's ``name``."""

    code = ErrorCode.COPY_FAILED

    def __init__(self, call: str, status: int, name: str) -> None:
        super().__init__(f"{call} failed: {name} ({status}).")
        self.call = call
        self.status = status
        self.name = name


class CudaMissing(KvoffdError):
    """There is no CUDA driver here."""

    code = ErrorCode.UNSUPPORTED


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _AccessDescription(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_uint))


class _CopyAttributes(ctypes.Structure):
    _fields_ = (
        ("source_access_order", ctypes.c_uint),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * IPC_HANDLE_BYTES),)


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * UUID_BYTES),)


_INT, _UINT, _SIZE, _ADDRESS, _POINTER = (
    ctypes.c_int,
    ctypes.c_uint,
    ctypes.c_size_t,
    ctypes.c_uint64,
    ctypes.c_void_p,
)
_PROTOTYPES: dict[str, tuple[type, ...]] = {
    "cuInit": (_UINT,),
    "cuDriverGetVersion": (_POINTER,),
    "cuGetErrorName": (_INT, _POINTER),
    "cuDeviceGetCount": (_POINTER,),
    "cuDeviceGet": (_POINTER, _INT),
    "cuDeviceGetUuid": (_POINTER, _INT),
    "cuDeviceGetUuid_v2": (_POINTER, _INT),
    "cuDeviceGetName": (_POINTER, _INT, _INT),
    "cuDeviceGetPCIBusId": (_POINTER, _INT, _INT),
    "cuDevicePrimaryCtxRetain": (_POINTER, _INT),
    "cuDevicePrimaryCtxRelease_v2": (_INT,),
    "cuCtxSetCurrent": (_POINTER,),
    "cuCtxGetStreamPriorityRange": (_POINTER, _POINTER),
    "cuStreamCreateWithPriority": (_POINTER, _UINT, _INT),
    "cuStreamDestroy_v2": (_POINTER,),
    "cuEventCreate": (_POINTER, _UINT),
    "cuEventRecord": (_POINTER, _POINTER),
    "cuEventSynchronize": (_POINTER,),
    "cuEventDestroy_v2": (_POINTER,),
    "cuMemcpyAsync": (_ADDRESS, _ADDRESS, _SIZE, _POINTER),
    "cuMemHostRegister_v2": (_POINTER, _SIZE, _UINT),
    "cuMemHostUnregister": (_POINTER,),
    "cuIpcOpenMemHandle_v2": (_POINTER, _IpcHandle, _UINT),
    "cuIpcCloseMemHandle": (_ADDRESS,),
    "cuMemGetAddressRange_v2": (_POINTER, _POINTER, _ADDRESS),
    "cuMemAddressReserve": (_POINTER, _SIZE, _SIZE, _ADDRESS, _ADDRESS),
    "cuMemAddressFree": (_ADDRESS, _SIZE),
    "cuMemImportFromShareableHandle": (_POINTER, _POINTER, _UINT),
    "cuMemMap": (_ADDRESS, _SIZE, _SIZE, _ADDRESS, _ADDRESS),
    "cuMemUnmap": (_ADDRESS, _SIZE),
    "cuMemRelease": (_ADDRESS,),
    "cuMemSetAccess": (_ADDRESS, _SIZE, _POINTER, _SIZE),
    "cuGetProcAddress_v2": (ctypes.c_char_p, _POINTER, _INT, _ADDRESS, _POINTER),
}


class CudaDriver:
    """The driver library. All but ``version`` and what is about devices need a context that is current in the thread.

    Addresses, contexts, streams and events are ints; devices are the driver's ordinals in this process.

    Args:
        library: path of libcuda; the system's when it is empty.

    Raises:
        CudaMissing: it is not there, or is too old.
    """

    def __init__(self, library: str = "") -> None:
        path = library or DEFAULT_LIBRARY
        try:
            self._library = ctypes.CDLL(path)
            for name, argtypes in _PROTOTYPES.items():
                function = getattr(self._library, name)
                function.argtypes = argtypes
                function.restype = ctypes.c_int
        except (OSError, AttributeError) as error:
            raise CudaMissing(
                f"The CUDA driver {path} cannot be used ({error}); install a driver of CUDA 12 or newer, or set "
                "cuda_library."
            ) from error
        self._copy = self._library.cuMemcpyAsync

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise self.error(name, status)

    def error(self, call: str, status: int) -> CudaError:
        """The exception for a status that is not 0."""
        name = ctypes.c_char_p()
        known = self._library.cuGetErrorName(status, ctypes.byref(name)) == 0 and name.value is not None
        return CudaError(call, status, (name.value or b"").decode() if known else "an unknown error")

    # --- devices and contexts ---------------------------------------------------------------------

    def init(self) -> None:
        """Starts the driver; repeatable."""
        self._call("cuInit", 0)

    def version(self) -> int:
        """Highest CUDA version the driver knows: 1000 * major + 10 * minor."""
        version = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(version))
        return version.value

    def device_count(self) -> int:
        """GPUs (or MIG instances) that this process may use."""
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def device(self, ordinal: int) -> int:
        """The driver's name of a device."""
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        return device.value

    def uuid(self, device: int) -> bytes:
        """16 bytes: of the MIG instance where the device is one."""
        uuid = _Uuid()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(uuid), device)
        return bytes(uuid.bytes)

    def whole_uuid(self, device: int) -> bytes:
        """16 bytes: of the whole GPU, also where the device is a MIG instance of it."""
        uuid = _Uuid()
        self._call("cuDeviceGetUuid", ctypes.byref(uuid), device)
        return bytes(uuid.bytes)

    def device_name(self, device: int) -> str:
        """As NVIDIA sells it."""
        text = ctypes.create_string_buffer(128)
        self._call("cuDeviceGetName", text, len(text), device)
        return text.value.decode(errors="replace")

    def pci_bus_id(self, device: int) -> str:
        """``domain:bus:device.function``, as in sysfs but for upper case."""
        text = ctypes.create_string_buffer(32)
        self._call("cuDeviceGetPCIBusId", text, len(text), device)
        return text.value.decode(errors="replace")

    def retain_context(self, device: int) -> int:
        """The device's primary context, made if need be. To be released as often."""
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        return context.value or 0

    def release_context(self, device: int) -> None:
        """Gives one retain back; the context goes with the last."""
        self._call("cuDevicePrimaryCtxRelease_v2", device)

    def set_context(self, context: int) -> None:
        """Makes the context current in this thread; 0 for none."""
        self._call("cuCtxSetCurrent", context or None)

    # --- streams, events, copies ------------------------------------------------------------------

    def create_stream(self, *, urgent: bool) -> int:
        """A stream that waits for no other; an urgent one has the highest priority, others the lowest."""
        least, greatest, stream = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        self._call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
        priority = greatest.value if urgent else least.value
        self._call("cuStreamCreateWithPriority", ctypes.byref(stream), _STREAM_NON_BLOCKING, priority)
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        """Gives a stream up."""
        self._call("cuStreamDestroy_v2", stream)

    def create_event(self) -> int:
        """An event whose waiter sleeps."""
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), _EVENT_BLOCKING_SYNC | _EVENT_DISABLE_TIMING)
        return event.value or 0

    def record_event(self, event: int, stream: int) -> None:
        """The event happens when everything in the stream so far is done."""
        self._call("cuEventRecord", event, stream)

    def wait_event(self, event: int) -> None:
        """Sleeps until the event has happened: for ever on a GPU that hangs."""
        self._call("cuEventSynchronize", event)

    def destroy_event(self, event: int) -> None:
        """Gives an event up."""
        self._call("cuEventDestroy_v2", event)

    def copy(self, destination: int, source: int, size: int, stream: int) -> None:
        """Puts one copy into the stream."""
        status = self._copy(destination, source, size, stream)
        if status:
            raise self.error("cuMemcpyAsync", status)

    def batch_copy(self) -> BatchCopy | None:
        """The call for many copies at once; None where the driver has none (before CUDA 12.8)."""
        version = self.version()
        # Asked for a newer version than its own, a driver may answer with the older call, which takes other arguments.
        if version < 12080:
            return None
        has_fail_index = version < 13000
        function, status = ctypes.c_void_p(), ctypes.c_int()
        error = self._library.cuGetProcAddress_v2(
            _BATCH_SYMBOL, ctypes.byref(function), 12080 if has_fail_index else 13000, 0, ctypes.byref(status)
        )
        if error or not function.value:
            return None
        return BatchCopy(self, function.value, has_fail_index)

    # --- memory -----------------------------------------------------------------------------------

    def register_host(self, address: int, size: int) -> None:
        """Pins host memory, for all contexts."""
        self._call("cuMemHostRegister_v2", address, size, _MEMHOSTREGISTER_PORTABLE)

    def unregister_host(self, address: int) -> None:
        """Unpins what was registered at this address."""
        self._call("cuMemHostUnregister", address)

    def open_ipc(self, handle: bytes) -> int:
        """Maps another process's allocation; its address here."""
        address = ctypes.c_uint64()
        self._call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            _IpcHandle.from_buffer_copy(handle),
            _IPC_MEM_LAZY_ENABLE_PEER_ACCESS,
        )
        return address.value

    def close_ipc(self, address: int) -> None:
        """Unmaps it."""
        self._call("cuIpcCloseMemHandle", address)

    def address_range(self, address: int) -> tuple[int, int]:
        """Begin and size of the allocation that an address lies in."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        return base.value, size.value

    def reserve(self, size: int) -> int:
        """Reserves addresses."""
        address = ctypes.c_uint64()
        self._call("cuMemAddressReserve", ctypes.byref(address), size, 0, 0, 0)
        return address.value

    def free_reservation(self, address: int, size: int) -> None:
        """Gives reserved addresses back."""
        self._call("cuMemAddressFree", address, size)

    def import_descriptor(self, fd: int) -> int:
        """Takes an allocation from a descriptor, which stays the caller's. To be released."""
        allocation = ctypes.c_uint64()
        self._call("cuMemImportFromShareableHandle", ctypes.byref(allocation), fd, _HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return allocation.value

    def release(self, allocation: int) -> None:
        """Lets an imported allocation go; a mapping keeps it."""
        self._call("cuMemRelease", allocation)

    def map(self, address: int, size: int, allocation: int) -> None:
        """Maps an allocation at reserved addresses."""
        self._call("cuMemMap", address, size, 0, allocation, 0)

    def unmap(self, address: int, size: int) -> None:
        """Unmaps it."""
        self._call("cuMemUnmap", address, size)

    def allow_access(self, address: int, size: int, device: int) -> None:
        """Lets a device read and write mapped addresses."""
        description = _AccessDescription(_Location(_LOCATION_TYPE_DEVICE, device), _ACCESS_FLAGS_PROT_READWRITE)
        self._call("cuMemSetAccess", address, size, ctypes.byref(description), 1)


class BatchCopy:
    """``cuMemcpyBatchAsync``, called with arrays: its cost in Python does not depend on their length.

    The copies of one batch run in any order; the batch keeps the stream's. The call has two forms: the older tells
    which copy was wrong.
    """

    def __init__(self, driver: CudaDriver, function: int, has_fail_index: bool) -> None:
        self._driver = driver
        fail_index = (_POINTER,) if has_fail_index else ()
        prototype = ctypes.CFUNCTYPE(
            _INT, _POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE, *fail_index, _POINTER
        )
        self._function = prototype(function)
        # One entry of attributes, which holds from copy 0 on: for all of them.
        self._attributes = _CopyAttributes(
            source_access_order=_SRC_ACCESS_ORDER_STREAM, flags=_MEMCPY_PREFER_OVERLAP_WITH_COMPUTE
        )
        self._first = ctypes.c_size_t(0)
        self._fail_index = ctypes.c_size_t(0)
        self._fixed: tuple[int, ...] = (ctypes.addressof(self._attributes), ctypes.addressof(self._first), 1)
        if has_fail_index:
            self._fixed += (ctypes.addressof(self._fail_index),)

    def __call__(self, destinations: int, sources: int, sizes: int, count: int, stream: int) -> None:
        """Puts ``count`` copies into the stream; the addresses are of uint64 arrays, read before the call returns."""
        status = self._function(destinations, sources, sizes, count, *self._fixed, stream)
        if status:
            raise self._driver.error("cuMemcpyBatchAsync", status)
