"""The daemon without its sockets: frames in, frames out. Runs in one thread.

Handlers of requests are in ``requests``, ``jobs``, ``admin`` and ``stats``. A ``Host`` provides clock, threads and
memory.
"""

from __future__ import annotations

import logging
from collections import Counter
from weakref import WeakSet

# These imports fill the table of handlers.
import kvoffd.server.admin
import kvoffd.server.requests
import kvoffd.server.stats  # noqa: F401
from kvoffd.cache.branch_points import BranchPoints
from kvoffd.cache.cache import Cache
from kvoffd.cache.curve import HitRatioCurve
from kvoffd.cache.learned import Learned, LruFallback
from kvoffd.cache.namespace import Namespace
from kvoffd.config import Config
from kvoffd.errors import KvoffdError, refusal_of
from kvoffd.observe.logging import RareWarnings
from kvoffd.observe.loop_watch import LoopWatch
from kvoffd.observe.meters import HOUR_S, LOOKUP_BOUNDS_S, CounterWindows, DurationHistogram
from kvoffd.pool.pool import Pool
from kvoffd.server.events import EventLog, Frames
from kvoffd.server.handlers import HANDLERS, Answer, Pending
from kvoffd.server.health import health_reply
from kvoffd.server.jobs import Jobs
from kvoffd.server.memory import Host, MemoryMapper
from kvoffd.server.namespaces import FORGET_AFTER_S, forget_idle
from kvoffd.server.persistence import State
from kvoffd.server.scrubber import Scrubber
from kvoffd.server.sessions import Session, Sessions
from kvoffd.server.tier_supervisor import TierSupervisor, make_tiering
from kvoffd.server.trace import Tracer
from kvoffd.server.traffic import TrafficCounts
from kvoffd.system.calls import call_each
from kvoffd.tiering.tiering import Tiering
from kvoffd.transfer.cuda.gpus import Gpus
from kvoffd.transfer.engine import CopyEngine
from kvoffd_proto import admin as a
from kvoffd_proto import codec
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.stats import Histogram

logger = logging.getLogger(__name__)
_refused = RareWarnings(logger, logging.INFO)

STATE_WAIT_S = 1.5
"""Time for ``kvoffd.state`` to be written; the client waits for 2 s."""
_REQUESTS = "requests"
"""Name of a counter besides the names of error codes."""
MAX_PENDING = 64
"""Limit of a session's requests with pending replies."""

NEW_WORK = m.OpenNamespace, m.Register, m.Submit
"""Requests that a stopping daemon refuses."""

if HANDLERS.keys() != m.EXCHANGES.keys():
    raise AssertionError(f"requests without a handler: {m.EXCHANGES.keys() - HANDLERS.keys()}")


class Service:
    """The parts of one daemon, its outgoing messages, and its counters.

    The sockets call ``handle`` for each request, send the messages of ``outgoing``, and then call ``after_send``: at
    once if ``urgent``, else a little later. Between requests they call ``background`` while it has more to do.
    """

    def __init__(
        self,
        config: Config,
        cache: Cache,
        events: EventLog,
        engine: CopyEngine,
        gpus: Gpus,
        pool: Pool,
        host: Host,
        state: State,
        max_attached: int = 2**16,
    ) -> None:
        clock = host.now
        self.config = config
        self.clock = clock
        self.started_at = clock()
        self.cache, self.pool = cache, pool
        self.events = events
        self.state = state
        self.memory = MemoryMapper(engine, host, gpus)
        self.jobs = Jobs(config, cache, pool, host)
        self.sessions = Sessions(config, cache, self.jobs, host, max_attached)
        self.tiering: Tiering | None = None
        """None if no tier is configured."""
        if config.disk or config.shared or config.peers:
            self.tiering = make_tiering(config, cache, events, clock, lambda: clock() < self.jobs.quiet_at, state)
        self.tier_supervisor = TierSupervisor(config, self.tiering, cache, pool, clock, host.post, state)
        self.scrubber = Scrubber(cache, clock)
        self.traffic = TrafficCounts(cache, clock, state.counted.lifetime)
        self.tracer = Tracer(cache, clock)
        self.curve = HitRatioCurve(cache.slots.pool_bytes, clock)
        self.pending: list[Pending] = []
        """Replies that are not available yet, oldest first."""
        self.replies: list[tuple[bytes, bytes]] = []
        """Routes and frames to send."""
        self.publications: list[Frames] = []
        """Messages to publish."""
        self.errors: Counter[str] = Counter()
        self.requests = 0
        self._gained = CounterWindows(clock)
        """Increases of requests, and of errors by code."""
        self.replies_dropped: Counter[str] = Counter()
        """Counts by reason, ``gone`` or ``unread``."""
        self.branch_points = BranchPoints(clock)
        self.lookup_times = DurationHistogram(LOOKUP_BOUNDS_S)
        self._lookup_times_gained = CounterWindows(clock)
        self.loop_watch = LoopWatch()
        self.sockets_problem = ""
        """Reason why engines cannot connect."""
        self._totals_due = self.started_at + config.limits.totals_every_s
        self._partial_warned: WeakSet[Namespace] = WeakSet()
        state.generations.is_open = lambda fingerprint: fingerprint in cache.namespaces
        cache.on_counted, cache.on_offered = self.curve.requested, self.curve.stored
        self._lru_fallback = LruFallback(self.curve, cache.policy) if isinstance(cache.policy, Learned) else None

    # --- called by the sockets ---------------------------------------------------------------------

    def handle(self, route: bytes, frame: bytes) -> None:
        """Handle one request frame. Never raises. Its reply is added to ``replies``, or ``pending`` if it must wait."""
        self.requests += 1
        request_id, session = 0, None
        answer: Answer
        try:
            if len(frame) > (most := self.config.limits.max_frame_bytes):
                raise KvoffdError(
                    f"The frame has {len(frame)} bytes; the limit is {most}. Send it in parts.", ErrorCode.TOO_LARGE
                )
            request = codec.decode_request(frame)
            request_id = request.request_id
            session = self.sessions.by_route.get(route)
            exchange, handler = HANDLERS[type(request)]
            if session is None:
                answer = self._answer_without_session(route, request)
            else:
                session.last_request_at = self.clock()
                if session.role not in exchange.roles and (session.role or not isinstance(request, m.Hello)):
                    raise _wrong_role(session, request)
                if self.sessions.stopping and isinstance(request, NEW_WORK):
                    raise KvoffdError.of(ErrorCode.SHUTTING_DOWN)
                if self.pending and sum(one.session is session for one in self.pending) >= MAX_PENDING:
                    raise KvoffdError(
                        f"{MAX_PENDING} requests of the session wait for replies, its limit; wait for some.",
                        ErrorCode.TOO_MANY,
                    )
                # A lookup changes no block, so reports can wait until its reply is sent.
                if not isinstance(request, m.Lookup):
                    self.cache.report_requests()
                answer = handler(self, session, request)
        except codec.CODEC_ERRORS as error:
            why = f"The frame is not a request of protocol {m.PROTOCOL_VERSION}: {error}. Fix the client."
            refusal = KvoffdError(why, ErrorCode.MALFORMED)
            answer = self.refusal(codec.request_id_of(frame), refusal)
        except Exception as error:
            answer = self.refusal(request_id, error, session)
        if isinstance(answer, Pending):
            answer.request_id, answer.session = request_id, session
            if not self._poll(answer):
                self.pending.append(answer)
        elif answer is not None:
            self._reply(route, request_id, answer, session)

    def outgoing(self) -> tuple[list[Frames], list[tuple[bytes, bytes]]]:
        """Return publications, and replies by route. Send publications first: a reply may refer to a completion."""
        if self.pending:
            self.pending = [pending for pending in self.pending if not self._poll(pending)]
        if self.jobs.with_results:
            for session in self.jobs.with_results.values():
                if frames := session.completions.flush(self.sessions.credit_bytes):
                    self.publications.append(frames)
            self.jobs.with_results.clear()
        if self.events.pending:
            self.publications += self.events.take()
        publications, self.publications = self.publications, []
        replies, self.replies = self.replies, []
        return publications, replies

    @property
    def urgent(self) -> bool:
        """Whether ``after_send`` may start promotions that lookups wait for."""
        return self.tiering is not None and self.tiering.has_queued_promotions

    def after_send(self) -> None:
        """Do the work of lookups that may wait until replies are sent."""
        self.cache.report_requests()
        if self.tiering is not None:
            self.tiering.pump()

    def background(self) -> bool:
        """Do some milliseconds of long work: free blocks that were reset, unpin blocks of ended leases, fail overdue
        promotions, publish events of recovered blocks. Return whether there is more."""
        more = self.cache.announce_recovered()
        if self.tiering is not None:
            more = self.tiering.background() or more
        return self.cache.background() or more

    def tick(self) -> None:
        """Do periodic work, such as ending overdue leases and copies, and dropping partial blocks.

        A part that raises does not keep the others from it.
        """
        call_each(
            (
                self._end_overdue,
                self.memory.tick,
                self._count,
                self.curve.tick,
                self.branch_points.tick,
                self._judge_policy,
                lambda: forget_idle(self, FORGET_AFTER_S),
                self.tier_supervisor.tick,
                self.follow_fleet,
            )
        )

    def in_last_hour(self) -> tuple[int, dict[str, int]]:
        """Return the last hour's requests, and its errors by code."""
        _, gained = self._gained.gained(HOUR_S, {_REQUESTS: self.requests, **self.errors})
        counts = {name: int(count) for name, count in gained.items() if count}
        return counts.pop(_REQUESTS, 0), counts

    def lookups_in_last(self, window_s: float) -> Histogram:
        """Return the durations of the lookups of the last minute or hour, one of ``WINDOWS_S``."""
        _, gained = self._lookup_times_gained.gained(window_s, self.lookup_times.counted().buckets)
        return Histogram({bound: int(count) for bound, count in gained.items()})

    def save_totals(self) -> None:
        self._totals_due = self.clock() + self.config.limits.totals_every_s
        self.state.save_lifetime(self.traffic.lifetime(self.traffic.total()))

    # --- replies -----------------------------------------------------------------------------------

    def _answer_without_session(self, route: bytes, request: m.AnyRequest) -> m.AnyReply:
        """Return the reply to a client without a session. Raises KvoffdError, which is counted."""
        if route in self.sessions.departed:  # sent before the client left, so not counted as an error
            return m.Error(request.request_id, ErrorCode.BAD_TOKEN, ErrorCode.BAD_TOKEN.sentence)
        if isinstance(request, a.Health):
            return health_reply(self, request)
        raise KvoffdError.of(ErrorCode.BAD_TOKEN)

    def _poll(self, pending: Pending) -> bool:
        """Add the reply to ``replies`` if it is available; else return False."""
        assert pending.session is not None
        if pending.session.ended:
            return True
        try:
            reply = pending.poll(self.clock() >= pending.until)
        except Exception as error:
            reply = self.refusal(pending.request_id, error, pending.session)
        if reply is not None:
            self._reply(pending.session.route, pending.request_id, reply, pending.session)
        return reply is not None

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

        Errors of administrators, such as a mistyped name, are neither counted nor logged, except internal ones.
        """
        refusal = refusal_of(error)
        if session is None or session.role is not m.Role.ADMIN or refusal.code is ErrorCode.INTERNAL:
            self.count_error(refusal.code)
            who = "a client without a session" if session is None else f"session {session.id} ({session.name})"
            _refused.warn("A request of %s was refused, %s: %s", who, refusal.code.name.lower(), refusal.message)
        return m.Error(request_id, refusal.code, refusal.message)

    def count_error(self, code: ErrorCode) -> None:
        self.errors[code.name.lower()] += 1

    # --- for handlers ------------------------------------------------------------------------------

    def reset(self, fingerprint: bytes | None) -> int:
        """Void all blocks of a namespace, open or not, or of all, in the pool and on disks; return how many there were.

        That holds for later daemons once the state file is saved: see ``reply_once_saved``. Shared stores keep their
        objects, whose generation is their own. Of a bench nothing is in the state file: no tier gets its blocks, and
        each run has a namespace of its own.
        """
        chosen = [one for one in self.cache.namespaces.values() if fingerprint in (None, one.fingerprint)]
        generation = None
        if not (fingerprint is not None and any(one.of_bench for one in chosen)):
            generation = self.state.generations.void_here(fingerprint)
        count = self.tiering.remove_all(fingerprint) if self.tiering is not None else 0
        return count + self.cache.reset(*chosen, generation=generation)

    def reply_once_saved(self, reply: m.Done, otherwise: str, in_memory: str = "") -> Pending:
        """Return ``reply``, to be sent once all changes so far are in ``kvoffd.state`` on its device.

        If the write fails or takes long, the reply is the error NOT_KEPT with the sentence ``otherwise``; if the file
        is in memory, with ``in_memory``, unless that is empty.
        """
        file, number = self.state.file, self.state.file.requested

        def poll(late: bool) -> m.Done | None:
            tried = file.tried >= number
            if file.written >= number:
                if in_memory and not file.outlives_reboot:
                    raise KvoffdError(in_memory, ErrorCode.NOT_KEPT)
                return reply
            if not tried and not late:
                return None
            raise KvoffdError(f"It is done, but {file.problem}. {otherwise}", ErrorCode.NOT_KEPT)

        return Pending(poll, self.clock() + STATE_WAIT_S)

    def follow_fleet(self) -> int:
        """Drop the blocks of namespaces that were voided for all nodes; return how many there were."""
        count = 0
        for fingerprint in list(self.state.generations.voided):
            count += self.reset(fingerprint)
            self.state.generations.followed(fingerprint)
        return count

    # --- internal ----------------------------------------------------------------------------------

    def _end_overdue(self) -> None:
        if self.cache.tick():
            self._warn_of_partial()

    def _count(self) -> None:
        self.traffic.tick()
        self._gained.sample({_REQUESTS: self.requests, **self.errors})
        self._lookup_times_gained.sample(self.lookup_times.counted().buckets)
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
