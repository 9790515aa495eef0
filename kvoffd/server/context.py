"""What requests and reports work on, and which function answers which request."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar, cast

from msgspec import Struct

from kvoffd.cache.cache import BlockCache
from kvoffd.cache.curve import HitRatioCurve
from kvoffd.cache.namespace import Namespace
from kvoffd.config import Config
from kvoffd.errors import KvoffdError, refusal_of
from kvoffd.observe.loop_watch import LoopWatch
from kvoffd.observe.meters import LOOKUP_BOUNDS_S, DurationHistogram, RateMeter
from kvoffd.server.disks import Disks
from kvoffd.server.engine_jobs import EngineJobs
from kvoffd.server.engine_memory import MemoryMapper
from kvoffd.server.jobs import JobRunner
from kvoffd.server.kept_limits import KeptLimits
from kvoffd.server.publisher import EventPublisher, Frames
from kvoffd.server.recent import Recent
from kvoffd.server.recorder import Recorder
from kvoffd.server.scrubber import Scrubber
from kvoffd.server.session import Session
from kvoffd.server.sessions import Sessions
from kvoffd.tiering.manager import TieringManager
from kvoffd_proto import codec
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode

logger = logging.getLogger(__name__)

REMOVAL_WAIT_S = 0.5
"""For disks to note what an invalidation, a reset or a clear removed; the answer waits for it."""

StructT = TypeVar("StructT", bound=Struct)


@dataclass
class Outbox:
    """What is to be sent: replies as (sender, frame), publications as frames of ``events.sock``."""

    replies: list[tuple[bytes, bytes]] = field(default_factory=list)
    event_replays: list[tuple[bytes, Iterator[Frames]]] = field(default_factory=list)
    publications: list[Frames] = field(default_factory=list)


@dataclass
class Context:
    """The parts of one daemon, what it is about to send, and what it counts. In the service's thread."""

    config: Config
    clock: Callable[[], float]
    started_at: float
    cache: BlockCache
    publisher: EventPublisher
    memory: MemoryMapper
    sessions: Sessions
    runner: JobRunner
    jobs: EngineJobs
    scrubber: Scrubber
    recent: Recent
    recorder: Recorder
    curve: HitRatioCurve
    disks: Disks
    kept_limits: KeptLimits
    outbox: Outbox = field(default_factory=Outbox)
    sender: bytes = b""
    """Who sent the request that is being handled."""
    lookups: list[tuple[int, float | None]] = field(default_factory=list)
    """Lease and seconds of lookups that are to be counted once their replies are out."""
    errors: Counter[str] = field(default_factory=Counter)
    http_problem: str = ""
    """Why nothing is served over HTTP, although it should be."""
    requests: int = 0
    replies_dropped: Counter[str] = field(default_factory=Counter)
    """By reason, ``gone`` or ``unread``."""
    publications_dropped: int = 0
    lookup_times: DurationHistogram = field(default_factory=lambda: DurationHistogram(LOOKUP_BOUNDS_S))
    loop_watch: LoopWatch = field(default_factory=LoopWatch)
    lookup_rate: RateMeter = field(default_factory=RateMeter)

    def __post_init__(self) -> None:
        self.epoch = self.sessions.epoch

    @property
    def tiering(self) -> TieringManager | None:
        return self.disks.tiering

    def others_served(self, done: Callable[[], bool], until: float) -> Iterator[None]:
        """Let others be served until it is done, or it is that late."""
        while not done() and self.clock() < until:
            yield None

    def removals_kept(self) -> Iterator[None]:
        """Let others be served until what was removed from disks stays away after a kill too, or it takes too long."""
        kept = self.disks.removals_kept()
        yield from self.others_served(kept, self.clock() + REMOVAL_WAIT_S)
        if not kept():
            logger.warning(
                "A disk takes long to note what was removed from it: the answer goes out, and a kill or a power cut "
                "before it is noted would bring that back."
            )

    def reply(self, sender: bytes, reply: m.AnyReply) -> None:
        """Send a reply with the next flush."""
        self.outbox.replies.append((sender, codec.encode(reply)))

    def answer_later(self, request_id: int) -> Callable[[m.AnyReply | Exception], None]:
        """What sends the reply, or the refusal, to the request that is being handled, once that is known."""
        sender = self.sender

        def answer(result: m.AnyReply | Exception) -> None:
            self.reply(sender, self.refusal(request_id, result) if isinstance(result, Exception) else result)

        return answer

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
        """Raise KvoffdError where a lookup or an invalidation has more keys than it may."""
        total = sum(len(part.keys) for part in groups) // namespace.key_bytes
        _check_at_most(total, self.config.max_keys_per_request)

    def check_block_count(self, namespace: Namespace, keys: bytes) -> None:
        """Raise KvoffdError where an operator names more blocks in one request than a job may have."""
        _check_at_most(len(keys) // namespace.key_bytes, self.config.max_keys_per_job)

    def check_lease_count(self, session: Session) -> None:
        limit = self.config.max_leases
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
Answer: TypeAlias = m.AnyReply | Iterator[m.AnyReply | None] | None
"""None where the answer comes later, as that of accepted jobs does. What takes long is done in parts: an iterator does
one at each step, of which the last may give the reply."""
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
