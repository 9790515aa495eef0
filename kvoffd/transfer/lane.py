"""One direction of an engine: a queue, the threads that work it off, and what happens to what is late."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from kvoffd.transfer.engine import DirectionLoad, Outcome, Transfer

_log = logging.getLogger(__name__)

# A copy thread looks at the deadline once a step; one that has not noticed it after this long hangs.
OVERDUE_GRACE_S = 1.0


class Turn:
    """What a copier asks and tells between the steps of one transfer."""

    __slots__ = ("_lane", "_transfer")

    def __init__(self, lane: Lane, transfer: Transfer) -> None:
        self._lane = lane
        self._transfer = transfer

    def ending(self) -> Outcome | None:
        """How the transfer must end now, before its next step; None when it may go on."""
        if self._transfer.abandoned:
            return Outcome.FAILED
        return Outcome.DEADLINE if self._lane.clock() >= self._transfer.deadline else None

    def copied(self, nbytes: int) -> None:
        """Counts bytes."""
        self._lane.count(nbytes)


class Copier(Protocol):
    """What one thread of a lane copies with. All of it is called in that thread."""

    def open(self) -> None:
        """Before the first transfer. An exception ends the thread and is raised by ``Lane.wait_open``."""
        ...

    def copy(self, transfer: Transfer, turn: Turn) -> Outcome:
        """Executes the transfer; an exception fails it. On return nothing touches the transfer's memory any more."""
        ...

    def close(self) -> None:
        """After the last transfer."""
        ...


class Lane:
    """A queue and one thread for each copier. Everything mutable is guarded by ``_wake``.

    Args:
        name: of the threads.
        clock: what deadlines are measured on, in seconds.
    """

    def __init__(self, name: str, clock: Callable[[], float], copiers: Sequence[Copier]) -> None:
        self.clock = clock
        self._wake = threading.Condition()
        self._queue: dict[Transfer, None] = {}  # a queue that lets go of its middle
        self._running: set[Transfer] = set()
        self._overdue: set[Transfer] = set()
        self._stopped = False
        self._busy_seconds = 0.0
        self._bytes = 0
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
                transfer for transfer in self._running - self._overdue if now >= transfer.deadline + OVERDUE_GRACE_S
            ]
            self._overdue.update(late)
        for transfer in waiting:
            _finish(transfer, Outcome.DEADLINE, 0.0)
        for transfer in late:
            if transfer.on_overdue is not None:
                transfer.on_overdue(transfer)

    def load(self) -> DirectionLoad:
        """Counters."""
        with self._wake:
            return DirectionLoad(len(self._queue), len(self._running), self._busy_seconds, self._bytes)

    def count(self, nbytes: int) -> None:
        """Adds to the bytes copied."""
        with self._wake:
            self._bytes += nbytes

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
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, copier: Copier, opened: Future[None]) -> None:
        try:
            copier.open()
        except BaseException as error:
            opened.set_exception(error)
            return
        opened.set_result(None)
        try:
            while (transfer := self._next()) is not None:
                self._serve(copier, transfer)
        finally:
            copier.close()

    def _serve(self, copier: Copier, transfer: Transfer) -> None:
        turn = Turn(self, transfer)
        started = time.perf_counter()
        try:
            outcome = transfer.execute(turn.ending, lambda: copier.copy(transfer, turn))
        except Exception:
            _log.exception("A copy of %d bytes failed; its job fails, the copy thread goes on.", transfer.plan.nbytes)
            outcome = Outcome.FAILED
        seconds = time.perf_counter() - started
        with self._wake:
            self._running.remove(transfer)
            self._overdue.discard(transfer)
            self._busy_seconds += seconds
        _finish(transfer, outcome, seconds)

    def _next(self) -> Transfer | None:
        with self._wake:
            while not self._queue:
                if self._stopped:
                    return None
                self._wake.wait()
            transfer = next(iter(self._queue))
            del self._queue[transfer]
            self._running.add(transfer)
            return transfer


def _finish(transfer: Transfer, outcome: Outcome, seconds: float) -> None:
    try:
        transfer.on_done(transfer, outcome, seconds)
    except Exception:
        _log.exception("on_done of a transfer raised; the engine goes on, but the transfer's owner has a bug.")
