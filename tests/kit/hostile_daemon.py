"""A stand-in for the daemon that answers the wire wrongly, in many ways."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count, cycle
from pathlib import Path

import msgspec

from kvoffd_client.transport import MAX_DESCRIPTORS
from kvoffd_proto import codec, events, lifeline
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode
from tests.kit.submitted import jobs_in

from .fake_daemon import LIMITS, Answer, FakeDaemon, Peer
from .waiting import wait_until

RANDOM = random.Random(7)
FOREIGN_JOBS = [0, 1, 2, 3, 2**62, 2**62 + 1, 2**63 - 1]


class HostileDaemon(FakeDaemon):
    """Says that it has every block, and fails every load. The functions below make it worse, each in its way."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.close()  # its own directory
        self.directory = directory

    def begin(self, spoil: Callable[[HostileDaemon], None]) -> None:
        """Start it, with nothing wrong but this."""
        self.answers = {m.Submit: self.fail_loads}
        self.requests.clear()
        self.kv_messages.clear()
        self.epoch += 1
        spoil(self)
        self.start()

    def wait_engine(self, *, registered: bool = True) -> None:
        """Until an engine's scheduler and worker have come, and its memory is registered."""
        wait_until(lambda: {one.role for one in self.seen(m.Hello)} >= {m.Role.SCHEDULER, m.Role.WORKER})
        wait_until(lambda: self.seen(m.Register) or not registered)

    @property
    def asked(self) -> int:
        """Lookups that came."""
        return len(self.seen(m.Lookup))

    @property
    def loads(self) -> int:
        """Loads that were asked for."""
        return len(self.seen_jobs(loads=True))

    def fail_loads(self, request: m.AnyRequest, peer: Peer) -> Answer:
        assert isinstance(request, m.Submit)
        for job in jobs_in(request):
            peer.jobs[job.job_id] = job
            self._finish(peer, job.job_id, job.lease_id is None)
        return None


def strange_failures(daemon: HostileDaemon) -> None:
    """Loads fail with keys that nobody has, of groups that there are not."""

    def answer(request: m.AnyRequest, peer: Peer) -> Answer:
        assert isinstance(request, m.Submit)
        codes = [None, *ErrorCode]
        keys = [m.GroupKeys(65535, b"12345"), m.GroupKeys(0, b""), m.GroupKeys(0, b"x" * 33), m.GroupKeys(7, bytes(64))]
        results = [
            m.JobResult(job.job_id, False, 2**63 - 1, float("inf"), RANDOM.choice(codes), keys, keys)
            for job in jobs_in(request)
        ]
        daemon.complete(peer, [*results, *results])
        return None

    daemon.answers[m.Submit] = answer


def others_jobs(daemon: HostileDaemon) -> None:
    """Completions of jobs that were never sent, of other sessions, in numbers that jump, again and again."""

    def answer(request: m.AnyRequest, peer: Peer) -> Answer:
        foreign = [m.JobResult(job_id, True, 1, 0.0) for job_id in FOREIGN_JOBS]
        ours = {job.job_id for one in daemon.requests if isinstance(one, m.Submit) for job in jobs_in(one)}
        daemon.complete(peer, [one for one in foreign if one.job_id not in ours])
        daemon.fail_loads(request, peer)
        daemon.complete(peer, [], ahead=2**40)
        return None

    daemon.answers[m.Submit] = answer


def wrong_states(daemon: HostileDaemon) -> None:
    """Lookups are answered by too many states, by states of too few groups, and by states that there are not."""
    wrong: Iterator[Callable[[bytes], list[bytes]]] = cycle(
        [
            lambda one: [one * 2],
            lambda one: [],
            lambda one: [bytes(RANDOM.randrange(256) for _ in one)],
        ]
    )

    def answer(request: m.AnyRequest, peer: Peer) -> Answer:
        assert isinstance(request, m.Lookup)
        (group,) = request.groups
        states = next(wrong)(bytes([m.READY]) * (len(group.keys) // 32))
        return m.LookupReply(request.request_id, 5, states, 2**63 - 1, 2**63 - 1, 2**63 - 1)

    daemon.answers[m.Lookup] = answer


def others_replies(daemon: HostileDaemon) -> None:
    """Every request of a session that is open gets the answer to another one."""
    kinds = [m.Lookup, m.Submit, m.Results, m.Release, m.Cancel]
    answers = [
        lambda head: m.Done(*head, 2**63 - 1),
        lambda head: m.CancelReply(*head, [1], [2**62]),
        lambda head: m.LookupReply(*head, 1, [], 1, 1),
        lambda head: m.ResultsReply(*head, [], []),
        lambda head: m.Error(*head, RANDOM.choice(list(ErrorCode)), "\x1b[2J\n" * 100),
    ]

    def answer(request: m.AnyRequest, _: Peer) -> Answer:
        return RANDOM.choice(answers)((RANDOM.choice([request.request_id, 1, 2**62]),))

    for kind in kinds:
        daemon.answers[kind] = answer


def noise(daemon: HostileDaemon) -> None:
    """Requests of a session that is open get bytes that are no message."""
    nested = b"\x91" * 100_000
    junk = [b"", b"\xc1", RANDOM.randbytes(5000), nested, b"\xdd\xff\xff\xff\xff", codec.encode(m.Done(1, 1))[:-1]]
    for kind in (m.Lookup, m.Submit, m.Results, m.Release):
        daemon.answers[kind] = lambda _, __: RANDOM.choice(junk)


def strange_events(daemon: HostileDaemon) -> None:
    """KV events that name blocks twice, that were never stored, of groups that there are not, and no events at all."""
    names = [b"k" * 32, b"k" * 32, b"", b"x" * 1000]
    numbers = count(0)

    def answer(request: m.AnyRequest, peer: Peer) -> Answer:
        assert isinstance(request, m.Lookup)
        batch: list[events.KvEvent] = [
            events.BlockStored(names, 2**62, "CPU", 0),
            events.BlockStored(names, 3, "CPU", 0, names, b"12345"),
            events.BlockRemoved(names, "CPU", 0),
            events.BlockRemoved(names, "\ud800".encode("utf-8", "replace").decode(), 2**62),
            events.AllBlocksCleared(),
            events.BlockStored([], 0, "", 2**62),
        ]
        for fingerprint in {one.namespace for one in daemon.requests if isinstance(one, m.OpenNamespace)}:
            for payload in (codec.encode(events.EventBatch(0.0, batch)), b"\xc1", b"\x91" * 100_000):
                number = next(numbers)
                frames = (events.kv_topic(fingerprint), number.to_bytes(8, "big"), payload)
                daemon._events.send_multipart(frames)
        return daemon._default_answer(request, peer)

    daemon.answers[m.Lookup] = answer


def least_limits(daemon: HostileDaemon) -> None:
    """All limits are 1, and time is short."""

    def answer(request: m.AnyRequest, peer: Peer) -> Answer:
        welcome = daemon._default_answer(request, peer)
        assert isinstance(welcome, m.Welcome)
        limits = m.Limits(1 << 20, *[1] * (len(m.Limits.__struct_fields__) - 1))
        return msgspec.structs.replace(welcome, limits=limits, credit_bytes=2**63 - 1, lease_ttl_ms=1)

    daemon.answers[m.Hello] = answer


def no_frames(daemon: HostileDaemon) -> None:
    """No message of more than one byte is taken."""

    def answer(request: m.AnyRequest, peer: Peer) -> Answer:
        welcome = daemon._default_answer(request, peer)
        assert isinstance(welcome, m.Welcome)
        return msgspec.structs.replace(welcome, limits=msgspec.structs.replace(LIMITS, max_frame_bytes=1))

    daemon.answers[m.Hello] = answer


def silence(daemon: HostileDaemon) -> None:
    """Lookups and jobs get no answer."""
    for kind in (m.Lookup, m.Results):
        daemon.answers[kind] = lambda _, __: None


def lifeline_noise(daemon: HostileDaemon) -> None:
    """Frames of the lifeline that come out of turn, or are none."""
    frames = [
        lifeline.encode_frame(lifeline.Attached(2**62)),
        lifeline.encode_frame(lifeline.Greeting(m.PROTOCOL_VERSION, 1, 1, bytes(m.TOKEN_BYTES))),
        b"\xff" * 100,
        (10).to_bytes(4, "little") + b"\xc1" * 10,
        lifeline.encode_frame(lifeline.MemoryReleased()) * 50,
    ]

    def answer(request: m.AnyRequest, peer: Peer) -> Answer:
        with suppress(OSError):  # the client has gone
            peer.stream.send(RANDOM.choice(frames), socket.MSG_NOSIGNAL)
        return daemon._default_answer(request, peer)

    daemon.answers[m.Lookup] = answer


def descriptors(daemon: HostileDaemon) -> None:
    """The lifeline brings descriptors that nobody asked for."""
    released = lifeline.encode_frame(lifeline.MemoryReleased())
    opened = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def answer(request: m.AnyRequest, peer: Peer) -> Answer:
        with suppress(OSError):
            for _ in range(50):
                socket.send_fds(peer.stream, [released], [opened] * MAX_DESCRIPTORS, socket.MSG_NOSIGNAL)
        return daemon._default_answer(request, peer)

    daemon.answers[m.Lookup] = answer
    daemon.answers[m.Results] = answer


def endless_loads(daemon: HostileDaemon) -> None:
    """Jobs never end, and the daemon says that they run."""
    daemon.answers[m.Submit] = lambda *_: None
    daemon.answers[m.Results] = lambda request, peer: m.ResultsReply(
        request.request_id, [], [job.job_id for job in daemon.seen_jobs(loads=True)]
    )
