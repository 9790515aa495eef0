"""The wire, for tests at the border: no test but this file knows messages, their fields, the codec or error numbers.

``WireClient`` is one session that does what a test asks of it, well-formed or not. ``books`` is what the daemon says of
itself. Both speak plain words: roles, codes and states are strings, keys are lists of bytes, results are dataclasses of
this file. When the protocol changes, this file changes, and no test.

>>> with WireClient(directory) as worker, WireClient(directory, "scheduler") as scheduler:         # doctest: +SKIP
...     worker.open_namespace()
...     scheduler.open_namespace()
...     cache = worker.register(memory)
...     assert worker.store(cache, keys(1, 2), [3, 4]).ok
...     assert scheduler.lookup(1, keys(1, 2, 3)).states == "RR-"
...     assert worker.load(cache, scheduler.lease(1), keys(1, 2), [8, 9]).ok
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeAlias

import msgspec
import zmq
from msgspec import structs

from kvoffd_client import AdminClient, SchedulerClient, SharedMemory
from kvoffd_client.session import Closing
from kvoffd_client.worker_client import Job, submit_of
from kvoffd_proto import admin as a
from kvoffd_proto import codec, events, lifeline
from kvoffd_proto import messages as m
from kvoffd_proto import stats as s
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import CudaIpcHandle, GroupTransfer
from kvoffd_proto.messages import Handle as Handle
from kvoffd_proto.paths import SocketPaths
from kvoffd_proto.stats import DiskStats as DiskStats
from kvoffd_proto.stats import NamespaceStats as NamespaceStats
from kvoffd_proto.stats import SharedStats as SharedStats

from .waiting import wait_until

P = ParamSpec("P")
Segment: TypeAlias = m.MemfdHandle
Page: TypeAlias = m.PageRef
Tensor: TypeAlias = m.TensorLayout

TIMEOUT_S = 30.0
"""Long enough for a machine that gives a process no CPU for a while."""
VERSION = m.PROTOCOL_VERSION
NAMESPACE = bytes(range(32))
PAGE_BYTES = 16384
STATES = "-WRDS"
"""States of keys in a lookup: absent, being written, ready, coming from a disk, coming from a shared store."""
GPU = CudaIpcHandle(bytes(64), PAGE_BYTES, bytes(16))
"""A segment of GPU memory that there is not."""


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def keys(*numbers: int) -> list[bytes]:
    return list(map(key, numbers))


# --- what is sent ----------------------------------------------------------------------------------


class Part(NamedTuple):
    """The blocks of one group in a job. ``blocks`` may be bytes, to send ids that are none."""

    keys: Sequence[bytes]
    blocks: Sequence[int] | bytes
    group: int = 0
    first_block: int = 0
    """Engine blocks of the first key that are left out at its start."""
    parents: Sequence[bytes] = ()
    tokens: bytes = b""


class Store(NamedTuple):
    """One store of a step."""

    job: int
    parts: Sequence[Part]


class Load(NamedTuple):
    """One load of a step."""

    job: int
    lease: int
    parts: Sequence[Part]
    keep_lease: bool = False


def store_of(job: int, keys: Sequence[bytes], blocks: Sequence[int] | bytes, **part: Any) -> Store:
    return Store(job, [Part(keys, blocks, **part)])


def load_of(job: int, lease: int, keys: Sequence[bytes], blocks: Sequence[int] | bytes, **part: Any) -> Load:
    return Load(job, lease, [Part(keys, blocks, **part)])


# --- what comes back -------------------------------------------------------------------------------


class Refused(Exception):
    """The daemon refused a request, a job, a descriptor or the session: why, and its sentence."""

    def __init__(self, code: str, message: str, request: int | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.request = request
        """Number of the request that is answered; 0 where the frame had none, None where it was no request."""


def refusal(call: Callable[P, object], *arguments: P.args, **named: P.kwargs) -> Refused:
    """Call, and return why the daemon refused it. Fails where it did not, or does not say what to do."""
    try:
        answer = call(*arguments, **named)
    except Refused as refused:
        why = refused
    else:
        raise AssertionError(f"not refused: {answer!r}")
    assert re.search(r"[;.:] \w", why.message), f"It does not say what to do: {why.message}"
    return why


def refused(call: Callable[P, object], *arguments: P.args, **named: P.kwargs) -> str:
    """The code with which the daemon refuses a call, such as ``bad_keys``."""
    return refusal(call, *arguments, **named).code


def answer(call: Callable[P, object], *arguments: P.args, **named: P.kwargs) -> str:
    """``taken``, or the code with which the daemon refuses a call."""
    try:
        call(*arguments, **named)
    except Refused as why:
        return why.code
    return "taken"


@dataclass(frozen=True)
class Found:
    """What a lookup found: a letter of ``STATES`` for each key."""

    states: str
    pinned: int
    ttl_s: float


@dataclass(frozen=True)
class Result:
    """How a job ended."""

    job: int
    ok: bool
    nbytes: int
    seconds: float
    error: str | None
    failed: list[bytes]
    """Keys that were not stored, or that the load lacked, each with its group's keys in order."""
    rejected: list[bytes]
    """Keys of a store that the policy did not want."""


@dataclass(frozen=True)
class Batch:
    """Results that came together, and their number in the session."""

    number: int
    store_window_bytes: int
    results: list[Result]

    @property
    def jobs(self) -> list[int]:
        return [result.job for result in self.results]


class Unacknowledged(NamedTuple):
    """What the daemon has for a session: batches that were not acknowledged, and jobs that have not ended."""

    batches: list[Batch]
    unfinished: list[int]

    @property
    def results(self) -> list[Result]:
        return [result for batch in self.batches for result in batch.results]


# --- a client --------------------------------------------------------------------------------------


class _Sockets(Closing):
    """The sockets behind the lifeline."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._jobs, self._events = self._context.socket(zmq.DEALER), self._context.socket(zmq.SUB)
        self._numbers = itertools.count(1)

    def _open(self, directory: Path, routing_id: bytes, topic: bytes) -> None:
        paths = SocketPaths(directory)
        self._events.setsockopt(zmq.SUBSCRIBE, topic)
        self._events.connect(f"ipc://{paths.events}")
        if routing_id:
            self._jobs.setsockopt(zmq.ROUTING_ID, routing_id)
        self._jobs.connect(f"ipc://{paths.jobs}")

    def next_number(self) -> int:
        return next(self._numbers)

    def _send(self, kind: type[m.AnyRequest], *fields: Any, **named: Any) -> m.AnyRequest:
        request = kind(self.next_number(), *fields, **named)
        self._jobs.send(codec.encode(request))
        return request

    def _reply(self) -> m.AnyReply:
        reply = self._receive()
        if isinstance(reply, m.Error):
            raise _refused(reply)
        return reply

    def _receive(self) -> m.AnyReply:
        assert self._jobs.poll(TIMEOUT_S * 1000), "the daemon did not reply"
        return codec.decode_reply(self._jobs.recv())

    def close(self) -> None:
        self._context.destroy(linger=0)


class WireClient(_Sockets):
    """One session, opened step by step.

    Every method raises ``Refused`` where the daemon refuses; ``refused(client.lookup, ...)`` returns the code.

    Args:
        directory: where the daemon's sockets are.
        role: ``worker``, ``scheduler`` or ``admin``; None says no Hello.
        name: shown to operators.

    Attributes:
        rejected: why the daemon did not take the connection, or None.
        stream: the lifeline.
        session: number of the session.
        daemon_id: number of this run of the daemon.
        token: the session's secret.
        routing_id: whose requests these are, made of the token.
        limits: of the session, by name, as the daemon said to Hello.
    """

    def __init__(self, directory: Path, role: str | None = "worker", *, name: str = "test") -> None:
        super().__init__()
        self.directory = directory
        self.stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._frames = lifeline.FrameBuffer()
        self._bodies: list[bytes] = []
        self.session, self.daemon_id, self.token = 0, 0, bytes(m.TOKEN_BYTES)
        self._seen = 0
        self.rejected: Refused | None = None
        self.limits: Mapping[str, int] = {}
        try:
            # It waits its turn, where a timeout would make it fail.
            self.stream.connect(str(SocketPaths(directory).lifeline))
            self.stream.settimeout(TIMEOUT_S)
            greeting = self._lifeline_frame()
            if isinstance(greeting, lifeline.Greeting):
                self.session, self.daemon_id, self.token = greeting.session_id, greeting.epoch, greeting.token
            else:
                assert isinstance(greeting, lifeline.Refused), greeting
                self.rejected = Refused(_word(greeting.code), greeting.message)
            self.routing_id = lifeline.routing_id(self.token)
            self._open(directory, self.routing_id, events.session_topic(self.daemon_id, self.session))
            if role is not None:
                self.hello(role, name=name)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the session as a process that ends does. Repeatable."""
        self.stream.close()
        super().close()

    # --- the lifeline ---------------------------------------------------------------------------

    def _lifeline_frame(self) -> lifeline.FromDaemon:
        while not self._bodies:
            data = self.stream.recv(4096)
            assert data, "the daemon closed the lifeline"
            self._bodies += self._frames.feed(data)
        return lifeline.decode_from_daemon(self._bodies.pop(0))

    def attach(self, fd: int, segment: int | None = None) -> int:
        """Hand a descriptor over, and return its number in the session."""
        number = self.next_number() if segment is None else segment
        self.send_lifeline(attach_frame(number), [fd])
        return self.attached()

    def attached(self) -> int:
        """The daemon's answer to an attach that was sent by ``send_lifeline``."""
        answer = self._lifeline_frame()
        if isinstance(answer, lifeline.AttachRefused):
            raise Refused(_word(answer.code), answer.message)
        assert isinstance(answer, lifeline.Attached), answer
        return answer.segment_id

    def send_lifeline(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send bytes over the lifeline as they are."""
        socket.send_fds(self.stream, [data], list(fds)) if fds else self.stream.sendall(data)

    def leave(self, times: int = 1) -> None:
        """Say that the session ends."""
        self.send_lifeline(lifeline.encode_frame(lifeline.Leaving()) * times)

    def close_lifeline(self) -> None:
        """End the session; its request socket stays connected."""
        self.stream.close()

    def wait_lifeline_ended(self) -> None:
        """Until the daemon has closed the lifeline. Fails where it does not."""
        try:
            while self.stream.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass

    def is_released(self) -> bool:
        """Whether the daemon's last word over the lifeline is that it touches the client's memory no more."""
        while data := self.stream.recv(4096):
            self._bodies += self._frames.feed(data)
        return [*map(lifeline.decode_from_daemon, self._bodies)][-1:] == [lifeline.MemoryReleased()]

    # --- requests -------------------------------------------------------------------------------

    def raw(self, *frames: bytes) -> str:
        """Send frames as they are; the kind of the reply."""
        self.send_raw(*frames)
        return type(self._reply()).__name__.lower()

    def send_raw(self, *frames: bytes, block: bool = True) -> bool:
        """Send frames and read nothing. False where ``block`` is false and the daemon takes no more for now."""
        try:
            self._jobs.send_multipart(frames, 0 if block else zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def is_answered(self, timeout_s: float) -> bool:
        """Whether a request is answered in time, as none is that a broken connection loses."""
        request = self._send(a.Health)
        return bool(self._jobs.poll(timeout_s * 1000)) and self._receive().request_id == request.request_id

    def hello(self, role: str, *, version: int = VERSION, name: str = "test", software: str = "wire") -> None:
        answer = self.ask(m.Hello, version, role, name, software)
        self.limits = structs.asdict(answer.limits)

    def health(self) -> str:
        """``ok``, ``degraded`` or ``down``: a round trip through the loop that serves engines."""
        return str(self.ask(a.Health).level)

    def stats(self) -> None:
        self.ask(s.Stats)

    def open_namespace(
        self,
        namespace: bytes = NAMESPACE,
        world_size: int = 1,
        groups: int = 1,
        *,
        label: str = "test",
        description: str = "{}",
    ) -> bool:
        """Open a namespace of keys of 32 bytes. False where it was open already."""
        specs = [m.GroupSpec("full", 16)] * groups
        answer = self.ask(m.OpenNamespace, namespace, label, world_size, 32, specs, description)
        return bool(answer.created)

    def register(
        self,
        memory: SharedMemory,
        page_bytes: int = PAGE_BYTES,
        *,
        rank: int = 0,
        namespace: bytes = NAMESPACE,
        blocks_per_key: int = 1,
    ) -> bytes:
        """Attach ``memory`` and register it as one tensor of one group; the registration's id."""
        segment = Segment(self.attach(memory.fd), memory.size_bytes)
        tensor = Tensor(0, 0, page_bytes, memory.size_bytes // page_bytes)
        pages = [[Page(0, page_bytes)]]
        return self.register_layout(
            [segment], [tensor], pages, rank=rank, namespace=namespace, blocks_per_key=blocks_per_key
        )

    def register_layout(
        self,
        segments: Sequence[Handle],
        tensors: Sequence[Tensor],
        groups: Sequence[Sequence[Page]],
        *,
        rank: int = 0,
        namespace: bytes = NAMESPACE,
        blocks_per_key: int = 1,
    ) -> bytes:
        """Register attached memory of any layout; the registration's id."""
        registration = os.urandom(16)
        what = list(segments), list(tensors), list(map(list, groups))
        self.ask(m.Register, namespace, registration, rank, blocks_per_key, *what)
        return registration

    def unregister(self, registration: bytes) -> None:
        """End a registration: afterwards the daemon does not touch its memory."""
        self.ask(m.Unregister, registration)

    # --- a scheduler's ---------------------------------------------------------------------------

    def lease(self, number: int) -> int:
        """The id of this session's lease of a small number; an id is one already."""
        return number if number >= 1 << 32 else (self.session << 32) + number

    def lookup(
        self, lease: int, keys: Sequence[bytes], namespace: bytes = NAMESPACE, *, group: int = 0, giver: int = 0
    ) -> Found:
        """Look keys up under the lease of this number, or of this id."""
        groups = [m.GroupKeys(group, b"".join(keys))]
        answer = self.ask(m.Lookup, namespace, self.lease(lease), groups, giver=giver)
        return Found("".join(STATES[one] for one in b"".join(answer.states)), answer.pinned, answer.ttl_ms / 1000)

    def release(self, *leases: int) -> int:
        """End leases; how many there were."""
        return int(self.ask(m.Release, [self.lease(lease) for lease in leases]).count)

    def invalidate(self, keys: Sequence[bytes], namespace: bytes = NAMESPACE) -> int:
        """Drop blocks; how many there were."""
        return int(self.ask(m.Invalidate, namespace, [m.GroupKeys(0, b"".join(keys))]).count)

    def report(self, skipped_loads: int, namespace: bytes = NAMESPACE, tokens_per_second: float = 1.0) -> None:
        """Report what an engine counted."""
        self.ask(m.ReportEngine, namespace, tokens_per_second, skipped_loads)

    def hint(
        self,
        action: str,
        keys: Sequence[bytes],
        *,
        priority: int = 0,
        ttl_s: float = 60.0,
        giver: int = 1,
    ) -> int:
        """Retain, release or prefetch blocks; how many of them can be read."""
        groups = [m.GroupKeys(0, b"".join(keys))]
        return int(self.ask(m.Hint, NAMESPACE, action, groups, priority, ttl_s, giver).count)

    def reset(self, namespace: bytes = NAMESPACE) -> int:
        """Drop every block of a namespace; how many there were."""
        return int(self.ask(m.Reset, namespace).count)

    # --- a worker's ------------------------------------------------------------------------------

    def store(
        self, registration: bytes, keys: Sequence[bytes], blocks: Sequence[int] | bytes, *, job: int = 0, **part: Any
    ) -> Result:
        """Store keys from blocks, and wait for the result. The rest is as in ``Part``."""
        store = store_of(job or self.next_number(), keys, blocks, **part)
        return self.step(registration, [store])[store.job]

    def load(
        self,
        registration: bytes,
        lease: int,
        keys: Sequence[bytes],
        blocks: Sequence[int] | bytes,
        *,
        keep_lease: bool = False,
        **part: Any,
    ) -> Result:
        """Load keys into blocks under a lease's id, and wait for the result. The rest is as in ``Part``."""
        load = Load(self.next_number(), lease, [Part(keys, blocks, **part)], keep_lease)
        return self.step(registration, [], [load])[load.job]

    def submit(
        self, registration: bytes, stores: Sequence[Store] = (), loads: Sequence[Load] = (), acknowledged: int = 0
    ) -> None:
        """Send the jobs of one step, with the number up to which results have arrived, and wait for nothing."""
        step = self._submission(registration, stores, loads)
        self._jobs.send(codec.encode(structs.replace(step, acknowledged=acknowledged)))

    def step(self, registration: bytes, stores: Sequence[Store] = (), loads: Sequence[Load] = ()) -> dict[int, Result]:
        """Send the jobs of one step, and wait until each has ended; how, by job.

        Results are asked for: a subscription just made may miss the first publication. Raises Refused where the step is
        refused.
        """
        wanted = [store.job for store in stores] + [load.job for load in loads]
        before = self.acknowledge()
        self.submit(registration, stores, loads)
        return self.wait_ended(*wanted, after=before)

    def wait_ended(self, *jobs: int, after: int = 0) -> dict[int, Result]:
        """Wait until each job has ended, and say how; that acknowledges batches up to number ``after``."""
        wanted = set(jobs)
        results: list[Result] = []

        def ended() -> bool:
            replay = self._send(m.Results, after)
            while (reply := self._receive()).request_id != replay.request_id:
                assert isinstance(reply, m.Error), reply
                self._receive()  # the answer to the Results
                raise _refused(reply)
            assert isinstance(reply, m.ResultsReply), reply
            results[:] = [_result(one) for batch in reply.batches for one in batch.results if one.job_id in wanted]
            return len(results) >= len(wanted)

        if wanted:
            wait_until(ended, TIMEOUT_S, interval_s=0.001, explain=lambda: results)
        found = {result.job: result for result in results}
        assert len(found) == len(results), "a job ended twice"
        return found

    def cancel(self, *jobs: int) -> int:
        """Cancel jobs; how many will not run."""
        return self.ask(m.Cancel, list(jobs)).count

    # --- results ---------------------------------------------------------------------------------

    def unacknowledged(self) -> Unacknowledged:
        """Ask for all batches that were not acknowledged: some may have been lost."""
        answer = self.ask(m.Results, 0)
        return Unacknowledged(list(map(_batch, answer.batches)), list(answer.unfinished))

    def acknowledge(self, number: int = 0) -> int:
        """Say that all batches up to this number have arrived; the number of the session's last batch."""
        batches = self.ask(m.Results, number).batches
        self._seen = max(self._seen, number, *(batch.sequence for batch in batches))
        return self._seen

    def published(self, timeout_s: float = TIMEOUT_S) -> Batch | None:
        """The next batch that is published to this session; None where none comes in time."""
        if not self._events.poll(timeout_s * 1000):
            return None
        _, _, payload = self._events.recv_multipart()
        return _batch(codec.decode_completions(payload))

    # --- an administrator's ----------------------------------------------------------------------

    def clear(self, namespace: bytes | None = None) -> int:
        """Drop every block; how many there were."""
        return int(self.ask(a.Clear, namespace).count)

    # --- underneath -------------------------------------------------------------------------------

    def _submission(self, registration: bytes, stores: Sequence[Store], loads: Sequence[Load]) -> m.Submit:
        jobs = [Job(job, list(map(_transfer, parts)), lease, keep) for job, lease, parts, keep in loads]
        jobs += [Job(job, list(map(_transfer, parts))) for job, parts in stores]
        # The first groups of all jobs, then the second ones: a job may name a group twice here.
        most = max((len(job.groups) for job in jobs), default=0)
        rounds = [[replace(job, groups=job.groups[at : at + 1]) for job in jobs] for at in range(most)]
        made = [submit_of(self.next_number(), registration, 32, some) for some in (rounds or [jobs])]
        return structs.replace(
            made[0],
            stores=structs.replace(made[0].stores, groups=[part for one in made for part in one.stores.groups]),
            loads=structs.replace(made[0].loads, groups=[part for one in made for part in one.loads.groups]),
        )

    def set_quota(self, namespace: bytes, quota_bytes: int | None) -> None:
        self.ask(a.SetQuota, namespace, quota_bytes)

    def ask(self, kind: type[m.AnyRequest], *fields: Any, **named: Any) -> Any:
        """Send a request and return its reply. Raises Refused."""
        request = self._send(kind, *fields, **named)
        reply = self._reply()
        assert reply.request_id == request.request_id, (request, reply)
        assert isinstance(reply, m.EXCHANGES[kind].answer), reply
        return reply


class Eavesdropper(_Sockets):
    """Somebody without a session. So many publications may lie ``unread``."""

    def __init__(self, directory: Path, routing_id: bytes = b"", unread: int = 1000) -> None:
        super().__init__()
        self._events.setsockopt(zmq.RCVHWM, unread)
        self._open(directory, routing_id, b"")

    def ask(self) -> None:
        """Ask for the statistics."""
        self._send(s.Stats)

    def stats(self) -> None:
        self.ask()
        self._reply()

    def hears(self, timeout_s: float) -> bool:
        """Whether anything is published to it."""
        return bool(self._events.poll(timeout_s * 1000))

    def unread(self) -> int:
        """Take all that was published; how many messages it was."""
        count = 0
        while self.hears(0.5):
            self._events.recv_multipart()
            count += 1
        return count

    def is_answered(self, timeout_s: float) -> bool:
        """Whether anything comes back, be it a refusal."""
        return bool(self._jobs.poll(timeout_s * 1000))


def request_streams(directory: Path) -> list[Path]:
    """The sockets behind the lifeline, for clients that speak something else there."""
    paths = SocketPaths(directory)
    return [paths.jobs, paths.events]


NULL_GREETING = (b"\xff" + bytes(8) + b"\x7f\3\0" + b"NULL").ljust(64, b"\0")
"""How a ZeroMQ connection begins."""
_READY = b"\x05READY\x0bSocket-Type\0\0\0\6DEALER"


def is_admitted(stream: socket.socket) -> bool:
    """Whether the daemon admits a connection to ``jobs.sock``, which is a ZeroMQ client's from now on."""
    stream.sendall(NULL_GREETING + bytes([4, len(_READY)]) + _READY)
    received = b""
    while len(received) < len(NULL_GREETING) + 3 + len("READY"):
        if not (data := stream.recv(4096)):
            return False
        received += data
    return b"\x05READY" in received


def _word(code: ErrorCode) -> str:
    return code.name.lower()


def _refused(error: m.Error) -> Refused:
    return Refused(_word(error.code), error.message, error.request_id)


def _transfer(part: Part) -> GroupTransfer:
    blocks = part.blocks if isinstance(part.blocks, bytes) else struct.pack(f"<{len(part.blocks)}i", *part.blocks)
    parents = b"".join(part.parents)
    return GroupTransfer(part.group, b"".join(part.keys), blocks, part.first_block, parents, part.tokens)


def _keys_in(groups: Iterable[m.GroupKeys]) -> list[bytes]:
    return [group.keys[at : at + 32] for group in groups for at in range(0, len(group.keys), 32)]


def _result(one: m.JobResult) -> Result:
    error = None if one.error is None else _word(one.error)
    return Result(one.job_id, one.ok, one.bytes, one.seconds, error, _keys_in(one.failed), _keys_in(one.rejected))


def _batch(one: m.Completions) -> Batch:
    return Batch(one.sequence, one.credit_bytes, list(map(_result, one.results)))


# --- frames that are none --------------------------------------------------------------------------

GARBAGE: dict[str, bytes] = {
    "empty": b"",
    "no msgpack": b"\xc1",
    "zeros": b"\x00" * 100,
    "too few fields": msgspec.msgpack.encode(["lookup"]),
    "no such message": msgspec.msgpack.encode(["no such message", 7, b"0" * 16]),
    "a map": msgspec.msgpack.encode({"type": "stats"}),
    "nested too deep": b"\x91" * 100_000,
    "an array that claims a million items": b"\xdd" + (1_000_000).to_bytes(4, "big") + b"\xc0" * 1000,
    "an array that claims four billion items": b"\xdd\xff\xff\xff\xff",
    "a map that claims four billion items": b"\xdf\xff\xff\xff\xff" + b"\x00" * 1000,
    "bytes that claim two gigabytes": b"\x93\xa5stats\x01\xc6\x7f\xff\xff\xff",
    "a name that is not UTF-8": b"\x93\xa2\xff\xfe\x01\xc4\x00",
}
"""Frames on the request socket that are no request, by what is wrong with them."""

LIFELINE_GARBAGE: dict[str, bytes] = {
    "a length of four gigabytes": b"\xff\xff\xff\xff",
    "a length of zero": b"\x00\x00\x00\x00",
    "no msgpack": b"\x01\x00\x00\x00\xc1",
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "an attach without a descriptor": lifeline.encode_frame(lifeline.Attach(1)),
}
"""Bytes on the lifeline that end a session."""


def broken_request(number: int, nbytes: int = 0) -> bytes:
    """A request of this number, of this size or more, whose other fields are wrong."""
    return msgspec.msgpack.encode(["stats", number, "not bytes".ljust(nbytes)])


def attach_frame(segment: int) -> bytes:
    """The bytes that go over the lifeline with a descriptor."""
    return lifeline.encode_frame(lifeline.Attach(segment))


# --- KV events -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KvEvent:
    """Blocks that came to a tier or left it; all left every tier where ``kind`` is ``cleared``."""

    kind: str
    keys: list[bytes]
    medium: str | None = None
    group: int | None = None
    parents: Sequence[bytes] = ()
    tokens: bytes = b""


PROBE = b"probe "
"""Namespaces that a subscriber opens begin with it."""


@dataclass(frozen=True)
class KvMessage:
    """One message of KV events."""

    number: int
    namespace: bytes
    events: list[KvEvent]


class KvSubscriber(_Sockets):
    """Hears the KV events of all namespaces from its making on."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._open(directory, b"", events.KV_TOPIC_PREFIX)
        self._found: list[KvMessage] = []
        wait_until(lambda: self._probe() is not None and self._events.poll(50) > 0)  # else what comes is dropped
        self.messages()

    def messages(self) -> list[KvMessage]:
        """All that was published before this call. What it opens to know the end is left out."""
        probe = self._probe()
        while True:
            assert self._events.poll(TIMEOUT_S * 1000), "no KV events came"
            topic, number, payload = self._events.recv_multipart()
            namespace = bytes.fromhex(topic.removeprefix(events.KV_TOPIC_PREFIX).decode())
            if namespace == probe:
                return self._found
            if not namespace.startswith(PROBE):
                batch = events.decode_event_batch(payload)
                found = KvMessage(int.from_bytes(number, "big"), namespace, list(map(_kv_event, batch.events)))
                self._found.append(found)

    def _probe(self) -> bytes:
        """Open a namespace, which is published as cleared."""
        namespace = PROBE + os.urandom(32 - len(PROBE))
        with WireClient(self._directory) as client:
            client.open_namespace(namespace)
        return namespace


def _kv_event(event: events.KvEvent) -> KvEvent:
    if isinstance(event, events.AllBlocksCleared):
        return KvEvent("cleared", [])
    kind = "stored" if isinstance(event, events.BlockStored) else "removed"
    origins = () if isinstance(event, events.BlockRemoved) else (event.parents, event.token_ids)
    return KvEvent(kind, list(event.block_hashes), event.medium, event.group_idx, *origins)


# --- the books -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Books:
    """What a daemon says of itself, and what the kernel says of its process. The one who asks is in no number.

    What is not named here is a field of ``DaemonStats``: ``found.leases``, ``found.pool``, ``found.store``.
    The pool: ``free + writing + ready + leaving + quarantined = pool.size`` bytes.
    """

    said: s.DaemonStats
    clients: list[a.SessionInfo]
    listed: dict[bytes, a.NamespaceInfo]
    descriptors: int
    own_bytes: int
    """Resident memory that is neither the pool's, nor an engine's, nor a file's."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.said, name)

    @property
    def problems(self) -> dict[str, int]:
        return dict(Counter(one.reason for one in self.said.health_problems))

    @property
    def tiers(self) -> s.TieringStats:
        return self.said.tiers or s.TieringStats()

    @property
    def namespaces(self) -> dict[bytes, NamespaceStats]:
        """The open ones."""
        rows = {bytes.fromhex(row.fingerprint): row for row in self.said.namespaces}
        return {fingerprint: row for fingerprint, row in rows.items() if fingerprint in self.listed}

    free_bytes = property(lambda self: self.pool.of("free"))
    writing_bytes = property(lambda self: self.pool.of("writing"))
    ready_bytes = property(lambda self: self.pool.of("ready"))
    leaving_bytes = property(lambda self: self.pool.of("dropped"))  # dropped, and a lease or a copy still holds it
    quarantined_bytes = property(lambda self: self.pool.of("quarantined"))  # an earlier daemon's, not recovered yet
    sessions = property(lambda self: len(self.clients))
    ready_blocks = property(lambda self: sum(one.ready_blocks for one in self.namespaces.values()))

    @property
    def balanced(self) -> bool:
        """Whether every byte of the pool is in one state."""
        states = (self.free_bytes, self.writing_bytes, self.ready_bytes, self.leaving_bytes)
        return sum(states) + self.quarantined_bytes == self.pool.size_bytes

    @property
    def held(self) -> dict[str, int]:
        """What somebody holds: all of it is gone when nobody is connected."""
        found = {
            "sessions": self.sessions,
            "leases": self.leases,
            "pinned blocks": self.pinned_blocks,
            "pinned bytes": self.pool.pinned_bytes,
            "leaving bytes": self.leaving_bytes,
            "bytes being written": self.writing_bytes,
            "registrations": sum(client.registrations for client in self.clients),
            "jobs": sum(client.jobs for client in self.clients) + self.store.running_jobs + self.load.running_jobs,
        }
        return {name: count for name, count in found.items() if count}


def prompt_of(
    tokens: int, *, own: int = 0, loaded: int = 0, request: str = "r", keys: int = 0, **missing: Any
) -> m.PromptReport:
    """An engine's report of a prompt, of whose tokens its own cache had some, and others were loaded."""
    return m.PromptReport(request, 1.0, tokens, keys, 0, 0, 0, m.Outcome.LOADED, loaded, own_tokens=own, **missing)


def reported(admin: AdminClient) -> list[tuple[str, dict[str, int]]]:
    """The latest prompts that engines reported: names of requests, with their tokens by source."""
    return [(one.report.request, one.tokens) for one in admin.ask(a.ListPrompts, "").prompts]


class Said(NamedTuple):
    """What a daemon says of a prompt.

    Attributes:
        found: leading keys that were in the pool in the end.
        reason: why the first other key was missing.
        tiers: those that the reason is about.
    """

    found: int
    reason: str
    tiers: list[str]


def ask_for(scheduler: SchedulerClient, name: str, its: Sequence[bytes], patience_s: float) -> int:
    """Look up a prompt of one group as the connector does, again while keys are coming, for at most this time. Report
    what became of it; return how many leading keys were in the pool then."""
    groups, until = [m.GroupKeys(0, b"".join(its))], time.monotonic() + patience_s
    counted = last = scheduler.lookup(groups, reported=True)
    while True:
        assert last.wait(TIMEOUT_S)
        assert not last.failed
        if not last.pending or time.monotonic() >= until:
            break
        time.sleep(0.02)  # as the connector does
        if last is not counted:
            scheduler.release(last.lease_id)
        last = scheduler.lookup(groups, True, reported=True)
    found, (states,) = last.leading_ready(), last.states
    coming = len(states) - len(states.lstrip(bytes([m.READY, *m.COMING])))
    missing, reason = its[found : found + 1], ""
    if missing and states[found] in m.COMING:
        reason = "unanswered" if states[found] == m.SHARED and last.asking else "tier_late"
    outcome = m.Outcome.LOADED if found else m.Outcome.MISSED
    report = m.PromptReport(name, time.time(), 16 * len(its), len(its), found, 0, 0, outcome)
    scheduler.report_prompt(
        structs.replace(
            report,
            missing_key=b"".join(missing),
            reason=reason,
            missing_number=found + 1,
            lease_id=counted.lease_id,
            own_keys=[0],
            covered_keys=[found],
            coming_keys=[coming - found],
        )
    )
    for lease_id in {counted.lease_id, last.lease_id}:
        scheduler.release(lease_id)
    return found


def said_of(admin: AdminClient, name: str) -> Said | None:
    """What the daemon says of a prompt; None before it was reported."""
    listed = admin.ask(a.ListPrompts, name).prompts
    return Said(listed[-1].report.found_pool, listed[-1].report.reason, listed[-1].tiers) if listed else None


def reports(directory: Path) -> list[m.PromptReport]:
    """What engines have said of their prompts, with the daemon's reasons."""
    with AdminClient(directory) as admin:
        return [one.report for one in admin.ask(a.ListPrompts, "").prompts]


BOOKS = "books"


def books(directory: Path) -> Books:
    """What the daemon says of itself now, without the sessions of this function: an earlier call's may end late."""
    with WireClient(directory, "admin", name=BOOKS) as admin:
        said = admin.ask(s.Stats).stats
        process = Path("/proc", str(said.pid))
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        return Books(
            said,
            clients=[one for one in admin.ask(a.Sessions).sessions if one.name != BOOKS],
            listed={one.namespace: one for one in admin.ask(a.Namespaces).namespaces},
            descriptors=len(os.listdir(process / "fd")),
            own_bytes=int(status["RssAnon"].split()[0]) * 1024 - said.pool.size_bytes * (said.pool.memory == "private"),
        )
