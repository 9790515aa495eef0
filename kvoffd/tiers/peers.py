"""Blocks of other nodes' pools, as a store that is only read. A helper process (``peer_helper``) talks to the peers.

NIXL reads a peer's memory one-sidedly, and may still write what it was asked for long after it was told to stop, as
measured with a peer that was stopped and continued. So it writes to memory of its own, from which a block is copied
into the pool while its checksum is computed; only the helper's end frees what a lost peer may still send.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from itertools import accumulate, count, groupby
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import zmq
from zmq.utils import z85

from kvoffd.errors import KvoffdError
from kvoffd.pool.memory import PoolMemory
from kvoffd.system.files import address_of
from kvoffd.system.native import COUNT, NUMBER, VOID_P, declare, native
from kvoffd.system.rare_warnings import RareWarnings
from kvoffd.system.threads import AbandonableThreads, TaskThread
from kvoffd.tiers.header import Block, BlockGroup
from kvoffd.tiers.store import UNKEPT, GetRequest, PutRequest, Received, Store, StoreError
from kvoffd_proto.build import program
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import FINGERPRINT_BYTES

declare(keep_gil=False, host_copy=(COUNT, *(VOID_P, VOID_P, VOID_P, NUMBER) * 2, VOID_P))

logger = logging.getLogger(__name__)

SLICE_BYTES = 4 * 2**20
"""Memory that one read of the helper may use."""
SLICES = 4
"""Such reads of one peer at once: two threads with ``AHEAD`` each. Another peer's reads cannot use their memory."""
ABSENT, LENT, BUSY = range(3)
"""Answers about a block that a peer wants to borrow. BUSY: it has lent as many as it may."""
BUSY_S = 0.005
"""Pause after such an answer."""
AHEAD = 2
"""Reads of one thread that are under way."""
MAX_MESSAGE_BYTES = 192 * 1024
"""Limit of a message between helper and daemon, and between two helpers: what a Unix socket takes at once."""
MAX_QUEUED = 64
"""Messages that wait at each end of a connection between two nodes."""
MAX_KEYS = 2048
"""Keys of one message, of up to 64 bytes."""
MAX_FOLLOWED = 1024
"""Namespaces of one ``Follow`` besides the first."""
GENERATION_BYTES = 8
FOLLOWED_BYTES = GENERATION_BYTES + 1
"""Reply to a ``Follow``, for each namespace."""
MAX_BLOCKS, MAX_SHARDS = 1024, 4096
"""Blocks, and shards of them, that are lent at once."""
START_S = 10.0
"""Time since a helper's start for which a thread that asks waits for it."""
STARTS_S, PINNED_PER_S = 60.0, 2**30
"""Time after which a helper that starts is killed, and bytes of the pool, which RDMA pins, that add a second."""
SEND_S, SEND_PAUSE_S = 0.5, 0.001
"""Time for the helper to accept a message, after which it counts as hanging, and the pause between attempts."""
MAX_REPLIES = 64
"""Replies that wait for a helper that accepts no message now; further ones are dropped."""
BEAT_S, HANGS_S = 1.0, 10.0
"""Interval of the helper's signs of life, and time without one after which it is killed."""
FIRST_PAUSE_S, MAX_PAUSE_S, STEADY_S = 0.25, 1.0, 10.0
"""Pauses before the helper is started again, longer each time that it ended within the last."""
CANNOT_WORK_PAUSE_S = 30.0
"""Longest pause if it said that it cannot work."""
MODULES = "nixl_cu12", "nixl_cu13"
DEBIAN_LIBRARY = "/usr/lib/kvoffd"
"""Directory of kvoffd, and of what it needs, in the Debian package."""
_FRAME_BYTES = 10
"""Bytes before a message's payload: kind, peer or length of a route, and id."""


# Kinds of frames, to the helper and from it.
FIND, PIN, RELEASE, READ, FREE, REPLY, CONNECT, FOLLOW = range(8)
ANSWER, DONE, FAILED, REQUEST, STARTED, BEAT = range(16, 22)


class HelperSettings(msgspec.Struct, array_like=True, frozen=True):
    """First message to the helper. Descriptors are inherited; -1 for none."""

    peers: list[str]
    """Addresses; an empty one is set later, by ``PeerHelper.connect``."""
    listen: str
    secret: bytes
    pool: tuple[int, int, int] = -1, 0, 0
    """Descriptor, offset and size of the pool, opened for reading: it is served."""
    landing: tuple[int, int] = -1, 0
    """Descriptor and size of the memory for what is read."""


class Follow(msgspec.Struct, array_like=True, frozen=True):
    """Tells a namespace's generation, which the peer follows if it is higher, or 0. The reply is the peer's, of
    ``GENERATION_BYTES``, little-endian, and a byte: 1 if the peer has dropped all earlier blocks, and its next daemon
    would know that, else 0.

    Attributes:
        others: fingerprints of further namespaces whose generations are asked for, up to ``MAX_FOLLOWED``. The reply
            has the same of each. A peer of an earlier build ignores them: its reply is of the first namespace alone.
    """

    fingerprint: bytes
    generation: int
    others: bytes = b""


class Find(msgspec.Struct, array_like=True, frozen=True):
    """Asks which blocks a peer has. The reply is its generation, of ``GENERATION_BYTES``, little-endian, and a byte for
    each key, 0 or 1.

    Attributes:
        generation: the asker's fleet generation of the namespace. A peer with another one has nothing.
    """

    fingerprint: bytes
    generation: int
    group: int
    key_bytes: int
    keys: bytes


class Pin(msgspec.Struct, array_like=True, frozen=True):
    """Borrows blocks whose shards have these lengths. The reply is ``Pinned``; RELEASE with the same id ends it."""

    wanted: Find
    lengths: list[int]


class Pinned(msgspec.Struct, array_like=True, frozen=True):
    """Blocks that are lent.

    Attributes:
        seconds: time until the peer may overwrite them.
        there: a byte for each key, ABSENT, LENT or BUSY; after the first that is BUSY none is lent.
        offsets, checksums, first_blocks: [blocks that are there, ranks], of 8, 8 and 2 bytes, little-endian.
    """

    seconds: float
    there: bytes
    offsets: bytes
    checksums: bytes
    first_blocks: bytes


def frame(kind: int, number: int, ident: int, payload: bytes = b"") -> bytes:
    """Return a message of the channel. ``number``: of a peer, or the length of a route at the payload's beginning."""
    return bytes((kind, number)) + ident.to_bytes(8, "little") + payload


def parsed(data: bytes) -> tuple[int, int, int, bytes]:
    return data[0], data[1], int.from_bytes(data[2:_FRAME_BYTES], "little"), data[_FRAME_BYTES:]


def read_secret(path: str) -> bytes:
    """Return the secret that all nodes share. Raises KvoffdError."""
    try:
        with open(path, "rb") as file:
            secret = file.read(4097).strip()
    except OSError as error:
        raise KvoffdError(f"The secret of peers cannot be read: {error}.") from error
    if not 16 <= len(secret) <= 4096:
        why = f"{path} must hold 16 to 4096 characters, the same on all nodes; make it with: openssl rand -hex 32."
        raise KvoffdError(why, ErrorCode.BAD_ARGUMENT)
    return secret


def curve_keys(secret: bytes) -> tuple[bytes, bytes]:
    """Return the public and the secret key of both ends of each connection, made from the nodes' secret."""
    secret_key = z85.encode(blake2b(secret, digest_size=32, person=b"kvoffd peers").digest())
    return zmq.curve_public(secret_key), secret_key


def peer_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, keys: tuple[bytes, bytes], *, is_server: bool = False
) -> zmq.Socket[bytes]:
    """Return a socket that is not connected yet, for nodes with these keys."""
    made: zmq.Socket[bytes] = context.socket(kind)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.SNDHWM, MAX_QUEUED)
    made.setsockopt(zmq.RCVHWM, MAX_QUEUED)
    made.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    made.setsockopt(zmq.IPV6, 1)
    made.curve_publickey, made.curve_secretkey = keys
    if is_server:
        made.curve_server = True
    else:
        made.curve_serverkey = keys[0]
    return made


def check_installed() -> None:
    """Raise KvoffdError if NIXL is not installed. It is not imported: that is for the helper."""
    if not any(importlib.util.find_spec(name) for name in MODULES):
        # --no-deps: else it brings torch for CUDA. The Debian package has a directory of its own.
        where = f"--target {DEBIAN_LIBRARY} " if __file__.startswith(f"{DEBIAN_LIBRARY}/") else ""
        how = f"install it with: {sys.executable} -m pip install --no-deps {where}nixl-cu12."
        if importlib.util.find_spec("pip") is None:
            how = f"take the image with it (make image PEERS=yes), or get pip (apt install python3-pip), then {how}"
        raise KvoffdError(f"Peers need NIXL, which is not installed; {how}", ErrorCode.BAD_ARGUMENT)


def helper_command(channel: int) -> list[str]:
    """Return the helper's command line."""
    return [*program("kvoffd.tiers.peer_helper", Path(__file__).parents[2]), str(channel)]


class _Call:
    """A request to the helper that a thread waits for."""

    def __init__(self, kind: int, peer: int, ident: int, life: int) -> None:
        self.kind, self.peer, self.ident, self.life = kind, peer, ident, life
        self.ended = threading.Event()
        self.reply: bytes | None = None
        self.problem = ""


class PeerHelper:
    """Starts the helper, and starts it again when it has ended. ``call`` and ``send`` are for any thread.

    Args:
        settings: without descriptors.
        pool: descriptor, offset and size of the pool; only served if the settings name an address to listen on.
        on_request: called in a thread with a peer's route, the id and kind of its request, and the request.
        on_end: called in that thread when a helper that was started is gone, and with it all that peers borrowed.
    """

    def __init__(
        self,
        settings: HelperSettings,
        pool: tuple[int, int, int],
        on_request: Callable[[bytes, int, int, bytes], None],
        on_end: Callable[[], None],
    ) -> None:
        self._settings, self._pool = settings, pool
        self._on_request, self._on_end = on_request, on_end
        nbytes = len(settings.peers) * SLICES * SLICE_BYTES
        self._landing = PoolMemory.create(nbytes, "kvoffd-peers") if nbytes else None
        if self._landing is not None:
            self._landing.touch(1)
        self.landing_address = self._landing.mapping.address if self._landing is not None else 0
        self._lock = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._reads: dict[int, int] = {}
        """Peers by the ids of reads whose end the helper has not reported."""
        self._began = time.monotonic()
        self._ids = count(secrets.randbits(62))
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = threading.Event()
        """Set when the daemon stops."""
        self._start_ended = threading.Event()
        """Set unless a helper is starting: it works, or has failed."""
        self._cannot_work = False
        """Whether the last helper said so, as without NIXL."""
        self.life = 0
        """Number of helpers that have ended."""
        self.up, self.problem = False, ""
        """Whether a helper works, and if not, a sentence why."""
        self.refused_handshakes = self._refused_by_earlier = 0
        """Connections to ``listen`` that were refused; those of earlier helpers."""
        self._refusals = RareWarnings(logger)
        self._replies = TaskThread("kvoffd-replies")
        self._thread = AbandonableThreads([("kvoffd-peers", self._run)], self._closed.set)

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def check(self) -> None:
        """Raise StoreError unless the helper works. Waits for one that starts."""
        if not self.up:
            self._start_ended.wait(max(0.0, self._began + START_S - time.monotonic()))
        if not self.up:
            why = self.problem or "The helper process for peers has not started yet."
            raise StoreError("helper", why, final=True)

    def send(self, data: bytes, timeout_s: float = 0.0) -> bool:
        """Send a frame; return False if the helper does not accept it in time."""
        until = time.monotonic() + timeout_s
        while True:
            with self._lock:
                if self._channel is None:
                    return False
                try:
                    self._channel.send(data, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    pass  # its queue is full
                except OSError:
                    return False
                else:
                    return True
            if time.monotonic() >= until:  # without the lock: the daemon's thread must not wait for it
                return False
            time.sleep(SEND_PAUSE_S)

    def has_reads(self, peer: int) -> bool:
        """Return whether a peer's memory here may still be written, also by reads that nobody waits for any more."""
        with self._lock:
            return peer in self._reads.values()

    def connect(self, peer: int, address: str) -> bool:
        """Give a peer's number to another one, or to none, while nothing is being read of it.

        Return False if the helper has no time.
        """
        with self._lock:
            before, self._settings.peers[peer] = self._settings.peers[peer], address
            starts = self._channel is None
        if starts or self.send(frame(CONNECT, peer, 0, address.encode())):
            return True
        self._settings.peers[peer] = before
        return False

    def reply(self, route: bytes, ident: int, payload: bytes) -> None:
        """Answer a peer's request. Never blocks: a thread sends what the helper does not accept at once."""
        data = frame(REPLY, len(route), ident, route + payload)
        if not self.send(data) and self._replies.waiting < MAX_REPLIES:
            self._replies.put(partial(self.send, data, SEND_S))

    def begin(self, kind: int, peer: int, payload: bytes) -> _Call:
        """Send a request, whose answer ``wait`` returns. Raises StoreError."""
        with self._lock:
            call = _Call(kind, peer, next(self._ids) % 2**63, self.life)
            self._calls[call.ident] = call
            if kind == READ:
                self._reads[call.ident] = peer
        if not self.send(frame(kind, peer, call.ident, payload), SEND_S):
            with self._lock:
                self._reads.pop(call.ident, None)
            self.end(call)
            raise StoreError("helper", self.problem or "The helper process for peers hangs.", final=True)
        return call

    def wait(self, call: _Call, deadline: float) -> bytes:
        """Return the answer. Raises StoreError."""
        if not call.ended.wait(max(0.0, deadline - time.monotonic())):
            raise StoreError("timeout", "The peer did not answer in time.")
        if call.reply is None:
            raise StoreError("unreachable" if call.kind in (FIND, FOLLOW) else "disconnected", call.problem)
        return call.reply

    def end(self, call: _Call) -> None:
        """Forget a call. The helper uses a read's memory again once nothing can be written there any more."""
        with self._lock:
            self._calls.pop(call.ident, None)
        if call.kind == READ and not self.send(frame(FREE, call.peer, call.ident), SEND_S) and self.life == call.life:
            self._kill()  # it hangs, and that memory would be lost

    def call(self, kind: int, peer: int, payload: bytes, deadline: float) -> tuple[int, bytes]:
        """Send a request; return its id and the answer. Raises StoreError."""
        call = self.begin(kind, peer, payload)
        try:
            return call.ident, self.wait(call, deadline)
        except StoreError:
            if kind == PIN:
                self.send(frame(RELEASE, peer, call.ident))
            raise
        finally:
            self.end(call)

    def fail_calls(self, why: str, peer: int | None = None) -> None:
        """Have all that wait for an answer, or for one peer's, raise StoreError."""
        with self._lock:
            calls = [call for call in self._calls.values() if peer in (None, call.peer)]
        for call in calls:
            call.problem = why
            call.ended.set()

    def interrupt(self) -> None:
        """Have all calls, and those that wait for a helper that starts, raise StoreError: the daemon stops."""
        self._closed.set()
        self._start_ended.set()
        self.fail_calls("The daemon stops.")

    def close(self, deadline_s: float) -> bool:
        """End the helper; return False if it does not end in time."""
        self.interrupt()
        self._kill()
        self._replies.stop()
        until = time.monotonic() + deadline_s
        ended = self._thread.join(until)
        ended = self._replies.close(max(0.0, until - time.monotonic())) and ended
        if ended and self._landing is not None:
            self._landing.close()
            self._landing = None
        return ended

    def _kill(self) -> None:
        process = self._process
        if process is not None:
            with suppress(OSError):
                process.kill()

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closed.is_set():
            began = time.monotonic()
            self._cannot_work = False
            try:
                self._live()
            except Exception as error:
                self._cannot_work = not isinstance(error, ConnectionError)  # that is a kill
                self.problem = f"The helper process for peers cannot be started: {error}."
            self._start_ended.set()
            if self._closed.is_set():
                return
            # One that cannot work may take long to find that out, on a busy machine.
            lived = not self._cannot_work and time.monotonic() - began >= STEADY_S
            most_s = CANNOT_WORK_PAUSE_S if self._cannot_work else MAX_PAUSE_S
            pause_s = FIRST_PAUSE_S if lived else min(most_s, 2 * pause_s)
            logger.warning("%s It is started again in %.1f s.", self.problem, pause_s)
            self._closed.wait(pause_s)

    def _live(self) -> None:
        """Start a helper, and handle its messages until it is gone."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                self._process, settings = self._start(theirs.fileno())
            self._began = time.monotonic()
            pinned = self._pool[2] if settings.listen else 0
            patience_s, frames = STARTS_S + pinned / PINNED_PER_S, select.poll()
            frames.register(ours, select.POLLIN)
            self._start_ended.clear()
            if self._closed.is_set():  # ``interrupt`` may have set the event before it was cleared
                self._start_ended.set()
            with self._lock:  # so that no address is lost that is set now
                ours.send(msgspec.msgpack.encode(settings))
                self._channel = ours
            if self._closed.is_set():  # ``close`` may have killed the one before
                self._kill()
            try:
                # SO_RCVTIMEO would begin again whenever a signal, or a container that is frozen, interrupts the call.
                while (comes := frames.poll(1000 * patience_s)) and (data := ours.recv(MAX_MESSAGE_BYTES)):
                    self._received(data)
                    if data[0] == STARTED:
                        patience_s = HANGS_S
                if not comes:
                    while_what = "" if self.up else " while it started"
                    self.problem = f"The helper process for peers hung{while_what}, and was killed."
            finally:
                self.up = False
                with self._lock:
                    self._channel = None
                self._kill()
                code = self._process.wait()
                self.life += 1
                self._refused_by_earlier = self.refused_handshakes
                with self._lock:
                    self._reads.clear()
                if not self._closed.is_set():
                    self.problem = self.problem or f"The helper process for peers ended ({code}); the log may say why."
                self.fail_calls("The helper process for peers ended.")
                self._on_end()

    def _start(self, channel: int) -> tuple[subprocess.Popen[bytes], HelperSettings]:
        """Start the process, which inherits its end of the channel. Returns it, and the settings to send."""
        settings, inherited, served = self._settings, [channel], -1
        if settings.listen:
            fd, offset, nbytes = self._pool
            served = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            settings = msgspec.structs.replace(settings, pool=(served, offset, nbytes))
            inherited.append(served)
        if self._landing is not None:
            landing = self._landing.fd, self._landing.size_bytes
            settings = msgspec.structs.replace(settings, landing=landing)
            inherited.append(self._landing.fd)
        try:
            return subprocess.Popen(helper_command(channel), pass_fds=inherited, stdin=subprocess.DEVNULL), settings
        finally:
            if served >= 0:
                os.close(served)

    def _received(self, data: bytes) -> None:
        kind, number, ident, payload = parsed(data)
        if kind == REQUEST:
            self._on_request(payload[:number], ident, payload[number], payload[number + 1 :])
            return  # its id is the peer's, and answers no call
        if kind == STARTED:
            self.up, self._cannot_work, self.problem = not payload, bool(payload), payload.decode(errors="replace")
            self._start_ended.set()
            if self.up:
                logger.info("The helper process for peers has started.")
            return
        if kind == BEAT:
            self._count_refused(ident)
            return
        if kind in (DONE, FAILED):
            with self._lock:
                self._reads.pop(ident, None)
        if (call := self._calls.get(ident)) is not None and call.peer == number:
            if kind == (DONE if call.kind == READ else ANSWER):
                call.reply = payload
            else:
                call.problem = payload.decode(errors="replace")
            call.ended.set()

    def _count_refused(self, count: int) -> None:
        """Count the connections to ``listen`` that this helper has refused so far."""
        new = self._refused_by_earlier + count - self.refused_handshakes
        self.refused_handshakes += new
        if new:
            self._refusals.warn(
                "%d connections to peer_listen were refused so far: who connects has another secret, or is no kvoffd. "
                "Give all nodes the same peer_secret_file.",
                self.refused_handshakes,
            )


class PeerStore(Store):
    """The connection to one peer, of one thread. It is only read.

    Args:
        number: index of the peer in the helper's settings.
    """

    poll_s = 5.0
    most_window_keys = MAX_KEYS
    keys_at_once = MAX_KEYS
    blocks_at_once = MAX_BLOCKS
    bytes_at_once = 4 * SLICE_BYTES
    failed_s = 2.0  # a peer that was killed is back sooner than a store
    follows = True

    def __init__(self, helper: PeerHelper, number: int) -> None:
        self._helper, self._number = helper, number
        self._closed = False

    def connect(self) -> None:
        if self._closed:
            raise StoreError("closed", "The daemon stops.", final=True)
        self._helper.check()

    def ping(self, deadline: float) -> None:
        self._call(FIND, Find(bytes(FINGERPRINT_BYTES), 0, 0, 1, b""), deadline)

    def _call(self, kind: int, message: msgspec.Struct, deadline: float) -> tuple[int, bytes]:
        return self._helper.call(kind, self._number, msgspec.msgpack.encode(message), deadline)

    def generation(self, fingerprint: bytes, deadline: float) -> int:
        return self._generations(fingerprint, [], deadline)[0]

    def generations(self, fingerprints: Sequence[bytes], deadline: float) -> list[int | StoreError]:
        found = list[int | StoreError]()
        while len(found) < len(fingerprints):
            first, *others = fingerprints[len(found) : len(found) + 1 + MAX_FOLLOWED]
            found += self._generations(first, others, deadline)
            if others and len(found) == 1:  # an earlier build
                return [*found, *super().generations(fingerprints[1:], deadline)]
        return found

    def ask(self, group: BlockGroup, keys: Sequence[bytes], deadline: float, *, prefix: bool) -> tuple[int, list[bool]]:
        _, reply = self._call(FIND, _find_of(group, keys), deadline)
        if len(reply) != GENERATION_BYTES + len(keys):
            raise StoreError("protocol", f"The answer about {len(keys)} keys has {len(reply)} bytes.")
        return int.from_bytes(reply[:GENERATION_BYTES], "little"), [there == 1 for there in reply[GENERATION_BYTES:]]

    def touch(self, blocks: Sequence[Block], deadline: float) -> list[bool]:
        return [False] * len(blocks)

    def get(self, requests: Sequence[GetRequest], patience_s: float) -> Iterator[Received | None]:
        def same(request: GetRequest) -> tuple[BlockGroup, list[int]]:
            return request.group, list(map(len, request.views))

        for (_, lengths), members in groupby(requests, same):
            every, most = list(members), max(1, min(MAX_BLOCKS, MAX_SHARDS // max(1, len(lengths))))
            at, busy_until = 0, time.monotonic() + patience_s
            while at < len(every):
                before = at
                for received in self._borrow(every[at : at + most], lengths, patience_s):
                    at += 1
                    yield received
                if at > before:
                    busy_until = time.monotonic() + patience_s
                elif time.monotonic() >= busy_until:
                    raise StoreError("busy", "The peer lends no more blocks now: it has lent as many as it may.")
                else:
                    time.sleep(BUSY_S)

    def _borrow(
        self, requests: Sequence[GetRequest], lengths: list[int], patience_s: float
    ) -> Iterator[Received | None]:
        """Yield the blocks, which are of one group, up to the first that the peer does not lend now."""
        began = time.monotonic()
        wanted = Pin(_find_of(requests[0].group, [request.key for request in requests]), lengths)
        ident, reply = self._call(PIN, wanted, began + patience_s)
        reading: _Reading | None = None
        try:
            pinned = _CheckedPinned(reply, len(requests), len(lengths))
            until = began + pinned.seconds
            requests = requests[: len(pinned.places)]
            pieces_of = [_pieces(request, place) for request, place in zip(requests, pinned.places, strict=True)]
            reading = _Reading(self._helper, self._number, [piece for pieces in pieces_of for piece in pieces])
            for request, place, pieces in zip(requests, pinned.places, pieces_of, strict=True):
                if place is None:
                    yield None
                    continue
                while any(piece.missing_bytes for piece in pieces):
                    reading.land_next(min(until, time.monotonic() + patience_s))
                    if time.monotonic() >= until:
                        raise StoreError("timeout", "The peer's blocks came too late: they may have been overwritten.")
                block = Block(request.group, request.key, tuple(place.first_blocks), tuple(place.checksums))
                yield Received(block, [piece.checksum for piece in pieces])
        finally:
            if reading is not None:
                reading.end()
            self._helper.send(frame(RELEASE, self._number, ident), SEND_S)

    def put(self, requests: Sequence[PutRequest], deadline: float) -> Sequence[bool | None]:
        return [None] * len(requests)

    def remove(self, group: BlockGroup, keys: Sequence[bytes], deadline: float) -> None:
        """A peer's blocks are its own."""

    def raise_generation(self, fingerprint: bytes, seen: int, generation: int, deadline: float) -> int:
        _, reply = self._call(FOLLOW, Follow(fingerprint, generation), deadline)
        return checked_raise(reply, generation)

    def _generations(self, fingerprint: bytes, others: Sequence[bytes], deadline: float) -> list[int]:
        """Return the peer's generations; of a peer of an earlier build the first one alone."""
        _, reply = self._call(FOLLOW, Follow(fingerprint, 0, b"".join(others)), deadline)
        return [number for number, _ in _followed(reply, 1 + len(others))]

    def close(self) -> None: ...

    def interrupt(self) -> None:
        self._closed = True
        self._helper.fail_calls("The peer is not used any more.", self._number)


class _Place(NamedTuple):
    """A block that a peer lends: by rank, the offset in the peer's pool, the first engine block and the checksum."""

    offsets: list[int]
    first_blocks: list[int]
    checksums: list[int]


class _CheckedPinned:
    """A ``Pinned`` that was checked. Raises StoreError.

    Attributes:
        seconds: time until the peer may overwrite the blocks.
        places: of the requested blocks up to the first that is BUSY; None for one that the peer does not have.
    """

    def __init__(self, reply: bytes, keys: int, ranks: int) -> None:
        try:
            pinned = msgspec.msgpack.decode(reply, type=Pinned)
            there, self.seconds = pinned.there, pinned.seconds
            if len(there) != keys or not set(there) <= {ABSENT, LENT, BUSY}:
                raise ValueError("its length is wrong")
            columns = (pinned.offsets, "<u8"), (pinned.first_blocks, "<u2"), (pinned.checksums, "<u8")
            shape = there.count(LENT), ranks
            rows = zip(*(np.frombuffer(data, kind).reshape(shape).tolist() for data, kind in columns), strict=True)
            lent = map(_Place._make, rows)
            self.places = [next(lent) if state == LENT else None for state in there]
            if BUSY in there:
                del self.places[there.index(BUSY) :]
        except (msgspec.MsgspecError, ValueError) as error:
            raise StoreError("protocol", f"The peer's answer is not valid: {error}.") from error


class _Piece:
    """A shard to read: where it is in the peer's pool, and where it shall be."""

    __slots__ = ("address", "checksum", "missing_bytes", "offset", "view")

    def __init__(self, offset: int, view: memoryview) -> None:
        self.offset, self.view, self.missing_bytes = offset, view, len(view)
        self.address = address_of(view)
        self.checksum = 0
        """Checksum of its bytes; 0 if it came in several parts, or is short."""


def _pieces(request: GetRequest, place: _Place | None) -> list[_Piece]:
    """Return the pieces of a block, by rank; none if it is not lent."""
    return [] if place is None else list(map(_Piece, place.offsets, request.views))


class _Part:
    """Spans of pieces that one read of the helper brings, each with its begin and length."""

    call: _Call

    def __init__(self, spans: Sequence[tuple[_Piece, int, int]]) -> None:
        # Whole pieces come first: ``host_copy`` computes no checksum behind a span of which it gets no slot.
        spans = sorted(spans, key=lambda span: span[2] < len(span[0].view))
        self.spans, self.lengths = spans, [length for _, _, length in spans]
        self.addresses = [piece.address + begin for piece, begin, _ in spans]
        offsets = [(piece.offset + begin) % 2**64 for piece, begin, _ in spans]
        self.where = np.array([offsets, self.lengths], np.uint64).T.tobytes()


class _Reading:
    """Reads pieces from a peer, in parts, of which up to ``AHEAD`` are under way. For one thread.

    Args:
        peer: the peer's number.
        pieces: in the order in which they are read.
    """

    def __init__(self, helper: PeerHelper, peer: int, pieces: Sequence[_Piece]) -> None:
        self._helper, self._peer = helper, peer
        self._to_begin = _parts(pieces)
        self._under_way: deque[_Part] = deque()

    def land_next(self, deadline: float) -> None:
        """Wait for the next part, and copy it into the pool; begin to read others. Raises StoreError."""
        while len(self._under_way) < AHEAD and (part := next(self._to_begin, None)) is not None:
            part.call = self._helper.begin(READ, self._peer, part.where)
            self._under_way.append(part)
        self._land(self._under_way[0], deadline)
        self._under_way.popleft()

    def _land(self, part: _Part, deadline: float) -> None:
        helper = self._helper
        which = self._peer * SLICES + helper.wait(part.call, deadline)[0] % SLICES  # its own, whatever was answered
        landed = helper.landing_address + which * SLICE_BYTES
        whole = [piece for piece, _, length in part.spans if length == len(piece.view)]
        slots = array("Q", [piece.address for piece in whole])
        slot_bytes, sums = array("Q", [len(piece.view) for piece in whole]), array("Q", bytes(8 * len(whole)))
        sources = array("Q", [landed + start for start in accumulate((0, *part.lengths[:-1]))])
        columns = array("Q", part.addresses), sources, array("Q", part.lengths), slots, slot_bytes, sums
        to, of, sizes, *checked = (column.buffer_info()[0] for column in columns)
        native().host_copy(to, of, sizes, len(part.spans), *checked, len(whole), ctypes.byref(ctypes.c_uint32(0)))
        helper.end(part.call)
        if helper.life != part.call.life:  # another one may have written there
            raise StoreError("disconnected", "The helper process for peers ended during a read.")
        for piece, found in zip(whole, sums, strict=True):
            piece.checksum = found
        for piece, _, length in part.spans:
            piece.missing_bytes -= length

    def end(self) -> None:
        """End what is under way; its memory is used again once nothing can be written there any more."""
        for part in self._under_way:
            self._helper.end(part.call)


def _parts(pieces: Sequence[_Piece]) -> Iterator[_Part]:
    """Divide pieces into parts that the helper reads at once. Only a piece that is larger than one is divided."""
    spans: list[tuple[_Piece, int, int]] = []
    left = SLICE_BYTES
    for piece in pieces:
        if left < len(piece.view) <= SLICE_BYTES:
            yield _Part(spans)
            spans, left = [], SLICE_BYTES
        begin = 0
        while begin < len(piece.view):
            length = min(len(piece.view) - begin, left)
            spans.append((piece, begin, length))
            begin, left = begin + length, left - length
            if not left:
                yield _Part(spans)
                spans, left = [], SLICE_BYTES
    if spans:
        yield _Part(spans)


def checked_raise(reply: bytes, generation: int) -> int:
    """Return the generation of a peer that was sent this one, from its reply. Raises StoreError unless it has dropped
    all earlier blocks for good."""
    ((raised, is_kept),) = _followed(reply, 1)
    if raised < generation:
        raise StoreError("busy", "The peer has too many resets to follow; it lends nothing of this namespace yet.")
    if not is_kept:
        why = "The peer has not written the reset to its kvoffd.state yet: a kill there may bring blocks back."
        raise StoreError(UNKEPT, why)
    return raised


def _followed(reply: bytes, count: int) -> list[tuple[int, bool]]:
    """Return the generations of a reply to ``Follow``, and whether each is kept; of an earlier build's the first one.
    Raises StoreError."""
    if len(reply) not in (FOLLOWED_BYTES, FOLLOWED_BYTES * count):
        raise StoreError("protocol", f"The answer about {count} generations has {len(reply)} bytes.")
    return [
        (int.from_bytes(reply[at : at + GENERATION_BYTES], "little"), reply[at + GENERATION_BYTES] == 1)
        for at in range(0, len(reply), FOLLOWED_BYTES)
    ]


def _find_of(group: BlockGroup, keys: Sequence[bytes]) -> Find:
    return Find(group.fingerprint, group.generation, group.group_index, len(keys[0]), b"".join(keys))
