"""The daemon's core under messages that look right, in any order, from several sessions at once.

No message may make it raise, every message has one reply or is an accepted job, a refused one changes nothing, and
when all sessions have ended nothing is held.
"""

from __future__ import annotations

import os
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import cache
from typing import cast

from kvoffd.config import Config, Limits
from kvoffd.errors import KvoffdError
from kvoffd.server.persistence import State, StateFile
from kvoffd.server.sessions import Peer, Session
from kvoffd.system.mappings import MappedSegment, close_segments
from kvoffd.transfer.engine import CopyEngine, CopyStats, Transfer
from kvoffd.transfer.plan import Direction, Outcome
from kvoffd_client.jobs import Job, submit_of
from kvoffd_proto import admin as a
from kvoffd_proto import codec, lifeline
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import PROTOCOL_VERSION, MemfdHandle, PageRef, TensorLayout
from tests.fuzz.choices import Choices
from tests.fuzz.requests import BLOCKS, KEY_BYTES, NAMES, NAMESPACES, PAGE, WORLD, Requests
from tests.fuzz.trees import bend
from tests.kit.slot_cache import check_invariants
from tests.sim.parts import make_pool, make_service

STEPS = 100
POOL_BYTES = 1 << 20


class LazyEngine(CopyEngine):
    """Copies nothing; a transfer ends when it is told to, and the first of the queue counts as running."""

    def __init__(self) -> None:
        super().__init__({})
        self.queue: deque[Transfer] = deque()
        self.ended: Counter[tuple[Direction, Outcome]] = Counter()

    def submit(self, transfer: Transfer) -> None:
        self.queue.append(transfer)

    def cancel(self, transfer: Transfer) -> bool:
        if transfer not in self.queue or transfer is self.queue[0]:
            return False
        self.queue.remove(transfer)
        transfer.on_done(transfer, Outcome.CANCELLED)
        return True

    def end_first(self, outcome: Outcome) -> None:
        """End the first transfer, as a copy thread does."""
        if self.queue:
            transfer = self.queue.popleft()
            outcome = transfer.ending or outcome
            self.ended[transfer.direction, outcome] += 1
            transfer.on_done(transfer, outcome)

    def stats(self, direction: Direction) -> CopyStats:
        return CopyStats()

    def close(self, timeout_s: float) -> bool:
        return True


class FakeLifeline:
    """A lifeline that can be dead before its end is noticed."""

    def __init__(self) -> None:
        self.open = True

    def alive(self) -> bool:
        return self.open

    def close_descriptor(self, fd: int) -> None:
        os.close(fd)


class Segment(MappedSegment):
    """A mapping without memory."""

    def close(self) -> None:
        self._address = 0


class FuzzHost:
    """The service's ``Host``."""

    def __init__(self, harness: ServiceHarness, random_bytes: Callable[[int], bytes]) -> None:
        self._harness = harness
        self.random = random_bytes
        self.post = harness.done.append
        self.unmap = close_segments

    def now(self) -> float:
        return self._harness.now

    def map_memfd(self, fd: int, size_bytes: int) -> MappedSegment:
        os.fstat(fd)  # a closed one would be a bug of the service
        if size_bytes > BLOCKS * PAGE:
            raise KvoffdError("too large", ErrorCode.UNSAFE_SEGMENT)
        return Segment(1 << 40, size_bytes)


class ForgetfulFile(StateFile):
    """Has nothing written, at once."""

    is_saved, problem = True, ""  # type: ignore[assignment]

    def __init__(self) -> None:
        pass

    def save(self, content: bytes | Iterator[bytes]) -> None:
        pass


class ServiceHarness:
    """A service, its engine, and what happens to them."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.now = 100.0
        self.engine = LazyEngine()
        self.done: deque[Callable[[], None]] = deque()
        self.pool = make_pool(POOL_BYTES, None)
        config = Config(
            pool_bytes=POOL_BYTES, max_sessions=6, limits=Limits(
                max_jobs_in_flight=6, max_leases=3, max_keys_per_request=8,
                max_namespaces=2, max_segments=4, max_registrations=2, max_frame_bytes=65536,
            ),
        )  # fmt: skip
        rng = random.Random(1)
        host = FuzzHost(self, rng.randbytes)
        self.service = make_service(config, self.pool, None, self.engine, host, State(ForgetfulFile()))
        self.ended: list[bytes] = [lifeline.routing_id(bytes(m.TOKEN_BYTES))]
        """Routes of ended sessions, and one that was never given."""
        self.requests = Requests(choices, self.service)

    # --- what can happen ---------------------------------------------------------------------------

    def run(self) -> None:
        """Take ``STEPS`` random steps, and end all sessions."""
        try:
            if self.choices.byte() % 8:
                self.admit(m.Role.WORKER, NAMESPACES[0])
                self.admit(m.Role.SCHEDULER, NAMESPACES[0])
            for _ in range(STEPS):
                kind = self.choices.byte()
                if kind < 12 or not self.service.sessions:
                    self.connect()
                elif kind < 20:
                    self.hang_up()
                elif kind < 40:
                    self.attach()
                elif kind < 80:
                    self.end_transfer()
                elif kind < 88:
                    self.now += self.choices.of((0.1, 5.0, 40.0, 100.0))
                    self.service.tick()
                elif kind < 96:
                    self.load()
                else:
                    self.send(kind)
            self.finish()
        finally:
            for session in self.service.sessions:
                for fd in session.segments.values():
                    session.lifeline.close_descriptor(fd)
            self.pool.close()

    def connect(self) -> None:
        """Open a session, mostly with namespace and registration."""
        kind = self.choices.byte()
        role = (m.Role.WORKER, m.Role.SCHEDULER, m.Role.WORKER, m.Role.ADMIN)[kind % 4]
        self.admit(role, NAMESPACES[kind % 16 == 0], (kind // 32, 3)[kind >= 96], kind // 8)

    def admit(self, role: m.Role, space: bytes, stages: int = 3, rank: int = 0) -> None:
        """A session: said Hello from 1 stage on, in a namespace from 2 on, a worker's memory registered with 3."""
        try:
            session = self.service.sessions.open(FakeLifeline(), Peer(1, 1, 1))
        except KvoffdError:
            return
        if stages >= 1:
            self.handle(session.route, m.Hello(1, PROTOCOL_VERSION, role, "n", "s"))
        if stages >= 2 and role is not m.Role.ADMIN:
            self.handle(session.route, self.requests.open(space))
        if stages >= 3 and role is m.Role.WORKER and space in session.namespaces:
            self.service.sessions.attach(session, 0, os.dup(_null()))
            groups = [[PageRef(0, PAGE)]] * len(self.service.cache.namespace(space).groups)
            sound = (MemfdHandle(0, BLOCKS * PAGE), TensorLayout(0, 0, PAGE, BLOCKS))
            register = m.Register(1, space, NAMES[0], rank % WORLD[space], 1, [sound[0]], [sound[1]], groups)
            self.handle(session.route, register)

    def session(self) -> Session:
        return self.choices.of(list(self.service.sessions))

    def hang_up(self) -> None:
        session = self.session()
        cast(FakeLifeline, session.lifeline).open = False
        if self.choices.byte() % 2:  # else the daemon has not noticed yet
            self.ended.append(session.route)
            self.service.sessions.end(session, lambda: None)

    def attach(self) -> None:
        session, fd = self.session(), os.dup(_null())
        try:
            self.service.sessions.attach(session, self.choices.byte() % 6, fd)
        except KvoffdError:
            os.close(fd)

    def end_transfer(self) -> None:
        self.engine.end_first(self.choices.of((Outcome.DONE, Outcome.DONE, Outcome.FAILED, Outcome.DEADLINE)))
        self.take_done()

    def load(self) -> None:
        """A worker loads what somebody has a lease on."""
        workers = [session for session in self.service.sessions if session.registrations]
        leases = list(self.service.cache.leases)
        if workers and leases:
            worker, lease_id = self.choices.of(workers), self.choices.of(leases)
            name = self.choices.of(list(worker.registrations))
            if parts := self.requests.leased(lease_id):
                load = Job(8 + self.choices.byte() % 8, parts, lease_id)
                self.handle(worker.route, submit_of(1, name, KEY_BYTES, [load]))

    def take_done(self) -> None:
        while self.done:
            self.done.popleft()()
        self.service.outgoing()

    def work_off(self) -> None:
        while self.service.background():
            pass

    # --- messages ----------------------------------------------------------------------------------

    def send(self, kind: int) -> None:
        session = self.session()
        route = self.choices.of(self.ended) if kind % 32 == 0 else session.route
        frame = codec.encode(self.requests.make(session))
        self.handle_frame(route, bend(self.choices, frame) if kind % 16 == 1 else frame)

    def handle(self, route: bytes, message: m.AnyRequest) -> None:
        self.handle_frame(route, codec.encode(message))

    def handle_frame(self, route: bytes, frame: bytes) -> None:
        """Check that a frame has one reply or is an accepted job, and that a refusal changes nothing."""
        service = self.service
        self.take_done()
        self.work_off()
        before, jobs = self.state(), self._jobs()
        service.handle(route, frame)
        self.work_off()
        replies = [codec.decode_reply(reply) for _, reply in service.outgoing()[1]]
        after, accepted = self.state(), self._jobs() > jobs
        service.after_send()
        try:
            message = codec.decode_request(frame)
        except codec.CODEC_ERRORS:
            (reply,) = replies
            assert isinstance(reply, m.Error)
            assert reply.code is ErrorCode.MALFORMED
            assert before == after, (frame, before, after)
            return
        if not replies:
            later = isinstance(message, m.Unregister) or message.request_id == 0  # for whose reply nobody waits
            empty = isinstance(message, m.Submit) and not (message.stores.job_ids or message.loads.job_ids)
            assert later or empty or (isinstance(message, m.Submit) and accepted), message
            return
        (reply,) = replies
        assert reply.request_id == message.request_id
        if isinstance(reply, m.Error):
            assert reply.code is not ErrorCode.INTERNAL, (message, reply)
            assert before == after, (message, reply, before, after)
            assert route not in self.ended or reply.code is ErrorCode.BAD_TOKEN
        else:
            assert isinstance(message, a.Health) or route not in self.ended, message

    def _jobs(self) -> int:
        """Jobs that were accepted, but for those whose session ended before they did."""
        ended = sum(counters.jobs for counters in self.service.jobs.counters.values())
        return ended + sum(len(session.jobs) for session in self.service.sessions)

    def state(self) -> tuple[object, ...]:
        cache = self.service.cache
        sessions = tuple(  # without their completions: what a message acknowledges has arrived, whatever else it says
            (one.id, one.role, len(one.jobs), one.store_bytes, *map(len, _held(one))) for one in self.service.sessions
        )
        leases = tuple((lease.lease_id, lease.deadline) for lease in cache.leases.values())
        return cache.usage, leases, sessions, len(cache.namespaces), len(self.engine.queue)

    def finish(self) -> None:
        """End all sessions and transfers, and check that nothing is held."""
        check_invariants(self.service.cache)
        for session in list(self.service.sessions):
            cast(FakeLifeline, session.lifeline).open = False
            self.service.sessions.end(session, lambda: None)
        while self.engine.queue or self.done:
            self.end_transfer()
        self.now += 1000
        self.service.tick()
        cache = self.service.cache
        check_invariants(cache)
        for namespace in cache.namespaces.values():
            cache.reset(namespace)
        self.work_off()
        check_invariants(cache)
        usage = cache.usage
        assert usage.pinned == usage.dropped == usage.writing == 0, usage
        assert not len(cache.leases)
        assert not self.service.jobs.unfinished
        assert usage.free == POOL_BYTES, usage


def _held(session: Session) -> tuple[set[bytes], dict[int, int], list[bytes]]:
    return session.namespaces, session.segments, list(session.registrations)


@cache
def _null() -> int:
    return os.open(os.devnull, os.O_RDONLY)


def service(data: bytes) -> None:
    """Run the service on one input."""
    ServiceHarness(Choices(data)).run()
