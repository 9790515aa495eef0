"""A stand-in for the daemon: it speaks the wire, stores no bytes, and misbehaves as a test sets it to."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Self, TypeVar

import zmq

from kvoffd_client.worker_client import Job
from kvoffd_proto import admin as a
from kvoffd_proto import codec, events, lifeline
from kvoffd_proto import messages as m
from kvoffd_proto.messages import PROTOCOL_VERSION
from kvoffd_proto.paths import SocketPaths
from tests.kit.submitted import jobs_in

from .closing import Starting
from .waiting import DEADLINE_S

LIMITS = m.Limits(1 << 20, 65536, 1024, 1000, 1000, 1 << 20, 4, 64)
Answer = m.AnyReply | bytes | None
"""A reply, raw bytes to send instead of one, or silence."""
RequestT = TypeVar("RequestT", bound=m.AnyRequest)


class Peer:
    """One accepted lifeline and its session."""

    def __init__(self, stream: socket.socket, session_id: int) -> None:
        self.stream = stream
        self.session_id = session_id
        self.token = os.urandom(m.TOKEN_BYTES)
        self.frames = lifeline.FrameBuffer()
        self.identity = lifeline.routing_id(self.token)
        self.role: m.Role | None = None
        self.sequence = 0
        self.batches: list[m.Completions] = []
        self.jobs: dict[int, Job] = {}

    def acknowledge(self, sequence: int) -> None:
        self.batches = [batch for batch in self.batches if batch.sequence > sequence]


class FakeDaemon(Starting):
    """A daemon in one thread of the test's process; ``do`` runs a step of the test there and waits for it.

    Attributes:
        requests: all requests that were received, in order.
        greeted: connections that were accepted.
        strangers: those of them that are of no session that is open.
        answers: by request type, what to answer instead of the default.
        hold_jobs: jobs stay unfinished until finish() is called.
        drop_publications: completions are numbered, but not published.
        greeting_version: protocol version in the Greeting.
        close_on_eof: close the daemon's end of a lifeline whose client has closed its own.
    """

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kvoffd-fake-", dir="/tmp"))
        self.epoch = 1
        self.requests: list[m.AnyRequest] = []
        self.strangers: list[m.AnyRequest] = []
        self.answers: dict[type, Callable[[m.AnyRequest, Peer], Answer]] = {}
        self.peers: dict[bytes, Peer] = {}
        self.kv_messages: Counter[bytes] = Counter()
        """Of each topic, the number of its next message of KV events."""
        self.hold_jobs = False
        self.drop_publications = False
        self.greeting_version = PROTOCOL_VERSION
        self.close_on_eof = True
        self.frozen = threading.Event()
        self._steps: list[tuple[Callable[[], None], Future[None]]] = []
        self.greeted = 0
        self._stop = False
        self._thread: threading.Thread | None = None

    # --- life ------------------------------------------------------------------------------------

    def start(self) -> Self:
        self._stop = False
        self.frozen.clear()
        paths = SocketPaths(self.directory)
        self._context = zmq.Context()
        self._jobs = self._context.socket(zmq.ROUTER)
        self._events = self._context.socket(zmq.PUB)
        for path, bound in ((paths.jobs, self._jobs), (paths.events, self._events)):
            path.unlink(missing_ok=True)
            bound.setsockopt(zmq.LINGER, 0)
            bound.bind(f"ipc://{path}")
        paths.lifeline.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(str(paths.lifeline))
        self._listener.listen()
        self._thread = threading.Thread(target=self._run, name="fake-daemon")
        self._thread.start()
        return self

    def stop(self) -> None:
        """Close every socket at once, as when a daemon dies."""
        if self._thread is not None:
            self._stop = True
            self.frozen.clear()
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def do(self, step: Callable[[], None]) -> None:
        done: Future[None] = Future()
        self._steps.append((step, done))
        done.result(DEADLINE_S)

    # --- a test's steps --------------------------------------------------------------------------

    def freeze(self) -> None:
        """Hang: nothing is read or answered until ``frozen`` is cleared."""
        self.do(self.frozen.set)

    def peer(self, role: m.Role) -> Peer:
        found = [peer for peer in self.peers.values() if peer.role is role]
        if not found:
            raise LookupError(f"no {role} is connected")
        return found[-1]

    def finish(self, job_id: int) -> None:
        self.do(lambda: self._finish(self.peer(m.Role.WORKER), job_id))

    def end_session(self, role: m.Role) -> None:
        self.do(lambda: self._end(self.peer(role)))

    def send_raw(self, role: m.Role, *frames: bytes) -> None:
        self.do(lambda: self._jobs.send_multipart([self.peer(role).identity, *frames]))

    def send_lifeline(self, role: m.Role, data: bytes) -> None:
        self.do(lambda: self.peer(role).stream.sendall(data))

    def kv_event(self, fingerprint: bytes, batch: list[events.KvEvent], *, publish: bool) -> None:
        def step() -> None:
            topic = events.kv_topic(fingerprint)
            number = self.kv_messages[topic].to_bytes(8, "big")
            self.kv_messages[topic] += 1
            if publish:
                self._events.send_multipart((topic, number, codec.encode(events.EventBatch(0.0, batch))))

        self.do(step)

    def seen(self, kind: type[RequestT]) -> list[RequestT]:
        return [one for one in self.requests if isinstance(one, kind)]

    def seen_jobs(self, *, loads: bool) -> list[Job]:
        """The loads, or the stores, that came."""
        jobs = [job for one in self.requests if isinstance(one, m.Submit) for job in jobs_in(one)]
        return [job for job in jobs if (job.lease_id is not None) == loads]

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._jobs, zmq.POLLIN)
        while not self._stop:
            if self.frozen.is_set():
                time.sleep(0.005)  # a daemon that hangs; nothing is waited for here
                continue
            poller.poll(2)
            while self._steps:
                step, done = self._steps.pop(0)
                try:
                    step()
                    done.set_result(None)
                except Exception as error:
                    done.set_exception(error)
            self._accept()
            for peer in list(self.peers.values()):
                self._read(peer)
            while not self.frozen.is_set() and self._jobs.poll(0):
                self._handle(self._jobs.recv_multipart())
        for peer in list(self.peers.values()):
            peer.stream.close()
        self.peers.clear()
        self._listener.close()
        self._jobs.close()
        self._events.close()
        self._context.term()

    def _accept(self) -> None:
        try:
            stream, _ = self._listener.accept()
        except BlockingIOError:
            return
        stream.setblocking(False)
        self.greeted += 1
        peer = Peer(stream, self.greeted)
        self.peers[peer.token] = peer
        greeting = lifeline.Greeting(self.greeting_version, self.epoch, peer.session_id, peer.token)
        self._send_over_lifeline(peer, greeting)

    def _send_over_lifeline(self, peer: Peer, message: lifeline.FromDaemon) -> None:
        try:
            peer.stream.send(lifeline.encode_frame(message), socket.MSG_NOSIGNAL)
        except OSError:
            self._end(peer)  # the client is gone

    def _read(self, peer: Peer) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(peer.stream, 4096, 4)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        for fd in fds:
            os.close(fd)
        if not data:
            if self.close_on_eof:
                self.release(peer)
            return
        for body in peer.frames.feed(data):
            frame = lifeline.decode_from_client(body)
            if isinstance(frame, lifeline.Attach):
                self._send_over_lifeline(peer, lifeline.Attached(frame.segment_id))

    def release(self, peer: Peer) -> None:
        """Release the client's memory, as at the end of a session."""
        self._send_over_lifeline(peer, lifeline.MemoryReleased())
        self._end(peer)

    def _end(self, peer: Peer) -> None:
        peer.stream.close()
        self.peers.pop(peer.token, None)

    def _handle(self, frames: list[bytes]) -> None:
        request = codec.decode_request(frames[1])
        self.requests.append(request)
        peer = self.peers.get(frames[0].removeprefix(b"k"))
        if peer is None:
            self.strangers.append(request)
            return
        answer = self.answers.get(type(request), self._default_answer)(request, peer)
        if answer is not None:
            self._jobs.send_multipart([frames[0], answer if isinstance(answer, bytes) else codec.encode(answer)])

    def _default_answer(self, request: m.AnyRequest, peer: Peer) -> Answer:
        head = (request.request_id,)
        match request:
            case m.Hello():
                peer.role = request.role
                return m.Welcome(*head, peer.session_id, LIMITS, 1 << 20)
            case m.OpenNamespace():
                return m.NamespaceOpened(*head, True)
            case m.Register():
                return m.Registered(*head, request.registration_id, [4096 for _ in request.groups])
            case m.Lookup():
                states = [bytes([m.READY]) * (len(group.keys) // 32) for group in request.groups]
                return m.LookupReply(*head, request.lease_id, states, sum(map(len, states)), 600_000)
            case m.Results():
                peer.acknowledge(request.acknowledged)
                return m.ResultsReply(*head, list(peer.batches), list(peer.jobs))
            case m.Submit():
                peer.acknowledge(request.acknowledged)
                for job in jobs_in(request):
                    peer.jobs[job.job_id] = job
                    if not self.hold_jobs:
                        self._finish(peer, job.job_id)
                return None
            case a.Health():
                return a.HealthReply(*head, a.HealthLevel.OK, [])
            case _:
                return m.Done(*head, 1)

    def _finish(self, peer: Peer, job_id: int, ok: bool = True) -> None:
        job = peer.jobs.pop(job_id)
        failed = [] if ok else [m.GroupKeys(group.group, group.keys) for group in job.groups]
        self.complete(peer, [m.JobResult(job_id, ok, 4096 if ok else 0, 0.001, None, failed)])

    def complete(self, peer: Peer, results: list[m.JobResult]) -> None:
        """Number completions, and publish them. In the daemon's thread."""
        peer.sequence += 1
        batch = m.Completions(peer.sequence, 1 << 20, results)
        peer.batches.append(batch)
        if not self.drop_publications:
            topic = events.session_topic(self.epoch, peer.session_id)
            self._events.send_multipart([topic, peer.sequence.to_bytes(8, "big"), codec.encode(batch)])
