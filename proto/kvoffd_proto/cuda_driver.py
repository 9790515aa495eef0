"""The CUDA driver library by ctypes: loading, prototypes, structs and constants of ``cuda.h``, and what errors say.

Nothing here is on the wire. It lies in this package because the daemon, the clients and their benches all load the
driver, neither daemon nor client may import the other, and both import this package. It imports the standard library
only, and makes no call of the driver before it is asked to.

Declarations are those of NVIDIA's CUDA driver API, 12.0 to 13.x. Every call releases the GIL.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

DEFAULT_LIBRARY = "libcuda.so.1"

IPC_HANDLE_BYTES = 64
UUID_BYTES = 16
_TEXT_BYTES = 128

ERROR_INVALID_CONTEXT = 201

POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9
POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE = 10

STREAM_NON_BLOCKING = 1
EVENT_BLOCKING_SYNC = 1
EVENT_DISABLE_TIMING = 2
MEMHOSTALLOC_PORTABLE = 1
MEMHOSTREGISTER_PORTABLE = 1
IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1
MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1
MEM_HANDLE_TYPE_FABRIC = 8
MEM_LOCATION_TYPE_DEVICE = 1
MEM_ACCESS_FLAGS_PROT_READWRITE = 3
# The only order that is right for memory that kernels write.
MEMCPY_SRC_ACCESS_ORDER_STREAM = 1
MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE = 1


# The structs are those of cuda.h: CUmemLocation, CUmemAccessDesc and so on.


class MemLocation(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class MemAccessDesc(ctypes.Structure):
    _fields_ = (("location", MemLocation), ("flags", ctypes.c_uint))


class MemAllocationProp(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_uint),
        ("requested_handle_types", ctypes.c_uint),
        ("location", MemLocation),
        ("win32_handle_meta_data", ctypes.c_void_p),
        ("alloc_flags", ctypes.c_ubyte * 8),
    )


class MemcpyAttributes(ctypes.Structure):  # since 12.8
    _fields_ = (
        ("src_access_order", ctypes.c_uint),
        ("src_loc_hint", MemLocation),
        ("dst_loc_hint", MemLocation),
        ("flags", ctypes.c_uint),
    )


class IpcMemHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * IPC_HANDLE_BYTES),)


_INT, _UINT, _SIZE, _ADDRESS = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_uint64
_POINTER, _TEXT = ctypes.c_void_p, ctypes.c_char_p
PROTOTYPES: dict[str, tuple[type, ...]] = {
    "cuInit": (_UINT,),
    "cuDriverGetVersion": (_POINTER,),
    "cuGetErrorName": (_INT, _POINTER),
    "cuGetProcAddress_v2": (_TEXT, _POINTER, _INT, _ADDRESS, _POINTER),
    # Devices and contexts.
    "cuDeviceGetCount": (_POINTER,),
    "cuDeviceGet": (_POINTER, _INT),
    "cuDeviceGetUuid": (_POINTER, _INT),
    "cuDeviceGetUuid_v2": (_POINTER, _INT),
    "cuDeviceGetName": (_POINTER, _INT, _INT),
    "cuDeviceGetPCIBusId": (_POINTER, _INT, _INT),
    "cuDevicePrimaryCtxRetain": (_POINTER, _INT),
    "cuDevicePrimaryCtxRelease_v2": (_INT,),
    "cuCtxGetCurrent": (_POINTER,),
    "cuCtxSetCurrent": (_POINTER,),
    "cuCtxGetStreamPriorityRange": (_POINTER, _POINTER),
    # Streams, events, copies, kernels.
    "cuStreamCreate": (_POINTER, _UINT),
    "cuStreamCreateWithPriority": (_POINTER, _UINT, _INT),
    "cuStreamSynchronize": (_POINTER,),
    "cuStreamDestroy_v2": (_POINTER,),
    "cuEventCreate": (_POINTER, _UINT),
    "cuEventRecord": (_POINTER, _POINTER),
    "cuEventSynchronize": (_POINTER,),
    "cuEventDestroy_v2": (_POINTER,),
    "cuMemcpyAsync": (_ADDRESS, _ADDRESS, _SIZE, _POINTER),
    "cuModuleLoadData": (_POINTER, _TEXT),
    "cuModuleGetFunction": (_POINTER, _POINTER, _TEXT),
    "cuLaunchKernel": (_POINTER, *(_UINT,) * 7, _POINTER, _POINTER, _POINTER),
    # Memory of the GPU and of the host.
    "cuMemGetInfo_v2": (_POINTER, _POINTER),
    "cuMemAlloc_v2": (_POINTER, _SIZE),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemHostAlloc": (_POINTER, _SIZE, _UINT),
    "cuMemFreeHost": (_POINTER,),
    "cuMemHostRegister_v2": (_POINTER, _SIZE, _UINT),
    "cuMemHostUnregister": (_POINTER,),
    "cuPointerGetAttribute": (_POINTER, _INT, _ADDRESS),
    "cuMemGetAddressRange_v2": (_POINTER, _POINTER, _ADDRESS),
    # Memory of another process: IPC handles, and allocations of the virtual memory API.
    "cuIpcGetMemHandle": (_POINTER, _ADDRESS),
    "cuIpcOpenMemHandle_v2": (_POINTER, IpcMemHandle, _UINT),
    "cuIpcCloseMemHandle": (_ADDRESS,),
    "cuMemRetainAllocationHandle": (_POINTER, _ADDRESS),
    "cuMemGetAllocationPropertiesFromHandle": (_POINTER, _ADDRESS),
    "cuMemExportToShareableHandle": (_POINTER, _ADDRESS, _UINT, _ADDRESS),
    "cuMemImportFromShareableHandle": (_POINTER, _POINTER, _UINT),
    "cuMemRelease": (_ADDRESS,),
    "cuMemAddressReserve": (_POINTER, _SIZE, _SIZE, _ADDRESS, _ADDRESS),
    "cuMemAddressFree": (_ADDRESS, _SIZE),
    "cuMemMap": (_ADDRESS, _SIZE, _SIZE, _ADDRESS, _ADDRESS),
    "cuMemUnmap": (_ADDRESS, _SIZE),
    "cuMemSetAccess": (_ADDRESS, _SIZE, _POINTER, _SIZE),
}


class CudaCallFailed(Exception):
    """A call of the driver failed: ``call``, its ``status`` and the status's ``name``.

    Each side derives its own exception from this class and from the root of its exceptions.
    """

    def __init__(self, call: str, status: int, name: str) -> None:
        super().__init__(f"{call} failed: {name} ({status}).")
        self.call = call
        self.status = status
        self.name = name


class CudaLibrary:
    """The driver library, with the calls that both sides make; each side adds its own in a subclass.

    Addresses, contexts, streams and events are ints; devices are the driver's ordinals in this process. Calls about
    devices and contexts need ``cuInit``; all calls about memory, streams and events need a context that is current in
    the calling thread.

    Attributes:
        call_failed: the exception for a call that failed.
        library_missing: the exception for a driver that is not there, or is too old.
        setting: what names the library on this side, for the sentence of ``library_missing``.
    """

    call_failed: ClassVar[type[CudaCallFailed]]
    library_missing: ClassVar[type[Exception]]
    setting: ClassVar[str]

    def __init__(self, path: str) -> None:
        try:
            self._library = ctypes.CDLL(path)
            for name, argtypes in PROTOTYPES.items():
                function = getattr(self._library, name)
                function.argtypes = argtypes
                function.restype = ctypes.c_int
        except (OSError, AttributeError) as error:
            raise self.library_missing(
                f"The CUDA driver {path} cannot be used ({error}); install a driver of CUDA 12 or newer, or set "
                f"{self.setting}."
            ) from error

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise self.error(name, status)

    def _number(self, kind: type[ctypes._SimpleCData[Any]], name: str, *arguments: object) -> int:
        """Make a call that writes a number of this kind to its first argument; return it, 0 for a null pointer."""
        number = kind()
        self._call(name, ctypes.byref(number), *arguments)
        return number.value or 0

    def _bytes(self, size: int, name: str, *arguments: object) -> bytes:
        """Make a call that fills ``size`` bytes at its first argument; return them."""
        buffer = ctypes.create_string_buffer(size)
        self._call(name, buffer, *arguments)
        return buffer.raw

    def _text(self, name: str, device: int) -> str:
        return self._bytes(_TEXT_BYTES, name, _TEXT_BYTES, device).partition(b"\0")[0].decode(errors="replace")

    def error(self, call: str, status: int) -> CudaCallFailed:
        name = ctypes.c_char_p()
        known = self._library.cuGetErrorName(status, ctypes.byref(name)) == 0 and name.value is not None
        return self.call_failed(call, status, (name.value or b"").decode() if known else "an unknown error")

    def init(self) -> None:
        """Start the driver. Repeatable."""
        self._call("cuInit", 0)

    def version(self) -> int:
        """Return the highest CUDA version that the driver supports: 1000 * major + 10 * minor."""
        return self._number(_INT, "cuDriverGetVersion")

    def device_count(self) -> int:
        return self._number(_INT, "cuDeviceGetCount")

    def device(self, ordinal: int) -> int:
        return self._number(_INT, "cuDeviceGet", ordinal)

    def device_name(self, device: int) -> str:
        return self._text("cuDeviceGetName", device)

    def device_uuid(self, device: int) -> bytes:
        """Return 16 bytes: the UUID of the MIG instance where the device is one."""
        return self._bytes(UUID_BYTES, "cuDeviceGetUuid_v2", device)

    def retain_context(self, device: int) -> int:
        """Return the device's primary context, the one that torch uses; make it if need be. Release it as often."""
        return self._number(_POINTER, "cuDevicePrimaryCtxRetain", device)

    def release_context(self, device: int) -> None:
        """Give one ``retain_context`` back; the context goes with the last."""
        self._call("cuDevicePrimaryCtxRelease_v2", device)

    def set_context(self, context: int) -> None:
        """Make the context current in this thread; 0 for none."""
        self._call("cuCtxSetCurrent", context or None)

    def address_range(self, address: int) -> tuple[int, int]:
        """Return begin and size of the allocation, or of the mapped chunk, that an address lies in."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        return base.value, size.value
