"""The CUDA driver library by ctypes: loading, prototypes, structs and constants of ``cuda.h``, and error messages.

Nothing here is on the wire. It is in this package because daemon and clients both load the driver, and neither may
import the other. It imports only the standard library, and does not call the driver on import.

Declarations are those of NVIDIA's CUDA driver API, 12.0 to 13.x; ``tests/abi`` compares all of them with its headers.
Every call releases the GIL.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partialmethod

DEFAULT_LIBRARY = "libcuda.so.1"
LIBRARY_VARIABLE = "KVOFFD_CUDA_LIBRARY"

# Constants of cuda.h, without their prefix CU_ or CUDA_.
IPC_HANDLE_SIZE = 64

ERROR_INVALID_VALUE = 1
ERROR_OUT_OF_MEMORY = 2
ERROR_DEVICE_UNAVAILABLE = 46
ERROR_NO_DEVICE = 100
ERROR_INVALID_CONTEXT = 201
ERROR_MAP_FAILED = 205
ERROR_PEER_ACCESS_UNSUPPORTED = 217
ERROR_INVALID_HANDLE = 400
ERROR_TOO_MANY_PEERS = 711
ERROR_NOT_SUPPORTED = 801
ERROR_SYSTEM_NOT_READY = 802
ERROR_MPS_CONNECTION_FAILED = 805
ERROR_MPS_RPC_FAILURE = 806
ERROR_MPS_SERVER_NOT_READY = 807
ERROR_MPS_MAX_CLIENTS_REACHED = 808
ERROR_MPS_MAX_CONNECTIONS_REACHED = 809

DEVICE_ATTRIBUTE_INTEGRATED = 18
DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91

POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9
POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE = 10
POINTER_ATTRIBUTE_RANGE_START_ADDR = 11
POINTER_ATTRIBUTE_RANGE_SIZE = 12
POINTER_ATTRIBUTE_MEMPOOL_HANDLE = 17

GET_PROC_ADDRESS_DEFAULT = 0
STREAM_NON_BLOCKING = 1
EVENT_BLOCKING_SYNC = 1
EVENT_DISABLE_TIMING = 2
MEMHOSTREGISTER_PORTABLE = 1
IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1
MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1
MEM_HANDLE_TYPE_FABRIC = 8
MEM_LOCATION_TYPE_DEVICE = 1
MEM_ACCESS_FLAGS_PROT_READWRITE = 3
# The only correct order for memory that kernels write.
MEMCPY_SRC_ACCESS_ORDER_STREAM = 1
MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE = 1

RELAUNCH_ERRORS = frozenset({226, 700, 702, 714, 715, 716, 717, 718, 719, 721, 810, 911})
"""Errors after which, by cuda.h, the process must be terminated and relaunched: every later call fails.

In this order: contained, illegal address, launch timeout, hardware stack error, illegal instruction, misaligned
address, invalid address space, invalid pc, launch failed, tensor memory leak, MPS client terminated, external device.
"""

_MPS = (
    "This process cannot connect to MPS: it must run as the user of the MPS server, with access to the pipes "
    "(CUDA_MPS_PIPE_DIRECTORY) and the shared memory of nvidia-cuda-mps-control, also in a container (--ipc=host)."
)
_MPS_FULL = "The MPS server has reached its limit of clients; see nvidia-cuda-mps-control."
_ADVICE = {
    ERROR_DEVICE_UNAVAILABLE: (
        "The GPU may be in an exclusive compute mode (nvidia-smi -q -d COMPUTE), but daemon and engine both use it: "
        "set it to DEFAULT, or make both clients of MPS."
    ),
    ERROR_SYSTEM_NOT_READY: (
        "GPUs connected by NVSwitch need nvidia-fabricmanager: check that service, and restart this process when it "
        "runs."
    ),
    **dict.fromkeys((ERROR_MPS_CONNECTION_FAILED, ERROR_MPS_RPC_FAILURE, ERROR_MPS_SERVER_NOT_READY), _MPS),
    **dict.fromkeys((ERROR_MPS_MAX_CLIENTS_REACHED, ERROR_MPS_MAX_CONNECTIONS_REACHED), _MPS_FULL),
}

_ADVICE_OF_CALL = {
    ("cuDevicePrimaryCtxRetain", ERROR_OUT_OF_MEMORY): (
        "The GPU has no memory left for the daemon, which needs a few hundred MiB: start engines with a lower "
        "gpu_memory_utilization, or start the daemon first."
    ),
    ("cuInit", ERROR_NO_DEVICE): (
        "This process sees no GPU: run nvidia-smi in the same place, and give its container GPUs "
        "(NVIDIA_VISIBLE_DEVICES=all; CUDA_VISIBLE_DEVICES unset)."
    ),
}
_NO_START = (
    "The driver does not start: run nvidia-smi in the same place. Its kernel module may be missing or of another "
    "version, or this process may not open /dev/nvidia*. Restart this process after the repair: a driver may remember "
    "its failure."
)
_TEXT_BYTES = 128


# Structs and fields of cuda.h; see STRUCTS.


class MemLocation(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class MemAccessDesc(ctypes.Structure):
    _fields_ = (("location", MemLocation), ("flags", ctypes.c_uint))


class MemAllocationProp(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_uint),
        ("requestedHandleTypes", ctypes.c_uint),
        ("location", MemLocation),
        ("win32HandleMetaData", ctypes.c_void_p),
        ("allocFlags", ctypes.c_ubyte * 8),
    )


class MemcpyAttributes(ctypes.Structure):  # since 12.8
    _fields_ = (
        ("srcAccessOrder", ctypes.c_uint),
        ("srcLocHint", MemLocation),
        ("dstLocHint", MemLocation),
        ("flags", ctypes.c_uint),
    )


class IpcMemHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * IPC_HANDLE_SIZE),)


class Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 16),)


STRUCTS: dict[str, type[ctypes.Structure]] = {
    "CUmemLocation": MemLocation,
    "CUmemAccessDesc": MemAccessDesc,
    "CUmemAllocationProp": MemAllocationProp,
    "CUmemcpyAttributes": MemcpyAttributes,
    "CUipcMemHandle": IpcMemHandle,
    "CUuuid": Uuid,
}

TYPES: dict[str, type] = {
    "void *": ctypes.c_void_p,
    "const void *": ctypes.c_void_p,
    "const char *": ctypes.c_char_p,
    "const CUDA_MEMCPY2D *": ctypes.c_void_p,  # made only by the copy loop in C
    "char": ctypes.c_char,
    "int": ctypes.c_int,
    "unsigned int": ctypes.c_uint,
    "unsigned long long": ctypes.c_uint64,
    "size_t": ctypes.c_size_t,
    "cuuint64_t": ctypes.c_uint64,
    "CUresult": ctypes.c_uint,
    "CUdevice": ctypes.c_int,
    "CUdeviceptr": ctypes.c_uint64,
    "CUcontext": ctypes.c_void_p,
    "CUstream": ctypes.c_void_p,
    "CUevent": ctypes.c_void_p,
    "CUmemoryPool": ctypes.c_void_p,
    "CUdevice_attribute": ctypes.c_uint,
    "CUpointer_attribute": ctypes.c_uint,
    "CUmemGenericAllocationHandle": ctypes.c_uint64,
    "CUmemAllocationHandleType": ctypes.c_uint,
    "CUdriverProcAddressQueryResult": ctypes.c_uint,
}
"""The ctypes type of each C type, besides STRUCTS. All other types are pointers to these."""

POINTER_ATTRIBUTES: dict[int, str] = {
    POINTER_ATTRIBUTE_DEVICE_ORDINAL: "int",
    POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: "unsigned int",
    POINTER_ATTRIBUTE_RANGE_START_ADDR: "CUdeviceptr",
    POINTER_ATTRIBUTE_RANGE_SIZE: "size_t",
    POINTER_ATTRIBUTE_MEMPOOL_HANDLE: "CUmemoryPool",
}
"""C type that each attribute writes to the ``void *`` of ``cuPointerGetAttribute``."""
EXPORTED_HANDLES: dict[int, str] = {MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: "int"}
"""C type that each handle type writes to the ``void *`` of ``cuMemExportToShareableHandle``."""

PROTOTYPES: dict[str, tuple[str, ...]] = {
    "cuInit": ("unsigned int",),
    "cuDriverGetVersion": ("int *",),
    "cuGetErrorName": ("CUresult", "const char **"),
    "cuGetProcAddress_v2": ("const char *", "void **", "int", "cuuint64_t", "CUdriverProcAddressQueryResult *"),
    # Devices and contexts.
    "cuDeviceGetCount": ("int *",),
    "cuDeviceGet": ("CUdevice *", "int"),
    "cuDeviceGetUuid_v2": ("CUuuid *", "CUdevice"),
    "cuDeviceGetName": ("char *", "int", "CUdevice"),
    "cuDeviceGetPCIBusId": ("char *", "int", "CUdevice"),
    "cuDeviceGetAttribute": ("int *", "CUdevice_attribute", "CUdevice"),
    "cuDevicePrimaryCtxGetState": ("CUdevice", "unsigned int *", "int *"),
    "cuDevicePrimaryCtxRetain": ("CUcontext *", "CUdevice"),
    "cuDevicePrimaryCtxRelease_v2": ("CUdevice",),
    "cuCtxGetCurrent": ("CUcontext *",),
    "cuCtxGetDevice": ("CUdevice *",),
    "cuCtxSetCurrent": ("CUcontext",),
    "cuCtxGetStreamPriorityRange": ("int *", "int *"),
    # Streams, events, copies.
    "cuStreamCreateWithPriority": ("CUstream *", "unsigned int", "int"),
    "cuStreamSynchronize": ("CUstream",),
    "cuStreamDestroy_v2": ("CUstream",),
    "cuEventCreate": ("CUevent *", "unsigned int"),
    "cuEventRecord": ("CUevent", "CUstream"),
    "cuEventSynchronize": ("CUevent",),
    "cuEventDestroy_v2": ("CUevent",),
    "cuMemcpyAsync": ("CUdeviceptr", "CUdeviceptr", "size_t", "CUstream"),
    "cuMemcpy2DAsync_v2": ("const CUDA_MEMCPY2D *", "CUstream"),
    # Memory of the GPU and of the host.
    "cuMemGetInfo_v2": ("size_t *", "size_t *"),
    "cuMemHostRegister_v2": ("void *", "size_t", "unsigned int"),
    "cuMemHostUnregister": ("void *",),
    "cuPointerGetAttribute": ("void *", "CUpointer_attribute", "CUdeviceptr"),
    "cuMemGetAddressRange_v2": ("CUdeviceptr *", "size_t *", "CUdeviceptr"),
    # Memory of another process: IPC handles, and allocations of the virtual memory API.
    "cuIpcGetMemHandle": ("CUipcMemHandle *", "CUdeviceptr"),
    "cuIpcOpenMemHandle_v2": ("CUdeviceptr *", "CUipcMemHandle", "unsigned int"),
    "cuIpcCloseMemHandle": ("CUdeviceptr",),
    "cuMemRetainAllocationHandle": ("CUmemGenericAllocationHandle *", "void *"),
    "cuMemGetAllocationPropertiesFromHandle": ("CUmemAllocationProp *", "CUmemGenericAllocationHandle"),
    "cuMemExportToShareableHandle": (
        *("void *", "CUmemGenericAllocationHandle", "CUmemAllocationHandleType", "unsigned long long"),
    ),
    "cuMemImportFromShareableHandle": ("CUmemGenericAllocationHandle *", "void *", "CUmemAllocationHandleType"),
    "cuMemRelease": ("CUmemGenericAllocationHandle",),
    "cuMemAddressReserve": ("CUdeviceptr *", "size_t", "size_t", "CUdeviceptr", "unsigned long long"),
    "cuMemAddressFree": ("CUdeviceptr", "size_t"),
    "cuMemMap": ("CUdeviceptr", "size_t", "size_t", "CUmemGenericAllocationHandle", "unsigned long long"),
    "cuMemUnmap": ("CUdeviceptr", "size_t"),
    "cuMemSetAccess": ("CUdeviceptr", "size_t", "const CUmemAccessDesc *", "size_t"),
}
"""The C types of each symbol's arguments; all return a CUresult."""

_COLUMNS = ("CUdeviceptr *", "CUdeviceptr *", "size_t *", "size_t", "CUmemcpyAttributes *", "size_t *", "size_t")
BATCH_SYMBOL = "cuMemcpyBatchAsync"
BATCH_FORMS: dict[int, tuple[str, ...]] = {
    12080: (*_COLUMNS, "size_t *", "CUstream"),
    13000: (*_COLUMNS, "CUstream"),
}
"""The two forms of BATCH_SYMBOL, by the version passed to ``cuGetProcAddress``: destinations, sources, sizes, their
count, attributes, first copies, their count, in the older form the index of the failed copy, and the stream."""


def argument_type(text: str) -> type:
    """Return the ctypes type of a C argument: pointers accept only the header's types."""
    if (kind := TYPES.get(text) or STRUCTS.get(text.removeprefix("const "))) is not None:
        return kind
    assert text.endswith("*"), f"TYPES lacks {text}"
    return ctypes.POINTER(argument_type(text[:-1].rstrip()))


def argument_types(declared: tuple[str, ...]) -> list[type]:
    return list(map(argument_type, declared))


def declare(library: ctypes.CDLL, prototypes: dict[str, tuple[str, ...]]) -> None:
    """Set the prototypes of the library's functions. Raises AttributeError if one is missing."""
    for name, declared in prototypes.items():
        function = getattr(library, name)
        function.argtypes = argument_types(declared)
        function.restype = TYPES["CUresult"]


class CudaError(Exception):
    """A call of the driver failed, or no usable driver was found; then ``call`` is empty.

    Attributes:
        message: sentences for people: the call, its status and what to do.
    """

    def __init__(self, message: str, call: str = "", status: int = 0) -> None:
        super().__init__(message)
        self.message, self.call, self.status = message, call, status


# Driver calls that ``struct gpu_copying`` of gpu_copy.c always has, by the names of its fields in Python.
_COPY_CALLS = {
    "at_copy": "cuMemcpyAsync",
    "at_record": "cuEventRecord",
    "at_wait": "cuEventSynchronize",
    "at_sync": "cuStreamSynchronize",
}
# Attributes of all copies of every batch.
_BATCH_ATTRIBUTES = MemcpyAttributes(
    srcAccessOrder=MEMCPY_SRC_ACCESS_ORDER_STREAM, flags=MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
)


class Cuda:
    """The driver library at a path; if that is empty, at KVOFFD_CUDA_LIBRARY, else the system's.

    Addresses, contexts, streams and events are ints; devices are the driver's ordinals in this process. Calls on
    devices and contexts need ``init``; calls on memory, streams and events need a current context in the calling
    thread. All raise CudaError; the constructor does if the driver is missing or too old.

    Attributes:
        lost: the first error after which this process must end; None if there was none. See ``RELAUNCH_ERRORS``.
    """

    def __init__(self, library: str = "") -> None:
        path = library or os.environ.get(LIBRARY_VARIABLE) or DEFAULT_LIBRARY
        try:
            self._library = ctypes.CDLL(path)
            declare(self._library, PROTOTYPES)
        except (OSError, AttributeError) as error:
            raise CudaError(
                f"The CUDA driver {path} cannot be used ({error}); install a driver of CUDA 12 or newer, or name its "
                f"library in {LIBRARY_VARIABLE}."
            ) from error
        self.lost: CudaError | None = None

    def _call(self, name: str, *arguments: object) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise self.error(name, status)

    def _number(self, name: str, *arguments: object, written: str = "") -> int:
        """Make a call that writes a number; ``written`` is its type if the first argument is a ``void *``."""
        number = argument_type(written or PROTOTYPES[name][0].removesuffix("*").rstrip())()
        self._call(name, ctypes.byref(number), *arguments)
        return number.value or 0

    def _text(self, name: str, device: int) -> str:
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        self._call(name, text, _TEXT_BYTES, device)
        return text.value.decode(errors="replace")

    def error(self, call: str, status: int) -> CudaError:
        name = ctypes.c_char_p()
        known = self._library.cuGetErrorName(status, ctypes.byref(name)) == 0 and name.value is not None
        text = (name.value or b"").decode() if known else "an unknown error"
        advice = _ADVICE_OF_CALL.get((call, status)) or _ADVICE.get(status) or (_NO_START if call == "cuInit" else "")
        error = CudaError(f"{call} failed: {text} ({status}). {advice}".rstrip(), call, status)
        if status in RELAUNCH_ERRORS:
            self.lose(error)
        return error

    def lose(self, error: CudaError) -> None:
        """Record that a context is lost, after which this process cannot use GPUs. For any thread."""
        self.lost = self.lost or error

    # --- devices and contexts -----------------------------------------------------------------------

    def init(self) -> None:
        """Start the driver. Repeatable. The error names what is missing."""
        self._call("cuInit", 0)

    def version(self) -> int:
        """Return the highest CUDA version that the driver supports: 1000 * major + 10 * minor."""
        return self._number("cuDriverGetVersion")

    def devices(self) -> list[int]:
        return [self._number("cuDeviceGet", ordinal) for ordinal in range(self._number("cuDeviceGetCount"))]

    def device_name(self, device: int) -> str:
        return self._text("cuDeviceGetName", device)

    def is_integrated(self, device: int) -> bool:
        """Return whether the GPU has no memory of its own, but takes the host's."""
        return self._number("cuDeviceGetAttribute", DEVICE_ATTRIBUTE_INTEGRATED, device) != 0

    def pci_bus_id(self, device: int) -> str:
        """Return ``domain:bus:device.function``, as in sysfs but in upper case."""
        return self._text("cuDeviceGetPCIBusId", device)

    def device_uuid(self, device: int) -> bytes:
        """Return the 16 bytes of the UUID of the GPU or MIG instance."""
        uuid = Uuid()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(uuid), device)
        return bytes(uuid)

    def retain_context(self, device: int) -> int:
        """Return the device's primary context, which torch uses too, creating it if needed. Release it as often."""
        return self._number("cuDevicePrimaryCtxRetain", device)

    release_context = partialmethod(_call, "cuDevicePrimaryCtxRelease_v2")
    """Undo one ``retain_context``; the last one destroys the context."""

    def set_context(self, context: int) -> None:
        """Make the context current in this thread; 0 for none."""
        self._call("cuCtxSetCurrent", context or None)

    def current_context(self) -> int:
        """Return this thread's current context; 0 for none."""
        return self._number("cuCtxGetCurrent")

    @contextmanager
    def context(self, device: int | None = None) -> Iterator[None]:
        """Make a context of the device current in this thread: torch may have made its own in another thread.

        Without ``device``, choose any GPU that this process uses. If it uses none, do nothing.
        """
        before = self.current_context()
        if device is None and not before:
            device = next(filter(self._is_used, self.devices()), None)
        if device is None or (before and self._number("cuCtxGetDevice") == device):
            yield
            return
        with ExitStack() as undo:
            context = self.retain_context(device)
            undo.callback(self.release_context, device)
            self.set_context(context)
            undo.callback(self.set_context, before)
            yield

    def _is_used(self, device: int) -> bool:
        flags, active = ctypes.c_uint(), ctypes.c_int()
        self._call("cuDevicePrimaryCtxGetState", device, ctypes.byref(flags), ctypes.byref(active))
        return active.value != 0

    # --- memory of this process ---------------------------------------------------------------------

    def free_bytes(self) -> int:
        """Return the free bytes of the GPU's memory."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def pointer_attribute(self, attribute: int, address: int) -> int:
        return self._number("cuPointerGetAttribute", attribute, address, written=POINTER_ATTRIBUTES[attribute])

    def address_range(self, address: int) -> tuple[int, int]:
        """Return begin and size of the allocation or mapped chunk that contains an address."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        return base.value, size.value

    def register_host(self, address: int, size: int) -> None:
        self._call("cuMemHostRegister_v2", address, size, MEMHOSTREGISTER_PORTABLE)

    unregister_host = partialmethod(_call, "cuMemHostUnregister")

    # --- handles, made by engines and mapped by the daemon ------------------------------------------

    def ipc_handle(self, base: int) -> bytes:
        handle = IpcMemHandle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return bytes(handle)

    def open_ipc(self, handle: bytes) -> int:
        """Map another process's allocation; return its address here."""
        copied = IpcMemHandle.from_buffer_copy(handle)
        return self._number("cuIpcOpenMemHandle_v2", copied, IPC_MEM_LAZY_ENABLE_PEER_ACCESS)

    def import_size(self, address: int) -> int:
        """Return the size of an opened allocation from ``address`` on."""
        try:
            base, size = self.address_range(address)
        except CudaError:
            # cuda.h guarantees the range of the process's own allocations only; attributes work for any address.
            base = self.pointer_attribute(POINTER_ATTRIBUTE_RANGE_START_ADDR, address)
            size = self.pointer_attribute(POINTER_ATTRIBUTE_RANGE_SIZE, address)
        return base + size - address

    close_ipc = partialmethod(_call, "cuIpcCloseMemHandle")

    def export_chunk(self, address: int) -> tuple[int, int]:
        """Export the chunk mapped at ``address``: (fd, handle types). fd is -1 if it has no descriptor."""
        allocation = self._number("cuMemRetainAllocationHandle", address)
        try:
            properties, wanted = MemAllocationProp(), MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            self._call("cuMemGetAllocationPropertiesFromHandle", ctypes.byref(properties), allocation)
            types = int(properties.requestedHandleTypes)
            if not types & wanted:
                return -1, types
            written = EXPORTED_HANDLES[wanted]
            return self._number("cuMemExportToShareableHandle", allocation, wanted, 0, written=written), types
        finally:
            self.release(allocation)

    def import_descriptor(self, fd: int) -> int:
        """Return an allocation made from a descriptor, which stays the caller's. Release it after use."""
        return self._number("cuMemImportFromShareableHandle", fd, MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)

    release = partialmethod(_call, "cuMemRelease")
    """Release an allocation; its mappings keep it alive."""

    def reserve(self, size: int) -> int:
        """Reserve ``size`` bytes of addresses without mapping; return their begin."""
        return self._number("cuMemAddressReserve", size, 0, 0, 0)

    free_reservation = partialmethod(_call, "cuMemAddressFree")

    def map(self, address: int, size: int, allocation: int) -> None:
        self._call("cuMemMap", address, size, 0, allocation, 0)

    unmap = partialmethod(_call, "cuMemUnmap")

    def allow_access(self, address: int, size: int, device: int) -> None:
        description = MemAccessDesc(MemLocation(MEM_LOCATION_TYPE_DEVICE, device), MEM_ACCESS_FLAGS_PROT_READWRITE)
        self._call("cuMemSetAccess", address, size, ctypes.byref(description), 1)

    # --- copies -------------------------------------------------------------------------------------

    def create_stream(self, *, urgent: bool) -> int:
        """Return a non-blocking stream with the highest priority if ``urgent``, else the lowest."""
        least, greatest = ctypes.c_int(), ctypes.c_int()
        self._call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
        priority = greatest.value if urgent else least.value
        return self._number("cuStreamCreateWithPriority", STREAM_NON_BLOCKING, priority)

    destroy_stream = partialmethod(_call, "cuStreamDestroy_v2")

    def create_event(self) -> int:
        """Return an event whose waiter sleeps instead of spinning."""
        return self._number("cuEventCreate", EVENT_BLOCKING_SYNC | EVENT_DISABLE_TIMING)

    destroy_event = partialmethod(_call, "cuEventDestroy_v2")

    def copy_calls(self) -> dict[str, int]:
        """Return the fields of ``struct gpu_copying`` of gpu_copy.c that say what the driver can do: addresses of the
        functions that it calls, and of the arguments of a batch.

        ``at_rows`` and ``at_batch`` are missing if the GPU maps registered host memory at other addresses than this
        process (WSL, some virtual GPUs): only single copies translate those, and a batch would lose the context
        (sgl-project/sglang#40232). Drivers before CUDA 12.8 have no batches.
        """
        calls = {field: self._address_of(getattr(self._library, name)) for field, name in _COPY_CALLS.items()}
        version, attribute = self.version(), DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        if not self._number("cuDeviceGetAttribute", attribute, self._number("cuCtxGetDevice")):
            return calls
        calls["at_rows"] = self._address_of(self._library.cuMemcpy2DAsync_v2)
        if version < min(BATCH_FORMS):
            return calls
        # For a version newer than its own, a driver may return the older call, which has other arguments.
        form = max(known for known in BATCH_FORMS if known <= version)
        batch, found, get = ctypes.c_void_p(), ctypes.c_uint(), self._library.cuGetProcAddress_v2
        status = get(BATCH_SYMBOL.encode(), ctypes.byref(batch), form, GET_PROC_ADDRESS_DEFAULT, ctypes.byref(found))
        if not status and batch.value:
            calls |= {"at_batch": batch.value, "at_attributes": ctypes.addressof(_BATCH_ATTRIBUTES)}
            calls["has_fail_index"] = int(form == min(BATCH_FORMS))
        return calls

    @staticmethod
    def _address_of(function: object) -> int:
        return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


# Descriptors that a driver call may need for itself.
_SPARE_DESCRIPTORS = 8
_LINUX_LIMITS = 1024, 4096


def descriptor_limits() -> tuple[int, int]:
    """Return the soft and the hard limit; Linux's defaults if a seccomp filter forbids the call."""
    try:
        return resource.getrlimit(resource.RLIMIT_NOFILE)
    except OSError:
        return _LINUX_LIMITS


def wsl_hint() -> str:
    """Return a sentence if this is WSL 2, whose driver need not share memory between processes; else ``""``."""
    if "microsoft" not in os.uname().release.lower():
        return ""
    return "This is WSL 2: try a newer NVIDIA driver of Windows, or run engine and daemon on Linux itself."


def missing_descriptors() -> str:
    """Return a sentence if this process is nearly out of descriptors, which the driver does not report; else ``""``."""
    limit, _ = descriptor_limits()
    try:
        if len(os.listdir("/proc/self/fd")) < limit - _SPARE_DESCRIPTORS:
            return ""
    except OSError:  # not even that directory
        pass
    return (
        f"This process has nearly reached its limit of {limit} open files, and each chunk of GPU memory needs one: "
        "raise the limit (ulimit -n, LimitNOFILE=)."
    )
