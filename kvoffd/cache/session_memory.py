"""How much of the daemon's own memory sessions may make it hold, and how they share that."""

from __future__ import annotations

from collections import Counter

from kvoffd.errors import KvoffdError
from kvoffd_proto.errors import ErrorCode

COPY_BYTES, JOB_BYTES, PIECE_BYTES = 4096, 256, 40
"""What an unfinished copy takes: itself, with each job that it does, and with each of the pieces that these count as.
Measured: 3.8 KiB, 185 bytes; 26 to 37 bytes a piece, and 160 a key, which counts as eight pieces or more."""
RESULT_BYTES = 256
"""What a result takes until it is acknowledged, beside the keys that it names. Measured: 178 bytes."""


def copy_bytes(jobs: int, pieces: int) -> int:
    """What an unfinished copy of so many jobs and pieces takes."""
    return COPY_BYTES + jobs * JOB_BYTES + pieces * PIECE_BYTES


class SessionMemory:
    """The memory that is kept for sessions: leases, unfinished jobs, completions, registrations.

    Half of it is kept in equal parts for as many sessions as there may be, so that each always has its part. The other
    half is for those that need more: a session may have of it as much as it leaves free.

    Args:
        limit_bytes: all of it.
        max_sessions: how many may have some.
    """

    def __init__(self, limit_bytes: int, max_sessions: int) -> None:
        self._own_bytes = limit_bytes // 2 // max_sessions
        self._free_bytes = limit_bytes - limit_bytes // 2
        """Of the common half."""
        self._held: Counter[int] = Counter()

    @property
    def held_bytes(self) -> int:
        return self._held.total()

    def room(self, owner: int) -> int:
        """Bytes that the session may hold beside what it has."""
        held = self._held[owner]
        common = max(0, held - self._own_bytes)
        return max(0, self._own_bytes - held) + max(0, (self._free_bytes - common) // 2)

    def check(self, owner: int, nbytes: int) -> None:
        """Raise KvoffdError unless the session may hold so many more bytes."""
        if nbytes > (room := self.room(owner)):
            raise KvoffdError(
                f"The session holds {self._held[owner]} bytes of the daemon's memory and wants {nbytes} more, of which "
                f"it may have {room}; wait until what it has under way ends, or raise sessions_size.",
                ErrorCode.TOO_MANY,
            )

    def claim(self, owner: int, nbytes: int) -> None:
        """The session wants to hold so many more bytes, and does unless this raises KvoffdError."""
        self.check(owner, nbytes)
        self.take(owner, nbytes)

    def take(self, owner: int, nbytes: int) -> None:
        """The session holds more, or less where ``nbytes`` is negative."""
        before = self._held[owner]
        after = self._held[owner] = before + nbytes
        assert after >= 0
        self._free_bytes -= max(0, after - self._own_bytes) - max(0, before - self._own_bytes)
        if not after:
            del self._held[owner]
