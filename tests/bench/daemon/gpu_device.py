"""A GPU that holds an engine's memory: how fast it copies at best, and a load that computes on it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from uuid import UUID

from kvoffd_client.cuda_export import CudaError, ExportDriver, export_segments
from kvoffd_client.session import Closing
from kvoffd_proto import cuda
from kvoffd_proto.units import format_size
from tests.bench.daemon.host_device import BOTH, LOAD, STORE, Device
from tests.bench.daemon.results import BenchFailed
from tests.bench.daemon.synthetic_engine import EngineMemory

_GRANULARITY = 2 << 20
"""Smaller allocations share one of this size, which would be exported whole."""
_RELEASE = Path("/sys/module/nvidia/version")
COMPUTE_BYTES = 256 << 20
"""Much more than a GPU's cache holds."""
COMPUTE_KERNELS = 16
"""Kernels of one step, which takes some milliseconds."""
_BLOCKS, _THREADS = 1024, 256
_WORD_BYTES = 16
SWEEP = Path(__file__).with_name("sweep.ptx")
"""A kernel that reads and writes all of a buffer."""


class BenchDriver(ExportDriver):
    """The driver library as a bench uses it. See ExportDriver; all of these calls need a current context."""

    def create_stream(self) -> int:
        """Create a stream that waits for no other."""
        return self._number("cuStreamCreate", cuda.STREAM_NON_BLOCKING)

    def launch(self, kernel: int, blocks: int, threads: int, arguments: Sequence[int], stream: int) -> None:
        """Put ``blocks`` x ``threads`` of a kernel whose parameters are all 64-bit integers into the stream."""
        values = (ctypes.c_uint64 * len(arguments))(*arguments)
        first = ctypes.addressof(values)
        pointers = (ctypes.c_void_p * len(arguments))(*range(first, first + 8 * len(arguments), 8))
        self._call("cuLaunchKernel", kernel, blocks, 1, 1, threads, 1, 1, 0, stream, pointers, None)

    def allocate(self, size: int) -> int:
        """Allocate ordinary memory of the GPU; return its address."""
        return self._number("cuMemAlloc_v2", size)

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", address)

    def allocate_pinned(self, size: int) -> int:
        """Allocate pinned host memory, which all GPUs see at its address; return that."""
        return self._number("cuMemHostAlloc", size, cuda.MEMHOSTALLOC_PORTABLE)

    def free_pinned(self, address: int) -> None:
        self._call("cuMemFreeHost", address)

    def wait_stream(self, stream: int) -> None:
        """Wait until everything in the stream is done: for ever on a GPU that hangs."""
        self._call("cuStreamSynchronize", stream)

    def load_kernel(self, ptx: str, name: str) -> tuple[int, int]:
        """Compile a module; return it, which stays until it is unloaded or the context ends, and one of its kernels."""
        module = self._number("cuModuleLoadData", ptx.encode())
        return module, self._number("cuModuleGetFunction", module, name.encode())


class GpuDevice(Device, Closing):
    """GPU number ``ordinal``, as CUDA counts them in this process; its context is this thread's.

    The floor is one copy of ``size_bytes`` at a time between pinned memory and the GPU's.

    Raises:
        BenchFailed: there is no such GPU, or too little memory is free on it.
        KvoffdClientError: there is no driver.
    """

    floor_curves = ((STORE, "pinned copy from the GPU"), (LOAD, "pinned copy to the GPU"), (BOTH, "both at once"))

    def __init__(self, ordinal: int, size_bytes: int) -> None:
        try:
            self._driver = driver = BenchDriver()
        except CudaError as error:
            raise BenchFailed(f"CUDA does not start, so there is no GPU to measure; see nvidia-smi. {error}") from error
        count = driver.device_count()
        if ordinal >= count:
            raise BenchFailed(f"There is no GPU {ordinal}: CUDA finds {count} here, and counts them from 0.")
        device = driver.device(ordinal)
        self._size_bytes = size_bytes
        self.floor = f"one copy of {format_size(size_bytes)} between pinned memory and the GPU; at once: one each way"
        self.name = driver.device_name(device)
        self.uuid = str(UUID(bytes=driver.device_uuid(device)))
        with ExitStack() as undo:
            undo.enter_context(driver.context(device))
            self._copies = {
                direction: self._prepare_copy(undo, to_gpu=direction == LOAD) for direction in (STORE, LOAD)
            }
            self._undo = undo.pop_all()

    @property
    def driver_version(self) -> str:
        """The highest CUDA version that the driver knows, and the number of its release where the kernel has it."""
        major, minor = divmod(self._driver.version(), 1000)
        try:
            release = f"{_RELEASE.read_text().strip()}, "
        except OSError:
            release = ""
        return f"{release}CUDA {major}.{minor // 10}"

    @property
    def free_bytes(self) -> int:
        return self._driver.free_bytes()

    def allocate(self, size_bytes: int) -> EngineMemory:
        """Make an ordinary allocation and export it to the daemon."""
        size_bytes = -(-size_bytes // _GRANULARITY) * _GRANULARITY
        try:
            address = self._driver.allocate(size_bytes)
        except CudaError as error:
            raise BenchFailed(
                f"The GPU gives the bench no {format_size(size_bytes)} of its memory; stop what uses it. {error}"
            ) from error
        (segment,) = export_segments([(address, size_bytes)], self._driver)
        return EngineMemory(segment, address - segment.address, partial(self._driver.free, address))

    def floor_speed(self, direction: str) -> float:
        copies = list(self._copies.values()) if direction == BOTH else [self._copies[direction]]
        begin = time.perf_counter()
        for destination, source, stream in copies:
            self._driver.copy(destination, source, self._size_bytes, stream)
        for _, _, stream in copies:
            self._driver.wait_stream(stream)
        return len(copies) * self._size_bytes / (time.perf_counter() - begin)

    def _prepare_copy(self, undo: ExitStack, *, to_gpu: bool) -> tuple[int, int, int]:
        """Return destination, source and stream of the copies in one direction."""
        driver = self._driver
        try:
            host = driver.allocate_pinned(self._size_bytes)
            undo.callback(driver.free_pinned, host)
            device_memory = driver.allocate(self._size_bytes)
            undo.callback(driver.free, device_memory)
        except CudaError as error:
            size = format_size(2 * self._size_bytes)
            raise BenchFailed(f"The bench needs {size} of pinned memory and as much of the GPU's. {error}") from error
        stream = driver.create_stream()
        undo.callback(driver.destroy_stream, stream)
        return (device_memory, host, stream) if to_gpu else (host, device_memory, stream)

    def close(self) -> None:
        self._undo.close()


@contextmanager
def compute_load(ordinal: int) -> Iterator[Callable[[], None]]:
    """Make GPU number ``ordinal`` compute as decoding does: kernel after kernel reads and writes the GPU's memory.

    If this load does not slow down while the daemon copies, which takes its share of the same memory's bandwidth, an
    engine will not slow down either. Yields what launches the kernels of one step and waits for their end.
    Raises KvoffdClientError.
    """
    driver = BenchDriver()
    with ExitStack() as undo:
        undo.enter_context(driver.context(driver.device(ordinal)))
        _, kernel = driver.load_kernel(SWEEP.read_text(), "sweep")
        buffer = driver.allocate(COMPUTE_BYTES)
        undo.callback(driver.free, buffer)
        stream = driver.create_stream()
        undo.callback(driver.destroy_stream, stream)

        def step() -> None:
            for _ in range(COMPUTE_KERNELS):
                driver.launch(kernel, _BLOCKS, _THREADS, (buffer, COMPUTE_BYTES // _WORD_BYTES), stream)
            driver.wait_stream(stream)

        step()
        yield step
