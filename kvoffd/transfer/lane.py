"""One direction of an engine: a queue, the threads that work it off, and what happens to what is late."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple, Protocol

from kvoffd.transfer.engine import Direction, DirectionLoad, Outcome, Transfer
from kvoffd.transfer.slot_checksums import SlotChecksums
from kvoffd.transfer.sums import StoreSums, SumThreads

_log = logging.getLogger(__name__)

# A copy thread looks at the deadline once a step; one that has not noticed it after this long hangs.
OVERDUE_GRACE_S = 1.0
# Transfers that were copied and wait for their checksums. With more of them copy threads wait too.
MOST_BEHIND = 4


class CopyProgress:
    """What a copier asks and tells between the steps of one transfer.

    Attributes:
        in_place: bytes of the plan that are copied, in its order.
        sums: the checksums that follow the copy.
        thread_id: the kernel's, of the thread that copies.
    """

    __slots__ = ("_account", "_clock", "_transfer", "in_place", "sums", "thread_id")

    def __init__(self, clock: Callable[[], float], transfer: Transfer, account: Callable[[float, int], None]) -> None:
        self._clock = clock
        self._transfer = transfer
        self._account = account
        self.thread_id = threading.get_native_id()
        self.in_place = 0
        self.sums: StoreSums | None = None

    def ending(self) -> Outcome | None:
        """How the transfer must end now, before its next step; None when it may go on."""
        if self._transfer.abandoned:
            return Outcome.FAILED
        return Outcome.DEADLINE if self._clock() >= self._transfer.deadline else None

    def copied(self, nbytes: int) -> None:
        """So many bytes more of the plan are in place, in its order."""
        self.in_place += nbytes  # only ever by one thread

    def inspect(self, inspection: SlotChecksums, sums: Sequence[int] = ()) -> Outcome:
        """Take or compare checksums, all or those that a copier did not find (see ``SlotChecksums``); count them."""
        began = time.thread_time()
        outcome = inspection.enter(sums, self.ending)
        self._account(time.thread_time() - began, inspection.nbytes())
        return outcome or Outcome.DONE


class Copier(Protocol):
    """What one thread of a lane copies with. All of it is called in that thread."""

    def open(self) -> None:
        """Before the first transfer. An exception ends the thread and is raised by ``Lane.wait_open``."""
        ...

    def copy(self, transfer: Transfer, turn: CopyProgress) -> Outcome:
        """Executes the transfer; an exception fails it. On return nothing touches the transfer's memory any more."""
        ...

    def close(self) -> None:
        """After the last transfer."""
        ...


class ChecksumThreads(NamedTuple):
    """How a lane takes the checksums of stores, which stay unfinished until theirs are there.

    Attributes:
        threads: for the whole lane.
        followers: of these, for one store; a small one has none.
        inline_bytes: a store that large is small. Where no more is left when a copy is done, its thread reads it.
        enter: called by each thread first.
    """

    threads: int
    followers: int
    inline_bytes: int
    enter: Callable[[], None] = lambda: None


class Lane:
    """A queue and one thread for each copier. Everything mutable is guarded by ``_wake``.

    Args:
        name: of the threads.
        clock: what deadlines are measured on, in seconds.
        following: None for a lane that no stores come to, or whose copiers see to their checksums.
    """

    def __init__(
        self,
        name: str,
        clock: Callable[[], float],
        copiers: Sequence[Copier],
        following: ChecksumThreads | None = None,
    ) -> None:
        self.clock = clock
        self._following = following
        self._sums = SumThreads(f"{name}-sums", following.threads, following.enter) if following else None
        self._wake = threading.Condition()
        self._queue: dict[Transfer, None] = {}  # a queue that lets go of its middle
        self._running: dict[Transfer, CopyProgress] = {}
        self._overdue: dict[Transfer, float] = {}
        """Those whose thread does not look at the clock, and since when it has not even wanted a CPU."""
        self._behind = 0
        """Transfers that run though their copy is done."""
        self._stopped = False
        self._busy_seconds = 0.0
        self._bytes = 0
        self._sum_seconds = 0.0
        self._sum_bytes = 0
        self._opened: list[Future[None]] = [Future() for _ in copiers]
        self._threads = [
            threading.Thread(target=self._run, args=(copier, opened), name=f"{name}-{index}", daemon=True)
            for index, (copier, opened) in enumerate(zip(copiers, self._opened, strict=True))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def hangs(self) -> bool:
        """A transfer is overdue and its thread has not come back to say so."""
        return bool(self._overdue)

    @property
    def hangs_s(self) -> float:
        """For how long that has been known of a thread that waits for something other than a CPU; 0 when of none.

        A thread that a busy machine gives no CPU (tens of seconds were seen) comes back when it gets one.
        """
        with self._wake:
            return max((self.clock() - since for since in self._overdue.values()), default=0.0)

    def wait_open(self) -> None:
        """Waits until every copier is open; raises what one of them raised."""
        for opened in self._opened:
            opened.result()

    def submit(self, transfer: Transfer) -> None:
        """See TransferEngine."""
        with self._wake:
            accepted = not self._stopped
            if accepted:
                assert transfer not in self._queue, "A transfer is submitted once."
                assert transfer not in self._running, "A transfer is submitted once."
                self._queue[transfer] = None
                self._wake.notify()
        if not accepted:
            _finish(transfer, Outcome.CANCELLED, 0.0)

    def cancel(self, transfer: Transfer) -> bool:
        """See TransferEngine."""
        with self._wake:
            if transfer not in self._queue:
                return False
            del self._queue[transfer]
        _finish(transfer, Outcome.CANCELLED, 0.0)
        return True

    def expire(self) -> None:
        """See TransferEngine."""
        now = self.clock()
        with self._wake:
            waiting = [transfer for transfer in self._queue if now >= transfer.deadline]
            for transfer in waiting:
                del self._queue[transfer]
            late = [
                transfer
                for transfer in self._running
                if transfer not in self._overdue and now >= transfer.deadline + OVERDUE_GRACE_S
            ]
            starved = [transfer for transfer in self._overdue if _wants_cpu(self._running[transfer].thread_id)]
            self._overdue.update(dict.fromkeys(late + starved, now))
        for transfer in waiting:
            _finish(transfer, Outcome.DEADLINE, 0.0)
        for transfer in late:
            if transfer.on_overdue is not None:
                transfer.on_overdue(transfer)

    def load(self) -> DirectionLoad:
        """Counters."""
        with self._wake:
            return DirectionLoad(
                len(self._queue),
                len(self._running),
                self._busy_seconds,
                self._bytes + sum(turn.in_place for turn in self._running.values()),
                self._sum_seconds,
                self._sum_bytes,
            )

    def account(self, seconds: float, nbytes: int) -> None:
        """Adds to what checksums cost."""
        with self._wake:
            self._sum_seconds += seconds
            self._sum_bytes += nbytes

    def stop(self) -> None:
        """Cancels what waits, abandons what runs, has the threads end."""
        with self._wake:
            self._stopped = True
            waiting = list(self._queue)
            self._queue.clear()
            for transfer in self._running:
                transfer.abandoned = True
            self._wake.notify_all()
        for transfer in waiting:
            _finish(transfer, Outcome.CANCELLED, 0.0)

    def join(self, deadline: float) -> bool:
        """Waits for the threads until ``deadline`` (of ``time.monotonic``); False when one still runs."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False
        # Only copy threads hand checksums over.
        return self._sums is None or self._sums.join(deadline)

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

    def _serve(self, copier: Copier, transfer: Transfer, turn: CopyProgress) -> None:
        started = time.perf_counter()
        try:
            outcome = self._execute(copier, transfer, turn)
        except Exception:
            _log.exception("A copy of %d bytes failed; its job fails, the copy thread goes on.", transfer.plan.nbytes)
            outcome = Outcome.FAILED
        seconds = time.perf_counter() - started
        with self._wake:
            self._busy_seconds += seconds
            self._behind += 1
        sums, turn.sums = turn.sums, None  # they know each other
        if sums is None:
            self._end(transfer, outcome, seconds)
        else:
            sums.end(outcome)

    def _execute(self, copier: Copier, transfer: Transfer, turn: CopyProgress) -> Outcome:
        if (early := turn.ending()) is not None:
            return early
        inspection = transfer.inspection
        if inspection is not None and transfer.direction is Direction.LOAD:
            if (outcome := turn.inspect(inspection)) is not Outcome.DONE:
                return outcome
        elif inspection is not None and self._following is not None:
            turn.sums = self._follow(transfer, inspection, turn, self._following)
        return copier.copy(transfer, turn)

    def _follow(
        self, transfer: Transfer, inspection: SlotChecksums, turn: CopyProgress, following: ChecksumThreads
    ) -> StoreSums:
        threads = self._sums
        assert threads is not None
        began = time.perf_counter()
        followers = following.followers if inspection.nbytes() > following.inline_bytes else 0
        sums = StoreSums(
            inspection,
            turn,
            followers,
            following.inline_bytes,
            self.account,
            lambda outcome: self._end(transfer, outcome, time.perf_counter() - began),
        )
        for _ in range(followers):
            threads.submit(sums.follow)
        return sums

    def _end(self, transfer: Transfer, outcome: Outcome, seconds: float) -> None:
        with self._wake:
            self._bytes += self._running.pop(transfer).in_place
            self._overdue.pop(transfer, None)
            self._behind -= 1
            self._wake.notify()
        _finish(transfer, outcome, seconds)

    def _next(self) -> tuple[Transfer, CopyProgress] | None:
        with self._wake:
            while not self._queue or self._behind >= MOST_BEHIND:
                if self._stopped:
                    return None
                self._wake.wait()
            transfer = next(iter(self._queue))
            del self._queue[transfer]
            turn = self._running[transfer] = CopyProgress(self.clock, transfer, self.account)
            return transfer, turn


def _wants_cpu(thread_id: int) -> bool:
    """Whether a thread of this process runs or would if there was a CPU for it."""
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
