"""One direction of an engine: its queue, its copy threads, and what happens to transfers that are late."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

from kvoffd.system.native import native
from kvoffd.system.threads import DaemonThreads
from kvoffd.system.turns import Turns
from kvoffd.transfer.checksums import ChecksumThreadPool, SlotChecksums, StoreChecksums
from kvoffd.transfer.engine import DirectionLoad, Transfer
from kvoffd.transfer.pace import OTHERS_WAIT, STOP, Pace, Slice
from kvoffd.transfer.plan import Direction, Outcome

_log = logging.getLogger(__name__)

# A copy thread looks at the deadline every few milliseconds; one that has not noticed it after this long hangs.
OVERDUE_GRACE_S = 1.0
# Stores of an owner that are copied but wait for their checksums. One more ends without those that it lacks.
MAX_AWAITING_CHECKSUMS = 4


Steps: TypeAlias = Generator[None, None, Outcome]
"""A copy. It yields where it may rest for as long as others have their turns: nothing of it is in flight there."""


@dataclass(slots=True, eq=False)
class CopyProgress:
    """How far one transfer's copy is, shared by its copier and its lane.

    Attributes:
        pace: what its loop notes, and is told.
        thread_id: the kernel's id of the thread that copies; None while none does.
        checksums: the checksums that other threads take while the copy runs; None where there are none.
        steps: the copy, once it has begun.
        seconds: what it has taken of a thread.
    """

    _lane: Lane
    _transfer: Transfer
    pace: Pace
    thread_id: int | None = None
    checksums: StoreChecksums | None = None
    steps: Steps | None = None
    seconds: float = 0.0

    @property
    def copied_bytes(self) -> int:
        """Bytes of the plan that are copied, in the plan's order, at any time and in any thread."""
        return int(native().copied(ctypes.byref(self.pace)))

    def must_end(self) -> Outcome | None:
        """Return how the transfer must end now; None when it may go on."""
        if self._transfer.abandoned:
            return Outcome.FAILED
        return Outcome.DEADLINE if self._lane.clock() >= self._transfer.deadline else None

    def turn_is_over(self, read_bytes: int = 0) -> bool:
        """Return whether the slice is used and another owner's turn has come, so that this copy rests.

        ``read_bytes`` were read for checksums; what was copied is known.
        """
        self.pace.used += read_bytes
        return self.pace.used >= self.pace.slice_bytes and self._lane.end_slice(self._transfer, self)

    def take_checksums(self, checksums: SlotChecksums, sums: Sequence[int] = ()) -> Steps:
        """Take or compare all checksums of a transfer; ``sums`` are what its copier took, 0 for others.

        Counts what they cost.
        """
        if sums:
            checksums.sums[:] = sums
        reading, seconds = checksums.read(), 0.0
        try:
            while True:
                began = time.thread_time()
                nbytes = next(reading, None)
                seconds += time.thread_time() - began
                if nbytes is None:
                    return checksums.compare() or Outcome.DONE
                if (early := self.must_end()) is not None:
                    return early
                if self.turn_is_over(nbytes):
                    yield
        finally:
            self._lane.add_checksum_cost(seconds, checksums.nbytes())


class Copier(Protocol):
    """What one thread of a lane copies with. A copy may go on in another thread than it began in, but not at once."""

    def open(self) -> None:
        """Prepare for the first transfer. An exception ends the thread and is raised by ``Lane.wait_open``."""

    def copy(self, transfer: Transfer, progress: CopyProgress) -> Steps:
        """Copy, and return how it ended; an exception fails the transfer. Nothing touches its memory afterwards.

        Yields where ``CopyProgress.turn_is_over`` says so. Closed there, it ends.
        """

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

    Owners take turns, a slice at a time, so that a transfer waits for at most one slice of each other owner, however
    much they copy. While nobody else waits, a copy goes on. A transfer that has begun and rests is among those that
    wait and among those that have begun.

    Deadlines are measured on ``clock``, in seconds. A lane without stores, or whose copiers take the checksums
    themselves, has no ``checksum_threads``.
    """

    def __init__(
        self,
        name: str,
        clock: Callable[[], float],
        copiers: Sequence[Copier],
        one_slice: Slice,
        checksum_threads: ChecksumThreads | None = None,
    ) -> None:
        self.clock = clock
        self.slice = one_slice
        self._checksum_threads = checksum_threads
        self._checksum_pool = (
            ChecksumThreadPool(f"{name}-sums", checksum_threads.threads, checksum_threads.on_start)
            if checksum_threads
            else None
        )
        self._wake = threading.Condition()
        self._queue: Turns[Transfer] = Turns()
        self._begun: dict[Transfer, CopyProgress] = {}
        # Transfers whose thread does not look at the clock, and since when it has not even wanted a CPU.
        self._overdue: dict[Transfer, float] = {}
        # By owner, transfers that have not ended although their copy is done.
        self._awaiting_checksums: Counter[Hashable] = Counter()
        self._stopped = False
        self._busy_seconds = 0.0
        self._bytes = 0
        self._checksum_seconds = 0.0
        self._checksum_bytes = 0
        self._opened: list[Future[None]] = [Future() for _ in copiers]
        self._threads = DaemonThreads(
            (f"{name}-{index}", partial(self._run, copier, opened))
            for index, (copier, opened) in enumerate(zip(copiers, self._opened, strict=True))
        )

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
        with self._wake:
            accepted = not self._stopped
            if accepted:
                assert transfer not in self._begun, "A transfer is submitted once."
                self._wait(transfer)
                self._wake.notify()
        if not accepted:
            _finish(transfer, Outcome.CANCELLED, 0.0)

    def cancel(self, transfer: Transfer) -> bool:
        with self._wake:
            if transfer in self._begun or not self._queue.remove(transfer.owner, transfer):
                return False
        _finish(transfer, Outcome.CANCELLED, 0.0)
        return True

    def abandon(self, transfer: Transfer) -> None:
        with self._wake:
            transfer.abandoned = True
            self._stop_copy(transfer)

    def expire(self) -> None:
        now = self.clock()
        with self._wake:
            for transfer in self._begun:
                if now >= transfer.deadline:
                    self._stop_copy(transfer)
            waiting = [transfer for transfer in self._queue if now >= transfer.deadline]
            for transfer in waiting:
                self._queue.remove(transfer.owner, transfer)
            resting = {transfer: self._begun[transfer] for transfer in waiting if transfer in self._begun}
            over = [transfer for transfer in self._begun if now >= transfer.deadline + OVERDUE_GRACE_S]
            late = [transfer for transfer in over if transfer not in self._overdue and transfer not in resting]
            starved = [transfer for transfer in self._overdue if _wants_cpu(self._begun[transfer].thread_id)]
            self._overdue.update(dict.fromkeys(late + starved, now))
        for transfer in waiting:
            if transfer in resting:
                self._end_copy(transfer, resting[transfer], Outcome.DEADLINE)
            else:
                _finish(transfer, Outcome.DEADLINE, 0.0)
        for transfer in late:
            if transfer.on_overdue is not None:
                transfer.on_overdue(transfer)

    def load(self) -> DirectionLoad:
        with self._wake:
            return DirectionLoad(
                sum(transfer not in self._begun for transfer in self._queue),
                len(self._begun),
                self._busy_seconds,
                self._bytes + sum(progress.copied_bytes for progress in self._begun.values()),
                self._checksum_seconds,
                self._checksum_bytes,
            )

    def end_slice(self, transfer: Transfer, progress: CopyProgress) -> bool:
        """Begin another slice; return whether it is another owner's turn."""
        with self._wake:
            progress.pace.used = 0
            self._tell(transfer, progress)
            return self._queue.has_other(transfer.owner)

    def add_checksum_cost(self, seconds: float, nbytes: int) -> None:
        with self._wake:
            self._checksum_seconds += seconds
            self._checksum_bytes += nbytes

    def stop(self) -> None:
        """Cancel what waits, abandon what has begun, have the threads end."""
        with self._wake:
            self._stopped = True
            waiting = [transfer for transfer in self._queue if transfer not in self._begun]
            for transfer in waiting:
                self._queue.remove(transfer.owner, transfer)
            for transfer in self._begun:
                transfer.abandoned = True
                self._stop_copy(transfer)
            self._wake.notify_all()
        for transfer in waiting:
            _finish(transfer, Outcome.CANCELLED, 0.0)

    def join(self, deadline: float) -> bool:
        """Wait for the threads until ``deadline`` (of ``time.monotonic``); False when one still runs."""
        # Only copy threads submit to the pool, so it can be joined after them.
        return self._threads.join(deadline) and (self._checksum_pool is None or self._checksum_pool.join(deadline))

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
        """Copy until the transfer has ended or it is another owner's turn."""
        started = time.perf_counter()
        outcome = progress.must_end()
        try:
            if outcome is None:
                if progress.steps is None:
                    progress.steps = self._steps(copier, transfer, progress)
                next(progress.steps)
        except StopIteration as end:
            outcome = end.value
        except Exception:
            _log.exception("A copy of %d bytes failed; its job fails, the copy thread goes on.", transfer.plan.nbytes)
            outcome = Outcome.FAILED
        seconds = time.perf_counter() - started
        progress.seconds += seconds
        with self._wake:
            self._busy_seconds += seconds
            progress.pace.used = 0
            progress.thread_id = None
            if outcome is None:
                self._wait(transfer, first=True)
        if outcome is not None:
            self._end_copy(transfer, progress, outcome)

    def _steps(self, copier: Copier, transfer: Transfer, progress: CopyProgress) -> Steps:
        checksums = transfer.checksums
        if checksums is not None and transfer.direction is Direction.LOAD:
            if (outcome := (yield from progress.take_checksums(checksums))) is not Outcome.DONE:
                return outcome
        elif checksums is not None and self._checksum_threads is not None:
            progress.checksums = self._begin_checksums(transfer, checksums, progress, self._checksum_threads)
        return (yield from copier.copy(transfer, progress))

    def _end_copy(self, transfer: Transfer, progress: CopyProgress, outcome: Outcome) -> None:
        if progress.steps is not None:
            progress.steps.close()
        checksums = progress.checksums
        progress.steps = progress.checksums = None  # they refer to each other
        with self._wake:
            self._awaiting_checksums[transfer.owner] += 1
            behind = self._awaiting_checksums[transfer.owner] > MAX_AWAITING_CHECKSUMS
        if checksums is None:
            self._end(transfer, outcome, progress.seconds)
        else:
            checksums.copy_ended(outcome, behind=behind)

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
            pool.submit(transfer.owner, store.follow_copy)
        return store

    def _end(self, transfer: Transfer, outcome: Outcome, seconds: float) -> None:
        with self._wake:
            self._bytes += self._begun.pop(transfer).copied_bytes
            self._overdue.pop(transfer, None)
            self._awaiting_checksums[transfer.owner] -= 1
            if not self._awaiting_checksums[transfer.owner]:
                del self._awaiting_checksums[transfer.owner]
            self._wake.notify()
        _finish(transfer, outcome, seconds)

    def _next(self) -> tuple[Transfer, CopyProgress] | None:
        with self._wake:
            while (transfer := self._queue.take()) is None:
                if self._stopped and not self._queue:
                    return None
                self._wake.wait()
            progress = self._begun.get(transfer) or CopyProgress(self, transfer, Pace.of(self.slice))
            progress.thread_id = threading.get_native_id()
            self._begun[transfer] = progress
            self._tell(transfer, progress)
            return transfer, progress

    def _wait(self, transfer: Transfer, *, first: bool = False) -> None:
        """Queue a transfer; what other owners copy meanwhile is cut into slices."""
        self._queue.put(transfer.owner, transfer, first=first)
        for other, progress in self._begun.items():
            if other.owner != transfer.owner:
                progress.pace.look |= OTHERS_WAIT

    def _tell(self, transfer: Transfer, progress: CopyProgress) -> None:
        """Before a loop goes on: tell it what it would have been told meanwhile."""
        progress.pace.look = (OTHERS_WAIT if self._queue.has_other(transfer.owner) else 0) | (
            STOP if progress.must_end() else 0
        )

    def _stop_copy(self, transfer: Transfer) -> None:
        if transfer in self._begun:
            self._begun[transfer].pace.look |= STOP


def _wants_cpu(thread_id: int | None) -> bool:
    """Return whether a thread of this process runs, or would if there were a CPU for it; False where there is none."""
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
