"""One GPU that engines have registered memory of, from its first registration to its last."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from kvoffd.errors import KvoffdError
from kvoffd.system.numa import locality_of
from kvoffd.transfer.cuda.control import ControlThread
from kvoffd.transfer.cuda.device import Device
from kvoffd.transfer.cuda.driver import CudaDriver, CudaError
from kvoffd.transfer.cuda.engine import CudaEngine
from kvoffd.transfer.cuda.handles import GpuMappings, GpuSegment, IpcExport, VmmExport
from kvoffd.transfer.cuda.pinning import PinnedPool
from kvoffd.transfer.engine import Direction, DirectionLoad, TransferEngine
from kvoffd_proto.errors import ErrorCode

_log = logging.getLogger(__name__)

# A driver call of the control thread takes milliseconds, making a context up to some seconds.
HANGING_S = 15.0
_LANES_CLOSE_S = 10.0


class GpuMemory:
    """A registration's memory on one GPU. Its methods may be called from any thread and never wait.

    Attributes:
        segments: mapped memory, in the order of the handles.
        engine: copies to and from it.
        node: the GPU's NUMA node; None where the machine has but one or does not say.
    """

    def __init__(self, gpu: Gpu, segments: list[GpuSegment], engine: TransferEngine) -> None:
        self._gpu = gpu
        self.node = gpu.locality.node
        self.segments = segments
        self.engine = engine

    def close(self, on_closed: Callable[[], None]) -> None:
        """Unmaps it and then calls ``on_closed`` in another thread. No copy of it may be running."""
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
        """A sentence for the operator when the GPU does not answer."""
        engine = self.engine
        if self._control.busy_s < HANGING_S and not (engine is not None and engine.hangs):
            return None
        return (
            f"{self.device} does not answer. Its engines get no blocks, and those that wait for a load wait until the "
            "GPU comes back or the daemon is restarted; see the driver's log (dmesg)."
        )

    def load_of(self, direction: Direction) -> DirectionLoad:
        """Counters over all its engines."""
        past, engine = self._past[direction], self.engine
        return past if engine is None else past.plus(engine.load_of(direction))

    def map(self, owner: bytes, exports: Sequence[IpcExport | VmmExport], on_mapped: OnMapped) -> None:
        """See ``Gpus.map``."""

        def task() -> None:
            try:
                mapped: GpuMemory | KvoffdError = self._map(owner, exports)
            except KvoffdError as error:
                mapped = error
            except Exception:
                _log.exception("%s: mapping an engine's memory failed inside the daemon.", self.device)
                mapped = KvoffdError(ErrorCode.INTERNAL.sentence)
            on_mapped(mapped)

        self._control.submit(task)

    def unmap(self, segments: list[GpuSegment], on_unmapped: Callable[[], None]) -> None:
        """Undoes a ``map`` that went well."""

        def task() -> None:
            self._unmap(segments)
            on_unmapped()

        self._control.insist(task)

    def close(self, timeout_s: float) -> bool:
        """Does what waits and ends the control thread; False when it hangs."""
        return self._control.close(timeout_s)

    # --- in the control thread --------------------------------------------------------------------

    def _map(self, owner: bytes, exports: Sequence[IpcExport | VmmExport]) -> GpuMemory:
        if not self._registrations:
            self._open()
        try:
            segments = self._mappings.open(owner, exports)
        except BaseException:
            if not self._registrations:
                self._shut()
            raise
        self._registrations += 1
        assert self.engine is not None
        return GpuMemory(self, segments, self.engine)

    def _unmap(self, segments: list[GpuSegment]) -> None:
        for segment in segments:
            try:
                segment.close()
            except CudaError as error:
                # The context is lost, and with it everything in it; a new one is made after the last registration.
                _log.warning("%s: memory of an engine could not be unmapped: %s", self.device, error.message)
        self._registrations -= 1
        if not self._registrations:
            self._shut()

    def _open(self) -> None:
        driver, ordinal = self._driver, self.device.ordinal
        with ExitStack() as undo:
            context = driver.retain_context(ordinal)
            undo.callback(driver.release_context, ordinal)
            driver.set_context(context)
            engine = CudaEngine(
                driver, context, self._pool.is_pinned, name=str(self.device), locality=self.locality, clock=self._clock
            )
            undo.callback(engine.close, _LANES_CLOSE_S)
            engine.open()
            undo.pop_all()
        self._pool.acquire(ordinal)
        self.engine = engine
        where = "" if self.locality.node is None else f", its threads on NUMA node {self.locality.node}"
        _log.info("%s is in use%s.", self.device, where)

    def _shut(self) -> None:
        engine, self.engine = self.engine, None
        assert engine is not None
        for direction in Direction:
            self._past[direction] = self._past[direction].plus(engine.load_of(direction))
        if not engine.close(_LANES_CLOSE_S):
            _log.error("%s: a copy thread does not end; its context stays.", self.device)
            return
        self._pool.release()
        try:
            self._driver.set_context(0)
            self._driver.release_context(self.device.ordinal)
        except CudaError as error:
            _log.warning("%s: its context could not be given up: %s", self.device, error.message)
        _log.info("%s is not in use any more.", self.device)
