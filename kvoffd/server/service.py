"""The daemon without its sockets: frames in, frames out through an ``Outbox``. Runs in one thread.

What the single messages do is in ``requests``; time, threads, sockets and memory are handed in.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvoffd.cache.cache import BlockCache
from kvoffd.cache.namespace import Namespace
from kvoffd.config import Config
from kvoffd.errors import KvoffdError, UnknownNamespace
from kvoffd.observe.meters import LatencyRecorder, RateMeter
from kvoffd.server.block_access import BlockWrite, PutRunner
from kvoffd.server.disks import Disks
from kvoffd.server.engine_memory import GpuMapper, MemoryMapper
from kvoffd.server.jobs import Job, JobRunner
from kvoffd.server.operators import BlockAccess
from kvoffd.server.publisher import EventPublisher, Frames
from kvoffd.server.registration import Registration
from kvoffd.server.report import Reporter
from kvoffd.server.requests.table import HANDLERS
from kvoffd.server.scrubber import Scrubber
from kvoffd.server.session import CompletionLog, Lifeline, Peer, Session
from kvoffd.system.mappings import MappedSegment, map_memfd
from kvoffd.tiering.manager import TieringManager
from kvoffd.transfer.engine import Outcome, TransferEngine
from kvoffd_proto import codec
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode

logger = logging.getLogger(__name__)

MAX_DEFAULT_CREDIT_BYTES = 2**30
ALWAYS_ATTACHABLE = 64
"""Descriptors that a session may attach however many the others have, as long as there are any."""


@dataclass
class Outbox:
    """What is to be sent: replies as (sender, frame), publications as frames of ``events.sock``."""

    replies: list[tuple[bytes, bytes]] = field(default_factory=list)
    event_replays: list[tuple[bytes, list[Frames]]] = field(default_factory=list)
    publications: list[Frames] = field(default_factory=list)


class Service:
    """Sessions, requests and jobs of one daemon."""

    def __init__(
        self,
        config: Config,
        cache: BlockCache,
        publisher: EventPublisher,
        engine: TransferEngine,
        pool_address: int,
        table_bytes: int,
        clock: Callable[[], float],
        post: Callable[[Job | BlockWrite, Outcome], None],
        map_segment: Callable[[int, int], MappedSegment] = map_memfd,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
        max_attached: int = 2**16,
        gpu_mapper: GpuMapper | None = None,
    ) -> None:
        self.config = config
        self.cache = cache
        self.publisher = publisher
        self.memory = MemoryMapper(engine, map_segment, gpu_mapper)
        self.table_bytes = table_bytes
        self.clock = clock
        self.max_attached = max_attached
        """Descriptors that all sessions together may have attached and not registered."""
        self.started_at = clock()
        self.stopping = False
        self.credit_bytes = config.credit_bytes or min(cache.slots.pool_bytes // 8, MAX_DEFAULT_CREDIT_BYTES)
        """Bytes of stores that all sessions together may have outstanding."""
        self.epoch = int.from_bytes(random_bytes(8), "big") >> 1
        self.sessions: dict[int, Session] = {}
        self.jobs = JobRunner(cache, pool_address, clock, config.job_deadline_s, post, config.verify_share)
        self.puts = PutRunner(cache, self.memory, pool_address, clock, config.job_deadline_s, post)
        self.desk = BlockAccess(config, cache)
        self.errors: Counter[str] = Counter()
        self.requests = 0
        self.replies_dropped = 0
        self.lookup_latency = LatencyRecorder()
        self.lookup_rate = RateMeter()
        self.outbox = Outbox()
        self.sender = b""
        """Who sent the request that is being handled."""
        self.reporter = Reporter(self)
        self.scrubber = Scrubber(cache, clock)
        self.disks: Disks | None = None
        """The tiers below the pool, where there may be any."""
        self._random_bytes = random_bytes
        self._by_token: dict[bytes, Session] = {}
        self._last_session_id = 0
        self._looked_up: list[tuple[int, float]] = []

    # --- sessions: called by the lifeline's rim --------------------------------------------------

    def open_session(self, lifeline: Lifeline, peer: Peer, *, internal: bool = False) -> Session:
        """Admit a client that has connected to the lifeline. Raises KvoffdError when it may not come in."""
        self.refuse_when_stopping()
        if not internal and self._taken_sessions() >= self.config.max_sessions:
            raise KvoffdError(
                f"All {self.config.max_sessions} sessions are taken; raise max_sessions.", ErrorCode.TOO_MANY
            )
        self._last_session_id += 1
        session = Session(
            self._last_session_id,
            self._random_bytes(m.TOKEN_BYTES),
            peer,
            lifeline,
            self.clock(),
            CompletionLog(self.epoch, self._last_session_id),
            last_request_at=self.clock(),
            internal=internal,
        )
        self.sessions[session.id] = session
        self._by_token[session.token] = session
        return session

    def _taken_sessions(self) -> int:
        taken = sum(not session.internal for session in self.sessions.values())
        if taken < self.config.max_sessions:
            return taken
        # The last ones may be dead already, their EOF just not read yet.
        return sum(not session.internal and session.lifeline.alive() for session in self.sessions.values())

    def attach(self, session: Session, segment_id: int, fd: int) -> None:
        """Keep a descriptor for a Register to come. Owns ``fd`` on success only. Raises KvoffdError."""
        if session.ended:
            raise KvoffdError(ErrorCode.SESSION_ENDED.sentence, ErrorCode.SESSION_ENDED)
        if segment_id in session.segments:
            raise KvoffdError(f"Segment {segment_id} is attached already; use a new id.", ErrorCode.MALFORMED)
        if len(session.segments) >= self.config.max_segments:
            raise KvoffdError(f"The session holds {len(session.segments)} segments, its limit.", ErrorCode.TOO_MANY)
        free = self.max_attached - sum(len(other.segments) for other in self.sessions.values())
        # Nobody may take more than what is left then, so that however many sessions hoard, the next one has room.
        if free <= 0 or len(session.segments) >= max(free, ALWAYS_ATTACHABLE):
            raise KvoffdError(
                f"Descriptors are short: the session has {len(session.segments)} attached and {free} are left for all. "
                "Register them, or raise the daemon's limit of open files.",
                ErrorCode.TOO_MANY,
            )
        session.segments[segment_id] = fd

    def end_session(self, session: Session, on_drained: Callable[[], None]) -> None:
        """The lifeline has ended: drop what the session held, stop its copies, unmap its memory.

        ``on_drained`` is called once the last of its copies has ended.
        """
        if session.ended:
            return
        del self.sessions[session.id]
        del self._by_token[session.token]
        self.cache.end_owner(session.id)
        session.end(on_drained)
        self.jobs.abandon(list(session.jobs.values()))
        self.puts.end_session(session)
        self.desk.end_session(session)
        for registration in session.registrations.values():
            registration.close_when_idle(_nothing)
        session.registrations.clear()
        session.close_segments()
        if session.role is not None and not session.internal:
            logger.info("Session %d (%s %s) ended.", session.id, session.role, session.name)

    # --- requests: called by the jobs socket's rim ------------------------------------------------

    def handle(self, sender: bytes, frame: bytes) -> None:
        """Answer one request frame. Never raises; every frame gets a reply but an accepted job."""
        self.sender = sender
        reply = self._answer(frame, None)
        if reply is not None:
            self.reply(sender, reply)

    def answer(self, session: Session, frame: bytes) -> bytes:
        """The reply to a request frame of an administrator whose connection says who it is. Never raises."""
        assert session.role is m.Role.ADMIN
        reply = self._answer(frame, session)
        assert reply is not None, "what is offered over TCP is answered at once"
        return codec.encode(reply)

    def _answer(self, frame: bytes, session: Session | None) -> m.AnyReply | None:
        """The reply, or None for an accepted job. The request's token names the session where ``session`` is None."""
        self.requests += 1
        request_id = 0
        try:
            if len(frame) > self.config.max_frame_bytes:
                raise KvoffdError(
                    f"The frame has {len(frame)} bytes; {self.config.max_frame_bytes} are allowed. Send it in parts.",
                    ErrorCode.TOO_LARGE,
                )
            try:
                request = codec.decode_request(frame)
            except codec.CodecError as error:
                request_id = codec.request_id_of(frame)
                raise KvoffdError(f"The frame is not a request: {error}.", ErrorCode.MALFORMED) from error
            request_id = request.request_id
            return self._dispatch(request, session or self._by_token.get(request.token))
        except Exception as error:
            return self.refusal(request_id, error)

    def replay_events(self, sender: bytes, start: bytes) -> None:
        """Answer a replay request in the format of vLLM's event publisher: eight bytes, the first number wanted."""
        self.outbox.event_replays.append((sender, self.publisher.replay(int.from_bytes(start, "big"))))

    def reply(self, sender: bytes, reply: m.AnyReply) -> None:
        """Send a reply with the next flush."""
        self.outbox.replies.append((sender, codec.encode(reply)))

    def refusal(self, request_id: int, error: Exception) -> m.Error:
        """The reply to a request that raised ``error``, which is counted."""
        if isinstance(error, KvoffdError):
            code, sentence = error.code, error.message
        else:
            logger.error("A request failed inside the daemon.", exc_info=error)
            code, sentence = ErrorCode.INTERNAL, ErrorCode.INTERNAL.sentence
        self.count_error(code)
        return m.Error(request_id, self.epoch, code, sentence)

    def count_error(self, code: ErrorCode) -> None:
        """Count an error reply or a refusal at the lifeline."""
        self.errors[code.name.lower()] += 1

    # --- turns: called by the rim -----------------------------------------------------------------

    def transfer_done(self, job: Job | BlockWrite, outcome: Outcome) -> None:
        """A transfer has ended; called in the service's thread."""
        if isinstance(job, BlockWrite):
            self.puts.transfer_done(job, outcome)
        else:
            self.jobs.transfer_done(job, outcome)

    def flush(self) -> Outbox:
        """Take what is to be sent now."""
        for session in self.jobs.take_told():
            self.flush_completions(session)
        self.outbox.publications += self.publisher.flush()
        outbox, self.outbox = self.outbox, Outbox()
        return outbox

    def flush_completions(self, session: Session) -> None:
        """Close the session's open batch of completions and put it out for publication."""
        if frames := session.completions.flush(self.credit_of(session)):
            self.outbox.publications.append(frames)

    def after_send(self) -> None:
        """Work that may wait until the replies are out: what lookups leave behind."""
        for lease_id, seconds in self._looked_up:
            self.lookup_latency.observe(seconds)
            self.lookup_rate.add(1)
            self.cache.touch(lease_id)
        self._looked_up.clear()
        if self.tiering is not None:
            self.tiering.pump()

    @property
    def tiering(self) -> TieringManager | None:
        """What looks after the tiers below the pool; None while there is no tier."""
        return self.disks.tiering if self.disks is not None else None

    def tick(self) -> None:
        """Periodic work: leases and copies that are overdue, blocks that stay half-stored."""
        self.cache.expire()
        self.memory.expire()
        if self.disks is not None:
            self.disks.tick()
        for session in list(self.sessions.values()):
            if any(registration.memory.engine.lost for registration in session.registrations.values()):
                logger.warning("Session %d is ended: the GPU of its engine failed. It may register again.", session.id)
                self.end_session(session, session.lifeline.close)

    # --- for the requests -------------------------------------------------------------------------

    def note_lookup(self, lease_id: int, seconds: float) -> None:
        """A lookup took so long. It is counted, and the recency of what it found applied, once its reply is out."""
        self._looked_up.append((lease_id, seconds))

    def credit_of(self, session: Session) -> int:
        """Bytes of stores ``session`` may have outstanding: its share of what all writers together may."""
        if session.role is m.Role.ADMIN:
            return 0
        writers = sum(1 for other in self.sessions.values() if other.registrations)
        return self.credit_bytes // max(1, writers)

    def limits(self) -> m.Limits:
        """Bounds told to every session."""
        config = self.config
        return m.Limits(
            config.max_frame_bytes,
            config.max_keys_per_request,
            config.max_jobs_in_flight,
            config.max_leases,
            config.max_registrations,
            config.max_segments,
        )

    def refuse_when_stopping(self) -> None:
        """Raise KvoffdError when the daemon takes no new work."""
        if self.stopping:
            raise KvoffdError(ErrorCode.SHUTTING_DOWN.sentence, ErrorCode.SHUTTING_DOWN)

    def namespace_of(self, session: Session, fingerprint: bytes) -> Namespace:
        """A namespace that ``session`` has opened. Raises UnknownNamespace."""
        if fingerprint not in session.namespaces:
            raise UnknownNamespace(ErrorCode.UNKNOWN_NAMESPACE.sentence)
        return self.cache.namespace(fingerprint)

    def registration_of(self, session: Session, registration_id: bytes) -> Registration:
        """A registration of ``session``. Raises KvoffdError."""
        registration = session.registrations.get(registration_id)
        if registration is None:
            raise KvoffdError(ErrorCode.UNKNOWN_REGISTRATION.sentence, ErrorCode.UNKNOWN_REGISTRATION)
        return registration

    def check_key_count(self, namespace: Namespace, groups: Sequence[m.GroupKeys | m.GroupTransfer]) -> None:
        """Raise KvoffdError when a request names more keys than are allowed."""
        total = sum(len(part.keys) for part in groups) // namespace.key_bytes
        if total > self.config.max_keys_per_request:
            raise KvoffdError(
                f"{total} keys in one request; {self.config.max_keys_per_request} are allowed.", ErrorCode.TOO_MANY
            )

    def _dispatch(self, request: m.AnyRequest, session: Session | None) -> m.AnyReply | None:
        if session is None:
            raise KvoffdError(ErrorCode.BAD_TOKEN.sentence, ErrorCode.BAD_TOKEN)
        session.last_request_at = self.clock()
        exchange = m.EXCHANGES[type(request)]
        if session.role is None and not isinstance(request, m.Hello):
            raise KvoffdError(ErrorCode.NO_HELLO.sentence, ErrorCode.NO_HELLO)
        if session.role is not None and session.role not in exchange.roles:
            raise KvoffdError(
                f"{type(request).__name__} is for the role {' or '.join(sorted(exchange.roles))}, not {session.role}.",
                ErrorCode.WRONG_ROLE,
            )
        if session.peer.key and not exchange.over_tcp:
            raise KvoffdError(
                f"{type(request).__name__} is not for TCP; send it on the daemon's own machine.", ErrorCode.WRONG_ROLE
            )
        return HANDLERS[type(request)](self, session, request)


def _nothing() -> None:
    """Nobody waits for the end of this registration."""
