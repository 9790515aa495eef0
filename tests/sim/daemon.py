"""The daemon: the real core, on simulated sockets, in a process that can die at any event."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast
from zlib import crc32

import numpy as np

from kvoffd.cache.cache import Cache
from kvoffd.cache.states import READY
from kvoffd.cache.tickets import StorePart
from kvoffd.config import Config
from kvoffd.errors import KvoffdError
from kvoffd.pool.pool import Pool
from kvoffd.server.engine_memory import STUCK_AFTER_S
from kvoffd.server.events import EventLog
from kvoffd.server.jobs import JobCopy
from kvoffd.server.persistence import State
from kvoffd.server.session import ClientProcess
from kvoffd.server.sockets import AFTER_REPLY_S
from kvoffd.system.mappings import HostMapping, close_segments
from kvoffd.tiering import WriteMode
from kvoffd.transfer.engine import OVERDUE_GRACE_S
from kvoffd.transfer.plan import CopyEnd, Direction
from kvoffd_proto import admin as a
from kvoffd_proto import codec, lifeline
from kvoffd_proto import messages as m
from kvoffd_proto import stats as s
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import PROTOCOL_VERSION
from tests.sim.audit import Audit, Readable, blocks_of, watch_narrow, watch_quotas
from tests.sim.borrower import SimBorrower
from tests.sim.clock import Broken, Injected, Process
from tests.sim.disk import Device, SimDisk
from tests.sim.memory import AddressSpace, Segment
from tests.sim.network import Dealer, Lifeline
from tests.sim.parts import (
    SavedPool,
    make_config,
    make_pool,
    make_service,
    make_state,
    ready_records,
    save,
    save_copy,
    with_tiers,
)
from tests.sim.pool import WatchedPool, as_bytes, records_of
from tests.sim.promotions import PromotionWatch
from tests.sim.shared import SimShared
from tests.sim.tiers import SimTiers
from tests.sim.transfer_engine import SimTransferEngine

if TYPE_CHECKING:
    from tests.sim.world import World

TICK_S = 0.25
HELLO_DEADLINE_S = 10.0
BORROWED_PART = 0.2
"""Part of the daemons' lives in which a peer borrows blocks."""
CLOSE_S = 60.0
"""For a disk to be closed, of the test's own time: nothing is waited for."""
UNTRACED = (s.StatsReply, a.HealthReply)
"""Replies with figures of the test's real process, which differ from run to run."""


def job_end_bound_s(config: Config) -> float:
    """Seconds until every job has its result.

    A store is answered a grace after its deadline; for a load that hangs the daemon ends some seconds later.
    """
    return config.limits.job_deadline_s + OVERDUE_GRACE_S + STUCK_AFTER_S + 4 * TICK_S


class FailureLog(logging.Handler):
    """Keeps what the daemon logged as its own failure."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.failure: BaseException | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and not isinstance(record.exc_info[1], Injected):
            self.failure = record.exc_info[1]


class SimDaemon:
    """One life of the daemon."""

    def __init__(self, world: World, life: int, saved: SavedPool | None) -> None:
        self.world = world
        self.clock = world.clock
        self.process = Process(world.clock, f"daemon {life}")
        self._segments: dict[int, Segment] = {}
        """By the real descriptor that stands for it: the daemon closes it, and a leak shows."""
        self._rng = world.scenario.rng(f"daemon {life}")
        self.config = make_config(world.scenario.rng("config"))
        self.space = AddressSpace()
        self._pool: Pool = make_pool(world.pool_bytes, saved)
        data = as_bytes(self._pool.mapping.address, self._pool.pool_bytes)
        self.pool = WatchedPool(self._pool, data, world.content_of)
        self.pool.mapping = self.space.map(data)
        self.engine = SimTransferEngine(self, world.scenario.rng(f"copies {life}"))
        self.pool.before_write = self._maybe_die
        self.torn: SavedPool | None = None
        """The pool as it was when the process was killed in the middle of something."""
        state = make_state(world.written_state, self.process, world.scenario.rng(f"state {life}"))
        self.tiers: SimTiers | None = None
        make_tiers = None if world.device is None else partial(self._make_tiers, life, world.device, state)
        self.service = make_service(self.config, self._pool, self.pool, self.engine, self, state, make_tiers)
        cache, steps = self.service.cache, world.scenario.rng(f"steps {life}")
        cache.swept_at_once, cache.leases.ended_at_once = steps.choice((1, 3, 1024)), steps.choice((1, 3, 1024))
        self._more_at_once = self._rng.choice((0.0, 0.01, 0.2))
        """Seconds between two steps of background work."""
        jobs = self.service.jobs
        self._job_finished = jobs.finished
        self._in_queue = False
        jobs.finished = self._finished  # type: ignore[method-assign]
        self.promotions = PromotionWatch(self.service, self.world.faults.counts)
        self.pool.before_drop = self.promotions.dropped
        self._open_tiers(life)
        watch_quotas(self.service.cache)
        watch_narrow(self.service.cache)
        self.audit = Audit(self.service)
        self.lifelines: list[Lifeline] = []
        self._streams: list[Lifeline] = []
        self._dealers: dict[bytes, Dealer] = {}
        self._removals: dict[tuple[bytes, int], Callable[[], None]] = {}
        """By dealer and request: checks that removed blocks stay away for good."""
        self._work_due = False
        self._session_of_route: dict[bytes, int] = {}
        self._flush_due = self._serve_scheduled = False
        self._turns = 0
        self.clock.note(f"daemon starts, life {life}, pool {world.pool_bytes}")
        if (rng := world.scenario.rng(f"borrower {life}")).random() < BORROWED_PART and not world.faults.calm:
            SimBorrower(self, rng)
        self.process.after(TICK_S, self._tick)
        self._schedule_work()

    def _schedule_work(self) -> None:
        if not self._work_due:
            self._work_due = True
            self.process.after(self._rng.uniform(0.0, self._more_at_once), self._work)

    def _work(self) -> None:
        """As the sockets do after they have served who waits."""
        self._work_due = False
        if self.service.background():
            self._schedule_work()
        if self.service.waiting or self.service.events.pending:
            self.schedule_flush()

    def _make_tiers(
        self, life: int, device: Device, state: State, cache: Cache, events: EventLog, pool: Pool
    ) -> SimTiers:
        rng = self.world.scenario.rng(f"disk {life}")
        disk = SimDisk(device, self, rng)
        config = with_tiers(self.config, rng)
        if self.world.promotes:
            config = replace(config, disk_write=WriteMode.ALWAYS.value)
        self.tiers = SimTiers(config, disk, self.now, self.post, state, cache, events, pool)
        return self.tiers

    def _open_tiers(self, life: int) -> None:
        if (tiers := self.tiers) is None:
            return
        tiers.open(self.service)
        disk, objects = tiers.disk, self.world.shared
        drained = self.world.faults.calm
        promotes = self.world.promotes
        if objects is not None:
            rng = self.world.scenario.rng(f"shared {life}")
            drained = drained or rng.random() < (0.2 if promotes else 0.7)  # or the disk has most of what is asked for
            tiers.share_one(SimShared(objects, self, rng, tiers))
        if drained:
            disk.takes_writes = False

    # --- lifelines, as LifelineServer does it ------------------------------------------------------

    def accept(self, stream: Lifeline) -> None:
        try:
            session = self.service.sessions.open(stream, ClientProcess(1, 1, 1))
        except KvoffdError as refusal:
            stream.to_client.send(lifeline.Refused(refusal.code, refusal.message))
            stream.close()
            return
        stream.session = session
        self._session_of_route[session.route] = session.id
        self.lifelines.append(stream)
        self._streams = [one for one in self._streams if one.server_open] + [stream]
        stream.to_client.send(
            lifeline.Greeting(PROTOCOL_VERSION, self.service.sessions.epoch, session.id, session.token)
        )

    def lifeline_frame(self, stream: Lifeline, frame: tuple[lifeline.Attach, Segment] | None) -> None:
        session = stream.session
        if session is None or not stream.server_open or session.ended:
            return
        if frame is None:
            self._end(stream)
            return
        message, segment = frame
        fd = os.open(os.devnull, os.O_RDONLY)
        self._segments[fd] = segment
        try:
            self.service.sessions.attach(session, message.segment_id, fd)
        except KvoffdError as refusal:
            os.close(fd)
            stream.to_client.send(lifeline.AttachRefused(message.segment_id, refusal.code, refusal.message))
        else:
            stream.to_client.send(lifeline.Attached(message.segment_id))

    def _end(self, stream: Lifeline) -> None:
        session = stream.session
        self.clock.note(f"session {session.id} ends")
        self.lifelines.remove(stream)

        def drained() -> None:
            if any(number == session.id for number, _ in self.audit.unfinished) and self.service.jobs.of(session):
                raise Broken("a session ended while it had jobs")
            stream.close()

        self.service.sessions.end(session, drained)
        self._schedule_work()
        self.schedule_flush()

    # --- the jobs socket, as Transport does it ------------------------------------------------------

    def receive(self, dealer: Dealer, frames: Sequence[bytes]) -> None:
        self._dealers[dealer.name] = dealer
        self._handle(dealer, frames[0] if len(frames) == 1 else b"")
        if self._flush_due:
            return
        if self.world.faults.hit("late_flush"):  # as when more requests wait in the socket
            self._flush_due = True
            self.process.after(self._rng.uniform(0.0, 0.01), self._flush_now)
        else:
            self.flush()

    def _handle(self, dealer: Dealer, frame: bytes) -> None:
        service = self.service
        try:
            request = codec.decode_request(frame)
        except codec.CODEC_ERRORS:
            request = None
        wants_reply = request is None or (request.request_id != m.NO_REPLY and not isinstance(request, m.Submit))
        before, begun = self._holdings(), self.tiers.disk.file.begun if self.tiers is not None else 0
        sent, waiting = len(service.replies), service.waiting
        service.handle(dealer.name, frame)
        self._schedule_work()
        replies = [codec.decode_reply(reply) for _, reply in service.replies[sent:]]
        self.clock.note(
            f"{dealer.name.hex()} {type(request).__name__} {crc32(frame)} {[type(reply).__name__ for reply in replies]}"
        )
        if self.world.log.failure is not None:
            raise Broken(f"{type(request).__name__} failed inside the daemon: {self.world.log.failure!r}")
        refused = any(isinstance(reply, m.Error) for reply in replies)
        if refused and all(reply.code is not ErrorCode.INTERNAL for reply in replies if isinstance(reply, m.Error)):
            after = self._holdings()
            if before != after:
                raise Broken(f"a refused {type(request).__name__} changed something: {before} became {after}")
        if len(replies) == 1:
            reply = replies[0]
            stranger = dealer.name not in self._session_of_route
            # All that may connect may ask for the daemon's health.
            if stranger and not isinstance(request, a.Health | None) and not isinstance(reply, m.Error):
                raise Broken(f"a {type(request).__name__} with a route of nobody was served")
            if request is None and not isinstance(reply, m.Error):
                raise Broken("garbage was not refused")
        elif replies:
            raise Broken(f"{len(replies)} replies to one {type(request).__name__}")
        elif wants_reply and service.waiting == waiting:
            raise Broken(f"no reply to a {type(request).__name__}")
        if request is not None and not refused:
            self._watch_removal(dealer.name, request, begun)
        if request is not None and dealer.name in self._session_of_route:
            self.audit.served(self._session_of_route[dealer.name], request, replies)
        if self.tiers is not None and isinstance(request, m.Lookup):
            for reply in replies:
                if isinstance(reply, m.LookupReply):
                    self.promotions.answered(request, reply, self.tiers)

    def _watch_removal(self, sender: bytes, request: m.AnyRequest, begun: int) -> None:
        """What a request has removed is looked at before others are served. ``begun``: writes to the disk before it."""
        tiers = self.tiers
        if tiers is None or not isinstance(request, m.Invalidate | m.Reset | a.Clear):
            return
        last = begun if isinstance(request, a.Clear) and request.namespace is None else tiers.disk.file.begun
        self._removals[sender, request.request_id] = tiers.dropped(request, last)

    def _removal_answered(self, sender: bytes, reply: m.AnyReply) -> None:
        """What a request removed must not come back once that was said."""
        for_good = self._removals.pop((sender, reply.request_id), None)
        if for_good is not None and isinstance(reply, m.Done):
            for_good()
            self.world.faults.counts["disk_kept"] += 1

    def _holdings(self) -> tuple[object, ...]:
        """What a refused request must leave as it is."""
        service = self.service
        sessions = [
            (one.id, set(one.attached), set(one.registrations), set(one.namespaces)) for one in service.sessions
        ]
        return service.cache.life.usage, len(service.cache.leases.by_id), service.jobs.unfinished, sessions

    def flush(self) -> None:
        if self.torn is not None:
            return
        publications, replies = self.service.outgoing()
        for topic, sequence, payload in publications:
            self.audit.publication(topic, sequence, payload)
            self.clock.note(f"publish {topic[:12]!r} {int.from_bytes(sequence, 'big')} {crc32(payload)}")
            self.world.network.publish((topic, sequence, payload))
        for sender, frame in replies:
            reply = codec.decode_reply(frame)
            crc = 0 if isinstance(reply, UNTRACED) else crc32(frame)
            self.clock.note(f"reply {sender.hex()} {type(reply).__name__} {crc}")
            self._removal_answered(sender, reply)
            self._dealers[sender].reply((frame,))
        if self.service.urgent or not replies:
            self.service.after_send()
        elif not self._serve_scheduled:
            self._serve_scheduled = True
            self.process.after(AFTER_REPLY_S, self._rest)
        if self.service.events.pending:  # what came up from disk took others' place
            self.schedule_flush()
        else:
            self.check()

    def schedule_flush(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            self.process.after(self._rng.choice((0.0, 0.0, 0.0003)), self._flush_now)

    def _flush_now(self) -> None:
        self._flush_due = False
        self.flush()

    def _rest(self) -> None:
        self._serve_scheduled = False
        self.flush()

    # --- copies and time: those without an underscore are ``Host``'s ---------------------------------

    def now(self) -> float:
        return self.clock.now

    def random(self, count: int) -> bytes:
        return self._rng.randbytes(count)

    def unmap(self, segments: Sequence[HostMapping], then: Callable[[], None]) -> None:
        close_segments(segments, then)

    def post_of_tier(self, call: Callable[[], None]) -> None:
        """What a tier has its threads post."""

        def turn() -> None:
            call()
            self.schedule_flush()

        self.process.after(0.0, turn)

    def post(self, call: Callable[[], None]) -> None:
        delay = self._rng.uniform(0.0, 0.0005)
        if self.world.faults.hit("slow_post"):
            delay = self._rng.uniform(0.005, 0.1)
        self.process.after(delay, lambda: self._work_off(call))

    def _work_off(self, call: Callable[[], None]) -> None:
        self._in_queue = True
        try:
            call()
        finally:
            self._in_queue = False

    def _finished(self, job: JobCopy, outcome: CopyEnd) -> None:
        if not self._in_queue:  # it had nothing to copy and ends while it is accepted
            self._job_finished(job, outcome)
            return
        stream = cast(Lifeline, job.session.lifeline)
        held = stream.server_open and (stream.client_open or stream.to_daemon.under_way > 1)
        commits = self.pool.commits
        self.clock.note(f"finished {job.session.id}/{list(job.ids)} {job.session.name} {outcome.value}")
        self._job_finished(job, outcome)
        if job.direction is Direction.STORE and self.pool.commits > commits:
            if not held:
                raise Broken("a store was committed although its client had closed the lifeline")
            if outcome is not CopyEnd.DONE:
                raise Broken("a store was committed that did not copy everything")
        self.schedule_flush()

    def map_memfd(self, fd: int, size: int) -> HostMapping:
        segment = self._segments[fd]
        if size != segment.data.size:
            raise KvoffdError("The segment has another size.", ErrorCode.UNSAFE_SEGMENT)
        return cast(HostMapping, self.space.map(segment.data, segment))

    def _tick(self) -> None:
        self.service.tick()
        if self.tiers is not None:
            self.tiers.check_followed()
            for source in self.tiers.tiering.sources:
                self.promotions.check_given_up(source)
        if self.service.mapper.copy_hangs:
            self.clock.note("daemon ends itself: a copy hangs")
            self.world.faults.counts["ended_itself"] += 1
            self.die()
            return
        for stream in list(self.lifelines):
            session = stream.session
            if session is not None and session.role is None and session.opened_at < self.clock.now - HELLO_DEADLINE_S:
                self._end(stream)
        self._schedule_work()
        self.schedule_flush()
        self.process.after(TICK_S, self._tick)

    def evict_all(self) -> None:
        """Evict every block that may be evicted: first by a store that takes all the room there is, then the rest."""
        cache = self.service.cache
        if spaces := [(space, sizes[0]) for space in cache.namespaces.values() if (sizes := space.shard_bytes[0])]:
            space, length = self._rng.choice(spaces)
            count = self.pool.pool_bytes // cache.slots.slot_size(length)
            keys = b"".join(number.to_bytes(space.key_bytes, "big") for number in range(count))
            cache.stores.abort(cache.stores.begin(space, 0, [StorePart(0, keys)]))
        loose = [block for batch in cache.order.candidates() for block in batch if not cache.blocks.pins[block]]
        cache.life.evict(np.array(loose, np.uint32))
        self.schedule_flush()

    # --- invariants --------------------------------------------------------------------------------

    def check(self) -> None:
        """Check the jobs after every turn, and everything each ``check_every`` turns."""
        self.audit.check_jobs()
        self._turns += 1
        if self._turns % self.world.scenario.check_every == 0:
            self.check_all()

    def check_all(self) -> None:
        self.audit.check_cache()
        self.audit.check_events(self.tiers)
        in_use = {segment for session in self.service.sessions for segment in session.attached.values()}
        if len(in_use) > len(self.service.sessions) * self.config.limits.max_segments:
            raise Broken("more descriptors than segments are allowed")

    def check_at_rest(self) -> None:
        """Check that nothing is held once no session and no job is left."""
        self.flush()
        self.check_all()
        usage = self.service.cache.life.usage
        if usage.pinned or usage.dropped or self.service.cache.leases.by_id:
            raise Broken(f"no session is left but something is held: {usage}")
        if self.service.cache.order.retentions.retained_bytes:
            raise Broken("blocks are retained although no hint lasts as long as a session that is silent")
        if self.service.jobs.unfinished or not self.engine.idle:
            raise Broken("no session is left but jobs run")
        if self.service.waiting:
            raise Broken("no session is left but requests wait for their replies")
        if self.space.mapped_segments():
            raise Broken("no session is left but engine memory is mapped")

    # --- the end -----------------------------------------------------------------------------------

    def stop(self) -> None:
        """SIGTERM: as ``Daemon._shut_down``."""
        self.clock.note("daemon stops")
        self.service.sessions.stopping = True
        deadline = self.clock.now + self.config.shutdown_deadline_s

        def wait_for_jobs() -> None:
            if self.service.jobs.unfinished and self.clock.now < deadline:
                self.process.after(0.01, wait_for_jobs)
                return
            if self.service.jobs.unfinished:
                self.service.jobs.abandon(self.service.jobs.running)
            self.process.after(0.2, self._exit)

        wait_for_jobs()

    def _exit(self) -> None:
        if self.torn is None and not self.service.tier_supervisor.close(CLOSE_S):
            raise Broken("the disk was not closed")
        self.flush()
        self.die()

    def _maybe_die(self) -> None:
        """Killed at this very instant: what follows in this event happens to nobody but this object."""
        if self.torn is None and self.world.faults.hit("torn"):
            self.clock.note("daemon is killed in the middle of a change")
            self.torn = save_copy(self._pool)

    def die(self) -> None:
        self.clock.note("daemon dies")
        self.process.alive = False
        if self.tiers is not None:
            self.tiers.disk.crash()
        for stream in self._streams:
            stream.close()
        for session in self.service.sessions:
            for fd in session.attached.values():
                session.lifeline.close_descriptor(fd)
        self._verify_table()
        self.pool.verify_ready()
        if self.torn is not None:
            saved, expected = self.torn, None
        else:
            saved, expected = save(self._pool), self.readable()
        self._pool.close()
        self.world.daemon_died(saved, expected)

    def readable(self) -> dict[bytes, Readable]:
        """For each namespace with blocks that are readable, these blocks."""
        return blocks_of(self.service.cache, self.service.cache.blocks.state == READY)

    def discard(self) -> None:
        """Close the pool, which the test's process would leak."""
        self.process.alive = False
        self._pool.close()

    def _verify_table(self) -> None:
        """What a successor finds must be whole, wherever this daemon died; and it must find what was ready."""
        records = ready_records(self._pool)
        for offset, owner, first_block, length in records:
            self.pool.verify(owner, offset, first_block, length)
        found, ready = {record[0] for record in records}, {record[0] for record in records_of(self.service.cache)}
        if found != ready:
            raise Broken(f"the slot table tells of {len(found)} slots, {len(ready)} are ready")
