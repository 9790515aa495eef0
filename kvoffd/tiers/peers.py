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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count, groupby
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvoffd.errors import KvoffdError
from kvoffd.pool.memory import PoolMemory
from kvoffd.system.files import address_of
from kvoffd.system.native import COUNT, NUMBER, VOID_P, declare, native
from kvoffd.system.threads import DaemonThreads
from kvoffd.tiers.store import GetRequest, Received, Store, StoreError
from kvoffd_proto.errors import ErrorCode

declare(keep_gil=False, host_copy=(COUNT, *(VOID_P, VOID_P, VOID_P, NUMBER) * 2, VOID_P))

logger = logging.getLogger(__name__)

SLICE_BYTES = 4 * 2**20
"""Memory that one read of the helper may use."""
SLICES = 16
MOST_MESSAGE_BYTES = 192 * 1024
"""Limit of a message between helper and daemon, and between two helpers: what a Unix socket takes at once."""
MOST_KEYS = 2048
"""Keys of one message, of up to 64 bytes."""
MOST_BLOCKS, MOST_SHARDS = 256, 4096
"""Blocks, and shards of them, that are lent at once."""
MOST_RANKS = 1024
START_S = 10.0
"""Longest wait for a helper that starts, in a thread that asks."""
SEND_S = 0.5
"""Time for the helper to accept a message; later it counts as hanging."""
FIRST_PAUSE_S, MOST_PAUSE_S, STEADY_S = 0.25, 4.0, 10.0
"""Pauses before the helper is started again, longer each time that it ended within the last."""
MODULES = "nixl_cu12", "nixl_cu13"
_FRAME_BYTES = 10
"""Bytes before a message's payload: kind, peer or length of a route, and id."""

# Kinds of frames, to the helper and from it.
FIND, PIN, RELEASE, READ, FREE, REPLY = range(6)
ANSWER, DONE, FAILED, REQUEST, STARTED = range(16, 21)


class HelperSettings(msgspec.Struct, array_like=True, frozen=True):
    """First message to the helper. Descriptors are inherited; -1 for none."""

    peers: list[str]
    listen: str
    secret: bytes
    pool: tuple[int, int, int] = -1, 0, 0
    """Descriptor, offset and size of the pool, opened for reading: it is served."""
    landing: tuple[int, int] = -1, 0
    """Descriptor and size of the memory for what is read."""


class Find(msgspec.Struct, array_like=True, frozen=True):
    """Asks which blocks a peer has. The reply is a byte for each key, 0 or 1."""

    fingerprint: bytes
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
        there: a byte for each key, 0 or 1.
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


def check_installed() -> None:
    """Raise KvoffdError if NIXL is not installed. It is not imported: that is for the helper."""
    if not any(importlib.util.find_spec(name) for name in MODULES):
        raise KvoffdError(
            f"Peers need NIXL, which is not installed; install it with: {sys.executable} -m pip install --no-deps "
            "nixl-cu12 (without --no-deps it brings torch for CUDA).",
            ErrorCode.BAD_ARGUMENT,
        )


class _Call:
    """A request to the helper that a thread waits for."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.reply: bytes | None = None
        self.problem = ""


class Region(NamedTuple):
    """What a finished read of the helper has filled. ``life``: of the helper."""

    life: int
    ident: int
    offset: int


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
        self._landing = PoolMemory.create(SLICES * SLICE_BYTES, "kvoffd-peers") if settings.peers else None
        self.landing_address = self._landing.segment.address if self._landing is not None else 0
        self._lock = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._ids = count(secrets.randbits(62))
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closed, self._decided = threading.Event(), threading.Event()
        self.life, self.starts, self.up, self.problem = 0, 0, False, ""
        self._thread = DaemonThreads([("kvoffd-peers", self._run)], self._closed.set)

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def check(self) -> None:
        """Raise StoreError unless the helper works. Waits for one that starts."""
        if not self.up:
            self._decided.wait(START_S)
        if not self.up:
            why = self.problem or "The helper process for peers has not started yet."
            raise StoreError("helper", why, final=True)

    def send(self, data: bytes, timeout_s: float = 0.0) -> bool:
        """Send a frame; return False if the helper does not accept it in time."""
        with self._lock:
            channel = self._channel
            if channel is None:
                return False
            try:
                try:
                    channel.send(data, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    if not timeout_s or not select.select([], [channel], [], timeout_s)[1]:
                        return False
                    channel.send(data, socket.MSG_DONTWAIT)
            except OSError:
                return False
            return True

    def reply(self, route: bytes, ident: int, payload: bytes) -> None:
        """Answer a peer's request; drop the answer if the helper does not accept it now."""
        self.send(frame(REPLY, len(route), ident, route + payload))

    def call(self, kind: int, peer: int, payload: bytes, deadline: float) -> tuple[int, bytes]:
        """Send a request; return its id and the answer. Raises StoreError."""
        with self._lock:
            ident = next(self._ids) % 2**63
            call = self._calls[ident] = _Call()
        try:
            if not self.send(frame(kind, peer, ident, payload), SEND_S):
                raise StoreError("helper", self.problem or "The helper process for peers hangs.", final=True)
            if not call.ended.wait(max(0.0, deadline - time.monotonic())):
                raise StoreError("timeout", "The peer did not answer in time.")
            if call.reply is None:
                raise StoreError("unreachable" if kind == FIND else "disconnected", call.problem)
            return ident, call.reply
        except StoreError:
            self.send(frame(FREE, peer, ident))
            raise
        finally:
            with self._lock:
                self._calls.pop(ident, None)

    def close(self, deadline_s: float) -> bool:
        """End the helper; return False if it does not end in time."""
        self._closed.set()
        self._decided.set()
        self._end()
        ended = self._thread.join(time.monotonic() + deadline_s)
        if ended and self._landing is not None:
            self._landing.close()
            self._landing = None
        return ended

    def _end(self) -> None:
        process = self._process
        if process is not None:
            with suppress(OSError):
                process.kill()

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closed.is_set():
            began = time.monotonic()
            try:
                self._live()
            except OSError as error:
                self.problem = f"The helper process for peers cannot be started: {error}."
            if self._closed.is_set():
                return
            lived = time.monotonic() - began >= STEADY_S
            pause_s = FIRST_PAUSE_S if lived else min(MOST_PAUSE_S, 2 * pause_s)
            logger.warning("%s It is started again in %.1f s.", self.problem, pause_s)
            self._closed.wait(pause_s)

    def _live(self) -> None:
        """Start a helper, and handle its messages until it is gone."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds: list[int] = []
        with ours:
            with theirs:
                settings = self._settings
                if settings.listen:
                    fd, offset, nbytes = self._pool
                    fds.append(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))
                    settings = msgspec.structs.replace(settings, pool=(fds[0], offset, nbytes))
                if self._landing is not None:
                    landing = self._landing.fd, self._landing.size_bytes
                    settings = msgspec.structs.replace(settings, landing=landing)
                inherited = [theirs.fileno(), *fds, *([self._landing.fd] if self._landing is not None else [])]
                command = [sys.executable, "-m", "kvoffd.tiers.peer_helper", str(theirs.fileno())]
                try:
                    self._process = subprocess.Popen(command, pass_fds=inherited, stdin=subprocess.DEVNULL)
                finally:
                    for fd in fds:
                        os.close(fd)
            self.starts += 1
            self._decided.clear()
            if self._closed.is_set():
                self._decided.set()
            ours.send(msgspec.msgpack.encode(settings))
            with self._lock:
                self._channel = ours
            if self._closed.is_set():
                self._end()
            try:
                while data := ours.recv(MOST_MESSAGE_BYTES):
                    self._received(data)
            finally:
                self.up = False
                with self._lock:
                    self._channel = None
                self._decided.set()  # this one has failed
                self._end()
                code = self._process.wait()
                self.life += 1
                if not self._closed.is_set():
                    self.problem = self.problem or f"The helper process for peers ended ({code}); the log may say why."
                with self._lock:
                    calls = list(self._calls.values())
                for call in calls:
                    call.problem = "The helper process for peers ended."
                    call.ended.set()
                self._on_end()

    def _received(self, data: bytes) -> None:
        kind, number, ident, payload = parsed(data)
        if kind == REQUEST:
            self._on_request(payload[:number], ident, payload[number], payload[number + 1 :])
        elif kind == STARTED:
            self.up, self.problem = not payload, payload.decode()
            self._decided.set()
            if self.up:
                logger.info("The helper process for peers has started.")
        elif (call := self._calls.get(ident)) is not None:
            if kind == FAILED:
                call.problem = payload.decode(errors="replace")
            else:
                call.reply = payload
            call.ended.set()
        elif kind == DONE:  # nobody waits for it any more
            self.send(frame(FREE, number, ident), SEND_S)


class PeerStore(Store):
    """The connection to one peer, of one thread. It is only read.

    Args:
        number: index of the peer in the helper's settings.
    """

    poll_s = 3600.0  # see has_generations
    most_window_keys = MOST_KEYS
    keys_at_once = MOST_KEYS
    blocks_at_once = MOST_BLOCKS
    bytes_at_once = SLICE_BYTES
    has_generations = False

    def __init__(self, helper: PeerHelper, number: int) -> None:
        self._helper, self._number = helper, number
        self._no_stop = ctypes.c_uint32(0)
        self._closed = False

    def connect(self) -> None:
        if self._closed:
            raise StoreError("closed", "The daemon stops.", final=True)
        self._helper.check()

    def ping(self, deadline: float) -> None:
        self._call(FIND, Find(b"", 0, 1, b""), deadline)

    def _call(self, kind: int, message: msgspec.Struct, deadline: float) -> tuple[int, bytes]:
        return self._helper.call(kind, self._number, msgspec.msgpack.encode(message), deadline)

    def ask(
        self, generation_key: bytes, keys: Sequence[bytes], deadline: float, *, prefix: bool
    ) -> tuple[int, list[bool]]:
        if not keys:
            return 0, []
        _, there = self._call(FIND, _find_of(keys), deadline)
        if len(there) != len(keys):
            raise StoreError("protocol", f"{len(keys)} keys were requested, but {len(there)} answered.")
        return 0, [one == 1 for one in there]

    def touch(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        return [False] * len(keys)

    def get(self, requests: Sequence[GetRequest], patience_s: float) -> Iterator[Received | None]:
        def same(request: GetRequest) -> tuple[bytes, list[int]]:
            return request.key.rpartition(b"/")[0], list(map(len, request.views))

        for (_, lengths), members in groupby(requests, same):
            every, most = list(members), max(1, min(MOST_BLOCKS, MOST_SHARDS // max(1, len(lengths))))
            for at in range(0, len(every), most):
                yield from self._borrow(every[at : at + most], lengths, patience_s)

    def _borrow(
        self, requests: Sequence[GetRequest], lengths: list[int], patience_s: float
    ) -> Iterator[Received | None]:
        """Yield the blocks, which are of one group."""
        began = time.monotonic()
        ident, reply = self._call(PIN, Pin(_find_of([one.key for one in requests]), lengths), began + patience_s)
        try:
            pinned = _Lent(reply, len(requests), len(lengths))
            until = began + pinned.seconds
            yield from self._read(requests, pinned, lengths, patience_s, until)
        finally:
            self._helper.send(frame(RELEASE, self._number, ident), SEND_S)

    def _read(
        self, requests: Sequence[GetRequest], lent: _Lent, lengths: list[int], patience_s: float, until: float
    ) -> Iterator[Received | None]:
        """Read what is lent in parts that the helper reads at once, and yield each block once its parts are there."""
        nbytes, rows = sum(lengths), iter(range(lent.blocks))
        waiting: list[tuple[GetRequest, int | None]] = []
        at_once = max(1, SLICE_BYTES // max(1, nbytes))
        for request, there in zip(requests, lent.there, strict=True):
            waiting.append((request, next(rows) if there else None))
            if sum(row is not None for _, row in waiting) == at_once:
                yield from self._fill(waiting, lent, patience_s, until)
                waiting.clear()
        yield from self._fill(waiting, lent, patience_s, until)

    def _fill(
        self, waiting: Sequence[tuple[GetRequest, int | None]], lent: _Lent, patience_s: float, until: float
    ) -> Iterator[Received | None]:
        pieces = [
            (lent.offsets[row][rank], view)
            for request, row in waiting
            if row is not None
            for rank, view in enumerate(request.views)
        ]
        sums = self._copy(pieces, patience_s, until)
        at = 0
        for request, row in waiting:
            if row is None:
                yield None
                continue
            count_ = len(request.views)
            yield Received(b"", sums[at : at + count_], (tuple(lent.firsts[row]), tuple(lent.checksums[row])))
            at += count_

    def _copy(self, pieces: Sequence[tuple[int, memoryview]], patience_s: float, until: float) -> Sequence[int]:
        """Read shards of the peer into views; return their checksums, 0 where a shard came in several parts."""
        sums: list[int] = [0] * len(pieces)
        part: list[tuple[int, int, int, int]] = []
        """Number of the piece, offset in the peer's pool, address in ours, length."""
        left = SLICE_BYTES
        for number, (offset, view) in enumerate(pieces):
            address, begin = address_of(view) if len(view) else 0, 0
            while begin < len(view):
                length = min(len(view) - begin, left)
                part.append((number, offset + begin, address + begin, length))
                begin, left = begin + length, left - length
                if not left:
                    self._copy_part(part, pieces, sums, patience_s, until)
                    part, left = [], SLICE_BYTES
        if part:
            self._copy_part(part, pieces, sums, patience_s, until)
        return sums

    def _copy_part(
        self,
        part: Sequence[tuple[int, int, int, int]],
        pieces: Sequence[tuple[int, memoryview]],
        sums: list[int],
        patience_s: float,
        until: float,
    ) -> None:
        helper, life = self._helper, self._helper.life
        numbers, offsets, addresses, lengths = zip(*part, strict=True)
        where = np.array([offsets, lengths], np.uint64).T.tobytes()
        ident, reply = helper.call(READ, self._number, where, min(until, time.monotonic() + patience_s))
        try:
            landed = int.from_bytes(reply, "little") + helper.landing_address
            sources = array("Q", [landed + sum_ for sum_ in _starts(lengths)])
            to, sizes = array("Q", addresses), array("Q", lengths)
            whole = [number for number, size in zip(numbers, lengths, strict=True) if size == len(pieces[number][1])]
            slots = array("Q", [address_of(pieces[number][1]) for number in whole])
            slot_sizes = array("Q", [len(pieces[number][1]) for number in whole])
            found = array("Q", bytes(8 * len(whole)))
            columns = [column.buffer_info()[0] for column in (to, sources, sizes)]
            checked = [column.buffer_info()[0] for column in (slots, slot_sizes, found)]
            stop = ctypes.byref(self._no_stop)
            native().host_copy(*columns, len(part), *checked, len(whole), stop)
            for number, one in zip(whole, found, strict=True):
                sums[number] = one
        finally:
            helper.send(frame(FREE, self._number, ident), SEND_S)
        if helper.life != life:
            raise StoreError("disconnected", "The helper process for peers ended during a read.")
        if time.monotonic() >= until:
            raise StoreError("timeout", "The peer's blocks were read too late: they may have been overwritten.")

    def put(
        self, objects: Sequence[tuple[bytes, Sequence[bytes | memoryview]]], deadline: float
    ) -> Sequence[bool | None]:
        return [None] * len(objects)

    def remove(self, keys: Sequence[bytes], deadline: float) -> None:
        """A peer's blocks are its own."""

    def raise_generation(self, generation_key: bytes, seen: int, generation: int, deadline: float) -> int:
        raise StoreError("read_only", "A peer's blocks are cleared on that node.")

    def close(self) -> None: ...

    def interrupt(self) -> None:
        self._closed = True


class _Lent:
    """A checked ``Pinned``. Raises StoreError."""

    def __init__(self, reply: bytes, keys: int, ranks: int) -> None:
        try:
            pinned = msgspec.msgpack.decode(reply, type=Pinned)
            self.seconds = pinned.seconds
            self.there = list(pinned.there)
            self.blocks = sum(self.there)
            if len(self.there) != keys or not set(self.there) <= {0, 1}:
                raise ValueError("its length is wrong")
            self.offsets = _column(pinned.offsets, "<u8", self.blocks, ranks).tolist()
            self.checksums = _column(pinned.checksums, "<u8", self.blocks, ranks).tolist()
            self.firsts = _column(pinned.first_blocks, "<u2", self.blocks, ranks).tolist()
        except (msgspec.MsgspecError, ValueError) as error:
            raise StoreError("protocol", f"The peer's answer is not valid: {error}.") from error


def _column(data: bytes, kind: str, rows: int, columns: int) -> npt.NDArray[Any]:
    return np.frombuffer(data, kind).reshape(rows, columns)


def _starts(lengths: Sequence[int]) -> list[int]:
    starts, at = [], 0
    for length in lengths:
        starts.append(at)
        at += length
    return starts


def _find_of(names: Sequence[bytes]) -> Find:
    """Return the message for objects' names, which are of one group: see ``object_prefix``."""
    _, _, fingerprint, _, group, key = names[0].split(b"/")
    keys = b"".join([name[-len(key) :] for name in names])
    return Find(bytes.fromhex(fingerprint.decode()), int(group), len(key) // 2, bytes.fromhex(keys.decode()))
