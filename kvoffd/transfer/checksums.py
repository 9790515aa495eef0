"""Checksums of a transfer's slots: compared before a load copies them, taken while a store does.

Where a device copies, threads follow the copy and read the slots that are whole. The copy loop of host memory takes the
checksums itself (see ``host_engine``).

Measured on an EPYC, where a copy makes 18 GB/s: bytes that another thread copied are read at 30 GB/s, bytes that the
same thread copied just before at 70 to 85. So the copy's own thread reads the little that is left when it is done.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvoffd.system.threads import DaemonThreads
from kvoffd.system.turns import Turns
from kvoffd.transfer.plan import Outcome

# Read at a time, so that a deadline or an abandon is noticed within a millisecond.
_STEP_BYTES = 8 << 20

_log = logging.getLogger(__name__)

# A thread claims so much at a time, so that several threads share the slots of a store.
_CLAIM_BYTES = 4 << 20
# A task that has caught up with the copy looks again after this time, in which 4 MiB are copied: to be woken for each
# part would cost the copy's thread more than the checksums do. A copy that stands still is looked at ever less often.
_POLL_S = 0.0002
_LONGEST_POLL_S = 0.01


@dataclass(slots=True, eq=False)
class _Task:
    """A task of the checksum threads. While it has nothing to read it is due again at a time of ``time.monotonic``."""

    owner: Hashable
    step: Callable[[], int | None]
    pause_s: float = _POLL_S
    due: float = 0.0


@dataclass(eq=False)
class SlotChecksums:
    """The checksums of one transfer's slots: taken of a store's slots, compared for a load's.

    Attributes:
        digests: returns the checksums of slots of the pool, given as ``slots`` are; none is 0.
        slots: offset and length in bytes of each slot.
        expected: the checksum that each slot must have; None where they are to be found out.
        whole_after: ``Plan.whole_after`` of a store; where it is empty, no slot is whole before all are.
        pool_address: the pool's address, to which a store's offsets are relative, for a copier that takes checksums.
        sums: the checksum of each slot; 0 for slots that were not read since the transfer ended before, or the threads
            that take checksums were behind.
    """

    digests: Callable[[Sequence[tuple[int, int]]], list[int]]
    slots: Sequence[tuple[int, int]]
    expected: Sequence[int] | None = None
    whole_after: Sequence[int] = ()
    pool_address: int | None = None

    def __post_init__(self) -> None:
        self._begins = list(accumulate((length for _, length in self.slots), initial=0))
        self.sums = [0] * len(self.slots)

    def __len__(self) -> int:
        return len(self.slots)

    def whole_slots(self, copied_bytes: int) -> int:
        """Return how many slots, from the first on, are whole once ``copied_bytes`` of the plan are copied."""
        return bisect_right(self.whole_after, copied_bytes)

    def nbytes(self, first: int = 0, stop: int | None = None) -> int:
        """Return the bytes of the slots from ``first`` on, before ``stop``."""
        return self._begins[len(self) if stop is None else stop] - self._begins[first]

    def slot_addresses(self) -> list[tuple[int, int]]:
        """Return address and length in bytes of each slot; nothing where the address of the pool was not given."""
        if self.pool_address is None:
            return []
        return [(self.pool_address + offset, length) for offset, length in self.slots]

    def run(self, must_end: Callable[[], Outcome | None], first: int = 0, stop: int | None = None) -> Outcome | None:
        """Read the slots from ``first`` on, before ``stop``, unless ``must_end`` says that the transfer must end now.

        Returns how it must end, CORRUPT where a slot has another checksum than expected; None when it may go on.
        """
        for _ in self.read(first, stop):
            if (early := must_end()) is not None:
                return early
        return self.compare(first, stop)

    def read(self, first: int = 0, stop: int | None = None) -> Iterator[int]:
        """Read the slots from ``first`` on, before ``stop``, whose checksums are not known, in steps of up to 8 MiB or
        one slot; yield the bytes of each step when it is done.
        """
        begin, stop = first, len(self) if stop is None else stop
        while begin < stop:
            if self.sums[begin]:
                begin += 1
                continue
            end = min(stop, max(begin + 1, bisect_right(self._begins, self._begins[begin] + _STEP_BYTES) - 1))
            end = next((index for index in range(begin, end) if self.sums[index]), end)
            self.sums[begin:end] = self.digests(self.slots[begin:end])
            yield self.nbytes(begin, end)
            begin = end

    def compare(self, first: int = 0, stop: int | None = None) -> Outcome | None:
        """Return CORRUPT where a slot from ``first`` on, before ``stop``, has another checksum than expected."""
        wrong = self.expected is not None and self.sums[first:stop] != list(self.expected[first:stop])
        return Outcome.CORRUPT if wrong else None


class ChecksumThreadPool:
    """Threads that run tasks of several owners, who take turns, after ``on_start``."""

    def __init__(self, name: str, count: int, on_start: Callable[[], None]) -> None:
        self._on_start = on_start
        self._wake = threading.Condition()
        self._tasks: Turns[_Task] = Turns()
        self._pausing: list[_Task] = []  # those that had nothing to read
        self._stopped = False
        self._threads = DaemonThreads((f"{name}-{index}", self._run) for index in range(count))

    def submit(self, owner: Hashable, step: Callable[[], int | None]) -> None:
        """Have one thread after the other call ``step``, which must not raise and returns how many bytes it read, until
        it returns None. After 0 it is called again a little later.
        """
        with self._wake:
            self._tasks.put(owner, _Task(owner, step))
            self._wake.notify()

    def join(self, deadline: float) -> bool:
        """End the threads after all tasks; False when one still runs at ``deadline`` (of ``time.monotonic``)."""
        with self._wake:
            self._stopped = True
            self._wake.notify_all()
        return self._threads.join(deadline)

    def _run(self) -> None:
        self._on_start()
        while (task := self._next()) is not None:
            nbytes = task.step()
            if nbytes is None:
                continue
            with self._wake:
                if nbytes:
                    task.pause_s = _POLL_S
                    self._tasks.put(task.owner, task)
                else:
                    task.due = time.monotonic() + task.pause_s
                    task.pause_s = min(2 * task.pause_s, _LONGEST_POLL_S)
                    self._pausing.append(task)

    def _next(self) -> _Task | None:
        with self._wake:
            while True:
                now = time.monotonic()
                for task in [one for one in self._pausing if one.due <= now]:
                    self._pausing.remove(task)
                    self._tasks.put(task.owner, task)
                if (taken := self._tasks.take()) is not None:
                    return taken
                if self._stopped and not self._pausing:
                    return None
                self._wake.wait(min((one.due - now for one in self._pausing), default=None))


@dataclass(eq=False)
class StoreChecksums:
    """Takes the checksums of one store while it is copied, in ``threads`` tasks that call ``follow_copy`` repeatedly.

    The copy's own thread helps at the end. ``on_end`` is called once with how the store ended: after ``copy_ended`` and
    the None of every ``follow_copy``, in the thread of whichever comes last.

    Args:
        copied_bytes: returns how many bytes of the plan are copied, in its order.
        must_end: returns how the transfer must end now; None while it may go on.
        inline_bytes: if no more than this is left when the copy is done, the copy's thread reads it.
        add_cost: called with the CPU seconds and the bytes of what was read.
    """

    _checksums: SlotChecksums
    _copied_bytes: Callable[[], int]
    _must_end: Callable[[], Outcome | None]
    _threads: int
    _inline_bytes: int
    _add_cost: Callable[[float, int], None]
    _on_end: Callable[[Outcome], None]

    def __post_init__(self) -> None:
        self._claim_slots = max(1, _CLAIM_BYTES * len(self._checksums) // max(1, self._checksums.nbytes()))
        self._lock = threading.Lock()
        self._next = 0  # the first slot that no thread has claimed
        self._copied = False
        self._unfinished = 1 + self._threads  # the copy and the tasks that follow it
        self._outcome = Outcome.DONE

    def follow_copy(self) -> int | None:
        """Read some slots that are whole; return the bytes, 0 where there are none now, to be called again.

        Returns None once the copy has ended and all are claimed, or the transfer must end.
        """
        if (early := self._must_end()) is None and (claimed := self._claim()) is not None:
            if not claimed:
                return 0
            if (early := self._take(claimed)) is Outcome.DONE:
                return max(1, self._checksums.nbytes(claimed.start, claimed.stop))
        self._finish(early or Outcome.DONE)
        return None

    def copy_ended(self, outcome: Outcome, *, behind: bool) -> None:
        """Take note of how the copy ended. Called in its thread.

        ``behind`` leaves out what nobody has begun to read, unless it is to be compared: those sums stay 0.
        """
        with self._lock:
            self._copied = True
            if outcome is not Outcome.DONE:
                self._outcome = outcome
            if outcome is not Outcome.DONE or (behind and self._checksums.expected is None):
                self._next = len(self._checksums)
            left = self._checksums.nbytes(self._next)
            alone = self._unfinished == 1
        if alone or left <= self._inline_bytes:
            while outcome is Outcome.DONE and (claimed := self._claim()):
                outcome = self._take(claimed)
        self._finish(outcome)

    def _claim(self) -> range | None:
        """Claim some slots that are whole; an empty range when there are none now, None when there will be none."""
        with self._lock:
            slots = len(self._checksums)
            if self._copied and self._next == slots:
                return None
            whole = slots if self._copied else self._checksums.whole_slots(self._copied_bytes())
            first = self._next
            self._next = max(first, min(whole, first + self._claim_slots))
            return range(first, self._next)

    def _take(self, claimed: range) -> Outcome:
        began = time.thread_time()
        try:
            outcome = self._checksums.run(self._must_end, claimed.start, claimed.stop) or Outcome.DONE
        except Exception:
            _log.exception("A checksum could not be taken; its job fails, the thread goes on.")
            outcome = Outcome.FAILED
        self._add_cost(time.thread_time() - began, self._checksums.nbytes(claimed.start, claimed.stop))
        return outcome

    def _finish(self, outcome: Outcome) -> None:
        """One thread is done. The first that did not go well decides how the store ends."""
        with self._lock:
            if self._outcome is Outcome.DONE:
                self._outcome = outcome
            self._unfinished -= 1
            last = not self._unfinished
        if last:
            self._on_end(self._outcome)
