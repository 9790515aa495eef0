"""The GPUs that engines have registered memory of, each with threads of its own, so that one that hangs hangs alone.

GPUs are found by UUID, never by ordinal: the engine may count them otherwise.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple, TypeVar
from uuid import UUID

from kvoffd.errors import KvoffdError, refusal_of
from kvoffd.system.numa import locality_of
from kvoffd.system.threads import TaskThread
from kvoffd.transfer.cuda.engine import GpuEngine
from kvoffd.transfer.cuda.mappings import HandleCache, IpcExport, MappedSegment, VmmExport
from kvoffd.transfer.cuda.pinning import PinnedPool, PinProgress
from kvoffd.transfer.engine import CopyEngine, CopyStats
from kvoffd.transfer.plan import Direction
from kvoffd_proto.cuda import Cuda, CudaError
from kvoffd_proto.errors import ErrorCode

_log = logging.getLogger(__name__)

# A driver call of a control thread takes milliseconds, making a context up to some seconds.
HANGING_S = 15.0
MAX_WAITING_TASKS = 64

Found = TypeVar("Found")


def _submit(thread: TaskThread, what: str, task: Callable[[], object]) -> None:
    """Have the thread of a device or driver run a task. Raises KvoffdError when too many wait."""
    if not thread.put(task, MAX_WAITING_TASKS):
        raise KvoffdError(
            f"{what} has not answered for {thread.busy_s:.0f} s and {thread.waiting} requests wait for it; see the "
            "driver's log (dmesg), and restart the daemon if the GPU is well.",
            ErrorCode.TOO_MANY,
        )


class NoSuchGpu(KvoffdError):
    """The daemon does not see the GPU that an engine named."""

    code = ErrorCode.UNSUPPORTED


class Device(NamedTuple):
    """One GPU, or one MIG instance; ``ordinal`` is the driver's number for it in this process."""

    ordinal: int
    uuid: bytes
    name: str
    pci_bus_id: str

    def __str__(self) -> str:
        return f"{self.name} {UUID(bytes=self.uuid)}"


def list_devices(driver: Cuda) -> list[Device]:
    """Start the driver and return all devices. Makes no context. Raises CudaError."""
    driver.init()
    return [Device(n, driver.device_uuid(n), driver.device_name(n), driver.pci_bus_id(n)) for n in driver.devices()]


def find_device(devices: list[Device], uuid: bytes) -> Device:
    """Return the device with this UUID. Raises NoSuchGpu with a sentence that says what is there instead."""
    for device in devices:
        if device.uuid == uuid:
            return device
    seen = "none at all" if not devices else ", ".join(map(str, devices))
    raise NoSuchGpu(
        f"The daemon does not see the engine's GPU or MIG instance {UUID(bytes=uuid)}. It sees {seen}. Give its "
        "container all GPUs that engines use (NVIDIA_VISIBLE_DEVICES=all, no CUDA_VISIBLE_DEVICES). CUDA lets a "
        "process use one MIG instance only: run one daemon for each, with the engine's CUDA_VISIBLE_DEVICES."
    )


@dataclass(frozen=True, eq=False)
class GpuMemory:
    """A registration's memory on one GPU, for any thread."""

    segments: list[MappedSegment]
    """In the order of the handles."""
    engine: CopyEngine
    node: int | None
    """The GPU's NUMA node; None where the machine has only one or does not tell."""
    close: Callable[[Callable[[], None]], None]
    """Unmaps the memory, then calls its argument in another thread. Never waits. No copy of it may be running."""


OnMapped = Callable[[GpuMemory | KvoffdError], None]


def _outcome(work: Callable[[], Found]) -> Found | KvoffdError:
    """Return what it returns, or why it cannot: a waiting caller always gets an answer."""
    try:
        return work()
    except CudaError as error:
        return KvoffdError(error.message, ErrorCode.COPY_FAILED)
    except Exception as error:
        return refusal_of(error)


class Gpu:
    """A device's context, engine and mappings, and the thread that makes and unmakes them."""

    def __init__(self, device: Device, pool: PinnedPool, clock: Callable[[], float]) -> None:
        self.device = device
        self.locality = locality_of(device.pci_bus_id)
        self._driver = pool.driver
        self._pool = pool
        self._clock = clock
        self._control = TaskThread(f"kvoffd-gpu-{device.ordinal}", clock)
        self._handles = HandleCache(pool.driver, device.ordinal)
        self._registrations = 0
        # Set and cleared by the control thread, read by others.
        self.engine: GpuEngine | None = None
        self._past = dict.fromkeys(Direction, CopyStats())
        self._context = ExitStack()

    @property
    def problem(self) -> str | None:
        """A sentence for the operator when the GPU does not answer; else None."""
        engine = self.engine
        if self._control.busy_s < HANGING_S and (engine is None or not engine.hangs_s()):
            return None
        return (
            f"{self.device} does not answer. Its engines get no blocks, and those that wait for a load wait until the "
            "GPU answers again or the daemon is restarted; see the driver's log (dmesg)."
        )

    def stats(self, direction: Direction) -> CopyStats:
        """Return the counters over all engines that the GPU has had."""
        past, engine = self._past[direction], self.engine
        return past if engine is None else past.plus(engine.stats(direction))

    def map(self, exports: Sequence[IpcExport | VmmExport], on_mapped: OnMapped) -> None:
        _submit(self._control, str(self.device), lambda: on_mapped(_outcome(lambda: self._map(exports))))

    def close(self, timeout_s: float) -> bool:
        return self._control.close(timeout_s)

    # --- in the control thread --------------------------------------------------------------------

    def _map(self, exports: Sequence[IpcExport | VmmExport]) -> GpuMemory:
        if not self._registrations:
            self._open_engine()
        try:
            segments = self._handles.open(exports)
        except BaseException:
            if not self._registrations:
                self._close_engine()
            raise
        self._registrations += 1
        assert self.engine is not None

        def close(closed: Callable[[], None]) -> None:
            # It undoes what was submitted, and so is bounded too.
            self._control.put(lambda: self._unmap(segments, closed))

        return GpuMemory(segments, self.engine, self.locality.node, close)

    def _unmap(self, segments: list[MappedSegment], on_unmapped: Callable[[], None]) -> None:
        for segment in segments:
            try:
                segment.close()
            except CudaError as error:
                # As where the context is lost, with everything in it.
                _log.warning("%s: memory of an engine could not be unmapped: %s", self.device, error.message)
        self._registrations -= 1
        if not self._registrations:
            self._close_engine()
        on_unmapped()

    def _open_engine(self) -> None:
        chunks, name, clock = self._pool.chunks, str(self.device), self._clock
        with ExitStack() as undo:
            undo.enter_context(self._driver.context(self.device.ordinal))
            engine = GpuEngine(self._driver, chunks, name=name, locality=self.locality, clock=clock)
            self._context = undo.pop_all()
        self._pool.acquire(self.device.ordinal)
        self.engine = engine
        where = "" if self.locality.node is None else f", its threads on NUMA node {self.locality.node}"
        _log.info("%s is in use%s.", self.device, where)

    def _close_engine(self) -> None:
        engine, self.engine = self.engine, None
        assert engine is not None
        for direction in Direction:
            self._past[direction] = self._past[direction].plus(engine.stats(direction))
        # No copy runs, but its threads may hang in the driver: so does the GPU then, and this thread with it.
        engine.destroy()
        self._pool.release()
        try:
            self._context.close()
        except CudaError as error:  # as where the context is lost
            _log.warning("%s: its context could not be given back: %s", self.device, error.message)
        _log.info("%s is not in use any more.", self.device)


class Gpus:
    """All GPUs of the machine. Makes no call of CUDA in its callers' threads, and none before ``pin_pool`` or ``map``.

    The pool has been touched already, and stays pinned for ``pin_linger_s`` after its last use. Deadlines are measured
    on ``clock``; ``library`` and ``batches`` are those of Cuda.
    """

    def __init__(
        self,
        pool_address: int,
        pool_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        library: str = "",
        *,
        batches: bool = True,
        pin_linger_s: float = 0.0,
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._gpus: dict[bytes, Gpu] = {}
        self._devices: list[Device] = []
        self._finder: TaskThread | None = None
        self._missing = ""
        self._refusal = ""
        self._pool: PinnedPool | None = None
        try:
            driver = Cuda(library, batches=batches)
        except CudaError as error:
            self._missing = error.message
        else:
            self._pool = PinnedPool(driver, pool_address, pool_bytes, linger_s=pin_linger_s)

    @property
    def available(self) -> bool:
        """Whether there is a CUDA driver. Whether it finds GPUs shows when the first engine registers."""
        return self._pool is not None

    @property
    def problems(self) -> list[str]:
        """Sentences for the operator, one a problem."""
        found = [gpu.problem for gpu in self._all_gpus()]
        if self._finder is not None and self._finder.busy_s > HANGING_S:
            found.append("The CUDA driver does not answer, so no engine on a GPU can register; see its log (dmesg).")
        if self._pool is not None:
            found.append(self._pool.problem)
        return [problem for problem in found if problem is not None]

    @property
    def lost(self) -> str | None:
        """Why this process must end to use the GPUs again, as a sentence; else None."""
        error = self._pool.driver.lost if self._pool is not None else None
        return error.message if error is not None else None

    @property
    def pinning(self) -> PinProgress:
        return self._pool.progress if self._pool is not None else PinProgress()

    def pin_pool(self) -> None:
        """Pin the pool now, in the background, in the context of the first GPU, if there is one."""
        if (pool := self._pool) is None:
            return

        def pin() -> None:
            try:
                first, *_ = self._list_devices(pool.driver)
            except CudaError as error:
                _log.info("The pool is not pinned before an engine on a GPU registers: %s", error.message)
            else:
                pool.pin(first.ordinal)

        self._in_finder(pin)

    def map(self, uuid: bytes, exports: Sequence[IpcExport | VmmExport], on_mapped: OnMapped) -> None:
        """Map the memory of a registration on the GPU with this UUID, then call ``on_mapped``.

        ``on_mapped`` is called in another thread with the memory, or with why there is none; until then descriptors in
        ``exports`` must stay open. On a GPU that hangs it is never called. Raises KvoffdError when there is no driver
        or too much waits already; then it is not called either.
        """
        if (pool := self._pool) is None:
            raise KvoffdError(self._missing, ErrorCode.UNSUPPORTED)
        with self._lock:
            gpu = self._gpus.get(uuid)
        if gpu is not None:
            gpu.map(exports, on_mapped)
            return

        def find() -> None:
            refusal = _outcome(lambda: self._find_gpu(pool, uuid).map(exports, on_mapped))
            if refusal is not None:
                if refusal.message != self._refusal:  # engines try again and again
                    _log.warning("Engines on a GPU cannot register: %s", refusal.message)
                self._refusal = refusal.message
                on_mapped(refusal)

        self._in_finder(find)

    def _in_finder(self, task: Callable[[], None]) -> None:
        with self._lock:
            if self._finder is None:
                self._finder = TaskThread("kvoffd-gpu-finder", self._clock)
        _submit(self._finder, "The CUDA driver", task)

    def stats(self, direction: Direction) -> CopyStats:
        loads = (gpu.stats(direction) for gpu in self._all_gpus())
        return reduce(CopyStats.plus, loads, CopyStats())

    def tick(self) -> None:
        for engine in self._engines():
            engine.tick()

    def stop(self, timeout_s: float) -> bool:
        """Cancel what waits, abandon what runs; False when a copy still runs after ``timeout_s``."""
        deadline, engines = time.monotonic() + timeout_s, self._engines()
        for engine in engines:  # all of them are stopped before any is waited for
            engine.close(0.0)
        return all(engine.close(deadline - time.monotonic()) for engine in engines)

    def close(self, timeout_s: float) -> bool:
        """Wait until all memory that was given back is unmapped and the pool is unpinned; False when it is not."""
        deadline = time.monotonic() + timeout_s
        parts: list[TaskThread | Gpu | PinnedPool | None] = [self._finder, *self._all_gpus(), self._pool]
        closed = [part.close(max(0.0, deadline - time.monotonic())) for part in parts if part is not None]
        return all(closed)

    def _all_gpus(self) -> list[Gpu]:
        with self._lock:
            return list(self._gpus.values())

    def _engines(self) -> list[GpuEngine]:
        return [engine for gpu in self._all_gpus() if (engine := gpu.engine) is not None]

    def _find_gpu(self, pool: PinnedPool, uuid: bytes) -> Gpu:
        """In the finder's thread. Raises NoSuchGpu, CudaError."""
        device = find_device(self._list_devices(pool.driver), uuid)
        with self._lock:
            if uuid not in self._gpus:
                self._gpus[uuid] = Gpu(device, pool, self._clock)
            return self._gpus[uuid]

    def _list_devices(self, driver: Cuda) -> list[Device]:
        """In the finder's thread. Raises CudaError, also where there is none."""
        if not self._devices:
            self._devices = list_devices(driver)
        return self._devices
