"""The GPU that a bench's engines have their memory on, and how fast it copies at best."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from uuid import UUID

from kvoffd_client.bench.gpu_driver import BenchDriver
from kvoffd_client.bench.place import BOTH, LOAD, STORE
from kvoffd_client.bench.report import BenchFailed
from kvoffd_client.cuda.export import CudaError, GpuSegment, export_segments
from kvoffd_proto.units import format_size

_GRANULARITY = 2 << 20
"""Smaller allocations share one of this size, which would be exported whole."""
_RELEASE = Path("/sys/module/nvidia/version")


class GpuMemory:
    """One ordinary allocation, exported."""

    def __init__(self, driver: BenchDriver, size_bytes: int) -> None:
        self._driver = driver
        size_bytes = -(-size_bytes // _GRANULARITY) * _GRANULARITY
        try:
            self._address = driver.allocate(size_bytes)
        except CudaError as error:
            raise BenchFailed(
                f"The GPU gives the bench no {format_size(size_bytes)} of its memory; stop what uses it. {error}"
            ) from error
        self.registered: GpuSegment
        (self.registered,) = export_segments([(self._address, size_bytes)], driver)

    @property
    def offset_bytes(self) -> int:
        """Where in the exported segment it begins."""
        return self._address - self.registered.address

    def close(self) -> None:
        """Free it."""
        self._driver.free(self._address)


class Gpu:
    """GPU number ``ordinal``, as CUDA counts them in this process; its context is this thread's.

    One large copy at a time between pinned memory and the GPU's is the floor: ``size_bytes`` each.

    Raises:
        BenchFailed: there is no such GPU, or too little memory is free on it.
        KvoffdClientError: there is no driver.
    """

    curves = ((STORE, "pinned copy from the GPU"), (LOAD, "pinned copy to the GPU"), (BOTH, "both at once"))

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
            self._copies = {way: self._prepare(undo, to_gpu=way == LOAD) for way in (STORE, LOAD)}
            self._undo = undo.pop_all()

    @property
    def driver_version(self) -> str:
        """The highest CUDA version it knows, and NVIDIA's number of the release where the kernel tells it."""
        major, minor = divmod(self._driver.version(), 1000)
        try:
            release = f"{_RELEASE.read_text().strip()}, "
        except OSError:
            release = ""
        return f"{release}CUDA {major}.{minor // 10}"

    @property
    def free_bytes(self) -> int:
        """Of the GPU's memory: what no process has."""
        return self._driver.free_bytes()

    def allocate(self, size_bytes: int) -> GpuMemory:
        """See Place."""
        return GpuMemory(self._driver, size_bytes)

    def speed(self, way: str) -> float:
        """See Place."""
        copies = list(self._copies.values()) if way == BOTH else [self._copies[way]]
        begin = time.perf_counter()
        for destination, source, stream in copies:
            self._driver.copy(destination, source, self._size_bytes, stream)
        for _, _, stream in copies:
            self._driver.wait_stream(stream)
        return len(copies) * self._size_bytes / (time.perf_counter() - begin)

    def _prepare(self, undo: ExitStack, *, to_gpu: bool) -> tuple[int, int, int]:
        """Destination, source and stream of one direction's copies."""
        driver = self._driver
        try:
            host = driver.allocate_pinned(self._size_bytes)
            undo.callback(driver.free_pinned, host)
            there = driver.allocate(self._size_bytes)
            undo.callback(driver.free, there)
        except CudaError as error:
            size = format_size(2 * self._size_bytes)
            raise BenchFailed(f"The bench needs {size} of pinned memory and as much of the GPU's. {error}") from error
        stream = driver.create_stream()
        undo.callback(driver.destroy_stream, stream)
        return (there, host, stream) if to_gpu else (host, there, stream)

    def close(self) -> None:
        """Give everything back."""
        self._undo.close()

    def __enter__(self) -> Gpu:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()
