"""The future answer to one lookup."""

from __future__ import annotations

from collections.abc import Callable

from kvoffd_proto.messages import PENDING, READY

_READY_BYTE = bytes([READY])
_PENDING_BYTE = bytes([PENDING])

Waiter = Callable[[Callable[[], bool], float], bool]
"""Waits until its first argument says True, for at most its second, in seconds; returns what the first says."""


class LookupTicket:
    """The answer to one lookup, now or later. Reading it never blocks; wait() does.

    Attributes:
        lease_id: name of the lease for Load and release; 0 when the lookup never left this process.
        done: the answer is here, or will never come.
        failed: done without an answer (not connected, refused, too late): treat every key as absent.
        states: per group of the request one byte a key: 0 absent, 1 writing, 2 ready, 3 pending; empty until done or
            when failed. What is pending comes up from a tier below the pool: ask again.
        wait_s: the daemon's guess of how long until all pending keys are ready, in seconds; 0.0 where it has none.
        pinned: blocks pinned under the lease; 0 means that there is no lease.
        answered_at: time.monotonic() of the answer, 0.0 before.
        alive: the answer's pins still hold as far as is known: not released, not ended, same connection.
    """

    __slots__ = ("alive", "answered_at", "done", "failed", "lease_id", "pinned", "states", "wait_s", "waiter")

    def __init__(self, lease_id: int) -> None:
        self.lease_id = lease_id
        self.done = False
        self.failed = False
        self.states: list[bytes] = []
        self.pinned = 0
        self.wait_s = 0.0
        self.answered_at = 0.0
        self.alive = False
        self.waiter: Waiter | None = None

    @property
    def pending(self) -> bool:
        """Whether some key is on its way up from a tier below the pool."""
        return any(_PENDING_BYTE in states for states in self.states)

    def leading_ready(self, index: int = 0) -> int:
        """Length of the unbroken run of ready keys at the start of the ``index``-th group of the request."""
        if index >= len(self.states):
            return 0
        states = self.states[index]
        return len(states) - len(states.lstrip(_READY_BYTE))

    def wait(self, timeout_s: float) -> bool:
        """Wait until done. Returns False when it is not after ``timeout_s`` seconds."""
        return self.done or (self.waiter is not None and self.waiter(lambda: self.done, timeout_s))

    def answer(self, states: list[bytes], pinned: int, now: float, wait_s: float = 0.0) -> None:
        """Settle with the daemon's answer. For the session only."""
        if self.done:
            return
        self.wait_s = wait_s
        self.states, self.pinned, self.answered_at, self.alive = states, pinned, now, pinned > 0
        self.done = True  # last, since readers hold no lock

    def fail(self) -> None:
        """Settle without one. For the session only."""
        if not self.done:
            self.failed = True
            self.done = True
