"""One connected client process and everything the daemon holds for it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvoffd_proto import codec, events
from kvoffd_proto.messages import Completions, JobResult, Role

if TYPE_CHECKING:
    from kvoffd.server.block_access import Staging
    from kvoffd.server.jobs import Job
    from kvoffd.server.registration import Registration


@dataclass(frozen=True)
class Peer:
    """Who is at the other end, as the kernel says (SO_PEERCRED). pid is 0 from another pid namespace."""

    pid: int
    uid: int
    gid: int
    key: str = ""
    """Of an administrator over TCP, whom the kernel does not know: the public key."""

    def __str__(self) -> str:
        return f"key {self.key}" if self.key else f"uid {self.uid}"


class Lifeline(Protocol):
    """The session's stream, as much of it as the service needs."""

    def alive(self) -> bool:
        """Whether the peer still holds its end, asked of the kernel now, not of an event that may be queued."""
        ...

    def close(self) -> None:
        """Close the stream. The peer takes this for the end of the session."""
        ...


class StandingLifeline:
    """Of a session that lasts as long as the daemon."""

    def alive(self) -> bool:
        return True

    def close(self) -> None:
        pass


class CompletionLog:
    """A session's completions: numbered, and kept until the client acknowledges them."""

    def __init__(self, epoch: int, session_id: int) -> None:
        self._epoch = epoch
        self._session_id = session_id
        self._topic = events.session_topic(epoch, session_id)
        self._pending: list[JobResult] = []
        self._kept: deque[Completions] = deque()
        self._kept_results = 0
        self.kept_bytes = 0
        """Of the keys in results that are not acknowledged: what a client that never reads could make large."""
        self.sequence = 0

    def add(self, result: JobResult) -> None:
        """Put ``result`` into the batch that the next flush publishes."""
        self._pending.append(result)
        self.kept_bytes += _key_bytes(result)

    def flush(self, credit_bytes: int) -> tuple[bytes, bytes, bytes] | None:
        """Close the current batch; return it as the frames to publish, or None when it is empty."""
        if not self._pending:
            return None
        self.sequence += 1
        batch = Completions(self._epoch, self._session_id, self.sequence, credit_bytes, self._pending)
        self._pending = []
        self._kept.append(batch)
        self._kept_results += len(batch.results)
        return self._topic, self.sequence.to_bytes(events.SEQUENCE_BYTES, "big"), codec.encode(batch)

    def acknowledge(self, sequence: int) -> None:
        """Forget all batches up to ``sequence``."""
        while self._kept and self._kept[0].sequence <= sequence:
            results = self._kept.popleft().results
            self._kept_results -= len(results)
            self.kept_bytes -= sum(map(_key_bytes, results))

    def replay(self) -> list[Completions]:
        """All batches that are not acknowledged, oldest first."""
        return list(self._kept)

    def __len__(self) -> int:
        """Results that are not acknowledged."""
        return self._kept_results + len(self._pending)


def _key_bytes(result: JobResult) -> int:
    return sum(len(part.keys) for part in result.failed)


@dataclass(eq=False)
class Session:
    """State of one client. Ends with its lifeline; ``ended`` stays true while its last copies run out."""

    id: int
    token: bytes
    peer: Peer
    lifeline: Lifeline
    opened_at: float
    completions: CompletionLog
    role: Role | None = None
    name: str = ""
    software: str = ""
    last_request_at: float = 0.0
    internal: bool = False
    """The daemon's own probe: not shown and not counted."""
    ended: bool = False
    namespaces: set[bytes] = field(default_factory=set)
    segments: dict[int, int] = field(default_factory=dict)
    """Attached descriptors that no registration has taken over yet: segment id -> fd."""
    registrations: dict[bytes, Registration] = field(default_factory=dict)
    staging: dict[int, Staging] = field(default_factory=dict)
    """Mapped segments that an operator puts blocks from: by segment id."""
    registering: set[bytes] = field(default_factory=set)
    """Ids of registrations whose memory is being mapped."""
    jobs: dict[int, Job] = field(default_factory=dict)
    hanging: set[Job] = field(default_factory=set)
    """Jobs that have their completion but whose copy may still touch the client's memory."""
    store_bytes: int = 0
    """Bytes of unfinished stores, held against the session's credit."""
    _on_drained: Callable[[], None] | None = None

    def end(self, on_drained: Callable[[], None]) -> None:
        """Mark the session as ended; call ``on_drained`` once its last copy has ended, at once when there is none."""
        self.ended = True
        self._on_drained = on_drained
        self._drain()

    def job_ended(self, job_id: int) -> None:
        """Forget a job that got its completion."""
        del self.jobs[job_id]
        self._drain()

    def job_hangs(self, job: Job) -> None:
        """A job got its completion, but its copy has not come back."""
        self.hanging.add(job)
        del self.jobs[job.id]

    def copy_came_back(self, job: Job) -> None:
        """The copy of a job that hung touches nothing any more."""
        self.hanging.discard(job)
        self._drain()

    def _drain(self) -> None:
        if self._on_drained is not None and not self.jobs and not self.hanging:
            on_drained, self._on_drained = self._on_drained, None
            on_drained()

    def close_segment(self, segment_id: int) -> None:
        """Close one that is mapped by now."""
        os.close(self.segments.pop(segment_id))

    def close_segments(self) -> None:
        """Close descriptors that were attached and never registered."""
        for fd in self.segments.values():
            os.close(fd)
        self.segments.clear()
