"""The daemon without its sockets: frames in, frames out. Runs in one thread.

A request is handled by a method of the part that it is about, which ``@answers`` marks: ``grep 'answers('`` lists them.
A ``Host`` provides clock, threads and memory.
"""

from __future__ import annotations

import logging
from functools import partial
from weakref import WeakSet

from kvoffd.cache.branch_points import BranchPoints
from kvoffd.cache.cache import Cache
from kvoffd.cache.curve import HitRatioCurve
from kvoffd.cache.learned import Learned, LruFallback
from kvoffd.cache.namespace import Namespace
from kvoffd.config import Config
from kvoffd.errors import KvoffdError, refusal_of
from kvoffd.observe.loop_watch import LoopWatch
from kvoffd.pool.pool import Pool
from kvoffd.server.admin import Administration
from kvoffd.server.engine_memory import MemoryMapper
from kvoffd.server.events import EventLog, Frames
from kvoffd.server.handlers import Answer, Pending, handlers_of
from kvoffd.server.health import HealthWatch
from kvoffd.server.host import Host
from kvoffd.server.jobs import Jobs
from kvoffd.server.known_namespaces import KnownNamespaces, NamespaceUser
from kvoffd.server.lookups import Lookups
from kvoffd.server.loop_share import LoopShare
from kvoffd.server.persistence import State
from kvoffd.server.registrations import Registrations
from kvoffd.server.reports import Reports
from kvoffd.server.request_counts import RequestCounts
from kvoffd.server.resets import NamespaceResets
from kvoffd.server.scrubber import Scrubber
from kvoffd.server.session import Session
from kvoffd.server.sessions import SessionTable
from kvoffd.server.stats import Statistics
from kvoffd.server.tier_supervisor import TierSupervisor
from kvoffd.server.tracer import Tracer
from kvoffd.server.traffic import TrafficCounts
from kvoffd.system.calls import call_each
from kvoffd.system.rare_warnings import RareWarnings
from kvoffd.transfer.cuda.gpus import Gpus
from kvoffd.transfer.engine import CopyEngine, WorkByDirection
from kvoffd_proto import admin as a
from kvoffd_proto import codec, stats
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode

logger = logging.getLogger(__name__)
_refused = RareWarnings(logger, logging.INFO)

MAX_PENDING = 64
"""Limit of a session's requests with pending replies."""

NEW_WORK = m.OpenNamespace, m.Register, m.Submit
"""Requests that a stopping daemon refuses."""
QUESTIONS = (
    stats.Stats,
    stats.ListBranchPoints,
    a.Sessions,
    a.Namespaces,
    a.DescribeNamespace,
    a.ListPrompts,
    a.ListBlocks,
)
"""Requests whose answer grows with what the daemon has. They change nothing, and share a part of the loop's time."""
PROGRAM_ERRORS = ErrorCode.INTERNAL, ErrorCode.MALFORMED, ErrorCode.TOO_LARGE
"""Errors that no administrator makes by typing, but a program."""


class Service:
    """The parts of one daemon, its outgoing messages, and its counters.

    In a turn of the loop the sockets call ``handle`` for each request, send the messages of ``outgoing``, and then call
    ``after_send``: at once if ``urgent``, else a little later. Each turn ends with a step of ``background``.
    """

    def __init__(
        self,
        config: Config,
        cache: Cache,
        events: EventLog,
        engine: CopyEngine,
        gpus: Gpus,
        copy_work: WorkByDirection,
        pool: Pool,
        host: Host,
        state: State,
        tier_supervisor: TierSupervisor,
        max_attached: int = 2**16,
    ) -> None:
        clock = host.now
        self.config, self.clock = config, clock
        self.cache, self.pool, self.events, self.state = cache, pool, events, state
        self.tier_supervisor = tier_supervisor
        self.mapper = MemoryMapper(engine, host, gpus)
        self.branch_points = BranchPoints(clock)
        self.jobs = Jobs(config, cache, pool, host)
        self.sessions = SessionTable(config, cache, self.jobs, host, max_attached)
        self.scrubber = Scrubber(cache, clock)
        self.traffic = TrafficCounts(cache, clock, state.counted.lifetime)
        self.curve = HitRatioCurve(cache.slots.pool_bytes, clock)
        self.request_counts = RequestCounts(clock)
        self.loop_watch = LoopWatch()
        users: list[NamespaceUser] = [self.traffic, self.curve, self.branch_points]
        if tier_supervisor.tiering is not None:
            users.append(tier_supervisor.tiering)
        self.namespaces = KnownNamespaces(config, cache, self.sessions, state, clock, users)
        self.resets = NamespaceResets(cache, state, tier_supervisor, self.namespaces, clock)
        self.health = HealthWatch(config, cache, pool, gpus, self.sessions, tier_supervisor, state.file, self.traffic)
        tracer = Tracer(cache, clock)
        self.lookups = Lookups(config, cache, clock, tier_supervisor, tracer)
        self.reports = Reports(cache, self.sessions, tier_supervisor, self.traffic)
        self.statistics = Statistics(
            config=config,
            clock=clock,
            cache=cache,
            pool=pool,
            events=events,
            state=state,
            gpus=gpus,
            copy_work=copy_work,
            jobs=self.jobs,
            sessions=self.sessions,
            tier_supervisor=tier_supervisor,
            traffic=self.traffic,
            curve=self.curve,
            branch_points=self.branch_points,
            request_counts=self.request_counts,
            lookups=self.lookups,
            loop_watch=self.loop_watch,
            health=self.health,
        )
        self.handlers = handlers_of(
            (
                self.sessions,
                self.namespaces,
                Registrations(config, cache, self.mapper, self.sessions, self.jobs),
                self.lookups,
                self.jobs,
                self.reports,
                self.resets,
                self.statistics,
                self.health,
                self.scrubber,
                tracer,
                Administration(cache),
            )
        )
        self._questions = LoopShare(clock)
        self.pending: list[Pending] = []
        """Replies that are not available yet, oldest first, but those to ``QUESTIONS``."""
        self.replies: list[tuple[bytes, bytes]] = []
        """Routes and frames to send."""
        self._totals_due = clock() + config.limits.totals_every_s
        self._partial_warned: WeakSet[Namespace] = WeakSet()
        # Connected here, since each is made before what it asks.
        state.generations.known = cache.namespaces  # whose entries stay, however many resets there are
        cache.prompts.curve, cache.prompts.branch_points = self.curve, self.branch_points
        self._lru_fallback = LruFallback(self.curve, cache.policy) if isinstance(cache.policy, Learned) else None

    # --- called by the sockets ---------------------------------------------------------------------

    def handle(self, route: bytes, frame: bytes) -> None:
        """Handle one request frame. Never raises. Its reply comes with ``outgoing``, perhaps with a later one."""
        self.request_counts.requests += 1
        request_id, session = 0, self.sessions.by_route.get(route)
        answer: Answer
        try:
            if len(frame) > (most := self.config.limits.max_frame_bytes):
                raise KvoffdError(
                    f"The frame has {len(frame)} bytes; the limit is {most}. Send it in parts.", ErrorCode.TOO_LARGE
                )
            try:
                request = codec.decode_request(frame)
            except codec.CODEC_ERRORS as error:
                why = f"The frame is not a request of protocol {m.PROTOCOL_VERSION}: {error}. Fix the client."
                raise KvoffdError(why, ErrorCode.MALFORMED) from None
            request_id = request.request_id
            exchange, handler = self.handlers[type(request)]
            if session is None:
                answer = self._answer_without_session(route, request)
            else:
                session.last_request_at = self.clock()
                is_first_hello = session.role is None and isinstance(request, m.Hello)
                if session.role not in exchange.roles and not is_first_hello:
                    raise _wrong_role(session, request)
                if self.sessions.stopping and isinstance(request, NEW_WORK):
                    raise KvoffdError.of(ErrorCode.SHUTTING_DOWN)
                if session.waiting >= MAX_PENDING:
                    raise KvoffdError(
                        f"{MAX_PENDING} requests of the session wait for replies, its limit; wait for some.",
                        ErrorCode.TOO_MANY,
                    )
                # The policy hears of earlier lookups before blocks change. A lookup changes none: it need not wait.
                if self.cache.prompts.unreported and not isinstance(request, m.Lookup):
                    self.cache.prompts.report()
                if isinstance(request, QUESTIONS):
                    session.waiting += 1
                    self._questions.ask(session, request_id, partial(handler, session, request))
                    return
                answer = handler(session, request)
        except Exception as error:
            answer = self.refusal(request_id or codec.request_id_of(frame), error, session)
        if isinstance(answer, Pending):
            assert session is not None, "a request without a session is answered at once"
            answer.request_id, answer.session = request_id, session
            session.waiting += 1
            if not self._settle(answer):
                self.pending.append(answer)
        elif answer is not None:
            self._reply(route, request_id, answer, session)

    def outgoing(self) -> tuple[list[Frames], list[tuple[bytes, bytes]]]:
        """Return publications, and replies by route. Send publications first: a reply may refer to a completion."""
        while self._questions.lines and (question := self._questions.take()) is not None:
            self._settle(question)  # at once: a question never waits for its reply, only for its turn
        if self.pending:
            self.pending = [pending for pending in self.pending if not self._settle(pending)]
        if self.jobs.with_results:
            self.sessions.close_batches()
        publications, self.sessions.publications = self.sessions.publications, []
        if self.events.pending:
            publications += self.events.take()
        replies, self.replies = self.replies, []
        return publications, replies

    @property
    def waiting(self) -> int:
        """Number of requests without a reply yet."""
        return len(self.pending) + len(self._questions)

    @property
    def urgent(self) -> bool:
        """Whether ``after_send`` may start promotions that lookups wait for."""
        tiering = self.tier_supervisor.tiering
        return tiering is not None and tiering.has_queued_promotions

    def after_send(self) -> None:
        """Do the work of lookups that may wait until replies are sent."""
        self.cache.prompts.report()
        if (tiering := self.tier_supervisor.tiering) is not None:
            tiering.pump()

    def background(self) -> bool:
        """Do some milliseconds of long work: free blocks that were reset, end overdue leases and unpin blocks of ended
        ones, drop blocks that were partial for too long, fail overdue promotions, publish events of recovered blocks.
        Return whether there is more."""
        more = self.cache.life.announce_recovered()
        if (tiering := self.tier_supervisor.tiering) is not None:
            more = tiering.background() or more
        return self.cache.background() or more

    def tick(self) -> None:
        """Do periodic work, such as ending overdue leases and copies, and dropping partial blocks.

        A part that raises does not keep the others from it.
        """
        call_each(
            (
                self.cache.tick,
                self._warn_of_partial,
                self.mapper.tick,
                self.traffic.tick,
                self.lookups.recent.sample,
                self.loop_watch.recent.sample,
                self.jobs.tick,
                self.request_counts.tick,
                self._save_totals_if_due,
                self.curve.tick,
                self.branch_points.tick,
                self._judge_policy,
                self.namespaces.tick,
                self.tier_supervisor.tick,
                self.resets.follow_fleet,
            )
        )

    def save_totals(self) -> None:
        """Save the lifetime totals for the next daemon."""
        self._totals_due = self.clock() + self.config.limits.totals_every_s
        self.state.save_lifetime(self.traffic.lifetime(self.traffic.total()))

    # --- replies -----------------------------------------------------------------------------------

    def _answer_without_session(self, route: bytes, request: m.AnyRequest) -> m.AnyReply:
        """Return the reply to a client without a session. Raises KvoffdError, which is counted."""
        if route in self.sessions.departed:  # sent before the client left, so not counted as an error
            return m.Error(request.request_id, ErrorCode.BAD_TOKEN, ErrorCode.BAD_TOKEN.sentence)
        if isinstance(request, a.Health):
            return self.health.reply(request.request_id)
        raise KvoffdError.of(ErrorCode.BAD_TOKEN)

    def _settle(self, pending: Pending) -> bool:
        """Add the reply to ``replies`` if it is available, or drop it if its session has ended; else return False."""
        session = pending.session
        assert session is not None
        if session.ended:
            return True
        started_at = self.clock()
        try:
            reply = pending.poll(started_at >= pending.until)
        except Exception as error:
            reply = self.refusal(pending.request_id, error, session)
        if reply is None:
            return False
        session.waiting -= 1
        self._reply(session.route, pending.request_id, reply, session)
        if pending.charge is not None:
            pending.charge(self.clock() - started_at)
        return True

    def _reply(self, route: bytes, request_id: int, reply: m.AnyReply, session: Session | None) -> None:
        """Add a reply to ``replies``, or the error INTERNAL if it cannot be encoded. Request 0 gets none but errors."""
        if not (request_id or isinstance(reply, m.Error)):
            return
        try:
            frame = codec.encode(reply)
        except Exception as error:
            frame = codec.encode(self.refusal(request_id, error, session))
        self.replies.append((route, frame))

    def refusal(self, request_id: int, error: Exception, session: Session | None = None) -> m.Error:
        """Return the reply to a request that raised ``error``, and count and log it.

        Errors of administrators, such as a mistyped name, are neither counted nor logged, except ``PROGRAM_ERRORS``.
        """
        refusal = refusal_of(error)
        if session is None or session.role is not m.Role.ADMIN or refusal.code in PROGRAM_ERRORS:
            self.request_counts.count_error(refusal.code)
            who = "a client without a session" if session is None else f"session {session.id} ({session.name})"
            _refused.warn("A request of %s was refused, %s: %s", who, refusal.code.name.lower(), refusal.message)
        return m.Error(request_id, refusal.code, refusal.message)

    # --- internal ----------------------------------------------------------------------------------

    def _save_totals_if_due(self) -> None:
        if self.clock() >= self._totals_due:
            self.save_totals()

    def _judge_policy(self) -> None:
        if self._lru_fallback is not None:
            self._lru_fallback.judge()

    def _warn_of_partial(self) -> None:
        """Warn once for each namespace whose blocks lack shards: no engine can read them."""
        for namespace in self.cache.namespaces.values():
            if namespace.counters.partial_blocks and namespace not in self._partial_warned:
                self._partial_warned.add(namespace)
                logger.warning(
                    "Blocks of the namespace %s were dropped, because not all of its %d ranks stored their shards in "
                    "time. A worker failed, or the engine's workers are on several nodes; stats count such blocks as "
                    "partial_blocks.",
                    namespace.label,
                    namespace.world_size,
                )


def _wrong_role(session: Session, request: m.AnyRequest) -> KvoffdError:
    if session.role is None:
        return KvoffdError.of(ErrorCode.NO_HELLO)
    return KvoffdError(
        f"{type(request).__name__} is for the role {' or '.join(sorted(m.EXCHANGES[type(request)].roles))}, not "
        f"{session.role}; open another session for it.",
        ErrorCode.WRONG_ROLE,
    )
