"""A client for tests that know the messages, with which it goes. Tests at the border use ``kit.wire``."""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path
from typing import Any

import zmq

from kvoffd_client import SharedMemory
from kvoffd_client.jobs import GroupTransfer, Job
from kvoffd_client.session import Closing
from kvoffd_proto import codec, lifeline
from kvoffd_proto import messages as m
from kvoffd_proto import stats as s
from kvoffd_proto.messages import PROTOCOL_VERSION, MemfdHandle, PageRef, TensorLayout
from kvoffd_proto.paths import SocketPaths

from .waiting import wait_until

TIMEOUT_S = 5.0
JOB_DEADLINE_S = 30.0

ZERO_TOKEN = bytes(m.TOKEN_BYTES)
NAMESPACE = bytes(range(32))


def key(number: int) -> bytes:
    """A 32-byte key."""
    return number.to_bytes(32, "big")


def keys(*numbers: int) -> bytes:
    """Several keys end to end."""
    return b"".join(map(key, numbers))


def ids(*numbers: int) -> bytes:
    """Block ids as the wire has them."""
    return b"".join(number.to_bytes(4, "little", signed=True) for number in numbers)


def store_of(job: int, blob: bytes, block_ids: bytes, first_block: int = 0, group: int = 0) -> Job:
    return Job(job, [GroupTransfer(group, blob, block_ids, first_block)])


def refusal_of(reply: m.AnyReply) -> m.Error:
    """What a refusal says."""
    assert isinstance(reply, m.Error), reply
    return reply


class WireClient(Closing):
    """One session, opened step by step."""

    def __init__(self, directory: Path, role: m.Role | None = m.Role.WORKER) -> None:
        self.paths = SocketPaths(directory)
        self.stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.stream.connect(str(self.paths.lifeline))  # waits its turn, where a timeout would make it fail
        self.stream.settimeout(TIMEOUT_S)
        self._buffer = lifeline.FrameBuffer()
        self._bodies: list[bytes] = []
        self.greeting = self.lifeline_frame()
        self._context = zmq.Context()
        self.jobs = self._context.socket(zmq.DEALER)
        self._ids = itertools.count(1)
        self.token = ZERO_TOKEN
        self.session_id = 0
        if isinstance(self.greeting, lifeline.Greeting):
            self.token = self.greeting.token
            self.session_id = self.greeting.session_id
        for option, value in ((zmq.LINGER, 0), (zmq.ROUTING_ID, lifeline.routing_id(self.token))):
            self.jobs.setsockopt(option, value)
        self.jobs.connect(f"ipc://{self.paths.jobs}")
        if role is not None:
            self.hello(role)

    # --- the lifeline --------------------------------------------------------------------------

    def lifeline_frame(self) -> lifeline.FromDaemon:
        while not self._bodies:
            data = self.stream.recv(4096)
            assert data, "the daemon closed the lifeline"
            self._bodies += self._buffer.feed(data)
        return lifeline.decode_from_daemon(self._bodies.pop(0))

    def attach(self, fd: int, segment_id: int) -> lifeline.FromDaemon:
        self.send_fds(lifeline.encode_frame(lifeline.Attach(segment_id)), [fd])
        return self.lifeline_frame()

    def send_fds(self, data: bytes, fds: list[int]) -> None:
        socket.send_fds(self.stream, [data], fds) if fds else self.stream.sendall(data)

    # --- requests ------------------------------------------------------------------------------

    def next_id(self) -> int:
        return next(self._ids)

    def raw(self, *frames: bytes) -> m.AnyReply:
        """Send frames as they are and return the next reply."""
        self.jobs.send_multipart(frames)
        return self.reply()

    def reply(self) -> m.AnyReply:
        assert self.jobs.poll(TIMEOUT_S * 1000), "the daemon did not reply"
        return codec.decode_reply(self.jobs.recv())

    def request(self, what: m.AnyRequest | type[m.AnyRequest], *fields: Any, **named: Any) -> m.AnyRequest:
        """A request of this kind with a new id; one that is made already as it is."""
        return what(self.next_id(), *fields, **named) if isinstance(what, type) else what

    def ask(self, what: m.AnyRequest | type[m.AnyRequest], *fields: Any, **named: Any) -> Any:
        """Send a ``request``; its reply, of the type that is declared at it."""
        request = self.request(what, *fields, **named)
        reply = self.raw(codec.encode(request))
        assert isinstance(reply, m.EXCHANGES[type(request)].answer), reply
        assert reply.request_id == request.request_id
        return reply

    def refused(self, what: m.AnyRequest | type[m.AnyRequest], *fields: Any, **named: Any) -> m.Error:
        """Why a ``request`` is refused."""
        request = self.request(what, *fields, **named)
        reply = self.raw(codec.encode(request))
        assert reply.request_id == request.request_id
        return refusal_of(reply)

    def send(self, what: m.AnyRequest | type[m.AnyRequest], *fields: Any, **named: Any) -> m.AnyRequest:
        """Send a ``request``, which is returned, and do not wait for its reply."""
        request = self.request(what, *fields, **named)
        self.jobs.send(codec.encode(request))
        return request

    def hello(self, role: m.Role) -> m.Welcome:
        return self.ask(m.Hello, PROTOCOL_VERSION, role, "test", "wire")

    def open_namespace(self, fingerprint: bytes = NAMESPACE, world_size: int = 1, groups: int = 1) -> None:
        specs = [m.GroupSpec("full", 16)] * groups
        self.ask(m.OpenNamespace, fingerprint, "test", world_size, 32, specs, "{}")

    def register(
        self,
        memory: SharedMemory,
        page_bytes: int = 16384,
        rank: int = 0,
        fingerprint: bytes = NAMESPACE,
        blocks_per_key: int = 1,
    ) -> bytes:
        """Attach ``memory`` and register it as one tensor of one group; return the registration id."""
        segment_id = self.next_id()
        attached = self.attach(memory.fd, segment_id)
        assert isinstance(attached, lifeline.Attached), attached
        registration_id = os.urandom(16)
        blocks = memory.size_bytes // page_bytes
        self.ask(
            m.Register,
            fingerprint,
            registration_id,
            rank,
            blocks_per_key,
            [MemfdHandle(segment_id, memory.size_bytes)],
            [TensorLayout(0, 0, page_bytes, blocks)],
            [[PageRef(0, page_bytes)]],
        )
        return registration_id

    # --- leases and jobs -------------------------------------------------------------------------

    def lease(self, number: int) -> int:
        return (self.session_id << 32) + number

    def store(self, registration: bytes, job: int, blob: bytes, block_ids: bytes, first_block: int = 0) -> m.JobResult:
        return self.result(m.Submit, registration, [store_of(job, blob, block_ids, first_block)])

    def result(self, what: m.Submit | type[m.Submit], *fields: Any, **named: Any) -> m.JobResult:
        """Send a job, and ask for its result until it is there."""
        request = self.request(what, *fields, **named)
        (job,) = (*request.stores, *request.loads)
        self.send(request)

        def result() -> m.JobResult | None:
            reply = self.ask(m.Results, 0)
            results = (result for batch in reply.batches for result in batch.results)
            return next((result for result in results if result.job_id == job.job_id), None)

        found = wait_until(result, JOB_DEADLINE_S, interval_s=0.001)
        assert found is not None
        return found

    def close(self) -> None:
        self.stream.close()
        self._context.destroy(linger=0)


def stats(directory: Path) -> s.DaemonStats:
    """The daemon's statistics, over a session of their own."""
    with WireClient(directory, m.Role.ADMIN) as admin:
        return admin.ask(s.Stats).stats
