"""What requests and reports work on, and which function answers which request."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar, cast

from msgspec import Struct

from kvoffd.cache.cache import BlockCache, Steps
from kvoffd.cache.curve import HitRatioCurve
from kvoffd.cache.namespace import Namespace
from kvoffd.config import Config
from kvoffd.errors import KvoffdError, refusal_of
from kvoffd.observe.loop_watch import LoopWatch
from kvoffd.observe.meters import LOOKUP_BOUNDS_S, DurationHistogram, RateMeter
from kvoffd.server.background import Background
from kvoffd.server.engine_memory import MemoryMapper
from kvoffd.server.events import EventLog, Frames
from kvoffd.server.jobs import Jobs
from kvoffd.server.persistence import State
from kvoffd.server.recent import Recent
from kvoffd.server.recorder import Recorder
from kvoffd.server.scrubber import Scrubber
from kvoffd.server.sessions import Session, Sessions
from kvoffd.server.tiers import Tiers
from kvoffd.tiering.manager import TieringManager
from kvoffd_proto import codec
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode

logger = logging.getLogger(__name__)

REMOVAL_WAIT_S = 0.5
"""For disks to note what an invalidation, a reset or a clear removed; the answer waits for it."""
MAX_PENDING = 64
"""Requests of a session whose replies wait."""

StructT = TypeVar("StructT", bound=Struct)


@dataclass(eq=False)
class Pending:
    """A reply that must wait. Returned by a handler; the service asks ``poll`` for the reply until it is there.

    Attributes:
        poll: returns the reply, or None where it is not there yet; raises KvoffdError to refuse the request. Its
            argument says that ``until`` has passed: then it must do one of the two others.
        until: time of the daemon's clock.
    """

    poll: Callable[[bool], m.AnyReply | None]
    until: float = float("inf")
    request_id: int = field(default=0, init=False)
    sender: bytes = field(default=b"", init=False)
    session: Session | None = field(default=None, init=False)
    """Whose request it is. When it ends, nobody is left to be answered."""


class Later:
    """A reply that a callback brings, or the reason why there is none."""

    def __init__(self) -> None:
        self._result: m.AnyReply | Exception | None = None

    def bring(self, result: m.AnyReply | Exception) -> None:
        self._result = result

    def poll(self, late: bool = False) -> m.AnyReply | None:
        """As of Pending."""
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


@dataclass
class Outbox:
    """What is to be sent: replies as (sender, frame), publications as frames of ``events.sock``."""

    replies: list[tuple[bytes, bytes]] = field(default_factory=list)
    publications: list[Frames] = field(default_factory=list)


@dataclass
class Context:
    """The parts of one daemon, what it is about to send, and what it counts. In the service's thread."""

    config: Config
    clock: Callable[[], float]
    started_at: float
    cache: BlockCache
    events: EventLog
    memory: MemoryMapper
    sessions: Sessions
    jobs: Jobs
    scrubber: Scrubber
    recent: Recent
    recorder: Recorder
    curve: HitRatioCurve
    tiers: Tiers
    state: State
    background: Background = field(default_factory=Background)
    pending: list[Pending] = field(default_factory=list)
    """Requests whose replies wait, oldest first."""
    outbox: Outbox = field(default_factory=Outbox)
    lookups: list[tuple[int, float | None]] = field(default_factory=list)
    """Lease and seconds of lookups that are to be counted once their replies are out."""
    errors: Counter[str] = field(default_factory=Counter)
    sockets_problem: str = ""
    """Why no engine can connect."""
    http_problem: str = ""
    """Why nothing is served over HTTP, although it should be."""
    requests: int = 0
    replies_dropped: Counter[str] = field(default_factory=Counter)
    """By reason, ``gone`` or ``unread``."""
    lookup_times: DurationHistogram = field(default_factory=lambda: DurationHistogram(LOOKUP_BOUNDS_S))
    loop_watch: LoopWatch = field(default_factory=LoopWatch)
    lookup_rate: RateMeter = field(default_factory=RateMeter)

    def __post_init__(self) -> None:
        self.epoch = self.sessions.epoch

    @property
    def tiering(self) -> TieringManager | None:
        return self.tiers.tiering

    def removal(
        self, request_id: int, steps: Steps, then: Callable[[int], int] | None = None, *, at_once: bool = False
    ) -> Pending:
        """Remove blocks, in the background or ``at_once``.

        The reply comes once they stay away after a kill too, or that takes long. ``then`` is called after the last step
        with the number of blocks that were removed, whoever still waits; it returns that of the reply.
        """
        saved: Callable[[], bool] = lambda: False  # noqa: E731
        until = 0.0

        def removed(count: int) -> int:
            nonlocal saved, until
            count = then(count) if then is not None else count
            saved, until = self.tiers.removals_saved(), self.clock() + REMOVAL_WAIT_S
            return count

        work = self.background.add(steps, removed, at_once=at_once)

        def poll(late: bool) -> m.Done | None:
            if not work.done:
                return None
            if work.error is not None:
                raise work.error
            if not saved():
                if self.clock() < until:
                    return None
                logger.warning(
                    "A disk takes long to note what was removed from it: the answer goes out, and a kill or a power "
                    "cut before it is noted would bring that back."
                )
            return m.Done(request_id, self.epoch, work.count)

        return Pending(poll)

    def reply(self, sender: bytes, reply: m.AnyReply) -> None:
        """Send a reply with the next flush."""
        self.outbox.replies.append((sender, codec.encode(reply)))

    def refusal(self, request_id: int, error: Exception) -> m.Error:
        """The reply to a request that raised ``error``, which is counted."""
        refusal = refusal_of(error)
        self.count_error(refusal.code)
        return m.Error(request_id, self.epoch, refusal.code, refusal.message)

    def count_error(self, code: ErrorCode) -> None:
        """Count what went wrong; an administrator who mistypes a name has the answer, and nothing is wrong."""
        if code is not ErrorCode.BAD_ARGUMENT:
            self.errors[code.name.lower()] += 1

    def flush_completions(self, session: Session) -> None:
        """Close the session's open batch of completions and put it out for publication."""
        if frames := session.completions.flush(self.sessions.credit_of(session)):
            self.outbox.publications.append(frames)

    def check_key_count(self, namespace: Namespace, groups: Sequence[m.GroupKeys]) -> None:
        """Raise KvoffdError where a request has more keys than it may."""
        total = sum(len(part.keys) for part in groups) // namespace.key_bytes
        _check_at_most(total, self.config.limits.max_keys_per_request)

    def check_block_count(self, namespace: Namespace, keys: bytes) -> None:
        """Raise KvoffdError where an operator names more blocks in one request than a job may have."""
        _check_at_most(len(keys) // namespace.key_bytes, self.config.limits.max_keys_per_job)

    def check_lease_count(self, session: Session) -> None:
        limit = self.config.limits.max_leases
        if self.cache.leases.count_of(session.id) >= limit:
            raise KvoffdError(f"The session holds {limit} leases, its limit; release some.", ErrorCode.TOO_MANY)


def _check_at_most(keys: int, most: int) -> None:
    if keys > most:
        raise KvoffdError(f"{keys} keys in one request; {most} are allowed. Send several.", ErrorCode.TOO_MANY)


def filled(kind: type[StructT], *sources: object, **given: object) -> StructT:
    """Return a struct: a field is ``given``, or else the attribute of the same name of the first source that has it.

    A counter with the name of its field needs no line here.

    Raises:
        AttributeError: a field is nowhere to be found.
    """
    for name in kind.__struct_fields__:
        if name not in given:
            for source in sources:
                if hasattr(source, name):
                    given[name] = getattr(source, name)
                    break
            else:
                raise AttributeError(f"Nothing that counts has {kind.__name__}.{name}.")
    return kind(**given)


RequestT = TypeVar("RequestT", bound=m.AnyRequest)
Answer: TypeAlias = m.AnyReply | Pending | None
"""None where the answer comes by other ways, as that of accepted jobs does."""
Handler: TypeAlias = Callable[[Context, Session, RequestT], Answer]

HANDLERS: dict[type[m.AnyRequest], tuple[m.Exchange, Handler[m.AnyRequest]]] = {}


def answers(kind: type[RequestT]) -> Callable[[Handler[RequestT]], Handler[RequestT]]:
    """Make the decorated function the handler of requests of this kind."""

    def register(handler: Handler[RequestT]) -> Handler[RequestT]:
        assert kind not in HANDLERS, kind
        # It is called with requests of its own kind only, which the type of the table cannot say.
        HANDLERS[kind] = m.EXCHANGES[kind], cast("Handler[m.AnyRequest]", handler)
        return handler

    return register
