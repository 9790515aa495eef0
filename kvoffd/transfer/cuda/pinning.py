"""Pins the pool for the GPUs, chunk by chunk, in the background."""

from __future__ import annotations

import logging
import threading
import time
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffd.transfer.cuda.driver import CudaDriver, CudaError
from kvoffd.transfer.cuda.gpu_copy import STEP_BYTES, PinnedChunks
from kvoffd_proto.units import format_size

_log = logging.getLogger(__name__)

# Long calls hold locks that stop every process on every GPU of the machine, and beyond 512 GiB they fail.
CHUNK_BYTES = 256 << 20
_PAGE_BYTES = 4096


class PinProgress(NamedTuple):
    """How much of the pool is pinned. Bytes that are neither pinned nor refused are not pinned yet."""

    pool_bytes: int
    pinned_bytes: int
    refused_bytes: int
    """Bytes that the driver refused to pin: copies of them are right but slow."""
    gpu_bytes: int
    """What pinning has taken of the memory of the GPU in whose context it is done, as the driver shows it."""


UNPINNED = PinProgress(0, 0, 0, 0)


class PinnedPool:
    """The pool's memory, pinned while at least one GPU uses it and for ``linger_s`` after, before that if told to.

    It is pinned once for all GPUs, under the primary context of the first one that asks, which therefore stays until
    all is unpinned. Copies may use any of it at any time: what is not pinned is copied by calls that allow that.
    Chunks begin at multiples of ``chunk_bytes`` of the address, so that no piece of a plan, cut as ``GpuCopy``
    cuts, lies in two of them.

    The pool's address is on a page boundary, and its pages have been touched. ``chunk_bytes`` are pinned at a time: a
    multiple of STEP_BYTES.
    """

    def __init__(
        self, driver: CudaDriver, address: int, size_bytes: int, chunk_bytes: int = CHUNK_BYTES, linger_s: float = 0.0
    ) -> None:
        if chunk_bytes % STEP_BYTES:
            raise ValueError(f"Chunks of {chunk_bytes} bytes are no multiple of {STEP_BYTES} bytes.")
        self._driver = driver
        self._chunk_bytes = chunk_bytes
        self._linger_s = linger_s
        end = address + -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
        self._first = address // chunk_bytes
        self._chunks = list(pairwise([address, *range((self._first + 1) * chunk_bytes, end, chunk_bytes), end]))
        self._size_bytes = size_bytes
        # Written by the pinning thread, read by copy threads: a copy that sees too little pinned is merely slower.
        self._pinned = np.zeros(len(self._chunks), dtype=np.bool_)
        self._users = 0
        self._change = threading.Lock()
        self._run: _PinRun | None = None

    def pin(self, device: int) -> None:
        """Start the pinning before a GPU uses the pool."""
        with self._change:
            self._start(device)

    def acquire(self, device: int) -> None:
        """Count a GPU that uses the pool; the first one starts the pinning, unless it was started or lingers."""
        with self._change:
            self._users += 1
            if self._users == 1:
                self._start(device)

    def _start(self, device: int) -> None:
        if self._run is None or not self._run.keep():
            # A run before this one may still unpin, or hang with its GPU: the new thread waits for it, nobody else.
            self._run = _PinRun(self._driver, device, self._chunks, self._pinned, self._run)
            self._run.start()

    def release(self) -> None:
        """Count a GPU less; some time after the last one all is unpinned. No copy of the GPU may be running."""
        with self._change:
            self._users -= 1
            if self._users == 0 and self._run is not None:
                self._run.stop(self._linger_s)

    def close(self, timeout_s: float) -> bool:
        """Unpin, if no GPU uses the pool; False when it is pinned still after ``timeout_s``. Then keep the memory."""
        with self._change:
            run = self._run
            if run is not None and not self._users:
                run.stop()
        if run is not None:
            run.join(timeout_s)
        return run is None or not run.is_alive()

    @property
    def chunks(self) -> PinnedChunks:
        return PinnedChunks(self._pinned, self._chunk_bytes, self._first)

    @property
    def progress(self) -> PinProgress:
        """How much is pinned; after the last release what was, until all is unpinned and the context is gone."""
        run = self._run
        if self._users or run is None:
            pinned = _bytes_of([chunk for chunk, done in zip(self._chunks, self._pinned.tolist(), strict=True) if done])
        else:
            pinned = run.pinned_bytes if run.is_alive() else 0
        refused = run.refused_bytes if run is not None and not run.stopping else 0
        gpu_bytes = run.gpu_bytes if pinned and run is not None else 0
        return PinProgress(self._size_bytes, min(pinned, self._size_bytes), min(refused, self._size_bytes), gpu_bytes)

    @property
    def problem(self) -> str | None:
        """A sentence for the operator when a part of the pool could not be pinned; else None."""
        refused_bytes = self.progress.refused_bytes
        if not refused_bytes:
            return None
        return (
            f"{format_size(refused_bytes)} of the pool could not be pinned, so GPU copies of them are slow; the log "
            "has the driver's reason. In confidential computing it pins nothing; elsewhere it may lack memory."
        )


class _PinRun(threading.Thread):
    """Pins the pool when the first GPU asks for it, unpins it when the last one goes."""

    def __init__(
        self,
        driver: CudaDriver,
        device: int,
        chunks: list[tuple[int, int]],
        pinned: npt.NDArray[np.bool_],
        before: _PinRun | None,
    ) -> None:
        super().__init__(name="kvoffd-pin", daemon=True)
        self._driver, self._device = driver, device
        self._chunks, self._pinned = chunks, pinned
        self._before = before
        self._registered: list[int] = []
        # Guards the step from "registered" to "seen as pinned" against a stop in between.
        self._change = threading.Condition()
        self._stop_at: float | None = None
        self.stopping = False
        self.pinned_bytes = 0
        self.refused_bytes = 0
        self.gpu_bytes = 0

    def keep(self) -> bool:
        """Stay pinned until the next ``stop``; False when it is too late for that, or nothing was pinned."""
        with self._change:
            self._stop_at = None
            return not self.stopping and self.is_alive()

    def stop(self, linger_s: float = 0.0) -> None:
        """Let nothing count as pinned when ``linger_s`` have passed; the thread unpins and ends.

        At once where something was refused: the next run may get it.
        """
        with self._change:
            self._stop_at = time.monotonic() + (0.0 if self.refused_bytes else linger_s)
            self._stop_if_due()
            self._change.notify()

    def _stop_if_due(self) -> None:
        if self._stop_at is not None and time.monotonic() >= self._stop_at:
            self.stopping = True
            self._pinned[:] = False

    def _wait_for_stop(self) -> None:
        with self._change:
            while not self.stopping:
                self._change.wait(None if self._stop_at is None else max(0.0, self._stop_at - time.monotonic()))
                self._stop_if_due()

    def run(self) -> None:
        if self._before is not None:
            self._before.join()
            self._before = None
        try:
            context = self._driver.retain_context(self._device)
        except CudaError as error:
            self._refuse(error)
            return
        try:
            self._driver.set_context(context)
            before = self._free_bytes()
            self._pin()
            after = self._free_bytes()
            if before is not None and after is not None:
                self.gpu_bytes = max(0, before - after)
            self._wait_for_stop()
        except CudaError as error:
            self._refuse(error)
        finally:
            self._unpin()
            self._driver.leave_context(self._device)

    def _refuse(self, error: CudaError) -> None:
        self.refused_bytes = _bytes_of(self._chunks)
        _log.warning("The pool is not pinned: %s", error.message)

    def _pin(self) -> None:
        started = time.monotonic()
        for index, (begin, end) in enumerate(self._chunks):
            if self.stopping:
                return
            try:
                self._driver.register_host(begin, end - begin)
            except CudaError as error:
                if not self.refused_bytes:
                    _log.warning("A part of the pool cannot be pinned and is used as it is: %s", error.message)
                self.refused_bytes += end - begin
                continue
            self._registered.append(begin)
            self.pinned_bytes += end - begin
            with self._change:
                self._stop_if_due()
                self._pinned[index] = not self.stopping
        pinned = _bytes_of(self._chunks) - self.refused_bytes
        _log.info("%s of the pool are pinned after %.1f s.", format_size(pinned), time.monotonic() - started)

    def _free_bytes(self) -> int | None:
        try:
            return self._driver.free_bytes()
        except CudaError as error:
            _log.info("What pinning takes of the GPU's memory is not known: %s", error.message)
            return None

    def _unpin(self) -> None:
        failures: list[str] = []
        for address in self._registered:
            try:
                self._driver.unregister_host(address)
            except CudaError as error:  # as where the context is lost, and the registrations with it
                failures.append(error.message)
        if failures:
            _log.warning("%d parts of the pool could not be unpinned: %s", len(failures), failures[0])


def _bytes_of(chunks: list[tuple[int, int]]) -> int:
    return sum(end - begin for begin, end in chunks)
