"""Executes plans on threads: a queue of transfers for each direction, and the engine for host memory.

A copy is one call of C without the interpreter's lock. It ends when all is copied or the transfer's stop flag is set.
Loads and stores have threads of their own, so that no load waits for a store.

A transfer ends (``on_done``) only when nothing touches its memory any more. On a GPU that hangs that may be never.
``tick`` then tells the owner (``on_overdue``), who may answer a store, since nobody reads its slots before they are
committed, but must not answer a load, since its bytes may still land in the engine's blocks.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import add
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from kvoffd.system.native import Native, NotCompiled, native
from kvoffd.system.threads import DaemonThreads
from kvoffd.transfer.plan import Direction, Outcome, Plan

_log = logging.getLogger(__name__)

# A copy looks at its stop flag each MiB or 512 pieces; one that has not returned so long after it was set hangs.
OVERDUE_GRACE_S = 1.0
# Stores whose checksums wait for a thread; one more is read by the thread that copied it.
MAX_UNREAD_STORES = 4
# Read for checksums between two looks at whether the transfer must end, and by one thread of several.
READ_BYTES = 4 << 20

_STRIPE_BYTES = 64
RAISED = "The owner of a transfer raised: a bug; the engine goes on."


@dataclass(eq=False)
class SlotChecksums:
    """The checksums of one transfer's slots: taken of a store's slots, compared for a load's.

    Attributes:
        digests: returns the checksums of slots of the pool, given as ``slots`` are; none is 0.
        slots: offset and length in bytes of each slot.
        sums: the checksum of each slot; 0 as long as it is not read, for good where the transfer ends before.
        expected: the checksum that each slot must have; None where they are to be found out.
        pool_address: the pool's address, to which a store's offsets are relative.
    """

    digests: Callable[[Sequence[tuple[int, int]]], list[int]]
    slots: Sequence[tuple[int, int]]
    sums: list[int]
    expected: Sequence[int] | None = None
    pool_address: int = 0


@dataclass(slots=True, eq=False)
class Transfer:
    """One job's copy. Compared by identity; belongs to the engine from ``submit`` until ``on_done``.

    Attributes:
        plan: called once, in the thread that copies: thousands of pieces take milliseconds.
        deadline: on the engine's clock, in seconds; looked at before the transfer starts, and by ``tick``.
        on_done: called exactly once, from any thread, with the transfer and its outcome, when nothing touches its
            memory any more, its slots included. It must be quick and must not raise.
        on_overdue: called at most once, by ``tick`` in its caller's thread: the copy has not come back a while after
            the deadline and may touch the memory until ``on_done``, if that ever comes.
        checksums: of its slots. A load's are compared before its first byte moves; a store's are taken.
        ending: how it must end, where that was decided before its copy was done.
        stop: not 0 where the copy must return; C looks at it.
        began_at, ended_at: on the engine's clock, when its copy began and ended; 0.0 before. Not what it waited for
            other copies.
    """

    direction: Direction
    plan: Callable[[], Plan]
    deadline: float
    on_done: Callable[[Transfer, Outcome], None]
    on_overdue: Callable[[Transfer], None] | None = None
    checksums: SlotChecksums | None = None
    ending: Outcome | None = None
    stop: ctypes.c_uint32 = field(default_factory=ctypes.c_uint32)
    began_at: float = 0.0
    ended_at: float = 0.0

    @property
    def copy_s(self) -> float:
        """Seconds from the beginning of its copy to its end; 0.0 where it has not begun, or does not end."""
        return self.ended_at - self.began_at if self.began_at and self.ended_at else 0.0

    def must_end(self, outcome: Outcome) -> None:
        """Have the copy return soon, which ``on_done`` tells; the first reason counts. From any thread."""
        self.ending = self.ending or outcome
        self.stop.value = 1

    def unread_parts(self) -> deque[list[int]]:
        """Return the numbers of the slots whose checksums are not known yet, in parts of about READ_BYTES."""
        parts: deque[list[int]] = deque()
        nbytes = READ_BYTES
        if (checksums := self.checksums) is not None:
            for number, found in enumerate(checksums.sums):
                if not found:
                    if nbytes >= READ_BYTES:
                        parts.append([])
                        nbytes = 0
                    parts[-1].append(number)
                    nbytes += checksums.slots[number][1]
        return parts

    def read_part(self, part: Sequence[int]) -> None:
        """Take the checksums of these slots, unless it must end."""
        if (checksums := self.checksums) is not None and not self.stop.value:
            for number, found in zip(
                part, checksums.digests([checksums.slots[number] for number in part]), strict=True
            ):
                checksums.sums[number] = found

    def read_slots(self) -> None:
        """Take all checksums that are not known yet; it must end where a load's slot has another than is expected."""
        for part in self.unread_parts():
            self.read_part(part)
        if (checksums := self.checksums) is None or checksums.expected is None or self.stop.value:
            return
        if checksums.sums != list(checksums.expected):
            self.must_end(Outcome.CORRUPT)


@dataclass(slots=True, eq=False)
class _Reading:
    """The checksums of one store, which threads take side by side: parts that none has begun, and all that are open."""

    transfer: Transfer
    parts: deque[list[int]]
    open: int


class CopyStats(NamedTuple):
    """What one direction of an engine has to do and has done."""

    queued: int = 0
    """Transfers whose copy has not begun."""
    running: int = 0
    """Transfers whose copy has begun, those that wait for their checksums included."""
    busy_seconds: float = 0.0
    checksum_seconds: float = 0.0
    """CPU seconds that went into checksums which the copy loop has not taken."""
    refused_batches: int = 0
    """Batches and rows of copies that a CUDA driver refused, so that their pieces were copied one by one."""

    def plus(self, other: CopyStats) -> CopyStats:
        return CopyStats(*map(add, self, other))


class CopyQueue:
    """The transfers of one direction, first in first out, and a thread for each of ``copies``.

    Each of these copies until all is copied or ``transfer.stop`` is set. Nothing touches the memory afterwards, also
    where it raises, which fails the transfer. It may fill in a store's checksums. ``readers`` more threads, if any,
    take those of what was stored side by side, so that the copy goes on with the next store.

    Everything mutable is guarded by the one lock of ``_wake`` and ``_to_read``, for which readers wait. Each thread
    begins with ``on_start``.
    """

    def __init__(
        self,
        name: str,
        clock: Callable[[], float],
        copies: Sequence[Callable[[Transfer], None]],
        readers: int = 0,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock = clock
        self._on_start = on_start
        lock = threading.Lock()
        self._wake, self._to_read = threading.Condition(lock), threading.Condition(lock)
        self._waiting: dict[Transfer, None] = {}
        # With the threads that copy it, or read it for its checksums; none while it waits for one that reads.
        self._running: dict[Transfer, set[int]] = {}
        self._unread: deque[_Reading] = deque()
        # Transfers that do not come back, and since when their thread has not even wanted a CPU.
        self._overdue: dict[Transfer, float] = {}
        self._stopped = False
        self._max_unread = MAX_UNREAD_STORES if readers else 0
        self._busy_seconds = self._checksum_seconds = 0.0
        works: list[tuple[str, Callable[[], None]]]
        works = [(f"{name}-{number}", partial(self._copy_all, copy)) for number, copy in enumerate(copies)]
        works += [(f"{name}-sums-{number}", self._read_all) for number in range(readers)]
        self._threads = DaemonThreads(works, self.stop)

    def hangs_s(self) -> float:
        """See ``CopyEngine``.

        A thread that a busy machine gives no CPU (tens of seconds were seen) comes back when it gets one.
        """
        with self._wake:
            return max((self._clock() - since for since in self._overdue.values()), default=0.0)

    def submit(self, transfer: Transfer) -> None:
        """Queue the transfer; after ``stop`` it is CANCELLED at once. There is no bound: the server bounds the jobs."""
        with self._wake:
            if not self._stopped:
                self._waiting[transfer] = None
                self._wake.notify_all()
                return
        self._end(transfer, Outcome.CANCELLED)

    def cancel(self, transfer: Transfer) -> bool:
        """End a transfer that has not started as CANCELLED; False, and nothing changes, when it runs or has ended."""
        with self._wake:
            if transfer not in self._waiting:
                return False
            del self._waiting[transfer]
        self._end(transfer, Outcome.CANCELLED)
        return True

    def tick(self) -> None:
        now = self._clock()
        with self._wake:
            waiting = [transfer for transfer in self._waiting if now >= transfer.deadline]
            for transfer in waiting:
                del self._waiting[transfer]
            late: list[Transfer] = []
            for transfer, threads in self._running.items():
                if now >= transfer.deadline:
                    transfer.must_end(Outcome.DEADLINE)
                if now >= transfer.deadline + OVERDUE_GRACE_S:
                    if transfer not in self._overdue:
                        late.append(transfer)
                    elif not all(map(_wants_cpu, threads)):
                        continue
                    self._overdue[transfer] = now
        for transfer in waiting:
            self._end(transfer, Outcome.DEADLINE)
        for transfer in late:
            if transfer.on_overdue is not None:
                try:
                    transfer.on_overdue(transfer)
                except Exception:
                    _log.exception(RAISED)

    def stats(self) -> CopyStats:
        with self._wake:
            return CopyStats(len(self._waiting), len(self._running), self._busy_seconds, self._checksum_seconds)

    def stop(self) -> None:
        """Cancel what waits, have what runs end as FAILED, and the threads with it."""
        with self._wake:
            self._stopped = True
            waiting, self._waiting = self._waiting, {}
            for transfer in self._running:
                transfer.must_end(Outcome.FAILED)
            self._wake.notify_all()
            self._to_read.notify_all()
        for transfer in waiting:
            self._end(transfer, Outcome.CANCELLED)

    def join(self, deadline: float) -> bool:
        """Wait for the threads until ``deadline`` (of ``time.monotonic``); False when one still runs."""
        return self._threads.join(deadline)

    # --- in a thread ------------------------------------------------------------------------------

    def _copy_all(self, copy: Callable[[Transfer], None]) -> None:
        self._on_start()
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._stopped)
                if not self._waiting:
                    return
                transfer = next(iter(self._waiting))
                del self._waiting[transfer]
                self._running[transfer] = {threading.get_native_id()}
            started, storing = time.perf_counter(), transfer.direction is Direction.STORE
            transfer.began_at = self._clock()
            if transfer.began_at >= transfer.deadline:
                transfer.must_end(Outcome.DEADLINE)
            checksums = transfer.checksums
            try:
                if not storing and checksums is not None:
                    self._read(transfer.read_slots)
                if transfer.ending is None:
                    copy(transfer)
            except Exception:
                _failed(transfer)
            with self._wake:
                self._busy_seconds += time.perf_counter() - started
                # Never after ``stop``, when nobody would read it.
                unread = storing and transfer.ending is None and checksums is not None and 0 in checksums.sums
                if unread and len(self._unread) < self._max_unread:
                    self._running[transfer].clear()
                    parts = transfer.unread_parts()
                    self._unread.append(_Reading(transfer, parts, len(parts)))
                    self._to_read.notify(len(parts))
                    continue
            if unread:
                try:
                    self._read(transfer.read_slots)
                except Exception:
                    _failed(transfer)
            self._came_back(transfer)

    def _read_all(self) -> None:
        self._on_start()
        thread_id = threading.get_native_id()
        while True:
            with self._wake:
                self._to_read.wait_for(lambda: self._unread or self._stopped)
                if not self._unread:
                    return
                reading = self._unread[0]
                transfer, part = reading.transfer, reading.parts.popleft()
                if not reading.parts:
                    self._unread.popleft()
                self._running[transfer].add(thread_id)
            try:
                self._read(partial(transfer.read_part, part))
            except Exception:
                _failed(transfer)
            with self._wake:
                self._running[transfer].discard(thread_id)
                reading.open -= 1
                ended = not reading.open
            if ended:
                self._came_back(transfer)

    def _read(self, read: Callable[[], None]) -> None:
        began = time.thread_time()
        try:
            read()
        finally:
            with self._wake:
                self._checksum_seconds += time.thread_time() - began

    def _came_back(self, transfer: Transfer) -> None:
        with self._wake:
            del self._running[transfer]
            self._overdue.pop(transfer, None)
        transfer.ended_at = self._clock()
        self._end(transfer, transfer.ending or Outcome.DONE)

    @staticmethod
    def _end(transfer: Transfer, outcome: Outcome) -> None:
        try:
            transfer.on_done(transfer, outcome)
        except Exception:
            _log.exception(RAISED)


def _failed(transfer: Transfer) -> None:
    """Have the transfer fail, whose copy raised."""
    _log.exception("A %s failed; its job fails, the thread goes on.", transfer.direction.value)
    transfer.must_end(Outcome.FAILED)


def _wants_cpu(thread_id: int) -> bool:
    """Return whether a thread of this process runs, or would if there were a CPU for it; False where there is none."""
    try:
        fields = Path(f"/proc/self/task/{thread_id}/stat").read_text()
    except OSError:
        return False
    return fields.rpartition(")")[2].split()[0] == "R"


class CopyEngine:
    """Executes transfers. Its methods, and those of its queues, may be called from any thread and never wait for a
    copy, but for ``close``."""

    def __init__(self, queues: dict[Direction, CopyQueue]) -> None:
        self.queues = queues

    def tick(self) -> None:
        """End waiting transfers beyond their deadline, stop running ones, and tell of those that do not come back.

        The owner calls this some times a second.
        """
        for queue in self.queues.values():
            queue.tick()

    def hangs_s(self) -> float:
        """For how long a copy has been known to be overdue whose thread waits for more than a CPU; 0 when none is."""
        return max(queue.hangs_s() for queue in self.queues.values())

    def stats(self, direction: Direction) -> CopyStats:
        """Return the counters of one direction."""
        return self.queues[direction].stats()

    def close(self, timeout_s: float) -> bool:
        """Cancel what waits, abandon what runs, end the threads.

        Returns False when a thread still copies after ``timeout_s``: the memory it uses must then stay mapped.
        """
        # Threads wait in real time whatever clock the deadlines are on.
        deadline = time.monotonic() + timeout_s
        for queue in self.queues.values():
            queue.stop()
        return all(queue.join(deadline) for queue in self.queues.values())


# --- host memory ----------------------------------------------------------------------------------


def host_copy(transfer: Transfer, library: Native | None = None) -> None:
    """Copy between mapped memfds until all is copied or ``transfer.stop`` is set. A wrong address kills the process.

    Takes the checksums (XXH3, 64 bits) of a store's slots, which are in the plan's order: that costs nothing while
    their bytes are in registers. One stays 0 where others must take it: of a slot of less than 241 bytes, of one that
    is not filled from its first byte on, or hashes to 0.

    Raises NotCompiled when kvoffd was installed without the library.
    """
    plan, taken = transfer.plan(), transfer.checksums if transfer.direction is Direction.STORE else None
    slots, begin = (taken.slots, taken.pool_address) if taken is not None else ((), 0)
    # A small copy takes less time than to make arrays of numpy.
    columns = array("Q", [begin + offset for offset, _ in slots]), array("Q", [length for _, length in slots])
    sums = array("Q", bytes(8 * len(slots)))
    addresses = [column.buffer_info()[0] for column in (*columns, sums)]
    pieces = [column.ctypes.data for column in (plan.destination, plan.source, plan.size)]
    (library or native()).host_copy(*pieces, len(plan.size), *addresses, len(slots), ctypes.byref(transfer.stop))
    if taken is not None:
        taken.sums = sums.tolist()


def try_out(library: Native) -> None:
    """Copy a little in pieces of odd sizes: a loop that was compiled wrongly must not write engines' memory."""
    source = np.arange(4096, dtype=np.uint8) * np.uint8(7)
    pool = np.zeros(4096 + _STRIPE_BYTES, dtype=np.uint8)
    begin = -pool.ctypes.data % _STRIPE_BYTES
    cuts = np.array([0, 1, 65, 1089, 3000, 4096], dtype=np.uint64)
    to, of = (cuts[:-1] + np.uint64(address) for address in (pool.ctypes.data + begin, source.ctypes.data))
    taken = SlotChecksums(lambda _: [], [(begin, 4096)], [0], pool_address=pool.ctypes.data)
    plan = Plan(to, of, np.diff(cuts), 4096)
    host_copy(Transfer(Direction.STORE, lambda: plan, 0.0, lambda *_: None, None, taken), library)
    if not np.array_equal(pool[begin : begin + 4096], source) or taken.sums != [xxhash.xxh3_64_intdigest(source.data)]:
        raise NotCompiled("The daemon's copy loop was compiled wrongly; install kvoffd again with another C compiler.")


class HostEngine(CopyEngine):
    """Copies by the CPU, with ``threads_per_direction`` threads each for stores and loads.

    Args:
        clock: what deadlines are measured on, in seconds.
        copy: as host_copy; tests pass their own.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        threads_per_direction: int = 1,
        copy: Callable[[Transfer], None] = host_copy,
    ) -> None:
        try_out(native())
        super().__init__(
            {one: CopyQueue(f"kvoffd-{one.value}", clock, [copy] * threads_per_direction) for one in Direction}
        )
