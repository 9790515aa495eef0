"""The daemon without its sockets: frames in, frames out through an ``Outbox``. Runs in one thread.

The requests are answered in ``engine_requests``, ``admin_requests`` and ``report``; time, threads, sockets and memory
are handed in.
"""

from __future__ import annotations

import logging
from weakref import WeakSet

# These fill the table of handlers.
import kvoffd.server.admin_requests
import kvoffd.server.engine_requests
import kvoffd.server.report  # noqa: F401
from kvoffd.cache.cache import BlockCache, Steps
from kvoffd.cache.curve import HitRatioCurve
from kvoffd.cache.namespace import Namespace
from kvoffd.config import Config
from kvoffd.errors import KvoffdError
from kvoffd.server.context import HANDLERS, MAX_PENDING, Answer, Context, Outbox, Pending
from kvoffd.server.engine_memory import MemoryMapper
from kvoffd.server.events import EventLog
from kvoffd.server.health import health_reply
from kvoffd.server.host import Host
from kvoffd.server.jobs import Jobs
from kvoffd.server.namespaces import FORGET_AFTER_S, forget_idle
from kvoffd.server.persistence import State
from kvoffd.server.recent import Recent
from kvoffd.server.recorder import Recorder
from kvoffd.server.scrubber import Scrubber
from kvoffd.server.sessions import Session, Sessions, credit_bytes
from kvoffd.server.tiers import OpenDisk, Tiers
from kvoffd.transfer.cuda.gpus import Gpus
from kvoffd.transfer.engine import TransferEngine
from kvoffd_proto import admin as a
from kvoffd_proto import codec
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode

logger = logging.getLogger(__name__)

if HANDLERS.keys() != m.EXCHANGES.keys():
    raise AssertionError(f"requests without a handler: {m.EXCHANGES.keys() - HANDLERS.keys()}")


class Service:
    """Sessions, requests and jobs of one daemon. Its arguments are explained where the parts that take them are."""

    def __init__(
        self,
        config: Config,
        cache: BlockCache,
        events: EventLog,
        engine: TransferEngine,
        gpus: Gpus,
        pool_address: int,
        host: Host,
        open_disk: OpenDisk,
        state: State,
        max_attached: int = 2**16,
    ) -> None:
        clock = host.now
        credit = credit_bytes(config, cache)
        jobs = Jobs(config, cache, pool_address, host, credit)
        self.context = Context(
            config,
            clock,
            clock(),
            cache,
            events,
            MemoryMapper(engine, host, gpus),
            Sessions(config, cache, jobs, host, max_attached),
            jobs,
            Scrubber(cache, clock),
            Recent(cache, clock),
            Recorder(cache, clock),
            HitRatioCurve(cache.slots.pool_bytes, clock),
            Tiers(config, cache, events, clock, open_disk, host.post, jobs.busy, state),
            state,
        )
        self.sessions = self.context.sessions
        state.is_there = lambda fingerprint: cache.find_namespace(fingerprint) is not None
        cache.watchers.append(self.context.curve.requested)
        if cache.inherited_blocks:
            self.context.background.add(self._take_over())
        self._half_stored_warned: WeakSet[Namespace] = WeakSet()

    # --- called by the sockets of requests --------------------------------------------------------

    def handle(self, sender: bytes, frame: bytes) -> None:
        """Answer one request frame. Never raises. Its reply is in the outbox then, unless it must wait."""
        context = self.context
        request_id, answer = self._answer(sender, frame)
        if isinstance(answer, Pending):
            answer.request_id, answer.sender = request_id, sender
            if not self._poll(answer):
                context.pending.append(answer)
        elif answer is not None:
            context.reply(sender, answer)

    def _poll(self, pending: Pending) -> bool:
        """Send the reply if it is there; False where it still waits."""
        context = self.context
        assert pending.session is not None
        if pending.session.ended:
            return True
        try:
            reply = pending.poll(context.clock() >= pending.until)
        except Exception as error:
            reply = context.refusal(pending.request_id, error)
        if reply is not None:
            context.reply(pending.sender, reply)
        return reply is not None

    def background(self) -> bool:
        """Do about a millisecond of what takes long: pins of ended leases, removals, blocks to take over.

        Returns whether there is more.
        """
        context = self.context
        more = context.cache.unpin_some()
        context.background.step()
        return more or len(context.background) > 0

    def _take_over(self) -> Steps:
        """Make blocks ready that an earlier daemon left, while engines are served."""
        context = self.context
        while context.cache.adopt_some():
            yield
        seconds = context.clock() - context.started_at
        logger.info("All of the earlier daemon's blocks are taken over %.3f s after the first ones.", seconds)
        return 0

    def flush(self) -> Outbox:
        """Take what is to be sent now."""
        context = self.context
        context.pending = [pending for pending in context.pending if not self._poll(pending)]
        for session in context.jobs.with_results.values():
            context.flush_completions(session)
        context.jobs.with_results.clear()
        context.outbox.publications += context.events.take()
        outbox, context.outbox = context.outbox, Outbox()
        return outbox

    def after_send(self) -> None:
        """Work that may wait until the replies are out: what lookups leave behind."""
        context = self.context
        for lease_id, seconds in context.lookups:
            if seconds is not None:
                context.lookup_times.observe(seconds)
                context.lookup_rate.add(1)
            context.cache.touch(lease_id)
        if context.lookups:
            context.cache.count_misses()
        context.lookups.clear()
        if (tiering := context.tiering) is not None:
            tiering.pump()

    def tick(self) -> None:
        """Periodic work: leases and copies that are overdue, blocks that stay half-stored."""
        context = self.context
        if context.cache.expire():
            self._warn_of_half_stored()
        context.memory.expire()
        context.recent.tick()
        context.curve.tick()
        forget_idle(context, FORGET_AFTER_S)
        context.tiers.tick()
        for fingerprint in context.tiering.take_voided() if context.tiering is not None else ():
            context.background.add(self._void(fingerprint))

    def _void(self, fingerprint: bytes) -> Steps:
        """Forget a namespace's blocks, since somebody reset it for all nodes."""
        context = self.context
        while (namespace := context.cache.find_namespace(fingerprint)) is not None and namespace.clearing:
            yield  # it may be forgotten then, and another one have its name
        context.state.raise_generation(fingerprint)
        if namespace is not None:
            yield from context.cache.reset(namespace)
            context.cache.set_generation(namespace, context.state.generation(fingerprint))
        elif context.tiering is not None:
            context.tiering.tier.remove_namespace(fingerprint)
        context.tiers.namespace_reset(fingerprint, everywhere=True)
        return 0

    def _warn_of_half_stored(self) -> None:
        """Say once for each namespace that blocks lack shards: its engine stores what nobody can ever read."""
        for namespace in self.context.cache.namespaces:
            if namespace.counters.half_stored_blocks and namespace not in self._half_stored_warned:
                self._half_stored_warned.add(namespace)
                logger.warning(
                    "Blocks of the namespace %s were dropped, since not all of its %d ranks stored their shard in "
                    "time. A worker failed, or the engine's workers are on several nodes; stats count such blocks as "
                    "half_stored_blocks.",
                    namespace.label,
                    namespace.world_size,
                )

    def _too_long(self, frame_bytes: int) -> KvoffdError:
        most = self.context.config.limits.max_frame_bytes
        return KvoffdError(
            f"The frame has {frame_bytes} bytes; {most} are allowed. Send it in parts.", ErrorCode.TOO_LARGE
        )

    def _answer(self, sender: bytes, frame: bytes) -> tuple[int, Answer]:
        """The request's number and what its handler returned."""
        context = self.context
        context.requests += 1
        request_id = 0
        try:
            if len(frame) > context.config.limits.max_frame_bytes:
                raise self._too_long(len(frame))
            try:
                request = codec.decode_request(frame)
            except codec.CodecError as error:
                request_id = codec.request_id_of(frame)
                raise KvoffdError(f"The frame is not a request: {error}.", ErrorCode.MALFORMED) from error
            request_id = request.request_id
            if self.sessions.has_departed(sender):
                # Its last message crossed the end of the lifeline: nothing is wrong.
                return request_id, m.Error(request_id, context.epoch, ErrorCode.BAD_TOKEN, ErrorCode.BAD_TOKEN.sentence)
            return request_id, self._dispatch(request, self.sessions.by_route.get(sender))
        except Exception as error:
            return request_id, context.refusal(request_id, error)

    def _dispatch(self, request: m.AnyRequest, session: Session | None) -> Answer:
        if session is None and isinstance(request, a.Health):
            return health_reply(self.context, request)
        if session is None:
            raise KvoffdError.of(ErrorCode.BAD_TOKEN)
        session.last_request_at = self.context.clock()
        exchange, handler = HANDLERS[type(request)]
        if session.role is None and not isinstance(request, m.Hello):
            raise KvoffdError.of(ErrorCode.NO_HELLO)
        if session.role is not None and session.role not in exchange.roles:
            raise KvoffdError(
                f"{type(request).__name__} is for the role {' or '.join(sorted(exchange.roles))}, not {session.role}.",
                ErrorCode.WRONG_ROLE,
            )
        if sum(pending.session is session for pending in self.context.pending) >= MAX_PENDING:
            raise KvoffdError(
                f"{MAX_PENDING} requests of the session wait for their replies, its limit; wait for some.",
                ErrorCode.TOO_MANY,
            )
        answer = handler(self.context, session, request)
        if isinstance(answer, Pending):
            answer.session = session
        return answer
