"""A stand-in for the daemon that answers the wire wrongly, as one with bugs, of another version, or that hangs may."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle
from pathlib import Path

from kvoffd_proto import codec, lifeline
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode
from tests.kit.fake_daemon import Answer, FakeDaemon, Peer
from tests.kit.submitted import jobs_in
from tests.kit.waiting import wait_until

RANDOM = random.Random(7)


class HostileDaemon(FakeDaemon):
    """Says that it has every block, and fails every load. The functions below make it worse, each in its way."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.close()  # its own directory
        self.directory = directory

    def begin(self, spoil: Callable[[HostileDaemon], None]) -> None:
        """Start it, with nothing wrong but this, and wait until the engine has registered its memory."""
        self.answers = {m.Submit: self.fail_loads}
        spoil(self)
        self.start()
        wait_until(lambda: {one.role for one in self.seen(m.Hello)} >= {m.Role.SCHEDULER, m.Role.WORKER})
        wait_until(lambda: self.seen(m.Register))

    @property
    def asked(self) -> int:
        """Lookups that came."""
        return len(self.seen(m.Lookup))

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


def wrong_states(daemon: HostileDaemon) -> None:
    """Lookups are answered by too many states, by states of too few groups, and by states that there are not."""
    wrong: Iterator[Callable[[bytes], list[bytes]]] = cycle(
        [lambda one: [one * 2], lambda one: [], lambda one: [bytes(RANDOM.randrange(256) for _ in one)]]
    )

    def answer(request: m.AnyRequest, peer: Peer) -> Answer:
        assert isinstance(request, m.Lookup)
        (group,) = request.groups
        states = next(wrong)(bytes([m.READY]) * (len(group.keys) // 32))
        return m.LookupReply(request.request_id, 5, states, 2**63 - 1, 2**63 - 1, 2**63 - 1)

    daemon.answers[m.Lookup] = answer


def noise(daemon: HostileDaemon) -> None:
    """Requests of a session that is open get bytes that are no message."""
    nested = b"\x91" * 100_000
    junk = [b"", b"\xc1", RANDOM.randbytes(5000), nested, b"\xdd\xff\xff\xff\xff", codec.encode(m.Done(1, 1))[:-1]]
    for kind in (m.Lookup, m.Submit, m.Results, m.Release):
        daemon.answers[kind] = lambda _, __: RANDOM.choice(junk)


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


def endless_loads(daemon: HostileDaemon) -> None:
    """Jobs never end, and the daemon says that they run."""
    daemon.answers[m.Submit] = lambda *_: None
    daemon.answers[m.Results] = lambda request, peer: m.ResultsReply(
        request.request_id, [], [job.job_id for job in daemon.seen_jobs(loads=True)]
    )
