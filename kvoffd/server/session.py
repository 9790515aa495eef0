"""One connected client process and everything the daemon holds for it: descriptors, memory, jobs, completions."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from kvoffd.cache.namespace import Namespace
from kvoffd.cache.pins import StoreTicket
from kvoffd.cache.session_memory import RESULT_BYTES, SessionMemory
from kvoffd.errors import KvoffdError, UnknownNamespace, UnsafeSegment
from kvoffd.server.engine_memory import EngineMemory
from kvoffd.transfer.checksums import SlotChecksums
from kvoffd.transfer.engine import Transfer
from kvoffd.transfer.plan import Direction, GroupLayout, Outcome
from kvoffd_proto import codec, events
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.lifeline import routing_id
from kvoffd_proto.messages import Completions, JobResult, Role

WHOLE_EVERY_S = 0.05
"""How often it is looked whether a client's memory is still all allocated: a microsecond a segment."""


@dataclass(frozen=True)
class Peer:
    """Who is at the other end, as the kernel says (SO_PEERCRED). pid is 0 from another pid namespace."""

    pid: int
    uid: int
    gid: int
    process: int = 0
    """A number of the process that no other has, also where pid is 0; 0 where the kernel tells none."""

    def __str__(self) -> str:
        return f"uid {self.uid}"


class Ending(StrEnum):
    CLOSED = "closed"
    """Its client said that it leaves."""
    GONE = "gone"
    """Its lifeline ended without a word: the process ended."""
    NO_HELLO = "no_hello"
    MALFORMED = "malformed"
    """What came over the lifeline was no message of it."""
    FAILED = "failed"
    """The daemon failed with it, or the client did not read its lifeline."""
    STOPPING = "stopping"
    """The daemon ends."""


class Lifeline:
    """The session's stream, as much of it as the service needs. As it is here it lasts as long as the daemon."""

    def alive(self) -> bool:
        """Whether the peer still holds its end, asked of the kernel now, not of an event that may be queued."""
        return True

    def close(self) -> None:
        """Close the stream. The peer takes this for the end of the session."""

    def close_descriptor(self, fd: int) -> None:
        """Close what the peer sent: where it is gone, that frees its memory, which takes a while."""
        os.close(fd)


class CompletionLog:
    """A session's completions: numbered, and kept until the client acknowledges them."""

    def __init__(self, epoch: int, session_id: int, memory: SessionMemory | None = None) -> None:
        self._epoch = epoch
        self._session_id = session_id
        self._memory = memory
        self._held_bytes = 0
        self.keys_bytes = 0
        """Of the keys that results name."""
        self._topic = events.session_topic(epoch, session_id)
        self._pending: list[JobResult] = []
        self._kept: deque[Completions] = deque()
        self._kept_results = 0
        self.sequence = 0

    def add(self, results: Sequence[JobResult]) -> None:
        """Put ``results`` into the batch that the next flush publishes."""
        self._pending += results
        self._hold(len(results), _keys_bytes(results))

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
        while self._kept and self._kept[0].sequence <= sequence:
            results = self._kept.popleft().results
            self._kept_results -= len(results)
            self._hold(-len(results), -_keys_bytes(results))

    def _hold(self, results: int, keys_bytes: int) -> None:
        """Charge the session for its results. Each takes less than its job did, so that this is never refused."""
        self.keys_bytes += keys_bytes
        if self._memory is not None:
            more_bytes = results * RESULT_BYTES + keys_bytes
            self._held_bytes += more_bytes
            self._memory.take(self._session_id, more_bytes)

    def end(self) -> None:
        """The session is over, and what it still gets is not kept for long."""
        if self._memory is not None:
            self._memory.take(self._session_id, -self._held_bytes)
            self._memory = None

    def replay(self) -> list[Completions]:
        """All batches that are not acknowledged, oldest first."""
        return list(self._kept)

    def __len__(self) -> int:
        """Results that are not acknowledged."""
        return self._kept_results + len(self._pending)


def _keys_bytes(results: Sequence[JobResult]) -> int:
    return sum([len(part.keys) for result in results if result.failed for part in result.failed])


@dataclass(eq=False)
class ClientMemory:
    """Mapped memory of a client that jobs copy from or to. Unmapped only when no job touches it any more."""

    memory: EngineMemory
    jobs: int = field(default=0, init=False)
    """Jobs that hold addresses inside the memory."""
    _on_closed: Callable[[], None] | None = field(default=None, init=False)
    _whole_at: float = field(default=float("-inf"), init=False)

    def check_whole(self, now: float) -> None:
        """Raise UnsafeSegment where the client has made holes in its memory, as far as was seen: the pages that a copy
        would allocate there are charged to the daemon.
        """
        if now - self._whole_at >= WHOLE_EVERY_S:
            if not all(segment.whole() for segment in self.memory.segments):
                raise UnsafeSegment(
                    "Pages of the registered memory were given back to the kernel since; register memory that stays."
                )
            self._whole_at = now

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the client's memory that the daemon can reach."""
        return sum(size for _, size in self.memory.spans)

    def close_when_idle(self, on_closed: Callable[[], None]) -> None:
        """Unmap once the last job has ended, then have ``on_closed`` called. Once."""
        assert self._on_closed is None, "a client's memory is closed once"
        self._on_closed = on_closed
        self._close_if_idle()

    def job_started(self) -> None:
        assert self._on_closed is None, "memory that is being closed takes no jobs"
        self.jobs += 1

    def job_ended(self) -> None:
        """A job will not touch the memory any more."""
        assert self.jobs > 0
        self.jobs -= 1
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._on_closed is not None and not self.jobs:
            self.memory.close(self._on_closed)


@dataclass(eq=False)
class Registration(ClientMemory):
    """KV tensors that a worker has registered: its memory and the layouts over it."""

    namespace: Namespace
    rank: int
    layouts: list[GroupLayout]
    charged_bytes: int
    """What it takes of the session's memory in the daemon."""


@dataclass(eq=False)
class Job(ABC):
    """A copy that was accepted for a session, from its acceptance until it touches nothing any more.

    ``JobRunner`` runs it. The kinds of jobs differ in what they copy and in how they are answered. The stores of one
    message are one copy, and each of them has its answer.
    """

    direction: ClassVar[Direction]

    ids: Sequence[int]
    """Of the jobs of the client that it does, each unique among the session's unfinished jobs."""
    session: Session
    client_memory: ClientMemory
    accepted_at: float = field(default=0.0, init=False)
    nbytes: int = field(default=0, init=False)
    pieces: int = field(default=0, init=False)
    """What it counts as in ``max_pieces_in_flight``."""
    charged_bytes: int = field(default=0, init=False)
    """What it takes of the session's memory in the daemon."""
    store_tickets: list[StoreTicket] = field(default_factory=list, init=False)
    checksums: SlotChecksums | None = field(default=None, init=False)
    transfer: Transfer | None = field(default=None, init=False)
    answered: bool = field(default=False, init=False)
    """It has its answer, but its copy hangs and still holds its slots and the client's memory."""

    @abstractmethod
    def end(self, outcome: Outcome) -> None:
        """Commit what was copied or give its slots back, and answer the client."""

    def answer_overdue(self) -> None:
        """Answer a store although its copy hangs beyond its deadline."""
        raise AssertionError("a load that hangs is not answered")


@dataclass(eq=False)
class Session:
    """State of one client. Ends with its lifeline; ``ended`` stays true while its last copies run out."""

    id: int
    token: bytes
    """Its client's secret, told over the lifeline."""
    peer: Peer
    lifeline: Lifeline
    opened_at: float
    completions: CompletionLog
    role: Role | None = None
    name: str = ""
    software: str = ""
    last_request_at: float = field(init=False)
    reserved: bool = False
    """One of those beyond max_sessions, which are for administrators."""
    ended: bool = False
    namespaces: set[bytes] = field(default_factory=set)
    segments: dict[int, int] = field(default_factory=dict)
    """Attached descriptors that no registration has taken over yet: segment id -> fd."""
    registrations: dict[bytes, Registration] = field(default_factory=dict)
    registering: set[bytes] = field(default_factory=set)
    """Ids of registrations whose memory is being mapped."""
    jobs: dict[int, Job] = field(default_factory=dict)
    """Unanswered jobs by id; several ids may be one copy."""
    hanging: set[Job] = field(default_factory=set)
    """Jobs that have their answer but whose copy may still touch the client's memory."""
    store_bytes: int = 0
    """Bytes of unfinished stores, held against the session's credit."""
    pieces: int = 0
    """Of all jobs that hold memory for what they copy."""
    _on_drained: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self.last_request_at = self.opened_at

    def check_namespace(self, fingerprint: bytes) -> None:
        """Raise UnknownNamespace unless the session has opened the namespace."""
        if fingerprint not in self.namespaces:
            raise UnknownNamespace(ErrorCode.UNKNOWN_NAMESPACE.sentence)

    def registration(self, registration_id: bytes) -> Registration:
        """A registration of the session. Raises KvoffdError."""
        registration = self.registrations.get(registration_id)
        if registration is None:
            raise KvoffdError.of(ErrorCode.UNKNOWN_REGISTRATION)
        return registration

    def end(self, on_drained: Callable[[], None]) -> None:
        """Mark the session as ended; call ``on_drained`` once its last copy has ended, at once when there is none."""
        self.ended = True
        self._on_drained = on_drained
        self._drain()

    def job_hangs(self, job: Job) -> None:
        """A job got its answer, but its copy has not come back."""
        self.hanging.add(job)
        self._forget(job)

    def job_ended(self, job: Job) -> None:
        """Forget a job that has its answer and whose copy touches nothing any more."""
        self.pieces -= job.pieces
        if job.answered:
            self.hanging.discard(job)
        else:
            self._forget(job)
        self._drain()

    @property
    def route(self) -> bytes:
        """The routing id of its client's requests."""
        return routing_id(self.token)

    @property
    def unfinished(self) -> int:
        """Jobs that have no answer, or whose copy may still touch the client's memory."""
        return len(self.jobs) + sum(len(job.ids) for job in self.hanging)

    def _forget(self, job: Job) -> None:
        for job_id in job.ids:
            del self.jobs[job_id]

    @property
    def descriptors(self) -> int:
        """Those that the daemon has open for it: attached, or of memory that is registered."""
        return len(self.segments) + sum(one.memory.descriptors for one in self.registrations.values())

    def close_memory(self) -> None:
        """Unmap all memory as soon as no job touches it, and close what was attached."""
        for memory in self.registrations.values():
            memory.close_when_idle(lambda: None)
        self.registrations.clear()
        self.close_segments()

    def close_segments(self) -> None:
        """Close descriptors that were attached and never registered."""
        for fd in self.segments.values():
            self.lifeline.close_descriptor(fd)
        self.segments.clear()

    def _drain(self) -> None:
        if self._on_drained is not None and not self.jobs and not self.hanging:
            on_drained, self._on_drained = self._on_drained, None
            on_drained()
