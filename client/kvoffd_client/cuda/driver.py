"""The few calls of the CUDA driver that an exporter makes, by ctypes.

The daemon has a binding of its own for the importer's calls: the two have but the loading in common, and neither side
may import the other. Prototypes and constants are those of ``cuda.h``.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar

from kvoffd_client.errors import KvoffdClientError

LIBRARY_VARIABLE = "KVOFFD_CUDA_LIBRARY"
DEFAULT_LIBRARY = "libcuda.so.1"

IPC_HANDLE_BYTES = 64
UUID_BYTES = 16

HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1
HANDLE_TYPE_FABRIC = 8

_ATTRIBUTE_DEVICE_ORDINAL = 9
_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE = 10


class CudaError(KvoffdClientError):
    """A call of the driver failed: ``call`` and its ``status``."""

    def __init__(self, call: str, status: int, name: str) -> None:
        super().__init__(f"{call} failed: {name} ({status}).")
        self.call = call
        self.status = status


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _AllocationProperties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_uint),
        ("requested_handle_types", ctypes.c_uint),
        ("location", _Location),
        ("win32_handle_meta_data", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


_INT, _SIZE, _ADDRESS, _POINTER = ctypes.c_int, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_void_p
PROTOTYPES: Mapping[str, tuple[type, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuGetErrorName": (_INT, _POINTER),
    "cuDeviceGetUuid_v2": (_POINTER, _INT),
    "cuDevicePrimaryCtxRetain": (_POINTER, _INT),
    "cuDevicePrimaryCtxRelease_v2": (_INT,),
    "cuCtxGetCurrent": (_POINTER,),
    "cuCtxSetCurrent": (_POINTER,),
    "cuPointerGetAttribute": (_POINTER, _INT, _ADDRESS),
    "cuMemGetAddressRange_v2": (_POINTER, _POINTER, _ADDRESS),
    "cuIpcGetMemHandle": (_POINTER, _ADDRESS),
    "cuMemRetainAllocationHandle": (_POINTER, _ADDRESS),
    "cuMemGetAllocationPropertiesFromHandle": (_POINTER, _ADDRESS),
    "cuMemExportToShareableHandle": (_POINTER, _ADDRESS, ctypes.c_uint, _ADDRESS),
    "cuMemRelease": (_ADDRESS,),
}


class ExportDriver:
    """The driver library. All but what is about devices and pointers' attributes needs a current context.

    Args:
        library: path of libcuda; KVOFFD_CUDA_LIBRARY or the system's when None.

    Attributes:
        prototypes: the arguments of each call; more of them in a subclass that makes more calls.

    Raises:
        KvoffdClientError: it is not there, or is too old.
    """

    prototypes: ClassVar[Mapping[str, tuple[type, ...]]] = PROTOTYPES

    def __init__(self, library: str | None = None) -> None:
        path = library or os.environ.get(LIBRARY_VARIABLE) or DEFAULT_LIBRARY
        try:
            self._library = ctypes.CDLL(path)
            for name, argtypes in self.prototypes.items():
                function = getattr(self._library, name)
                function.argtypes = argtypes
                function.restype = ctypes.c_int
        except (OSError, AttributeError) as error:
            raise KvoffdClientError(
                f"The CUDA driver {path} cannot be used ({error}); install a driver of CUDA 12 or newer, or set "
                f"{LIBRARY_VARIABLE}."
            ) from error
        self._call("cuInit", 0)

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(text))
            raise CudaError(name, status, (text.value or b"an unknown error").decode())

    def device_uuid(self, device: int) -> bytes:
        """16 bytes: of the MIG instance where the device is one."""
        uuid = (ctypes.c_ubyte * UUID_BYTES)()
        self._call("cuDeviceGetUuid_v2", uuid, device)
        return bytes(uuid)

    def device_of(self, address: int) -> int:
        """The device whose memory it is. Raises CudaError where it is none's."""
        device = ctypes.c_int()
        self._call("cuPointerGetAttribute", ctypes.byref(device), _ATTRIBUTE_DEVICE_ORDINAL, address)
        return device.value

    def has_ipc_handle(self, address: int) -> bool:
        """Ordinary memory; memory of the virtual memory API has none."""
        capable = ctypes.c_uint()
        self._call("cuPointerGetAttribute", ctypes.byref(capable), _ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, address)
        return bool(capable.value)

    def address_range(self, address: int) -> tuple[int, int]:
        """Begin and size of the allocation, or of the mapped chunk, that an address lies in."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        return base.value, size.value

    def ipc_handle(self, base: int) -> bytes:
        """The handle of a whole allocation."""
        handle = ctypes.create_string_buffer(IPC_HANDLE_BYTES)
        self._call("cuIpcGetMemHandle", handle, base)
        return handle.raw

    def export_chunk(self, address: int) -> tuple[int, int]:
        """(fd, handle types) of the chunk mapped at ``address``; fd is -1 where its types have no descriptors."""
        allocation = ctypes.c_uint64()
        self._call("cuMemRetainAllocationHandle", ctypes.byref(allocation), address)
        try:
            properties = _AllocationProperties()
            self._call("cuMemGetAllocationPropertiesFromHandle", ctypes.byref(properties), allocation)
            types = int(properties.requested_handle_types)
            fd = ctypes.c_int(-1)
            if types & HANDLE_TYPE_POSIX_FILE_DESCRIPTOR:
                self._call(
                    "cuMemExportToShareableHandle",
                    ctypes.byref(fd),
                    allocation,
                    HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                    0,
                )
            return fd.value, types
        finally:
            self._call("cuMemRelease", allocation)

    def current_context(self) -> int:
        """This thread's; 0 for none."""
        context = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(context))
        return context.value or 0

    def set_context(self, context: int) -> None:
        """Makes a context this thread's."""
        self._call("cuCtxSetCurrent", context or None)

    def retain_context(self, device: int) -> int:
        """The device's primary context: the one that torch uses."""
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        return context.value or 0

    def release_context(self, device: int) -> None:
        """Gives one retain back."""
        self._call("cuDevicePrimaryCtxRelease_v2", device)

    @contextmanager
    def context(self, device: int) -> Iterator[None]:
        """Makes the device's context this thread's for a while."""
        self.set_context(self.retain_context(device))
        try:
            yield
        finally:
            self.set_context(0)
            self.release_context(device)
