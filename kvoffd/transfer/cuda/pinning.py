"""Pins the pool for the GPUs, chunk by chunk, in the background."""

from __future__ import annotations

import logging
import threading
import time
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvoffd.system.threads import start
from kvoffd.transfer.cuda.engine import PinnedChunks
from kvoffd_proto.cuda import Cuda, CudaError
from kvoffd_proto.units import format_size

_log = logging.getLogger(__name__)

# A call's locks block every process on every GPU of the machine, so it must be short; beyond 512 GiB it fails.
CHUNK_BYTES = 256 << 20
_PAGE_BYTES = 4096
_NEVER = float("inf")


class PinProgress(NamedTuple):
    """Progress of pinning the pool, in bytes. The rest is not pinned yet."""

    pinned_bytes: int = 0
    refused_bytes: int = 0
    """Bytes that the driver refused to pin; their copies are slow."""
    gpu_bytes: int = 0
    """Memory that pinning has taken of the GPU in whose context it is done, as reported by the driver."""


class PinnedPool:
    """The pool's memory, pinned while at least one GPU uses it and for ``linger_s`` after.

    One thread pins and unpins. It pins once for all GPUs, in the primary context of the first GPU, which stays until
    all is unpinned. Copies may use all of the pool at any time: ``gpu_copy.c`` copies unpinned chunks with other calls.
    Chunks begin at addresses that are multiples of ``chunk_bytes``, where ``gpu_copy.c`` splits pieces.

    The pool's address is page-aligned, and its pages must be touched. ``chunk_bytes`` are pinned at a time.

    | state                             | ``_device``       | ``_keeps_pinned`` | left by                          |
    |-----------------------------------|-------------------|-------------------|----------------------------------|
    | unpinned, or being unpinned       | None              | False             | ``pin``                          |
    | to be pinned, once that has ended | the GPU that pins | False             | the thread; ``_unpin_if_due``    |
    | pinned, or being pinned           | None              | True              | ``_unpin_if_due``                |
    """

    def __init__(
        self, driver: Cuda, address: int, size_bytes: int, chunk_bytes: int = CHUNK_BYTES, linger_s: float = 0.0
    ) -> None:
        self.driver = driver
        self._size_bytes, self._linger_s = size_bytes, linger_s
        end = address + -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
        first = address // chunk_bytes
        self._chunks = list(pairwise([address, *range((first + 1) * chunk_bytes, end, chunk_bytes), end]))
        # Written under the lock, read by copy threads without it: a copy that sees an old flag is only slower.
        self.chunks = PinnedChunks(np.zeros(len(self._chunks), dtype=np.bool_), chunk_bytes, first)
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None
        self._users = 0
        self._device: int | None = None
        """GPU in whose context the thread must pin next, if any."""
        self._unpin_at = _NEVER
        """Time to unpin (``time.monotonic``); _NEVER from ``pin`` until the last GPU leaves."""
        self._keeps_pinned = False
        """Whether the thread pins chunks, or keeps them pinned; False from when it must unpin them."""
        self._closed = False
        self._pinned_bytes = self._refused_bytes = self._gpu_bytes = 0

    def pin(self, device: int) -> None:
        """Start to pin the pool unless it is pinned. Raises NoMoreThreads."""
        with self._change:
            if self._thread is None:
                start(thread := threading.Thread(target=self._run, name="kvoffd-pin", daemon=True))
                self._thread = thread
            self._unpin_at = _NEVER
            if not self._keeps_pinned and self._device is None:
                self._device = device
                self._change.notify()

    def acquire(self, device: int) -> None:
        """Add a GPU that uses the pool, and pin the pool. Raises NoMoreThreads; then nothing was added."""
        with self._change:
            self.pin(device)
            self._users += 1

    def release(self) -> None:
        """Remove a GPU; after the last one unpin the pool, later. No copy of the GPU may be running."""
        with self._change:
            self._users -= 1
            if not self._users:
                # At once if a part was refused: it may succeed for the next GPU.
                self._unpin_after(0.0 if self._refused_bytes else self._linger_s)

    def close(self, timeout_s: float) -> bool:
        """Unpin the pool if no GPU uses it; return False if it is pinned after ``timeout_s``: then keep the memory."""
        with self._change:
            if not self._users:
                self._closed = True
                self._unpin_after(0.0)
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    @property
    def progress(self) -> PinProgress:
        """Current progress. After the last release it shows the pinned bytes until all are unpinned."""
        with self._change:
            if self._keeps_pinned:
                pinned, refused = self._pinned_bytes, self._refused_bytes
            else:  # to GPUs that came after the last release, what is still pinned will not remain
                pinned, refused = 0 if self._users else self._pinned_bytes, 0
            gpu_bytes = self._gpu_bytes if pinned else 0
        return PinProgress(min(pinned, self._size_bytes), min(refused, self._size_bytes), gpu_bytes)

    @property
    def problem(self) -> str | None:
        """Sentence for the operator if a part of the pool could not be pinned; else None."""
        refused_bytes = self.progress.refused_bytes
        if not refused_bytes:
            return None
        return (
            f"{format_size(refused_bytes)} of the pool could not be pinned, so their GPU copies are slow; the log has "
            "the driver's reason. In confidential computing the driver pins nothing; elsewhere it may lack memory."
        )

    # --- under the lock ---------------------------------------------------------------------------

    def _unpin_after(self, seconds: float) -> None:
        self._unpin_at = time.monotonic() + seconds
        self._unpin_if_due()
        self._change.notify()

    def _unpin_if_due(self) -> None:
        if time.monotonic() >= self._unpin_at:
            self._keeps_pinned, self._device = False, None
            self.chunks.flags[:] = False

    # --- in the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._device is not None or self._closed)
                device, self._device = self._device, None
                if device is None:
                    return
                self._keeps_pinned = True
                self._pinned_bytes = self._refused_bytes = self._gpu_bytes = 0
            try:
                with self.driver.context(device):
                    self._serve()
            except CudaError as error:
                _log.warning("The GPU context to pin the pool could not be created or released: %s", error.message)
                with self._change:
                    self._refused_bytes = self._size_bytes
                self._wait_for_unpin()  # no new attempt, and ``problem`` says so, until the last GPU leaves
            with self._change:
                self._pinned_bytes = 0

    def _serve(self) -> None:
        """Pin all chunks, wait until they must be unpinned, and unpin them."""
        before = self._free_bytes()
        registered = self._pin()
        after = self._free_bytes()
        self._gpu_bytes = max(0, before - after) if before and after else 0
        self._wait_for_unpin()
        failures: list[str] = []
        for address in registered:
            try:
                self.driver.unregister_host(address)
            except CudaError as error:  # for example, the context is lost, and its registrations with it
                failures.append(error.message)
        if failures:
            _log.warning("%d parts of the pool could not be unpinned: %s", len(failures), failures[0])

    def _pin(self) -> list[int]:
        """Pin all chunks; return the addresses of those that are pinned."""
        started, registered = time.monotonic(), list[int]()
        for index, (begin, end) in enumerate(self._chunks):
            if not self._keeps_pinned:
                return registered
            try:
                self.driver.register_host(begin, end - begin)
            except CudaError as error:
                if not self._refused_bytes:
                    _log.warning("A part of the pool cannot be pinned and is used unpinned: %s", error.message)
                self._refused_bytes += end - begin
                continue
            registered.append(begin)
            with self._change:
                self._pinned_bytes += end - begin
                self._unpin_if_due()
                self.chunks.flags[index] = self._keeps_pinned
        _log.info(
            "%s of the pool are pinned after %.1f s.", format_size(self._pinned_bytes), time.monotonic() - started
        )
        return registered

    def _wait_for_unpin(self) -> None:
        with self._change:
            while self._keeps_pinned:
                left_s = self._unpin_at - time.monotonic()
                self._change.wait(None if left_s == _NEVER else max(0.0, left_s))
                self._unpin_if_due()

    def _free_bytes(self) -> int | None:
        try:
            return self.driver.free_bytes()
        except CudaError as error:
            _log.info("The GPU memory that pinning takes is unknown: %s", error.message)
            return None
