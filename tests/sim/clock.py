"""Virtual time: a queue of future events in their order, and the trace of past ones."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable
from heapq import heappop, heappush

Event = Callable[[], None]

TRACE_LINES = 2000
"""Lines of the trace for a report; the hash covers all."""


class Broken(AssertionError):
    """A promise of RELIABILITY.md does not hold, or the simulation got stuck. The text says which and how."""


class Injected(Exception):
    """A failure that a test put in: what the daemon does then must leave everything in order."""


class Clock:
    """Seconds that pass only from one event to the next. Events of the same time happen in the order of their entry."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.steps = 0
        self._queue: list[tuple[float, int, Event]] = []
        self._entries = 0
        self._hash = hashlib.sha256()
        self.trace: deque[str] = deque(maxlen=TRACE_LINES)

    def __call__(self) -> float:
        return self.now

    def at(self, when: float, event: Event) -> None:
        """Have ``event`` happen at ``when``, or now if that has passed."""
        self._entries += 1
        heappush(self._queue, (max(when, self.now), self._entries, event))

    def after(self, delay_s: float, event: Event) -> None:
        self.at(self.now + delay_s, event)

    def step(self) -> bool:
        """Let the next event happen; False when there is none."""
        if not self._queue:
            return False
        self.now, _, event = heappop(self._queue)
        self.steps += 1
        event()
        return True

    def next_at(self) -> float:
        return self._queue[0][0] if self._queue else float("inf")

    def note(self, line: str) -> None:
        """Enter a line into the trace. It must depend on nothing but the seed."""
        stamped = f"{self.now:.6f} {line}"
        self._hash.update(stamped.encode())
        self.trace.append(stamped)

    def digest(self) -> str:
        return self._hash.hexdigest()


class Stops:
    """A device or server that stops half-way: from the next read on nothing ends for a while, which ``due_s`` sets."""

    def __init__(self, clock: Clock, counts: Counter[str]) -> None:
        self._clock, self._counts = clock, counts
        self.due_s = self._until = 0.0

    def read_begins(self) -> None:
        if self.due_s:
            self._until, self.due_s = self._clock.now + self.due_s, 0.0
            self._counts["stopped_half_way"] += 1
            self._clock.note("a tier stops")

    @property
    def left_s(self) -> float:
        """Seconds until it goes on; 0.0 while it has not stopped."""
        return max(0.0, self._until - self._clock.now)


class Process:
    """Something that runs, may be stopped for a while (SIGSTOP), and dies."""

    def __init__(self, clock: Clock, name: str) -> None:
        self.name = name
        self.alive = True
        self.paused_until = 0.0
        self._clock = clock
        self._backlog: deque[Event] = deque()

    @property
    def now(self) -> float:
        return self._clock.now

    def run(self, event: Event) -> None:
        """Let ``event`` happen in this process: now, when it goes on (in this order), or never if it has died."""
        if not self.alive:
            return
        if self._backlog:
            self._backlog.append(event)
        elif self._clock.now < self.paused_until:
            self._backlog.append(event)
            self._clock.at(self.paused_until, self._go_on)
        else:
            event()

    def _go_on(self) -> None:
        if self._clock.now < self.paused_until:
            self._clock.at(self.paused_until, self._go_on)
            return
        while self._backlog and self.alive:
            self._backlog[0]()
            self._backlog.popleft()

    def after(self, delay_s: float, event: Event) -> None:
        self._clock.after(delay_s, lambda: self.run(event))

    def pause(self, seconds: float) -> None:
        self.paused_until = max(self.paused_until, self._clock.now + seconds)
