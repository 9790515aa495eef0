"""The calls of the CUDA driver that benches make besides the exporter's: they allocate, copy and compute themselves."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from kvoffd_client.cuda.export import ExportDriver
from kvoffd_proto import cuda_driver as cuda


class BenchDriver(ExportDriver):
    """The driver library, as a bench uses it. See ExportDriver; all of these calls need a current context."""

    def free_bytes(self) -> int:
        """Of the GPU's memory: what no process has."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def allocate(self, size: int) -> int:
        """Ordinary memory of the GPU."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), size)
        return address.value

    def free(self, address: int) -> None:
        """Gives it back."""
        self._call("cuMemFree_v2", address)

    def allocate_pinned(self, size: int) -> int:
        """Pinned memory of the host."""
        address = ctypes.c_uint64()
        self._call("cuMemHostAlloc", ctypes.byref(address), size, cuda.MEMHOSTALLOC_PORTABLE)
        return address.value

    def free_pinned(self, address: int) -> None:
        """Gives it back."""
        self._call("cuMemFreeHost", address)

    def create_stream(self) -> int:
        """A stream that waits for no other."""
        stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), cuda.STREAM_NON_BLOCKING)
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        """Gives a stream up."""
        self._call("cuStreamDestroy_v2", stream)

    def wait_stream(self, stream: int) -> None:
        """Until everything in the stream is done."""
        self._call("cuStreamSynchronize", stream)

    def copy(self, destination: int, source: int, size: int, stream: int) -> None:
        """Puts one copy into the stream."""
        self._call("cuMemcpyAsync", destination, source, size, stream)

    def load_kernel(self, ptx: str, name: str) -> int:
        """Has the driver compile a module and returns one of its kernels; the module stays until the context goes."""
        module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), ptx.encode())
        self._call("cuModuleGetFunction", ctypes.byref(kernel), module, name.encode())
        return kernel.value or 0

    def launch(self, kernel: int, blocks: int, threads: int, arguments: Sequence[int], stream: int) -> None:
        """Puts ``blocks`` x ``threads`` of a kernel whose parameters are all 64-bit integers into the stream."""
        values = (ctypes.c_uint64 * len(arguments))(*arguments)
        first = ctypes.addressof(values)
        pointers = (ctypes.c_void_p * len(arguments))(*range(first, first + 8 * len(arguments), 8))
        self._call("cuLaunchKernel", kernel, blocks, 1, 1, threads, 1, 1, 0, stream, pointers, None)
