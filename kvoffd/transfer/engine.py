"""Executes plans on threads: a queue of transfers for each direction, and the engine for host memory.

A copy is one call of C without the GIL. It ends when all is copied or the transfer's stop flag is set. Loads and stores
have their own threads, so that no load waits for a store. Sessions share a queue by bytes: the next transfer is the
oldest of the session that has copied the least while others waited. A copy that has begun is not interrupted for that.
So a session waits at most for the copies that run, each of ``max_keys_per_submit`` keys at most, and then gets an equal
part of what is copied.

A transfer ends (``on_done``) only when nothing touches its memory any more. If a GPU hangs that may be never. Then
``tick`` calls ``on_overdue``: the owner may answer a store, since slots are not read before they are committed, but not
a load, which may still write to the engine's blocks.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import numpy as np
import xxhash

from kvoffd.errors import KvoffdError
from kvoffd.system.fair_shares import FairShares
from kvoffd.system.native import COUNT, NUMBER, VOID_P, Native, NotCompiled, declare, native
from kvoffd.system.threads import AbandonableThreads
from kvoffd.transfer.plan import CopyEnd, Direction, Plan

declare(keep_gil=False, host_copy=(COUNT, *(VOID_P, VOID_P, VOID_P, NUMBER) * 2, VOID_P))

_log = logging.getLogger(__name__)

# A copy polls its stop flag each MiB or 512 pieces. After this time past its deadline it counts as hanging.
OVERDUE_GRACE_S = 1.0
# Limit of stores that wait for threads to compute checksums; beyond it the copying thread computes them.
MAX_UNREAD_STORES = 4
# Bytes that a thread reads for checksums before it polls whether the transfer must end.
READ_BYTES = 4 << 20
# Bytes that a copy counts for at least in its session's share: its planning and its end take as long as copying these.
LEAST_SHARE_BYTES = 1 << 20

# A copy computes checksums only of slots that begin at a multiple of this.
_STRIPE_BYTES = 64
RAISED = "The owner of a transfer raised: a bug; the engine continues."


@dataclass(eq=False)
class SlotChecksums:
    """The checksums of one transfer's slots: computed for a store, compared for a load.

    Attributes:
        digests: returns the checksums of slots of the pool, given like ``slots``; none is 0.
        slots: offset and length in bytes of each slot.
        sums: the checksum of each slot; 0 if it was not read, or not yet.
        expected: the checksums to compare with; None for a store.
        pool_address: the pool's address, to which a store's offsets are relative.
    """

    digests: Callable[[Sequence[tuple[int, int]]], list[int]]
    slots: Sequence[tuple[int, int]]
    sums: list[int]
    expected: Sequence[int] | None = None
    pool_address: int = 0

    def unread_parts(self) -> deque[list[int]]:
        """Return the numbers of the slots without checksums, in parts of about READ_BYTES."""
        parts, nbytes = deque[list[int]](), 0
        for number, found in enumerate(self.sums):
            if not found:
                if not parts or nbytes >= READ_BYTES:
                    parts.append([])
                    nbytes = 0
                parts[-1].append(number)
                nbytes += self.slots[number][1]
        return parts

    def read(self, part: Sequence[int]) -> None:
        """Read the slots with these numbers, and keep their checksums."""
        found = self.digests([self.slots[number] for number in part])
        for number, checksum in zip(part, found, strict=True):
            self.sums[number] = checksum


@dataclass(slots=True, eq=False)
class Transfer:
    """One job's copy. Compared by identity; belongs to the engine from ``submit`` until ``on_done``.

    Attributes:
        plan: returns the plan. Called once, in the copying thread, since thousands of pieces take milliseconds.
        deadline: on the engine's clock, in seconds; checked before the copy begins, and by ``tick``.
        on_done: called exactly once, in any thread, with the transfer and how it ended, when nothing touches its memory
            and slots any more. It must be quick and must not raise.
        on_overdue: called at most once, by ``tick`` in its caller's thread, if the copy has not ended a while after the
            deadline. The copy may touch the memory until ``on_done``, if that is ever called.
        checksums: of its slots. A load's are compared before its first byte is copied.
        session: id of the session whose job it is.
        nbytes: bytes that the plan copies.
        ending: how it will end, once ``must_end`` has decided that; else None, and it ends as DONE.
        stop: not 0 if the copy must return; C polls it.
        began_at: start of the copy on the engine's clock; 0.0 before.
        copy_s: duration of the copy in seconds, without its time in the queue; 0.0 until it has ended.
    """

    direction: Direction
    plan: Callable[[], Plan]
    deadline: float
    on_done: Callable[[Transfer, CopyEnd], None]
    on_overdue: Callable[[Transfer], None] | None = None
    checksums: SlotChecksums | None = None
    session: int = 0
    nbytes: int = 0
    ending: CopyEnd | None = None
    stop: ctypes.c_uint32 = field(default_factory=ctypes.c_uint32)
    began_at: float = 0.0
    copy_s: float = 0.0

    def must_end(self, end: CopyEnd) -> None:
        """Make the copy return soon, and end like this, or like an earlier call said. For any thread."""
        self.ending = self.ending or end
        self.stop.value = 1

    def complete_checksums(self) -> None:
        """Compute all missing checksums, unless the transfer must end. A load with a mismatch ends as CORRUPT."""
        if (checksums := self.checksums) is None:
            return
        for part in checksums.unread_parts():
            if not self.stop.value:
                checksums.read(part)
        if not self.stop.value and checksums.expected is not None and checksums.sums != list(checksums.expected):
            self.must_end(CopyEnd.CORRUPT)


@dataclass(slots=True, eq=False)
class _UnreadStore:
    """A store that was copied, and whose missing checksums readers compute, each one part at a time."""

    transfer: Transfer
    checksums: SlotChecksums
    parts: deque[list[int]]
    """Parts that no reader has begun."""
    unended_parts: int
    """Number of these, and of those that readers have begun and not ended."""


class CopyWork:
    """Work of one direction, of all engines that were given it. For any thread. Statistics read it as it is.

    Attributes:
        queued_jobs: transfers whose copy has not begun.
        running_jobs: transfers whose copy has begun, including those that wait for checksums.
        busy_seconds: of copying threads.
        checksum_seconds: CPU seconds of checksums outside the copy loop.
        refused_batches: batches and rows of copies that a CUDA driver refused; their pieces were copied one by one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.queued_jobs = self.running_jobs = self.refused_batches = 0
        self.busy_seconds = self.checksum_seconds = 0.0

    def add(
        self, *, queued: int = 0, running: int = 0, busy_s: float = 0.0, checksum_s: float = 0.0, refused: int = 0
    ) -> None:
        with self._lock:
            self.queued_jobs += queued
            self.running_jobs += running
            self.busy_seconds += busy_s
            self.checksum_seconds += checksum_s
            self.refused_batches += refused


WorkByDirection: TypeAlias = Mapping[Direction, CopyWork]
"""Work of stores and of loads."""


def new_work() -> WorkByDirection:
    return {direction: CopyWork() for direction in Direction}


class CopyQueue:
    """The transfers of one direction, and a thread for each of ``copy_functions``. Those of a session begin in order.

    Such a function copies until all is copied or ``transfer.stop`` is set, and touches no memory afterwards. If it
    raises, the transfer fails. It may fill in a store's checksums. ``readers`` more threads compute those that it left
    out, so that the copying thread continues with the next store.

    A transfer is in ``_waiting``, then in ``_running``, then in neither, and ``on_done`` is called:

    | it is in                      | from                  | until                                                 |
    |-------------------------------|-----------------------|-------------------------------------------------------|
    | ``_waiting``                  | ``submit``            | ``_take``; or it ends: ``cancel``, ``tick``, ``stop`` |
    | ``_running``                  | ``_take``             | no thread touches its memory: ``_end_running``        |
    | ``_running`` and ``_unread``  | ``_leave_to_readers`` | readers have begun all its parts                      |
    | ``_running`` and ``_overdue`` | ``tick``              | ``_end_running``                                      |

    The lock of ``_wake`` and ``_to_read`` guards all mutable state but ``work``; ``on_done`` and ``on_overdue`` are
    called without it. Each thread first calls ``on_start``.
    """

    def __init__(
        self,
        name: str,
        clock: Callable[[], float],
        work: CopyWork,
        copy_functions: Sequence[Callable[[Transfer], None]],
        readers: int = 0,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock = clock
        self._work = work
        self._on_start = on_start
        lock = threading.Lock()
        self._wake, self._to_read = threading.Condition(lock), threading.Condition(lock)
        self._waiting: dict[int, dict[Transfer, None]] = {}
        """Transfers whose copy has not begun, by session, each session's oldest first. None has an empty dict."""
        self._shares = FairShares[int]()
        """Bytes that each session's copies began to move while others waited, since the queue was last idle."""
        self._running: dict[Transfer, set[int]] = {}
        """Transfers whose copy has begun, with the ids of the threads that copy or read for checksums; none while it
        waits for a reader."""
        self._unread: deque[_UnreadStore] = deque()
        """Stores with parts that no reader has begun; at most ``_max_unread``."""
        self._overdue: dict[Transfer, float] = {}
        """Running transfers that have not ended in time, and when their threads last ran or waited for a CPU."""
        self._stopped = False
        self._max_unread = MAX_UNREAD_STORES if readers else 0
        threads: list[tuple[str, Callable[[], None]]]
        threads = [(f"{name}-{number}", partial(self._copy_all, copy)) for number, copy in enumerate(copy_functions)]
        threads += [(f"{name}-sums-{number}", self._read_all) for number in range(readers)]
        self._threads = AbandonableThreads(threads, self.stop)

    def hangs_s(self) -> float:
        """Return the seconds for which an overdue copy's threads have slept; 0 if no copy hangs.

        A thread that waits for a CPU does not hang: waits of tens of seconds were seen.
        """
        with self._wake:
            return max((self._clock() - since for since in self._overdue.values()), default=0.0)

    def submit(self, transfer: Transfer) -> None:
        """Queue a transfer; after ``stop`` it is CANCELLED at once. The server limits the number of jobs."""
        with self._wake:
            if not self._stopped:
                if not (self._waiting or self._running):
                    self._shares = FairShares()  # else what a session copied alone, long ago, would count
                self._waiting.setdefault(transfer.session, {})[transfer] = None
                self._work.add(queued=1)
                self._wake.notify_all()
                return
        self._end(transfer, CopyEnd.CANCELLED)

    def cancel(self, transfer: Transfer) -> bool:
        """End a queued transfer as CANCELLED; return False if it runs or has ended."""
        with self._wake:
            if transfer not in self._waiting.get(transfer.session, ()):
                return False
            self._withdraw([transfer])
        self._end(transfer, CopyEnd.CANCELLED)
        return True

    def tick(self) -> None:
        """See ``CopyEngine``. A copy is reported once; how long it hangs is counted from when its threads last wanted a
        CPU."""
        now = self._clock()
        with self._wake:
            self._withdraw(waiting := [transfer for transfer in self._all_waiting() if now >= transfer.deadline])
            late: list[Transfer] = []
            for transfer, threads in self._running.items():
                if now >= transfer.deadline:
                    transfer.must_end(CopyEnd.DEADLINE)
                if now < transfer.deadline + OVERDUE_GRACE_S:
                    continue
                if transfer not in self._overdue:
                    late.append(transfer)
                    self._overdue[transfer] = now
                elif not threads or all(map(_wants_cpu, threads)):  # without threads it waits for a reader
                    self._overdue[transfer] = now
        for transfer in waiting:
            self._end(transfer, CopyEnd.DEADLINE)
        for transfer in late:
            if transfer.on_overdue is not None:
                try:
                    transfer.on_overdue(transfer)
                except Exception:
                    _log.exception(RAISED)

    def stop(self) -> None:
        """Cancel queued transfers, make running ones end as FAILED, and the threads with them."""
        with self._wake:
            self._stopped = True
            self._withdraw(waiting := list(self._all_waiting()))
            for transfer in self._running:
                transfer.must_end(CopyEnd.FAILED)
            self._wake.notify_all()
            self._to_read.notify_all()
        for transfer in waiting:
            self._end(transfer, CopyEnd.CANCELLED)

    def join(self, deadline: float) -> bool:
        """Wait for the threads until ``deadline`` (``time.monotonic``); return False if one still runs."""
        return self._threads.join(deadline)

    def _all_waiting(self) -> Iterator[Transfer]:
        return chain.from_iterable(self._waiting.values())

    def _withdraw(self, transfers: Sequence[Transfer]) -> None:
        """Remove queued transfers from the queue. Called under the lock."""
        for transfer in transfers:
            of_session = self._waiting[transfer.session]
            del of_session[transfer]
            if not of_session:
                del self._waiting[transfer.session]
        self._work.add(queued=-len(transfers))

    # --- in its threads ---------------------------------------------------------------------------

    def _take(self, thread_id: int) -> Transfer:
        """Begin the next queued transfer. Called under the lock."""
        session = self._shares.order(self._waiting)[0]
        transfer = next(iter(self._waiting[session]))
        self._shares.use(session, max(transfer.nbytes, LEAST_SHARE_BYTES))
        self._withdraw([transfer])
        self._running[transfer] = {thread_id}
        self._work.add(running=1)
        transfer.began_at = self._clock()
        return transfer

    def _copy_all(self, copy: Callable[[Transfer], None]) -> None:
        """Copy one transfer after the other, until ``stop``."""
        self._on_start()
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._stopped)
                if self._stopped:  # nothing waits any more
                    return
                transfer = self._take(threading.get_native_id())
            self._copy(transfer, copy)
            checksums = transfer.checksums
            if transfer.direction is Direction.STORE and checksums is not None and 0 in checksums.sums:
                if self._leave_to_readers(transfer, checksums):
                    continue  # they end it
                self._compute(transfer, transfer.complete_checksums)
            self._end_running(transfer)

    def _copy(self, transfer: Transfer, copy: Callable[[Transfer], None]) -> None:
        """Copy a transfer, unless it is late, or a load's slots do not match their checksums."""
        started = time.perf_counter()
        if transfer.began_at >= transfer.deadline:
            transfer.must_end(CopyEnd.DEADLINE)
        if transfer.direction is Direction.LOAD and transfer.checksums is not None:
            self._compute(transfer, transfer.complete_checksums)
        if transfer.ending is None:
            try:
                copy(transfer)
            except Exception:
                _failed(transfer)
        self._work.add(busy_s=time.perf_counter() - started)

    def _leave_to_readers(self, transfer: Transfer, checksums: SlotChecksums) -> bool:
        """Have the readers compute a store's missing checksums and end it; return False if they do not take it."""
        with self._wake:
            # ``stop``, after which there are no readers, has set ``ending`` under this lock.
            if transfer.ending is not None or len(self._unread) >= self._max_unread:
                return False
            self._running[transfer].clear()
            parts = checksums.unread_parts()
            self._unread.append(_UnreadStore(transfer, checksums, parts, len(parts)))
            self._to_read.notify(len(parts))
            return True

    def _read_all(self) -> None:
        """Compute checksums of one part of a store after the other, until ``stop``; end each store after its last."""
        self._on_start()
        thread_id = threading.get_native_id()
        while True:
            with self._wake:
                self._to_read.wait_for(lambda: self._unread or self._stopped)
                if not self._unread:  # stopped, and no store is left that only readers would end
                    return
                store = self._unread[0]
                transfer, part = store.transfer, store.parts.popleft()
                if not store.parts:
                    self._unread.popleft()
                self._running[transfer].add(thread_id)
            if not transfer.stop.value:
                self._compute(transfer, partial(store.checksums.read, part))
            with self._wake:
                self._running[transfer].discard(thread_id)
                store.unended_parts -= 1
                is_read = not store.unended_parts
            if is_read:
                self._end_running(transfer)

    def _compute(self, transfer: Transfer, read: Callable[[], None]) -> None:
        """Have ``read`` compute checksums of a transfer, which fails if that raises, and count the time."""
        began = time.thread_time()
        try:
            read()
        except Exception:
            _failed(transfer)
        self._work.add(checksum_s=time.thread_time() - began)

    def _end_running(self, transfer: Transfer) -> None:
        """End a transfer that no thread touches any more."""
        with self._wake:
            del self._running[transfer]
            self._overdue.pop(transfer, None)
            self._work.add(running=-1)
        transfer.copy_s = self._clock() - transfer.began_at
        self._end(transfer, transfer.ending or CopyEnd.DONE)

    @staticmethod
    def _end(transfer: Transfer, end: CopyEnd) -> None:
        try:
            transfer.on_done(transfer, end)
        except Exception:
            _log.exception(RAISED)


def _failed(transfer: Transfer) -> None:
    """Log the exception that is being handled, and have its transfer fail."""
    _log.exception("A %s failed; its job fails, the thread continues.", transfer.direction.value)
    transfer.must_end(CopyEnd.FAILED)


def _wants_cpu(thread_id: int) -> bool:
    """Return whether a thread of this process runs or waits for a CPU; False if it has ended."""
    try:
        fields = Path(f"/proc/self/task/{thread_id}/stat").read_text()
    except OSError:
        return False
    return fields.rpartition(")")[2].split()[0] == "R"


class CopyEngine:
    """Executes transfers. Its methods, and those of its queues, are for any thread. Only ``close`` waits for copies."""

    def __init__(self, queues: Mapping[Direction, CopyQueue]) -> None:
        self.queues = queues

    def tick(self) -> None:
        """End queued transfers past their deadline, stop running ones, and report those that hang.

        The owner calls this a few times a second.
        """
        for queue in self.queues.values():
            queue.tick()

    def hangs_s(self) -> float:
        """Return the longest time of the queues; see ``CopyQueue``."""
        return max(queue.hangs_s() for queue in self.queues.values())

    def close(self, timeout_s: float) -> bool:
        """Cancel queued transfers, stop running ones, end the threads.

        Returns False if a thread still copies after ``timeout_s``: then its memory must stay mapped.
        """
        # Threads are joined in real time, whatever the engine's clock.
        deadline = time.monotonic() + timeout_s
        for queue in self.queues.values():
            queue.stop()
        return all(queue.join(deadline) for queue in self.queues.values())


@dataclass(frozen=True, eq=False)
class EngineMemory:
    """Mapped segments of one registration, and the copy engine for them."""

    engine: CopyEngine
    spans: list[tuple[int, int]]
    """(address, size in bytes) of each segment, in the order of the handles."""
    node: int | None
    """Preferred NUMA node of its slots; None if any, or unknown."""
    close: Callable[[Callable[[], None]], None]
    """Unmaps it, then calls its argument, perhaps in another thread. Call it once, while no copy uses the memory."""
    on_gpu: bool = False


OnMapped: TypeAlias = Callable[[EngineMemory | KvoffdError], None]


# --- host memory ----------------------------------------------------------------------------------


def host_copy(transfer: Transfer, library: Native | None = None) -> None:
    """Copy between mapped memfds until all is copied or ``transfer.stop`` is set. A wrong address crashes the process.

    Computes the checksums (XXH3, 64 bits) of a store's slots, which are in the plan's order, while their bytes are in
    registers. It leaves 0 for a slot of less than 241 bytes, one that is not filled from its first byte on, and one
    that hashes to 0.

    Raises NotCompiled if kvoffd was installed without the library.
    """
    plan = transfer.plan()
    checksums = transfer.checksums if transfer.direction is Direction.STORE else None
    slots = checksums.slots if checksums is not None else ()
    pool_address = checksums.pool_address if checksums is not None else 0
    # array: creating NumPy arrays would take longer than a small copy.
    slot_addresses = array("Q", [pool_address + offset for offset, _ in slots])
    slot_bytes, sums = array("Q", [length for _, length in slots]), array("Q", bytes(8 * len(slots)))
    at_pieces = [column.ctypes.data for column in (plan.destination, plan.source, plan.size)]
    at_slots = [column.buffer_info()[0] for column in (slot_addresses, slot_bytes, sums)]
    (library or native()).host_copy(*at_pieces, len(plan.size), *at_slots, len(slots), ctypes.byref(transfer.stop))
    if checksums is not None:
        checksums.sums = sums.tolist()


def try_out(library: Native) -> None:
    """Test the copy loop with pieces of odd sizes: a miscompiled one must not write to engines' memory."""
    source = np.arange(4096, dtype=np.uint8) * np.uint8(7)
    pool = np.zeros(4096 + _STRIPE_BYTES, dtype=np.uint8)
    begin = -pool.ctypes.data % _STRIPE_BYTES
    cuts = np.array([0, 1, 65, 1089, 3000, 4096], dtype=np.uint64)
    destinations, sources = (cuts[:-1] + np.uint64(at) for at in (pool.ctypes.data + begin, source.ctypes.data))
    checksums = SlotChecksums(lambda _: [], [(begin, 4096)], [0], pool_address=pool.ctypes.data)
    plan = Plan(destinations, sources, np.diff(cuts))
    host_copy(Transfer(Direction.STORE, lambda: plan, 0.0, lambda *_: None, checksums=checksums), library)
    is_copied = np.array_equal(pool[begin : begin + 4096], source)
    if not is_copied or checksums.sums != [xxhash.xxh3_64_intdigest(source.data)]:
        raise NotCompiled("The daemon's copy loop was miscompiled; install kvoffd again with another C compiler.")


class HostEngine(CopyEngine):
    """Copies with the CPU, with ``threads_per_direction`` threads each for stores and loads.

    Args:
        work: of each direction, to which it adds its own.
        clock: for deadlines, in seconds.
        copy: replaces host_copy in tests.
    """

    def __init__(
        self,
        work: WorkByDirection,
        clock: Callable[[], float] = time.monotonic,
        threads_per_direction: int = 1,
        copy: Callable[[Transfer], None] = host_copy,
    ) -> None:
        try_out(native())
        copies = [copy] * threads_per_direction
        super().__init__({one: CopyQueue(f"kvoffd-{one.value}", clock, work[one], copies) for one in Direction})
