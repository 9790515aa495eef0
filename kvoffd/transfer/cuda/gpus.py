"""The GPUs whose memory engines have registered. Each has its own threads, so that one that hangs blocks no other.

GPUs are found by UUID, not by ordinal, which may differ between engine and daemon.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple
from uuid import UUID

from kvoffd.errors import KvoffdError, NoMoreThreads, refusal_of
from kvoffd.system.files import OnError
from kvoffd.system.numa import locality_of
from kvoffd.system.threads import TaskThread
from kvoffd.transfer.cuda.engine import GpuEngine
from kvoffd.transfer.cuda.mappings import GpuMapping, IpcExport, OpenHandles, VmmExport
from kvoffd.transfer.cuda.pinning import PinnedPool, PinProgress
from kvoffd.transfer.engine import EngineMemory, OnMapped, WorkByDirection
from kvoffd_proto.cuda import Cuda, CudaError
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.units import format_size

_log = logging.getLogger(__name__)

# A driver call of a control thread takes milliseconds, creating a context up to some seconds.
HANGING_S = 15.0
MAX_WAITING_TASKS = 64


def _submit(thread: TaskThread, what: str, task: Callable[[], object]) -> None:
    """Queue a task in the thread of a device or driver. Raises KvoffdError if too many are queued."""
    if thread.waiting >= MAX_WAITING_TASKS:
        raise KvoffdError(
            f"{what} has not answered for {thread.busy_s:.0f} s, and {thread.waiting} requests wait for it; see the "
            "driver's log (dmesg), and restart the daemon if the GPU is healthy.",
            ErrorCode.TOO_MANY,
        )
    thread.put(task)


class NoSuchGpu(KvoffdError):
    """An engine's GPU is not visible to the daemon."""

    code = ErrorCode.UNSUPPORTED


class Device(NamedTuple):
    """One GPU or MIG instance; ``ordinal`` is its number in this process."""

    ordinal: int
    uuid: bytes
    name: str
    pci_bus_id: str

    def __str__(self) -> str:
        return f"{self.name} {UUID(bytes=self.uuid)}"


def list_devices(driver: Cuda) -> list[Device]:
    """Initialize the driver and return all devices, without creating a context. Raises CudaError."""
    driver.init()
    return [Device(n, driver.device_uuid(n), driver.device_name(n), driver.pci_bus_id(n)) for n in driver.devices()]


def find_device(devices: list[Device], uuid: bytes) -> Device:
    """Return the device with this UUID. Raises NoSuchGpu with a list of the visible devices."""
    for device in devices:
        if device.uuid == uuid:
            return device
    seen = "no GPU" if not devices else ", ".join(map(str, devices))
    raise NoSuchGpu(
        f"The daemon does not see the engine's GPU or MIG instance {UUID(bytes=uuid)}. It sees {seen}. Give its "
        "container all GPUs that engines use (NVIDIA_VISIBLE_DEVICES=all, no CUDA_VISIBLE_DEVICES). A process can use "
        "only one MIG instance: run a daemon for each, with the engine's CUDA_VISIBLE_DEVICES."
    )


def _mapping_refusal(error: Exception) -> KvoffdError:
    """Return the error for the client whose memory could not be mapped."""
    return KvoffdError(error.message, ErrorCode.COPY_FAILED) if isinstance(error, CudaError) else refusal_of(error)


class Gpu:
    """A device's context, engine and mappings, and the control thread that creates and destroys them."""

    def __init__(self, device: Device, pool: PinnedPool, work: WorkByDirection, clock: Callable[[], float]) -> None:
        self.device = device
        self.locality = locality_of(device.pci_bus_id)
        self._driver = pool.driver
        self._pool, self._work = pool, work
        self._clock = clock
        self._control = TaskThread(f"kvoffd-gpu-{device.ordinal}", clock)
        self._handles = OpenHandles(pool.driver, device.ordinal)
        self._registrations = 0
        self.engine: GpuEngine | None = None
        """Written by the control thread, read by others."""
        self._context = ExitStack()
        """Keeps the device's context while there is an engine."""

    @property
    def problem(self) -> str | None:
        """Sentence for the operator if the GPU does not answer; else None."""
        engine = self.engine
        if self._control.busy_s < HANGING_S and (engine is None or not engine.hangs_s()):
            return None
        return (
            f"{self.device} does not answer. Its engines get no blocks, and pending loads wait until the GPU answers "
            "or the daemon is restarted; see the driver's log (dmesg)."
        )

    def map(self, exports: Sequence[IpcExport | VmmExport], on_mapped: OnMapped) -> None:
        def map_and_answer() -> None:
            result: EngineMemory | KvoffdError
            try:
                result = self._map(exports)
            except Exception as error:
                result = _mapping_refusal(error)
            on_mapped(result)

        _submit(self._control, str(self.device), map_and_answer)

    def close(self, timeout_s: float) -> bool:
        """End the control thread after its tasks, which unmap what was closed; return False after ``timeout_s``."""
        return self._control.close(timeout_s)

    # --- in the control thread --------------------------------------------------------------------

    def _map(self, exports: Sequence[IpcExport | VmmExport]) -> EngineMemory:
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
            # No limit: each closes a mapping, and their number is limited.
            self._control.put(lambda: self._unmap(segments, closed))

        spans = [(segment.address, segment.size_bytes) for segment in segments]
        return EngineMemory(self.engine, spans, self.locality.node, close, on_gpu=True)

    def _unmap(self, segments: list[GpuMapping], on_unmapped: Callable[[], None]) -> None:
        for segment in segments:
            try:
                segment.close()
            except CudaError as error:
                # For example because the context is lost, and its mappings with it.
                _log.warning("%s: memory of an engine could not be unmapped: %s", self.device, error.message)
        self._registrations -= 1
        if not self._registrations:
            self._close_engine()
        on_unmapped()

    def _open_engine(self) -> None:
        chunks, work, name, clock = self._pool.chunks, self._work, str(self.device), self._clock
        with ExitStack() as undo:
            undo.enter_context(self._driver.context(self.device.ordinal))
            engine = GpuEngine(self._driver, chunks, work, name=name, locality=self.locality, clock=clock)
            with OnError(engine.destroy):
                self._pool.acquire(self.device.ordinal)
            self._context = undo.pop_all()
        self.engine = engine
        where = "" if self.locality.node is None else f", its threads on NUMA node {self.locality.node}"
        _log.info("%s is in use%s.", self.device, where)

    def _close_engine(self) -> None:
        engine, self.engine = self.engine, None
        assert engine is not None
        # No copy is running. If the engine's threads hang in the driver, this thread waits for them.
        engine.destroy()
        self._pool.release()
        try:
            self._context.close()
        except CudaError as error:  # for example, the context is lost
            _log.warning("%s: its context could not be released: %s", self.device, error.message)
        _log.info("%s is not in use any more.", self.device)


class Gpus:
    """All GPUs of the machine. Calls CUDA only in its own threads, after ``pin_pool`` or ``map``.

    The pool must be touched. It stays pinned for ``pin_linger_s`` after its last use.

    Args:
        work: of each direction, to which the copies of all GPUs are added.
        clock: for deadlines, in seconds.
        library: path of the CUDA driver; empty: see ``Cuda``.
    """

    def __init__(
        self,
        pool_address: int,
        pool_bytes: int,
        work: WorkByDirection,
        clock: Callable[[], float] = time.monotonic,
        library: str = "",
        *,
        pin_linger_s: float = 0.0,
    ) -> None:
        self._work = work
        self._clock = clock
        self._lock = threading.Lock()
        self._gpus: dict[bytes, Gpu] = {}
        self._devices: list[Device] = []
        self._pool_bytes = pool_bytes
        self.integrated = 0
        """Number of GPUs that take the host's memory, once they were looked for."""
        self._finder: TaskThread | None = None
        """Thread that lists the devices, made at the first use: on most machines nobody asks for a GPU."""
        self._why_no_driver = ""
        self._logged_refusal = ""
        """Message of the last refusal, which is not logged again: engines retry."""
        self._pool: PinnedPool | None = None
        try:
            driver = Cuda(library)
        except CudaError as error:
            self._why_no_driver = error.message
        else:
            self._pool = PinnedPool(driver, pool_address, pool_bytes, linger_s=pin_linger_s)

    @property
    def available(self) -> bool:
        """Whether there is a CUDA driver, with or without GPUs."""
        return self._pool is not None

    @property
    def problems(self) -> list[str]:
        """Sentences for the operator, one for each problem."""
        found = [gpu.problem for gpu in self._all_gpus()]
        if self._finder is not None and self._finder.busy_s > HANGING_S:
            found.append("The CUDA driver does not answer, so no engine on a GPU can register; see its log (dmesg).")
        if self._pool is not None:
            found.append(self._pool.problem)
        return [problem for problem in found if problem is not None]

    @property
    def lost(self) -> str | None:
        """Sentence why only a new process can use the GPUs again; else None."""
        error = self._pool.driver.lost if self._pool is not None else None
        return error.message if error is not None else None

    @property
    def pinning(self) -> PinProgress:
        return self._pool.progress if self._pool is not None else PinProgress()

    def pin_pool(self) -> None:
        """Start to pin the pool, in the context of the first GPU, if there is one."""
        if (pool := self._pool) is None:
            return

        def pin() -> None:
            try:
                first, *_ = self._known_devices(pool.driver)
                pool.pin(first.ordinal)
            except (CudaError, NoMoreThreads) as error:
                _log.info("The pool is not pinned until an engine on a GPU registers: %s", error.message)

        self._in_finder(pin)

    def map(self, uuid: bytes, exports: Sequence[IpcExport | VmmExport], on_mapped: OnMapped) -> None:
        """Map the memory of a registration on the GPU with this UUID, then call ``on_mapped``.

        ``on_mapped`` is called in another thread with the memory or an error; until then descriptors in ``exports``
        must stay open. If the GPU hangs it is never called. Raises KvoffdError, without calling it, if there is no
        driver or too many requests are queued.
        """
        if (pool := self._pool) is None:
            raise KvoffdError(self._why_no_driver, ErrorCode.UNSUPPORTED)
        with self._lock:
            gpu = self._gpus.get(uuid)
        if gpu is not None:
            gpu.map(exports, on_mapped)
            return

        def find() -> None:
            try:
                self._find_gpu(pool, uuid).map(exports, on_mapped)
            except Exception as error:
                refusal = _mapping_refusal(error)
                if refusal.message != self._logged_refusal:
                    _log.warning("Engines on a GPU cannot register: %s", refusal.message)
                self._logged_refusal = refusal.message
                on_mapped(refusal)

        self._in_finder(find)

    def _in_finder(self, task: Callable[[], None]) -> None:
        with self._lock:
            if self._finder is None:
                self._finder = TaskThread("kvoffd-gpu-finder", self._clock)
        _submit(self._finder, "The CUDA driver", task)

    def tick(self) -> None:
        for engine in self._engines():
            engine.tick()

    def stop(self, timeout_s: float) -> bool:
        """Cancel queued transfers and stop running ones; return False if a copy still runs after ``timeout_s``."""
        deadline, engines = time.monotonic() + timeout_s, self._engines()
        for engine in engines:  # stops all before it waits for any
            engine.close(0.0)
        return all(engine.close(deadline - time.monotonic()) for engine in engines)

    def close(self, timeout_s: float) -> bool:
        """Wait until closed memory is unmapped and the pool is unpinned; return False after ``timeout_s``."""
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
        """Return the GPU. Runs in the finder's thread. Raises NoSuchGpu, CudaError."""
        device = find_device(self._known_devices(pool.driver), uuid)
        with self._lock:
            if uuid not in self._gpus:
                self._gpus[uuid] = Gpu(device, pool, self._work, self._clock)
            return self._gpus[uuid]

    def _known_devices(self, driver: Cuda) -> list[Device]:
        """Return all devices, at least one: cuInit refuses a machine without any. Asks the driver once, in the finder's
        thread. Raises CudaError."""
        if not self._devices:
            self._devices = list_devices(driver)
            integrated = [one for one in self._devices if driver.is_integrated(one.ordinal)]
            self.integrated = len(integrated)
            for device in integrated:
                _log.warning(
                    "%s takes the host's memory, as the pool does; vLLM does not start if too little is free. Lower "
                    "its --gpu-memory-utilization by the pool's part (%s), or choose a smaller pool_size.",
                    device,
                    format_size(self._pool_bytes),
                )
        return self._devices
