"""The helper and its peers over real NIXL: a peer that lies, hangs or dies costs its own reads, and no wrong byte."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from hashlib import blake2b
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
import zmq
from zmq.utils import z85

from kvoffd.config import load_config
from kvoffd.errors import KvoffdError
from kvoffd.pool.checksums import digest
from kvoffd.pool.memory import PoolMemory
from kvoffd.server.tier_supervisor import shared_stores
from kvoffd.tiers import peer_helper, peer_process, peer_store
from kvoffd.tiers.header import make_block_group
from kvoffd.tiers.peer_messages import (
    FIND,
    FREE,
    GENERATION_BYTES,
    MAX_MESSAGE_BYTES,
    PIN,
    READ,
    RELEASE,
    REQUEST,
    SLICE_BYTES,
    SLICES,
    STARTED,
    Find,
    HelperSettings,
    Pin,
    Pinned,
    curve_keys,
    frame,
    peer_socket,
)
from kvoffd.tiers.peer_process import HelperProcess, PeerCall
from kvoffd.tiers.peer_store import PeerStore
from kvoffd.tiers.store import GetRequest, Received, StoreError
from tests.kit.amount import TIMES
from tests.kit.network import Network
from tests.kit.open_files import open_files
from tests.kit.ports import free_port
from tests.kit.require import require_nixl
from tests.kit.waiting import LONGER_THAN_A_TEST_S, wait_until

SIZE, BLOCKS = 64 * 4700, 24
KILLS, SEED = 5 * TIMES**2, int(os.environ.get("TESTS_SEED", "1"))
SECRET = b"a secret of tests"
PATIENCE_S = 20.0
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


@pytest.fixture(autouse=True)
def nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    require_nixl()
    monkeypatch.setenv("UCX_TLS", "tcp")
    from tests.kit.forked_helper import SUBPROCESS

    monkeypatch.setattr(peer_process, "subprocess", SUBPROCESS)


@pytest.fixture
def cold(nixl: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Helpers start as a daemon's do."""
    monkeypatch.setattr(peer_process, "subprocess", subprocess)


class Lender:
    """A node whose n-th key is its n-th block, or which lies as a test says."""

    def __init__(self, port: int = 0, size: int = SIZE, blocks: int = BLOCKS) -> None:
        self.port, self.size, self.mutes = port or free_port(), size, False
        self.memory = PoolMemory.create(blocks * size, "lender")
        data = np.random.default_rng(size).integers(0, 256, blocks * size, np.uint8)
        self.memory.buffer[:] = data.tobytes()
        self.offsets = [n * size for n in range(blocks)]
        self.sums = [digest(self.block(n)) for n in range(blocks)]
        self.seconds = 10.0
        self.raw: bytes | None = None
        self.lent: set[int] = set()
        settings = HelperSettings([], f"127.0.0.1:{self.port}", SECRET)
        self.helper = HelperProcess(settings, (self.memory.fd, 0, blocks * size), self.answer, self.lent.clear)

    def block(self, number: int) -> memoryview:
        return self.memory.buffer[number * self.size : (number + 1) * self.size]

    def answer(self, route: bytes, ident: int, kind: int, payload: bytes) -> None:
        if kind == RELEASE:
            self.lent.discard(ident)
        if self.mutes or kind == RELEASE:
            return
        reply = self.raw
        if kind == FIND:
            reply = bytes(GENERATION_BYTES) + bytes([1]) * (len(msgspec.msgpack.decode(payload)[4]) // 8)
        elif reply is None:
            self.lent.add(ident)
            numbers = np.frombuffer(msgspec.msgpack.decode(payload, type=Pin).wanted.keys, ">u8").tolist()
            offsets = np.array([self.offsets[n] for n in numbers], "<u8").tobytes()
            sums = np.array([self.sums[n] for n in numbers], "<u8").tobytes()
            pinned = Pinned(self.seconds, bytes([1]) * len(numbers), offsets, sums, bytes(2 * len(numbers)))
            reply = msgspec.msgpack.encode(pinned)
        self.helper.reply(route, ident, reply)

    def close(self) -> None:
        assert self.helper.close(10.0)


class Reader:
    def __init__(self, *ports: int, secret: bytes = SECRET) -> None:
        settings = HelperSettings([f"127.0.0.1:{port}" for port in ports], "", secret)
        self.helper = HelperProcess(settings, (-1, 0, 0), lambda *_: None, lambda: None)
        self.stores = [PeerStore(self.helper, number) for number in range(len(ports))]
        self._memory = PoolMemory.create(BLOCKS * SIZE, "reader")
        self.pool = self._memory.buffer

    def reachable(self) -> Reader:
        def answers() -> bool:
            try:
                for store in self.stores:
                    store.connect()
                    store.ping(time.monotonic() + 2.0)
            except StoreError:
                return False
            return True

        wait_until(answers, 30.0)
        return self

    def get(self, *numbers: int, size: int = SIZE, peer: int = 0, patience_s: float = PATIENCE_S) -> list[Received]:
        group = make_block_group(b"f" * 32, 0, 0, (size,))
        requests = [GetRequest(group, n.to_bytes(8, "big"), [self.pool[n * size : (n + 1) * size]]) for n in numbers]
        found = list(self.stores[peer].get(requests, patience_s))
        assert all(found)
        return [one for one in found if one is not None]

    def right(self, lender: Lender, *numbers: int, peer: int = 0, patience_s: float = PATIENCE_S) -> None:
        for number in numbers:
            self.pool[number * SIZE : (number + 1) * SIZE] = bytes(SIZE)
        for number, one in zip(numbers, self.get(*numbers, peer=peer, patience_s=patience_s), strict=True):
            assert self.pool[number * SIZE : (number + 1) * SIZE] == lender.block(number)
            assert one.block is not None
            assert tuple(one.checksums) == one.block.checksums == (lender.sums[number],)

    def close(self) -> None:
        assert self.helper.close(10.0)


@pytest.fixture
def lender(nixl: None) -> Iterator[Lender]:
    one = Lender()
    yield one
    one.close()


@pytest.fixture
def reader(lender: Lender) -> Iterator[Reader]:
    one = Reader(lender.port).reachable()
    yield one
    one.close()


@pytest.fixture
def full() -> Iterator[int]:
    """A port whose queue of connections is full: nothing answers there, as from a host that is gone."""
    with ExitStack() as stack:
        one = stack.enter_context(socket.socket())
        one.bind(("127.0.0.1", 0))
        one.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(one.getsockname())
        yield one.getsockname()[1]


def test_a_peer_that_finds_no_descriptor_for_its_socket_is_connected_once_there_is_one(
    lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed away until another one took its number."""
    no_more, make = [True] * 3, peer_socket

    def lacking(
        context: zmq.Context[zmq.Socket[bytes]], kind: int, keys: tuple[bytes, bytes], *, is_server: bool = False
    ) -> zmq.Socket[bytes]:
        if kind == zmq.DEALER and no_more:
            no_more.pop()
            raise zmq.ZMQError(errno.EMFILE)
        return make(context, kind, keys, is_server=is_server)

    monkeypatch.setattr(peer_helper, "peer_socket", lacking)  # also in the helper that is forked
    settings = HelperSettings([""], "", SECRET)
    helper, found = HelperProcess(settings, (-1, 0, 0), lambda *_: None, lambda: None), list[str]()
    store = PeerStore(helper, 0)
    assert helper.connect(0, f"127.0.0.1:{lender.port}")

    def answers() -> bool:
        try:
            store.connect()
            store.ping(time.monotonic() + 2.0)
        except StoreError as error:
            found.append(str(error))
            return False
        return True

    wait_until(answers, PATIENCE_S)
    assert helper.close(10.0)
    assert any("Too many open files" in why for why in found), found


def test_the_helper_finds_kvoffd_where_the_daemon_did() -> None:
    """The Debian package has it in a directory of its own, which only the daemon's script names."""
    _, *rest = peer_process.helper_command(0)
    ended = subprocess.run([sys.executable, "-I", "-S", *rest], capture_output=True, text=True, timeout=60, check=False)
    assert "No module named" in ended.stderr, "-S leaves out numpy"
    assert "No module named 'kvoffd'" not in ended.stderr


def test_without_nixl_it_does_not_start_and_says_what_to_type(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x" * 32)
    config = load_config({"peer_listen": "*:7400", "peer_secret_file": str(tmp_path / "secret")}, {})
    found, gone = importlib.util.find_spec, {"nixl_cu12", "nixl_cu13"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in gone else found(name))
    with pytest.raises(KvoffdError, match=rf"{re.escape(sys.executable)} -m pip install --no-deps nixl-cu12\.$"):
        shared_stores(config)
    monkeypatch.setattr(peer_process, "__file__", "/usr/lib/kvoffd/kvoffd/tiers/peer_process.py")
    with pytest.raises(KvoffdError, match="install --no-deps --target /usr/lib/kvoffd nixl-cu12"):
        shared_stores(config)
    gone.add("pip")
    with pytest.raises(KvoffdError, match=r"make image PEERS=yes.*apt install python3-pip"):
        shared_stores(config)


def test_what_is_wrong_with_a_peer_is_said_of_each(lender: Lender, full: int, caplog: pytest.LogCaptureFixture) -> None:
    """Another secret, an unknown name, a port without a daemon and a host that is gone have a sentence each."""
    closed = f"127.0.0.1:{free_port()}"
    secret, name, silent = f"127.0.0.1:{lender.port}", "no-such-host.invalid:7400", f"127.0.0.1:{full}"
    expected = {
        secret: f"{secret} refuses this node: it has another secret",
        name: f"{name} cannot be reached: its name is not known here",
        closed: f"{closed} cannot be reached: nothing listens there",
        silent: f"{silent} cannot be reached: its host does not answer",
    }
    helper = HelperProcess(HelperSettings(list(expected), "", SECRET + b"!"), (-1, 0, 0), lambda *_: None, lambda: None)
    stores = [PeerStore(helper, number) for number in range(len(expected))]

    def problems() -> dict[str, str]:
        found = {}
        for at, store in zip(expected, stores, strict=True):
            store.connect()
            with pytest.raises(StoreError) as raised:
                store.ping(time.monotonic() + 2.0)
            found[at] = str(raised.value)
        return found

    def are_right() -> bool:
        return all(found.startswith(expected[at]) for at, found in problems().items())

    wait_until(are_right, 30.0, explain=problems)
    wait_until(lambda: lender.helper.refused_handshakes >= 2, 30.0)
    said = wait_until(lambda: next((text for text in caplog.messages if "were refused" in text), ""))
    assert "has another secret" in said
    assert helper.close(10.0)
    lender.helper._kill()  # the next helper begins at 0, and the count goes on
    before = lender.helper.refused_handshakes
    other = Reader(lender.port, secret=SECRET + b"?")
    wait_until(lambda: lender.helper.refused_handshakes > before, 30.0)
    other.close()


def test_what_is_wrong_with_the_helper_is_said_of_the_last_one(nixl: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends before it reads a message, and the one before it hung."""
    from tests.kit.forked_helper import ForkedHelper

    starts = 0

    class Failing(ForkedHelper):
        def __init__(self, command: Sequence[str], pass_fds: Sequence[int], stdin: int) -> None:
            nonlocal starts
            starts, self._status = starts + 1, None
            self.pid = os.fork()
            if not self.pid:
                try:
                    if starts == 1:
                        time.sleep(LONGER_THAN_A_TEST_S)
                finally:
                    os._exit(3)

    monkeypatch.setattr(peer_process, "STARTS_S", 0.05)
    monkeypatch.setattr(peer_process, "subprocess", SimpleNamespace(Popen=Failing, DEVNULL=subprocess.DEVNULL))
    reader = Reader(free_port())
    wait_until(lambda: reader.helper.problem == "The helper process for peers hung while it started, and was killed.")
    wait_until(lambda: reader.helper.life >= 2)
    wait_until(lambda: " ended (" in reader.helper.problem, explain=lambda: reader.helper.problem)
    reader.close()


def test_a_peer_that_comes_up_is_used_whatever_was_said_of_it(nixl: None) -> None:
    port = free_port()
    reader = Reader(port)
    reader.stores[0].connect()
    with pytest.raises(StoreError, match=r"nothing listens there|does not answer"):
        reader.stores[0].ping(time.monotonic() + 2.0)
    lender = Lender(port)
    reader.reachable().right(lender, 1)
    reader.close()
    lender.close()


def test_blocks_come_byte_for_byte_with_their_checksums(cold: None, lender: Lender, reader: Reader) -> None:
    reader.right(lender, *range(BLOCKS))
    reader.right(lender, 5, 3)
    wait_until(lambda: not lender.lent)


@pytest.mark.parametrize(("size", "blocks"), [(16, 24), (240, 24), (5000, 24), (65_536, 24), (9_000_001, 4)])
def test_blocks_of_every_size(nixl: None, size: int, blocks: int) -> None:
    lender = Lender(size=size, blocks=blocks)
    reader = Reader(lender.port).reachable()
    reader.pool = memoryview(bytearray(blocks * size))
    found = reader.get(*range(blocks), size=size)
    assert reader.pool == lender.memory.buffer
    # Those that are short, or came in parts, are left to the caller: see Received.
    assert all(one.checksums[0] in (0, total) for one, total in zip(found, lender.sums, strict=True))
    reader.close()
    lender.close()


def test_wrong_descriptors_and_checksums_show_as_such(lender: Lender, reader: Reader) -> None:
    lender.offsets[1], lender.sums[2] = lender.offsets[5], lender.sums[3]
    found = reader.get(1, 2, 3)
    assert [one.block is not None and tuple(one.checksums) == one.block.checksums for one in found] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("offset", [BLOCKS * SIZE, 2**40, 2**63, 2**64 - 8])
def test_a_descriptor_outside_the_peers_memory_is_a_failure(lender: Lender, reader: Reader, offset: int) -> None:
    lender.offsets[1] = offset
    with pytest.raises(StoreError):
        reader.get(1)
    lender.offsets[1] = SIZE
    reader.reachable()
    wait_until(lambda: _works(reader, lender), 30.0)


def _works(reader: Reader, lender: Lender) -> bool:
    try:
        reader.right(lender, 1, 2, patience_s=1.0)
    except StoreError:
        return False
    return True


def _garbage() -> Sequence[bytes]:
    there = msgspec.msgpack.encode
    return [
        b"",
        b"\xc1",
        os.urandom(2000),
        there(Pinned(10.0, b"\1\1", b"", b"", b"")),
        there(Pinned(10.0, b"\1", b"1234567", b"12345678", b"12")),
        there(Pinned(10.0, b"\7", b"", b"", b"")),
        there([1, 2, 3]),
        there(Pinned(float("nan"), b"\1", bytes(8), bytes(8), bytes(2))),
    ]


def test_answers_that_are_none_are_failures(lender: Lender, reader: Reader) -> None:
    for raw in _garbage():
        lender.raw = raw
        with pytest.raises(StoreError):
            reader.get(1, patience_s=5.0)
    lender.raw = None
    reader.right(lender, 1)


@pytest.mark.parametrize("payload", [b"", b"\xff", b"\0" * 8, b"\xff" * 8])
def test_answers_that_nobody_asked_for_are_dropped(lender: Lender, reader: Reader, payload: bytes) -> None:
    """As for the reads that follow a question, whose ids a peer can guess: the daemon would copy from anywhere."""
    answer = lender.answer

    def answers_more(route: bytes, ident: int, kind: int, request: bytes) -> None:
        answer(route, ident, kind, request)
        for further in range(1, 50):
            lender.helper.reply(route, ident + further, payload)

    lender.helper._on_request = answers_more
    for _ in range(5):
        with suppress(StoreError):  # one may answer a later question
            reader.right(lender, *range(BLOCKS))
    lender.helper._on_request = answer
    wait_until(lambda: _works(reader, lender), 30.0)
    assert reader.helper.life == 0


@pytest.mark.parametrize("kind", [FIND, READ])
def test_a_peers_request_answers_no_call(nixl: None, kind: int) -> None:
    """It chooses the id of its request, and may have seen those of this node's calls."""
    reader, route = Reader(free_port()), b"route"
    call = PeerCall(kind, len(route), 7, 0)
    reader.helper._calls[7] = call
    reader.helper._received(frame(REQUEST, len(route), 7, route + bytes([FIND]) + b"chosen"))
    assert not call.ended.is_set()
    assert (call.reply, call.problem) == (None, "")
    reader.close()


def test_an_answer_does_not_wait_for_a_thread_that_waits_for_a_helper_that_hangs(lender: Lender) -> None:
    """The daemon's thread answers peers."""
    helper = lender.helper
    wait_until(lambda: helper.up, 60.0)
    os.kill(helper.pid, signal.SIGSTOP)
    try:
        while helper.send(bytes(MAX_MESSAGE_BYTES // 2)):
            pass
        thread = threading.Thread(target=helper.send, args=(bytes(10), LONGER_THAN_A_TEST_S))
        thread.start()
        wait_until(lambda: thread.is_alive(), 5.0)
        helper.reply(b"route", 1, b"")
    finally:
        os.kill(helper.pid, signal.SIGKILL)
        thread.join()


def test_an_answer_that_a_busy_helper_does_not_accept_at_once_is_sent_later(
    lender: Lender, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the asker would wait for its whole patience."""
    monkeypatch.setattr(peer_process, "SEND_S", PATIENCE_S)
    answer, late = lender.answer, threading.Event()

    def busy(route: bytes, ident: int, kind: int, payload: bytes) -> None:
        os.kill(lender.helper.pid, signal.SIGSTOP)
        while lender.helper.send(frame(FREE, 0, 0, bytes(MAX_MESSAGE_BYTES // 2))):
            pass
        answer(route, ident, kind, payload)
        late.set()
        os.kill(lender.helper.pid, signal.SIGCONT)

    lender.helper._on_request = busy
    reader.stores[0].ping(time.monotonic() + PATIENCE_S)
    assert late.is_set()


class RawPeer:
    """A peer that says what a test wants."""

    def __init__(self, port: int) -> None:
        secret = z85.encode(blake2b(SECRET, digest_size=32, person=b"kvoffd peers").digest())
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.curve_secretkey = secret
        self.socket.curve_publickey = self.socket.curve_serverkey = zmq.curve_public(secret)
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def say(self, kind: int, ident: int, payload: bytes = b"") -> None:
        self.socket.send_multipart([bytes([kind]), ident.to_bytes(8, "little"), payload])

    def close(self) -> None:
        self._context.destroy(0)


@pytest.fixture
def raw_peer(lender: Lender) -> Iterator[RawPeer]:
    with closing(RawPeer(lender.port)) as peer:
        yield peer


def pin_of(number: int) -> bytes:
    return msgspec.msgpack.encode(Pin(Find(b"f" * 32, 0, 0, 8, number.to_bytes(8, "big")), [SIZE]))


def test_what_was_lent_is_returned_by_a_peer_that_has_asked_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its blocks would stay pinned until the lease's deadline."""
    monkeypatch.setattr(peer_helper, "REQUESTS_PER_S", 0)
    monkeypatch.setattr(peer_helper, "BURST", 3)
    with closing(Lender()) as lender, closing(RawPeer(lender.port)) as peer:
        for ident in (1, 2, 3, 4):
            peer.say(PIN, ident, pin_of(ident))
        wait_until(lambda: len(lender.lent) == 3)
        for ident in (3, 2, 1):
            peer.say(RELEASE, ident)
        wait_until(lambda: not lender.lent)


def test_an_id_that_a_peer_repeats_is_one_request(lender: Lender, raw_peer: RawPeer) -> None:
    """Else as many would be in progress as it likes, however few all peers may have."""
    asked: list[int] = []
    lender.helper._on_request = lambda route, ident, kind, payload: asked.append(ident)
    for _ in range(10):
        raw_peer.say(FIND, 1)
    raw_peer.say(FIND, 2)
    wait_until(lambda: 2 in asked)
    assert asked == [1, 2]


def test_an_id_that_a_peer_repeats_keeps_no_later_one_from_being_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    helper, clock = object.__new__(peer_helper.Helper), Mock(return_value=0.0)
    monkeypatch.setattr(peer_helper, "time", SimpleNamespace(monotonic=clock))
    helper._lent_until, helper._in_flight, helper._spent, helper._spent_since = {}, {}, Counter(), 0.0
    helper._to_daemon = Mock()  # type: ignore[method-assign]
    router = Mock(get=Mock(side_effect=lambda _: zmq.POLLIN if messages else 0))
    router.recv_multipart = lambda _: messages.pop(0)
    for now, idents in ((0.0, (1, 2)), (0.9 * peer_helper.KEEPS_AWAKE_S, (1,)), (1.1 * peer_helper.KEEPS_AWAKE_S, ())):
        clock.return_value = now
        messages = [[b"route", bytes([PIN]), ident.to_bytes(8, "little"), b""] for ident in idents]
        helper._drop_expired(now)
        helper._pass_requests(router)
    assert list(helper._lent_until) == [(b"route", 1)]


class Stopped(Exception):
    """Enough was seen."""


@pytest.mark.parametrize("lent", [False, True])
def test_a_helper_to_which_nothing_comes_calls_nixl_once_and_waits_for_a_message(
    lent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shortly where something is lent: the peer may read it. It took a quarter of a CPU."""
    monkeypatch.setattr(peer_helper, "MOVED_S", LONGER_THAN_A_TEST_S)
    helper, pauses_ms = object.__new__(peer_helper.Helper), list[int]()
    helper._lent_until = {(b"route", 1): math.inf} if lent else {}
    helper._in_flight, helper._spent, helper._spent_since = {}, Counter(), math.inf
    helper._transfers, helper._stuck_reads, helper._links, helper._peers = {}, 0, {}, []
    helper._router = helper._router_events = None
    helper._busy_until, helper._beat_at = 0.0, math.inf
    helper._channel, helper._nixl = Mock(), Mock()

    def poll(timeout_ms: int) -> list[tuple[object, int]]:
        pauses_ms.append(timeout_ms)
        if len(pauses_ms) > 3:
            raise Stopped
        return []

    helper._poller = Mock(poll=poll)
    with pytest.raises(Stopped):
        helper.run()
    assert pauses_ms == [peer_helper.WAITING_MS if lent else peer_helper.IDLE_MS] * 4
    assert helper._nixl.get_new_notifs.call_count == 3


def test_whole_shards_have_their_checksums_though_a_part_of_another_comes_before_them() -> None:
    """It is the rest of one that one read cannot bring."""
    sizes = SLICE_BYTES + 4096, 8192, 300, 65_536
    memory = PoolMemory.create(sum(-(-size // 64) * 64 for size in sizes), "pool")
    data, views, at = np.random.default_rng(1), [], 0
    for size in sizes:
        views.append(memory.buffer[at : at + size])
        at += -(-size // 64) * 64
    source = data.integers(0, 256, sum(sizes), np.uint8).tobytes()
    landing = PoolMemory.create(SLICES * SLICE_BYTES, "landing")
    pieces = [peer_store._Piece(sum(sizes[:n]), view) for n, view in enumerate(views)]
    helper, begun = Mock(landing_address=landing.mapping.address, life=0), count()

    def begin(kind: int, peer: int, places: bytes) -> Mock:
        number = next(begun)
        where = np.frombuffer(places, np.uint64).reshape(-1, 2).tolist()
        read = b"".join(source[offset : offset + length] for offset, length in where)
        at = number % SLICES * SLICE_BYTES
        landing.buffer[at : at + len(read)] = read
        return Mock(life=0, number=number)

    helper.begin, helper.wait = begin, lambda call, deadline: bytes([call.number % SLICES])
    reading = peer_store._Reading(helper, 0, pieces)
    while any(piece.missing_bytes for piece in pieces):
        reading.land_next(0.0)
    assert helper.end.call_count == next(begun) == 2
    assert memory.buffer[: sizes[0]] == source[: sizes[0]]
    assert [piece.checksum for piece in pieces] == [0, *(digest(view) for view in views[1:])]


def test_a_lease_that_is_too_short_gives_nothing(lender: Lender, reader: Reader) -> None:
    lender.seconds = 0.0
    with pytest.raises(StoreError) as caught:
        reader.get(1)
    assert caught.value.kind == "timeout"


@pytest.mark.timeout(600)
def test_kills_of_either_helper_at_any_time_cost_no_byte_and_leave_nothing(
    nixl: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_process, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(peer_process, "MAX_PAUSE_S", 0.01)
    rng, lender = random.Random(SEED), Lender()
    reader = Reader(lender.port).reachable()
    descriptors, counts, slowest_s = len(open_files()), Counter[str](), 0.0

    wrong: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(20):
                reader.right(lender, *rng.sample(range(BLOCKS), 8), patience_s=1.0)
                counts["read"] += 1
        except StoreError:
            counts["failed reads"] += 1
        except BaseException as error:
            wrong.append(error)

    for _ in range(KILLS):
        thread = threading.Thread(target=read)
        thread.start()
        time.sleep(rng.choice((0.0, 0.002, 0.02, 0.1)) * rng.random())
        victim = rng.choice(("lender", "reader"))
        os.kill({"lender": lender.helper, "reader": reader.helper}[victim].pid, signal.SIGKILL)
        counts[victim] += 1
        began = time.monotonic()
        thread.join()
        assert not wrong
        wait_until(lambda: _works(reader, lender), 60.0)
        slowest_s = max(slowest_s, time.monotonic() - began)
    print(f"{KILLS} kills, seed {SEED}: {dict(counts)}; at most {slowest_s:.1f} s until blocks came again", flush=True)
    assert reader.helper.life >= counts["reader"]
    wait_until(lambda: not reader.helper._calls)  # the lease of a reader that was killed ends at its deadline
    wait_until(lambda: len(open_files()) <= descriptors)
    reader.close()
    lender.close()


def test_memory_of_a_read_that_was_given_up_is_not_used_again_while_it_may_be_written(
    lender: Lender, reader: Reader
) -> None:
    """What a stopped peer sends when it goes on lands where nobody reads."""
    other = Lender()
    both = Reader(lender.port, other.port).reachable()
    both.right(lender, *range(BLOCKS))
    both.right(other, *range(BLOCKS), peer=1)
    os.kill(lender.helper.pid, signal.SIGSTOP)
    lender_stopped = True
    try:
        # The descriptors are known, so that the reads themselves hang.
        for _ in range(20):  # more than it may have: another peer's have memory of their own
            where = np.array([[0, SIZE]], np.uint64).tobytes()
            with pytest.raises(StoreError):
                both.helper.call(READ, 0, where, time.monotonic() + 0.05)
        for _ in range(3):
            both.right(other, *range(BLOCKS), peer=1)
        os.kill(lender.helper.pid, signal.SIGCONT)
        lender_stopped = False
        for _ in range(10):
            both.right(other, *range(BLOCKS), peer=1)
        wait_until(lambda: _works(both, lender), 30.0)
    finally:
        if lender_stopped:
            os.kill(lender.helper.pid, signal.SIGCONT)
        both.close()
        other.close()


def test_a_peer_whose_blocks_do_not_come_costs_its_own_reads_only(
    lender: Lender, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked nothing while all its reads are stuck, and the helper goes on with the others'."""
    monkeypatch.setattr(peer_helper, "STUCK_S", 0.2)
    other = Lender()
    both = Reader(lender.port, other.port).reachable()
    both.right(lender, *range(BLOCKS))
    both.right(other, *range(BLOCKS), peer=1)
    os.kill(lender.helper.pid, signal.SIGSTOP)
    try:
        where = np.array([[0, SIZE]], np.uint64).tobytes()
        for _ in range(SLICES):
            with pytest.raises(StoreError, match="in time"):
                both.helper.call(READ, 0, where, time.monotonic() + 0.05)

        def is_stuck() -> bool:
            with pytest.raises(StoreError) as caught:
                both.stores[0].ping(time.monotonic() + 0.2)
            return "its blocks do not come" in caught.value.sentence

        wait_until(is_stuck)
        for _ in range(3):
            both.right(other, *range(BLOCKS), peer=1)
        assert both.helper.has_reads(0)
        assert not both.helper.has_reads(1)
    finally:
        os.kill(lender.helper.pid, signal.SIGCONT)
    wait_until(lambda: _works(both, lender), 30.0)
    wait_until(lambda: not both.helper.has_reads(0))
    assert both.helper.life == 0
    both.close()
    other.close()


def test_a_helper_that_hangs_while_it_starts_is_killed(nixl: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that ask wait for it once, not each time."""
    monkeypatch.setattr(peer_process, "STARTS_S", 3.0)
    monkeypatch.setattr(peer_process, "START_S", 0.5)
    reader = Reader(free_port())
    wait_until(lambda: reader.helper._channel is not None, interval_s=0.001)
    os.kill(pid := reader.helper.pid, signal.SIGSTOP)
    with pytest.raises(StoreError, match="has not started yet"):
        reader.stores[0].connect()
    wait = Mock(wraps=reader.helper._start_ended.wait)
    monkeypatch.setattr(reader.helper._start_ended, "wait", wait)
    with pytest.raises(StoreError, match="has not started yet"):
        reader.stores[0].connect()
    wait.assert_called_once_with(0.0)
    wait_until(lambda: reader.helper.life > 0)
    monkeypatch.setattr(peer_process, "STARTS_S", 60.0)  # the next one may take its time
    wait_until(lambda: reader.helper.up, 30.0)
    assert not os.path.exists(f"/proc/{pid}")
    reader.close()


def test_modules_of_the_working_directory_are_not_the_helpers(
    cold: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "zmq.py").write_text("import pathlib; pathlib.Path('ran').touch()")
    monkeypatch.chdir(tmp_path)
    reader = Reader(free_port())
    wait_until(lambda: reader.helper.up, 60.0)
    reader.close()
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper that is silent for 2 s hangs."""
    monkeypatch.setattr(peer_process, "HANGS_S", 2.0)


def test_a_helper_that_hangs_is_started_again(impatient: None, lender: Lender, reader: Reader) -> None:
    wait_until(lambda: lender.helper.up, 60.0)
    pid = lender.helper.pid
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: lender.helper.pid != pid and lender.helper.up, 60.0)
    assert not os.path.exists(f"/proc/{pid}")
    wait_until(lambda: _works(reader, lender), 30.0)


def test_a_helper_that_hangs_is_noticed_however_often_the_wait_is_interrupted(
    lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the container is frozen and thawed again and again."""
    monkeypatch.setattr(peer_process, "HANGS_S", 1.0)
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    (thread,) = lender.helper._thread._threads
    assert thread.ident is not None
    ident = thread.ident
    try:
        wait_until(lambda: lender.helper.up, 60.0)
        os.kill(pid := lender.helper.pid, signal.SIGSTOP)

        def is_noticed() -> bool:
            signal.pthread_kill(ident, signal.SIGUSR1)
            return lender.helper.life > 0

        wait_until(is_noticed, interval_s=0.1)
        assert not os.path.exists(f"/proc/{pid}")
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # what is still on its way
        signal.signal(signal.SIGUSR1, before)


def test_a_stop_does_not_wait_for_a_helper_that_starts(nixl: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_process, "START_S", LONGER_THAN_A_TEST_S)
    reader = Reader(free_port())
    wait_until(lambda: bool(reader.helper.pid))
    os.kill(reader.helper.pid, signal.SIGSTOP)
    failures: list[str] = []

    def connect() -> None:
        with suppress(StoreError):
            reader.stores[0].connect()
        failures.append(reader.helper.problem)

    thread = threading.Thread(target=connect)
    thread.start()
    reader.helper.interrupt()
    thread.join()
    reader.close()


def test_nobody_waits_for_a_helper_that_cannot_be_started(nixl: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the process may have no more descriptors."""
    monkeypatch.setattr(peer_process, "START_S", LONGER_THAN_A_TEST_S)
    popen = Mock(side_effect=OSError(24, "Too many open files"))
    monkeypatch.setattr(peer_process, "subprocess", SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL))
    reader = Reader(free_port())
    with pytest.raises(StoreError, match=r"cannot be started: .*Too many open files"):
        reader.stores[0].connect()
    reader.close()


def test_a_helper_says_why_it_cannot_work_though_the_sentence_is_cut_in_a_character() -> None:
    helper = object.__new__(HelperProcess)
    helper._start_ended = threading.Event()
    helper._received(frame(STARTED, 0, 0, "It has no größeren".encode()[:13]))
    assert (helper.up, helper.problem) == (False, "It has no gr\ufffd")


@pytest.mark.parametrize("starts", [False, True])
def test_a_helper_that_ended_before_it_heard_of_a_peer_leaves_it_to_the_next(starts: bool) -> None:
    """The next one has it from the settings, though it starts before the message to the one that ended fails."""
    helper = object.__new__(HelperProcess)
    helper._lock, helper._settings = threading.Lock(), HelperSettings(["before:1"], "", SECRET)
    ended, started = socket.socketpair()
    with ended, started:
        helper._channel = ended

        def send(data: bytes, timeout_s: float = 0.0) -> bool:
            helper._channel = started if starts else None
            return False

        helper.send = send  # type: ignore[method-assign]
        assert helper.connect(0, "after:1")
        assert helper._settings.peers == ["after:1"]
        helper.send = lambda data, timeout_s=0.0: False  # type: ignore[method-assign]
        helper._channel = started
        assert not helper.connect(0, "next:1"), "it runs, and accepts nothing"
        assert helper._settings.peers == ["after:1"]


def test_a_read_that_was_begun_before_the_helper_ended_is_not_sent_to_the_next() -> None:
    """It has failed, so nobody would know that its memory is being written."""
    helper = object.__new__(HelperProcess)
    helper._lock, helper._ids, helper._calls, helper._reads = threading.Lock(), count(), {}, {}
    helper.life, helper.problem = 0, "It ended."
    ended, ours, theirs = socket.socket(), *socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    send = helper.send

    def next_starts(data: bytes, timeout_s: float = 0.0, life: int | None = None) -> bool:
        helper.life, helper._channel = 1, ours
        return send(data, timeout_s, life)

    with ended, ours, theirs:
        helper._channel = ended
        helper.send = next_starts  # type: ignore[method-assign]
        with pytest.raises(StoreError, match="It ended"):
            helper.begin(READ, 0, b"")
        assert (helper._calls, helper._reads) == ({}, {})
        with pytest.raises(BlockingIOError):
            theirs.recv(1, socket.MSG_DONTWAIT)


def test_a_helper_that_cannot_work_is_started_less_and_less_often(
    cold: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However long each of them takes to say so."""
    monkeypatch.setattr(peer_process, "FIRST_PAUSE_S", 0.6)
    monkeypatch.setattr(peer_process, "STEADY_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        lender = Lender(taken.getsockname()[1])
        wait_until(lambda: "It is started again in 2.4 s" in caplog.text, 60.0, explain=lambda: caplog.text)
        lender.close()
    assert lender.helper.life == 2


def test_a_read_whose_memory_cannot_be_freed_ends_the_helper(lender: Lender, reader: Reader) -> None:
    """Else a helper that took no message for a while would keep the memory for ever."""
    reader.right(lender, 1)
    for turn in range(1, SLICES + 1):
        call = reader.helper.begin(READ, 0, np.array([[0, SIZE]], np.uint64).tobytes())
        os.kill(reader.helper.pid, signal.SIGSTOP)
        while reader.helper.send(bytes(MAX_MESSAGE_BYTES // 2)):
            pass
        reader.helper.end(call)
        wait_until(lambda turn=turn: reader.helper.life >= turn, 30.0)
        wait_until(lambda: _works(reader, lender), 30.0)


def test_a_read_that_a_busy_helper_does_not_get_leaves_it_alone(
    lender: Lender, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no memory of it that could be lost."""
    monkeypatch.setattr(peer_process, "SEND_S", 0.05)
    reader.right(lender, 1)
    os.kill(pid := reader.helper.pid, signal.SIGSTOP)
    while reader.helper.send(frame(FREE, 0, 0, bytes(MAX_MESSAGE_BYTES // 2))):
        pass
    with pytest.raises(StoreError, match="hangs"):
        reader.helper.begin(READ, 0, np.array([[0, SIZE]], np.uint64).tobytes())
    assert not reader.helper.has_reads(0)
    os.kill(pid, signal.SIGCONT)
    monkeypatch.setattr(peer_process, "SEND_S", PATIENCE_S)
    wait_until(lambda: _works(reader, lender), 30.0)
    assert (reader.helper.pid, reader.helper.life) == (pid, 0)


def test_reads_that_nobody_waits_for_leave_no_memory_taken(lender: Lender, reader: Reader) -> None:
    reader.right(lender, 1)
    where = np.array([[0, SIZE]], np.uint64).tobytes()
    for number in range(3 * SLICES):
        reader.helper.send(frame(READ, 0, 2**62 + number, where), 1.0)
        reader.helper.send(frame(FREE, 0, 2**62 + number), 1.0)
    wait_until(lambda: _works(reader, lender), 30.0)


def test_addresses_and_rdma_ports_that_are_up_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_helper, "INFINIBAND", tmp_path)
    addresses = peer_helper.interfaces()
    assert "127.0.0.1" in addresses
    for device, state in (("mlx5_0", "4: ACTIVE\n"), ("mlx5_1", "1: DOWN\n")):
        (tmp_path / device / "ports/1").mkdir(parents=True)
        (tmp_path / device / "ports/1/state").write_text(state)
    assert peer_helper.interfaces() == addresses | {"mlx5_0": 0}


def test_a_link_that_was_down_for_a_moment_is_not_known() -> None:
    """While NIXL started, UCX may not have seen it."""
    with Network(1) as network:
        code = (
            "import subprocess; from kvoffd.tiers.peer_helper import unbroken_interfaces as unbroken\n"
            "with unbroken() as known: pass\n"
            "with unbroken() as after: [subprocess.run(['ip', 'link', 'set', 'tun0', to]) for to in ('down', 'up')]\n"
            "with unbroken() as again: subprocess.run(['ip', 'address', 'add', '10.78.0.1/24', 'dev', 'tun0'])\n"
            "print(sorted(known), sorted(after), sorted(again))"
        )
        command = [*network.inside(0), sys.executable, "-c", code]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.strip() == f"{['10.77.0.1', '127.0.0.1']} {['127.0.0.1']} {['10.77.0.1', '127.0.0.1']}"


def test_a_peer_with_two_names_has_one_agent() -> None:
    """In the settings by name, and in a request by address; another peer's agent is nobody else's."""
    helper = object.__new__(peer_helper.Helper)
    helper._nixl, helper._agents = Mock(), {}
    helper._nixl.add_remote_agent.return_value = b"agent"
    helper._set_agent(0, b"metadata", 1)
    for _ in range(2):  # each answer has it
        helper._set_agent(3, b"metadata", 1)
    helper._nixl.remove_remote_agent.assert_not_called()
    assert helper._agents[0] == helper._agents[3]
    assert helper._nixl.add_remote_agent.call_count == 1
    with pytest.raises(ValueError, match="another peer has the same agent"):
        helper._set_agent(4, b"other metadata", 1)
    helper._drop_agent(3)
    assert not helper._agents, "its reads failed by either name"
    helper._nixl.remove_remote_agent.assert_called_once_with("agent")


def test_a_peer_that_is_connected_again_is_read_by_a_new_connection() -> None:
    """NIXL's own of before the network was away hangs as long again. See also ``tests/chaos/test_fleet.py``."""
    helper = object.__new__(peer_helper.Helper)
    helper._nixl, helper._agents = Mock(), {}
    helper._nixl.add_remote_agent.return_value = b"agent"
    helper._drop_agent(0)
    helper._nixl.remove_remote_agent.assert_not_called()
    for _ in range(2):
        helper._set_agent(0, b"metadata", 1)
        helper._drop_agent(0)
        helper._nixl.remove_remote_agent.assert_called_with("agent")
    assert helper._nixl.add_remote_agent.call_count == 2


def test_a_read_that_fails_late_does_not_end_the_connection_that_came_after_its_own() -> None:
    """Its end is reported, and its memory is free again, once."""
    helper = object.__new__(peer_helper.Helper)
    helper._nixl, helper._channel, helper._agents, helper._transfers = Mock(), Mock(), {}, {}
    helper._free, helper._landing_at = [[1, 0]], 0
    helper._nixl.add_remote_agent.return_value = b"agent"
    helper._nixl.transfer.return_value = "PROC"
    pieces = np.zeros(1, np.uint64), np.ones(1, np.uint64)
    helper._set_agent(0, b"metadata", 1)
    helper._begin_read(0, 7, *pieces)
    helper._drop_agent(0)
    helper._set_agent(0, b"metadata", 1)
    helper._begin_read(0, 8, *pieces)
    helper._nixl.check_xfer_state.side_effect = ["ERR", "PROC"]
    assert helper._end_transfers(time.monotonic())
    assert helper._nixl.remove_remote_agent.call_count == 1
    assert list(helper._agents) == [0]
    assert list(helper._transfers) == [8]
    helper._free_slice(7)
    assert helper._free == [[0]]
    assert helper._channel.send.call_count == 1


def test_a_link_says_when_it_is_connected_again() -> None:
    keys, port = curve_keys(SECRET), free_port()
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        dealer = stack.enter_context(peer_socket(context, zmq.DEALER, keys))
        dealer.setsockopt(zmq.RECONNECT_IVL, 10)
        link = peer_helper.Link(dealer)
        stack.enter_context(link.events)
        dealer.connect(f"tcp://127.0.0.1:{port}")
        for _ in range(2):
            router = stack.enter_context(peer_socket(context, zmq.ROUTER, keys, is_server=True))
            wait_until(lambda: _binds(router, port))  # noqa: B023
            wait_until(link.take)
            assert not link.take()
            router.close()


def _binds(router: zmq.Socket[bytes], port: int) -> bool:
    """Bind, unless the socket before has the port still."""
    try:
        router.bind(f"tcp://127.0.0.1:{port}")
    except zmq.ZMQError:
        return False
    return True


def test_an_agent_that_nixl_does_not_know_any_more_does_not_end_the_helper() -> None:
    """Its peer's number gets another one."""
    helper = object.__new__(peer_helper.Helper)
    helper._nixl, helper._agents = Mock(), {0: peer_helper.Agent(b"metadata", "agent", 1)}
    helper._nixl.remove_remote_agent.side_effect = RuntimeError("NIXL_ERR_NOT_FOUND")
    helper._settings, helper._peers, helper._asked = HelperSettings(["node-b:7400"], "", SECRET), [None], {}
    helper._without_socket = {}
    helper._replace(0, "")
    assert (helper._agents, helper._settings.peers) == ({}, [""])
