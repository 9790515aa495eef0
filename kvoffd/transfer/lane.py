"""One direction of an engine: its queue, its copy threads, and what happens to transfers that are late."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from kvoffd.transfer.checksums import ChecksumThreadPool, SlotChecksums, StoreChecksums
from kvoffd.transfer.engine import Direction, DirectionLoad, Outcome, Transfer, TransferEngine

_log = logging.getLogger(__name__)

# A copy thread looks at the deadline once a step; one that has not noticed it after this long hangs.
OVERDUE_GRACE_S = 1.0
# Transfers that are copied but wait for their checksums. With more of them the copy threads wait too.
MAX_AWAITING_CHECKSUMS = 4


@dataclass(slots=True, eq=False)
class CopyProgress:
    """How far one transfer's copy is, shared by its copier and its lane. Made in the thread that copies.

    Attributes:
        thread_id: the kernel's id of the thread that copies.
        copied_bytes: bytes of the plan that are copied, in the plan's order; only the copy thread writes it.
        checksums: the checksums that other threads take while the copy runs; None where there are none.
    """

    _clock: Callable[[], float]
    _transfer: Transfer
    _add_checksum_cost: Callable[[float, int], None]
    thread_id: int = field(default_factory=threading.get_native_id)
    copied_bytes: int = 0
    checksums: StoreChecksums | None = None

    def must_end(self) -> Outcome | None:
        """Return how the transfer must end now, before its next step; None when it may go on."""
        if self._transfer.abandoned:
            return Outcome.FAILED
        return Outcome.DEADLINE if self._clock() >= self._transfer.deadline else None

    def take_checksums(self, checksums: SlotChecksums, sums: Sequence[int] = ()) -> Outcome:
        """Take or compare all checksums of a transfer, but for ``sums`` that its copier took; count what they cost."""
        began = time.thread_time()
        outcome = checksums.complete(sums, self.must_end)
        self._add_checksum_cost(time.thread_time() - began, checksums.nbytes())
        return outcome or Outcome.DONE


class Copier(Protocol):
    """What one thread of a lane copies with. All methods are called in that thread."""

    def open(self) -> None:
        """Prepare for the first transfer. An exception ends the thread and is raised by ``Lane.wait_open``."""

    def copy(self, transfer: Transfer, progress: CopyProgress) -> Outcome:
        """Execute the transfer; an exception fails it. On return nothing touches the transfer's memory any more."""

    def close(self) -> None:
        """Give up what ``open`` made, after the last transfer."""


class ChecksumThreads(NamedTuple):
    """The threads that take the checksums of a lane's stores. A store ends when its checksums are taken.

    Attributes:
        threads: how many; all of them work for one store at a time, none for a small one.
        inline_bytes: size of a small store. Where no more than this is left when a copy is done, its thread reads it.
        on_start: called by each thread first.
    """

    threads: int
    inline_bytes: int
    on_start: Callable[[], None] = lambda: None


class Lane:
    """A queue and one thread for each copier. Everything mutable is guarded by ``_wake``.

    Deadlines are measured on ``clock``, in seconds. A lane without stores, or whose copiers take the checksums
    themselves, has no ``checksum_threads``.
    """

    def __init__(
        self,
        name: str,
        clock: Callable[[], float],
        copiers: Sequence[Copier],
        checksum_threads: ChecksumThreads | None = None,
    ) -> None:
        self.clock = clock
        self._checksum_threads = checksum_threads
        self._checksum_pool = (
            ChecksumThreadPool(f"{name}-sums", checksum_threads.threads, checksum_threads.on_start)
            if checksum_threads
            else None
        )
        self._wake = threading.Condition()
        # By owner, whose turn it is first: queues that let go of their middle.
        self._queue: dict[Hashable, dict[Transfer, None]] = {}
        self._running: dict[Transfer, CopyProgress] = {}
        # Transfers whose thread does not look at the clock, and since when it has not even wanted a CPU.
        self._overdue: dict[Transfer, float] = {}
        self._awaiting_checksums = 0  # transfers that still run although their copy is done
        self._stopped = False
        self._busy_seconds = 0.0
        self._bytes = 0
        self._checksum_seconds = 0.0
        self._checksum_bytes = 0
        self._opened: list[Future[None]] = [Future() for _ in copiers]
        self._threads = [
            threading.Thread(target=self._run, args=(copier, opened), name=f"{name}-{index}", daemon=True)
            for index, (copier, opened) in enumerate(zip(copiers, self._opened, strict=True))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def hangs(self) -> bool:
        """Whether a transfer is overdue and its thread has not come back."""
        return bool(self._overdue)

    @property
    def hangs_s(self) -> float:
        """See TransferEngine.

        A thread that a busy machine gives no CPU (tens of seconds were seen) comes back when it gets one.
        """
        with self._wake:
            return max((self.clock() - since for since in self._overdue.values()), default=0.0)

    def wait_open(self) -> None:
        """Wait until every copier is open; raise what one of them raised."""
        for opened in self._opened:
            opened.result()

    def submit(self, transfer: Transfer) -> None:
        """See TransferEngine."""
        with self._wake:
            accepted = not self._stopped
            if accepted:
                waiting = self._queue.setdefault(transfer.owner, {})
                assert transfer not in waiting, "A transfer is submitted once."
                assert transfer not in self._running, "A transfer is submitted once."
                waiting[transfer] = None
                self._wake.notify()
        if not accepted:
            _finish(transfer, Outcome.CANCELLED, 0.0)

    def cancel(self, transfer: Transfer) -> bool:
        """See TransferEngine."""
        with self._wake:
            if transfer not in self._queue.get(transfer.owner, ()):
                return False
            self._take(transfer)
        _finish(transfer, Outcome.CANCELLED, 0.0)
        return True

    def expire(self) -> None:
        """See TransferEngine."""
        now = self.clock()
        with self._wake:
            waiting = [one for queue in self._queue.values() for one in queue if now >= one.deadline]
            for transfer in waiting:
                self._take(transfer)
            over = [transfer for transfer in self._running if now >= transfer.deadline + OVERDUE_GRACE_S]
            late = [transfer for transfer in over if transfer not in self._overdue]
            starved = [transfer for transfer in self._overdue if _wants_cpu(self._running[transfer].thread_id)]
            self._overdue.update(dict.fromkeys(late + starved, now))
        for transfer in waiting:
            _finish(transfer, Outcome.DEADLINE, 0.0)
        for transfer in late:
            if transfer.on_overdue is not None:
                transfer.on_overdue(transfer)

    def load(self) -> DirectionLoad:
        with self._wake:
            return DirectionLoad(
                sum(map(len, self._queue.values())),
                len(self._running),
                self._busy_seconds,
                self._bytes + sum(progress.copied_bytes for progress in self._running.values()),
                self._checksum_seconds,
                self._checksum_bytes,
            )

    def add_checksum_cost(self, seconds: float, nbytes: int) -> None:
        with self._wake:
            self._checksum_seconds += seconds
            self._checksum_bytes += nbytes

    def stop(self) -> None:
        """Cancel what waits, abandon what runs, have the threads end."""
        with self._wake:
            self._stopped = True
            waiting = [transfer for queue in self._queue.values() for transfer in queue]
            self._queue.clear()
            for transfer in self._running:
                transfer.abandoned = True
            self._wake.notify_all()
        for transfer in waiting:
            _finish(transfer, Outcome.CANCELLED, 0.0)

    def join(self, deadline: float) -> bool:
        """Wait for the threads until ``deadline`` (of ``time.monotonic``); False when one still runs."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False
        # Only copy threads submit to the pool, so it can be joined now.
        return self._checksum_pool is None or self._checksum_pool.join(deadline)

    def _run(self, copier: Copier, opened: Future[None]) -> None:
        try:
            copier.open()
        except BaseException as error:
            opened.set_exception(error)
            return
        opened.set_result(None)
        try:
            while (taken := self._next()) is not None:
                self._serve(copier, *taken)
        finally:
            copier.close()

    def _serve(self, copier: Copier, transfer: Transfer, progress: CopyProgress) -> None:
        started = time.perf_counter()
        try:
            outcome = self._execute(copier, transfer, progress)
        except Exception:
            _log.exception("A copy of %d bytes failed; its job fails, the copy thread goes on.", transfer.plan.nbytes)
            outcome = Outcome.FAILED
        seconds = time.perf_counter() - started
        with self._wake:
            self._busy_seconds += seconds
            self._awaiting_checksums += 1
        checksums, progress.checksums = progress.checksums, None  # they refer to each other
        if checksums is None:
            self._end(transfer, outcome, seconds)
        else:
            checksums.copy_ended(outcome)

    def _execute(self, copier: Copier, transfer: Transfer, progress: CopyProgress) -> Outcome:
        if (early := progress.must_end()) is not None:
            return early
        checksums = transfer.checksums
        if checksums is not None and transfer.direction is Direction.LOAD:
            if (outcome := progress.take_checksums(checksums)) is not Outcome.DONE:
                return outcome
        elif checksums is not None and self._checksum_threads is not None:
            progress.checksums = self._begin_checksums(transfer, checksums, progress, self._checksum_threads)
        return copier.copy(transfer, progress)

    def _begin_checksums(
        self, transfer: Transfer, checksums: SlotChecksums, progress: CopyProgress, settings: ChecksumThreads
    ) -> StoreChecksums:
        pool = self._checksum_pool
        assert pool is not None
        began = time.perf_counter()
        threads = settings.threads if checksums.nbytes() > settings.inline_bytes else 0
        store = StoreChecksums(
            checksums,
            lambda: progress.copied_bytes,
            progress.must_end,
            threads,
            settings.inline_bytes,
            self.add_checksum_cost,
            lambda outcome: self._end(transfer, outcome, time.perf_counter() - began),
        )
        for _ in range(threads):
            pool.submit(store.follow_copy)
        return store

    def _end(self, transfer: Transfer, outcome: Outcome, seconds: float) -> None:
        with self._wake:
            self._bytes += self._running.pop(transfer).copied_bytes
            self._overdue.pop(transfer, None)
            self._awaiting_checksums -= 1
            self._wake.notify()
        _finish(transfer, outcome, seconds)

    def _take(self, transfer: Transfer) -> None:
        queue = self._queue[transfer.owner]
        del queue[transfer]
        if not queue:
            del self._queue[transfer.owner]

    def _next(self) -> tuple[Transfer, CopyProgress] | None:
        with self._wake:
            while not self._queue or self._awaiting_checksums >= MAX_AWAITING_CHECKSUMS:
                if self._stopped:
                    return None
                self._wake.wait()
            owner, queue = next(iter(self._queue.items()))
            transfer = next(iter(queue))
            self._take(transfer)
            if queue:  # its next turn is behind those of all others
                self._queue[owner] = self._queue.pop(owner)
            progress = self._running[transfer] = CopyProgress(self.clock, transfer, self.add_checksum_cost)
            return transfer, progress


def _wants_cpu(thread_id: int) -> bool:
    """Return whether a thread of this process runs, or would if there were a CPU for it."""
    try:
        fields = Path(f"/proc/self/task/{thread_id}/stat").read_text()
    except OSError:
        return False
    return fields.rpartition(")")[2].split()[0] == "R"


def _finish(transfer: Transfer, outcome: Outcome, seconds: float) -> None:
    try:
        transfer.on_done(transfer, outcome, seconds)
    except Exception:
        _log.exception("on_done of a transfer raised; the engine goes on, but the transfer's owner has a bug.")


class LaneEngine(TransferEngine):
    """An engine that has one lane for each direction."""

    def __init__(self, lanes: dict[Direction, Lane]) -> None:
        self._lanes = lanes

    def submit(self, transfer: Transfer) -> None:
        self._lanes[transfer.direction].submit(transfer)

    def cancel(self, transfer: Transfer) -> bool:
        return self._lanes[transfer.direction].cancel(transfer)

    def expire(self) -> None:
        for lane in self._lanes.values():
            lane.expire()

    def load_of(self, direction: Direction) -> DirectionLoad:
        return self._lanes[direction].load()

    def close(self, timeout_s: float) -> bool:
        # Threads wait in real time whatever clock the deadlines are on.
        deadline = time.monotonic() + timeout_s
        for lane in self._lanes.values():
            lane.stop()
        return all(lane.join(deadline) for lane in self._lanes.values())
