"""The GPUs that engines have registered memory of, each with threads of its own, so that one that hangs hangs alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from kvoffd.errors import KvoffdError
from kvoffd.transfer.cuda.control import ControlThread
from kvoffd.transfer.cuda.device import Device, find_device, list_devices
from kvoffd.transfer.cuda.driver import CudaDriver, CudaMissing
from kvoffd.transfer.cuda.gpu import HANGING_S, Gpu, OnMapped
from kvoffd.transfer.cuda.handles import IpcExport, VmmExport
from kvoffd.transfer.cuda.pinning import PinnedPool, PinProgress
from kvoffd.transfer.engine import Direction, DirectionLoad


class Gpus:
    """All GPUs of the machine. Makes no call of CUDA in its callers' threads, and none at all before the first ``map``.

    Args:
        pool_address: of the pool, touched already.
        pool_bytes: of the pool.
        clock: what deadlines are measured on, in seconds.
        library: path of libcuda; see CudaDriver.
    """

    def __init__(
        self,
        pool_address: int,
        pool_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        library: str = "",
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._gpus: dict[bytes, Gpu] = {}
        self._devices: list[Device] = []
        self._index: ControlThread | None = None
        self._missing = ""
        try:
            self._driver: CudaDriver | None = CudaDriver(library)
        except CudaMissing as error:
            self._driver, self._missing = None, error.message
        else:
            self._pool = PinnedPool(self._driver, pool_address, pool_bytes)

    @property
    def available(self) -> bool:
        """A CUDA driver is there; whether it finds GPUs shows when the first engine registers."""
        return self._driver is not None

    @property
    def problems(self) -> list[str]:
        """Sentences for the operator."""
        found = [gpu.problem for gpu in self._known()]
        if self._index is not None and self._index.busy_s > HANGING_S:
            found.append("The CUDA driver does not answer, so no engine on a GPU can register; see its log (dmesg).")
        if self._driver is not None:
            found.append(self._pool.problem)
        return [problem for problem in found if problem is not None]

    @property
    def pinning(self) -> PinProgress:
        """How much of the pool is pinned."""
        return self._pool.progress if self._driver is not None else PinProgress(0, 0, 0)

    def map(self, uuid: bytes, owner: bytes, exports: Sequence[IpcExport | VmmExport], on_mapped: OnMapped) -> None:
        """Maps the memory of registration ``owner`` on the GPU with this UUID and then calls ``on_mapped``.

        ``on_mapped`` is called in another thread with the memory, or with why there is none; until then descriptors in
        ``exports`` must stay open. On a GPU that hangs it is never called. Raises KvoffdError when there is no driver
        or too much waits already; then it is not called either.
        """
        driver = self._driver
        if driver is None:
            raise CudaMissing(self._missing)
        with self._lock:
            gpu = self._gpus.get(uuid)
            if gpu is None and self._index is None:
                self._index = ControlThread("kvoffd-gpu-index", "The CUDA driver", self._clock)
            index = self._index
        if gpu is not None:
            gpu.map(owner, exports, on_mapped)
            return

        def find() -> None:
            try:
                self._find(driver, uuid).map(owner, exports, on_mapped)
            except KvoffdError as error:
                on_mapped(error)

        assert index is not None
        index.submit(find)

    def load_of(self, direction: Direction) -> DirectionLoad:
        """Counters of one direction over all GPUs."""
        total = DirectionLoad(0, 0, 0.0, 0)
        for gpu in self._known():
            total = total.plus(gpu.load_of(direction))
        return total

    def expire(self) -> None:
        """See TransferEngine."""
        for gpu in self._known():
            if (engine := gpu.engine) is not None:
                engine.expire()

    def stop(self, timeout_s: float) -> bool:
        """Cancels what waits, abandons what runs; False when a copy still runs after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        engines = [engine for gpu in self._known() if (engine := gpu.engine) is not None]
        # Each is told before any is waited for.
        stopped = [engine.close(0.0) for engine in engines]
        return all(
            done or engine.close(deadline - time.monotonic()) for engine, done in zip(engines, stopped, strict=True)
        )

    def close(self, timeout_s: float) -> bool:
        """Waits until all memory that was given back is unmapped and the pool is unpinned; False when it is not."""
        deadline = time.monotonic() + timeout_s
        controls: list[Gpu | ControlThread] = [*self._known()]
        if self._index is not None:
            controls.insert(0, self._index)
        closed = [control.close(max(0.0, deadline - time.monotonic())) for control in controls]
        if self._driver is not None:
            closed.append(self._pool.close(max(0.0, deadline - time.monotonic())))
        return all(closed)

    def _known(self) -> list[Gpu]:
        with self._lock:
            return list(self._gpus.values())

    def _find(self, driver: CudaDriver, uuid: bytes) -> Gpu:
        """In the index thread. Raises NoSuchGpu, CudaError."""
        if not self._devices:
            self._devices = list_devices(driver)
        device = find_device(self._devices, uuid)
        with self._lock:
            gpu = self._gpus.get(uuid)
            if gpu is None:
                gpu = self._gpus[uuid] = Gpu(driver, device, self._pool, self._clock)
            return gpu
