"""The driver library as the benches use it, and a load that computes on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvoffd_proto.cuda import Cuda, declare
from tests.kit.cuda_calls import MEMHOSTALLOC_PORTABLE, TEST_PROTOTYPES

COMPUTE_BYTES = 256 << 20
"""Much more than a GPU's cache holds."""
COMPUTE_KERNELS = 16
"""Kernels of one step, which takes some milliseconds."""
_BLOCKS, _THREADS = 1024, 256
_WORD_BYTES = 16
SWEEP = Path(__file__).with_name("sweep.ptx")


class BenchDriver(Cuda):
    """The driver, started. All of these calls need a current context."""

    def __init__(self, library: str = "") -> None:
        super().__init__(library)
        declare(self._library, TEST_PROTOTYPES)
        self.init()

    def copy(self, destination: int, source: int, size: int, stream: int) -> None:
        self._call("cuMemcpyAsync", destination, source, size, stream)

    def launch(self, kernel: int, blocks: int, threads: int, arguments: Sequence[int], stream: int) -> None:
        """Put ``blocks`` x ``threads`` of a kernel whose parameters are all 64-bit integers into the stream."""
        values = (ctypes.c_uint64 * len(arguments))(*arguments)
        first = ctypes.addressof(values)
        pointers = (ctypes.c_void_p * len(arguments))(*range(first, first + 8 * len(arguments), 8))
        self._call("cuLaunchKernel", kernel, blocks, 1, 1, threads, 1, 1, 0, stream, pointers, None)

    def allocate(self, size: int) -> int:
        return self._number("cuMemAlloc_v2", size, written="CUdeviceptr")

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", address)

    def allocate_pinned(self, size: int) -> int:
        """Allocate pinned host memory, which all GPUs see at its address; return that."""
        return self._number("cuMemHostAlloc", size, MEMHOSTALLOC_PORTABLE, written="void *")

    def free_pinned(self, address: int) -> None:
        self._call("cuMemFreeHost", address)

    def wait_stream(self, stream: int) -> None:
        """Wait until everything in the stream is done: for ever on a GPU that hangs."""
        self._call("cuStreamSynchronize", stream)

    def sweep(self) -> int:
        """A kernel that reads and writes all of a buffer. Its module stays until the context ends."""
        module = self._number("cuModuleLoadData", SWEEP.read_bytes(), written="CUmodule")
        return self._number("cuModuleGetFunction", module, b"sweep", written="CUfunction")


@contextmanager
def compute_load(ordinal: int) -> Iterator[Callable[[], None]]:
    """Make GPU number ``ordinal`` compute as decoding does: kernel after kernel reads and writes the GPU's memory.

    If this load does not slow down while the daemon copies, which takes its share of the same memory's bandwidth, an
    engine will not slow down either. Yields what launches the kernels of one step and waits for their end.
    Raises CudaError.
    """
    driver = BenchDriver()
    with ExitStack() as undo:
        undo.enter_context(driver.context(driver.devices()[ordinal]))
        kernel = driver.sweep()
        buffer = driver.allocate(COMPUTE_BYTES)
        undo.callback(driver.free, buffer)
        stream = driver.create_stream(urgent=False)
        undo.callback(driver.destroy_stream, stream)

        def step() -> None:
            for _ in range(COMPUTE_KERNELS):
                driver.launch(kernel, _BLOCKS, _THREADS, (buffer, COMPUTE_BYTES // _WORD_BYTES), stream)
            driver.wait_stream(stream)

        step()
        yield step
