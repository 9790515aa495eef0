"""The GPUs that engines have registered memory of, each with threads of its own, so that one that hangs hangs alone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce

from kvoffd.errors import KvoffdError
from kvoffd.system.numa import locality_of
from kvoffd.transfer.cuda.control import ControlThread
from kvoffd.transfer.cuda.cuda_engine import CudaEngine
from kvoffd.transfer.cuda.device import Device, find_device, list_devices
from kvoffd.transfer.cuda.driver import CudaDriver, CudaError, CudaMissing
from kvoffd.transfer.cuda.handles import GpuMappings, GpuSegment, IpcExport, VmmExport
from kvoffd.transfer.cuda.pinning import UNPINNED, PinnedPool, PinProgress
from kvoffd.transfer.engine import DirectionLoad, TransferEngine
from kvoffd.transfer.plan import Direction
from kvoffd_proto.errors import ErrorCode

_log = logging.getLogger(__name__)

# A driver call of the control thread takes milliseconds, making a context up to some seconds.
HANGING_S = 15.0
_LANES_CLOSE_S = 10.0


@dataclass(frozen=True, eq=False)
class GpuMemory:
    """A registration's memory on one GPU. Its methods may be called from any thread and never wait."""

    _gpu: Gpu
    segments: list[GpuSegment]
    """In the order of the handles."""
    engine: TransferEngine

    @property
    def node(self) -> int | None:
        """The GPU's NUMA node; None where the machine has only one or does not tell."""
        return self._gpu.locality.node

    def close(self, on_closed: Callable[[], None]) -> None:
        """Unmap the memory, then call ``on_closed`` in another thread. No copy of it may be running."""
        self._gpu.unmap(self.segments, on_closed)


OnMapped = Callable[[GpuMemory | KvoffdError], None]


class Gpu:
    """A device's context, engine and mappings, and the thread that makes and unmakes them."""

    def __init__(self, driver: CudaDriver, device: Device, pool: PinnedPool, clock: Callable[[], float]) -> None:
        self.device = device
        self.locality = locality_of(device.pci_bus_id)
        self._driver = driver
        self._pool = pool
        self._clock = clock
        self._control = ControlThread(f"kvoffd-gpu-{device.ordinal}", str(device), clock)
        self._mappings = GpuMappings(driver, device.ordinal)
        self._registrations = 0
        # Set and cleared by the control thread, read by others.
        self.engine: CudaEngine | None = None
        self._past = dict.fromkeys(Direction, DirectionLoad(0, 0, 0.0, 0))

    @property
    def problem(self) -> str | None:
        """A sentence for the operator when the GPU does not answer; else None."""
        engine = self.engine
        if self._control.busy_s < HANGING_S and not (engine is not None and engine.hangs):
            return None
        return (
            f"{self.device} does not answer. Its engines get no blocks, and those that wait for a load wait until the "
            "GPU answers again or the daemon is restarted; see the driver's log (dmesg)."
        )

    def load_of(self, direction: Direction) -> DirectionLoad:
        """Return the counters over all engines that the GPU has had."""
        past, engine = self._past[direction], self.engine
        return past if engine is None else past.plus(engine.load_of(direction))

    def map(self, owner: bytes, exports: Sequence[IpcExport | VmmExport], on_mapped: OnMapped) -> None:
        def task() -> None:
            try:
                mapped: GpuMemory | KvoffdError = self._map(owner, exports)
            except KvoffdError as error:
                mapped = error
            except Exception:
                _log.exception("%s: mapping an engine's memory failed inside the daemon.", self.device)
                mapped = KvoffdError.of(ErrorCode.INTERNAL)
            on_mapped(mapped)

        self._control.submit(task)

    def unmap(self, segments: list[GpuSegment], on_unmapped: Callable[[], None]) -> None:
        """Undo a ``map`` that succeeded, then call ``on_unmapped``."""

        def task() -> None:
            self._unmap(segments)
            on_unmapped()

        self._control.submit_always(task)

    def close(self, timeout_s: float) -> bool:
        return self._control.close(timeout_s)

    # --- in the control thread --------------------------------------------------------------------

    def _map(self, owner: bytes, exports: Sequence[IpcExport | VmmExport]) -> GpuMemory:
        if not self._registrations:
            self._open_engine()
        try:
            segments = self._mappings.open(owner, exports)
        except BaseException:
            if not self._registrations:
                self._close_engine()
            raise
        self._registrations += 1
        assert self.engine is not None
        return GpuMemory(self, segments, self.engine)

    def _unmap(self, segments: list[GpuSegment]) -> None:
        for segment in segments:
            try:
                segment.close()
            except CudaError as error:
                # As where the context is lost, with everything in it.
                _log.warning("%s: memory of an engine could not be unmapped: %s", self.device, error.message)
        self._registrations -= 1
        if not self._registrations:
            self._close_engine()

    def _open_engine(self) -> None:
        driver, ordinal = self._driver, self.device.ordinal
        with ExitStack() as undo:
            context = driver.retain_context(ordinal)
            undo.callback(driver.release_context, ordinal)
            driver.set_context(context)
            engine = CudaEngine(
                driver, context, self._pool.chunks, name=str(self.device), locality=self.locality, clock=self._clock
            )
            undo.callback(engine.close, _LANES_CLOSE_S)
            engine.open()
            undo.pop_all()
        self._pool.acquire(ordinal)
        self.engine = engine
        where = "" if self.locality.node is None else f", its threads on NUMA node {self.locality.node}"
        _log.info("%s is in use%s.", self.device, where)

    def _close_engine(self) -> None:
        engine, self.engine = self.engine, None
        assert engine is not None
        for direction in Direction:
            self._past[direction] = self._past[direction].plus(engine.load_of(direction))
        if not engine.close(_LANES_CLOSE_S):
            _log.error("%s: a copy thread does not end; its context stays.", self.device)
            return
        self._pool.release()
        self._driver.leave_context(self.device.ordinal)
        _log.info("%s is not in use any more.", self.device)


class Gpus:
    """All GPUs of the machine. Makes no call of CUDA in its callers' threads, and none before ``pin_pool`` or ``map``.

    The pool has been touched already. Deadlines are measured on ``clock``; ``library``,
    ``batches`` and ``gather`` are CudaDriver's; the pool stays pinned for ``pin_linger_s`` after its last use.
    """

    def __init__(
        self,
        pool_address: int,
        pool_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        library: str = "",
        *,
        batches: bool = True,
        gather: bool = False,
        pin_linger_s: float = 0.0,
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._gpus: dict[bytes, Gpu] = {}
        self._devices: list[Device] = []
        self._index: ControlThread | None = None
        self._missing = ""
        self._refusal = ""
        try:
            self._driver: CudaDriver | None = CudaDriver(library, batches=batches, gather=gather)
        except CudaMissing as error:
            self._driver, self._missing = None, error.message
        else:
            self._pool = PinnedPool(self._driver, pool_address, pool_bytes, linger_s=pin_linger_s)

    @property
    def available(self) -> bool:
        """Whether there is a CUDA driver. Whether it finds GPUs shows when the first engine registers."""
        return self._driver is not None

    @property
    def problems(self) -> list[str]:
        """Sentences for the operator, one a problem."""
        found = [gpu.problem for gpu in self._all_gpus()]
        if self._index is not None and self._index.busy_s > HANGING_S:
            found.append("The CUDA driver does not answer, so no engine on a GPU can register; see its log (dmesg).")
        if self._driver is not None:
            found.append(self._pool.problem)
        return [problem for problem in found if problem is not None]

    @property
    def lost(self) -> str | None:
        """Why this process must end to use the GPUs again, as a sentence; else None."""
        error = self._driver.lost if self._driver is not None else None
        return error.message if error is not None else None

    @property
    def pinning(self) -> PinProgress:
        return self._pool.progress if self._driver is not None else UNPINNED

    def pin_pool(self) -> None:
        """Pin the pool now, in the background, in the context of the first GPU, if there is one."""
        driver = self._driver
        if driver is None:
            return

        def pin() -> None:
            try:
                first, *_ = self._list_devices(driver)
            except CudaError as error:
                _log.info("The pool is not pinned before an engine on a GPU registers: %s", error.message)
            else:
                self._pool.pin(first.ordinal)

        self._in_index(pin)

    def map(self, uuid: bytes, owner: bytes, exports: Sequence[IpcExport | VmmExport], on_mapped: OnMapped) -> None:
        """Map the memory of registration ``owner`` on the GPU with this UUID, then call ``on_mapped``.

        ``on_mapped`` is called in another thread with the memory, or with why there is none; until then descriptors in
        ``exports`` must stay open. On a GPU that hangs it is never called. Raises KvoffdError when there is no driver
        or too much waits already; then it is not called either.
        """
        driver = self._driver
        if driver is None:
            raise CudaMissing(self._missing)
        with self._lock:
            gpu = self._gpus.get(uuid)
        if gpu is not None:
            gpu.map(owner, exports, on_mapped)
            return

        def find() -> None:
            try:
                self._find_gpu(driver, uuid).map(owner, exports, on_mapped)
            except KvoffdError as error:
                if error.message != self._refusal:  # engines try again and again
                    _log.warning("Engines on a GPU cannot register: %s", error.message)
                self._refusal = error.message
                on_mapped(error)

        self._in_index(find)

    def _in_index(self, task: Callable[[], None]) -> None:
        with self._lock:
            if self._index is None:
                self._index = ControlThread("kvoffd-gpu-index", "The CUDA driver", self._clock)
        self._index.submit(task)

    def load_of(self, direction: Direction) -> DirectionLoad:
        loads = (gpu.load_of(direction) for gpu in self._all_gpus())
        return reduce(DirectionLoad.plus, loads, DirectionLoad(0, 0, 0.0, 0))

    def expire(self) -> None:
        for engine in self._engines():
            engine.expire()

    def stop(self, timeout_s: float) -> bool:
        """Cancel what waits, abandon what runs; False when a copy still runs after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        engines = self._engines()
        # All of them are stopped before any is waited for.
        stopped = [engine.close(0.0) for engine in engines]
        return all(
            done or engine.close(deadline - time.monotonic()) for engine, done in zip(engines, stopped, strict=True)
        )

    def close(self, timeout_s: float) -> bool:
        """Wait until all memory that was given back is unmapped and the pool is unpinned; False when it is not."""
        deadline = time.monotonic() + timeout_s
        index = [self._index] if self._index is not None else []
        pool = [self._pool] if self._driver is not None else []
        parts: list[ControlThread | Gpu | PinnedPool] = [*index, *self._all_gpus(), *pool]
        closed = [part.close(max(0.0, deadline - time.monotonic())) for part in parts]
        return all(closed)

    def _all_gpus(self) -> list[Gpu]:
        with self._lock:
            return list(self._gpus.values())

    def _engines(self) -> list[CudaEngine]:
        return [engine for gpu in self._all_gpus() if (engine := gpu.engine) is not None]

    def _find_gpu(self, driver: CudaDriver, uuid: bytes) -> Gpu:
        """In the index thread. Raises NoSuchGpu, CudaError."""
        device = find_device(self._list_devices(driver), uuid)
        with self._lock:
            gpu = self._gpus.get(uuid)
            if gpu is None:
                gpu = self._gpus[uuid] = Gpu(driver, device, self._pool, self._clock)
            return gpu

    def _list_devices(self, driver: CudaDriver) -> list[Device]:
        """In the index thread. Raises CudaError, also where there is none."""
        if not self._devices:
            self._devices = list_devices(driver)
        return self._devices
