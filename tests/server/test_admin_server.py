"""Administration over TCP: with a known key everything an administrator may do, without it nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import zmq

from kvoffd.config import Config
from kvoffd.errors import KvoffdError
from kvoffd.server.admin_server import MAX_CONNECTIONS, AdminKeys, AdminServer
from kvoffd_client import ClientOptions, DaemonUnavailable, RemoteAdminClient, RequestRefused
from kvoffd_client.cli import main
from kvoffd_client.testing import FakeEngine
from kvoffd_proto import blocks as b
from kvoffd_proto import codec
from kvoffd_proto import messages as m
from kvoffd_proto.curve_keys import read_public_keys, read_secret_key
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.handles import MemfdHandle, PageRef, TensorLayout
from kvoffd_proto.messages import PROTOCOL_VERSION
from kvoffd_proto.wire import NO_TOKEN
from tests.kit.daemon import DaemonProcess
from tests.kit.struct_wire import NAMESPACE, WireClient, ids, keys, stats

QUICK = ClientOptions(request_timeout_s=1.5)
PATIENT = ClientOptions(request_timeout_s=20.0)
SILENCE_MS = 1_000
STORED = [bytes([number]) * 32 for number in range(4)]


class Door(NamedTuple):
    """A daemon with the door open, an engine that uses it, and the keys of one administrator."""

    daemon: DaemonProcess
    engine: FakeEngine
    files: Path
    address: str
    server_key: str
    secret_key: str

    def client(self, **changes: object) -> RemoteAdminClient:
        values: dict[str, object] = {
            "address": self.address, "server_key": self.server_key, "secret_key": self.secret_key, "options": PATIENT,
        }  # fmt: skip
        return RemoteAdminClient(**(values | changes))  # type: ignore[arg-type]

    def command(self, *arguments: str) -> list[str]:
        key = str(self.files / "admin.key")
        return ["--address", self.address, "--server-key", self.server_key, "--key", key, *arguments]


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    files = tmp_path_factory.mktemp("keys")
    for name in ("server.key", "admin.key"):
        assert main(["keygen", str(files / name)]) == 0
    clients = files / "clients"
    clients.write_text("# whoever may come\n\n" + (files / "admin.key.pub").read_text())
    flags = {
        "admin_address": "127.0.0.1:0", "admin_key_file": str(files / "server.key"), "admin_clients_file": str(clients),
        "block_access": "write",
    }  # fmt: skip
    with DaemonProcess("16MiB", **flags) as daemon, FakeEngine(daemon.directory, "tiny") as engine:
        daemon.wait_log("Administration over")
        found = re.search(r"Administration over tcp://(\S+), known keys: 1;", daemon.log)
        assert found is not None
        (server_key,) = read_public_keys(files / "server.key.pub")
        assert server_key in daemon.log
        yield Door(daemon, engine, files, found[1], server_key, read_secret_key(files / "admin.key"))
        assert "Traceback" not in daemon.log


def dealer(context: zmq.Context[zmq.Socket[bytes]], door: Door, **keys: bytes) -> zmq.Socket[bytes]:
    """A socket of one's own making, with what keys are given."""
    connected = context.socket(zmq.DEALER)
    connected.setsockopt(zmq.LINGER, 0)
    for option, key in keys.items():
        connected.setsockopt(getattr(zmq, option), key)
    connected.connect(f"tcp://{door.address}")
    return connected


@pytest.fixture
def raw(door: Door) -> Iterator[zmq.Socket[bytes]]:
    """An administrator whom nobody keeps from sending what he likes."""
    with zmq.Context() as context:
        with dealer(context, door, **own_keys(door)) as connected:
            yield connected


def own_keys(door: Door) -> dict[str, bytes]:
    """What an administrator's socket is given."""
    secret, server = door.secret_key.encode(), door.server_key.encode()
    return {"CURVE_SERVERKEY": server, "CURVE_SECRETKEY": secret, "CURVE_PUBLICKEY": zmq.curve_public(secret)}


def ask(raw: zmq.Socket[bytes], *frames: bytes) -> m.AnyReply:
    raw.send_multipart(frames)
    assert raw.poll(20_000), "no answer came"
    return codec.decode_reply(raw.recv())


# --- with a known key --------------------------------------------------------------------------------


def test_an_administrator_may_administer(door: Door) -> None:
    assert door.engine.store(STORED, range(4)).ok
    with door.client() as admin:
        assert admin.health().healthy
        assert admin.stats().store.jobs >= 1
        assert {session.role for session in admin.sessions().sessions} == {"scheduler", "worker"}
        (namespace,) = admin.namespaces().namespaces
        assert namespace.ready_blocks == 4
        assert not admin.scrub(start=False).mismatches
        assert admin.clear(namespace.namespace) == 4
    assert door.engine.lookup(STORED) == 0
    key = next(iter(read_public_keys(door.files / "admin.key.pub")))
    door.daemon.wait_log(f"(key {key}) cleared 4 blocks.")


def test_the_command_line_reaches_it(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(door.command("health")) == 0
    assert "ok: " in capsys.readouterr().out
    assert main(door.command("sessions", "--json")) == 0
    assert len(json.loads(capsys.readouterr().out)["sessions"]) == 2
    assert main(door.command("clear", "--all", "--yes")) == 0
    assert "dropped from all namespaces" in capsys.readouterr().out
    file = str(door.files / "server.key.pub")
    assert main(["--address", door.address, "--server-key", file, "--key", str(door.files / "admin.key"), "stats"]) == 0


@pytest.mark.parametrize(
    "arguments",
    [("events",), ("bench", "jobs"), ("disk", "attach", "/x=1GiB"), ("disk", "drain", "/x"), ("disk", "detach", "/x")],
)
def test_what_needs_the_sockets_is_refused(
    door: Door, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert main(door.command(*arguments)) == 2
    assert "needs the daemon's sockets; run it on the daemon's own machine" in capsys.readouterr().err


def test_a_client_outlives_the_daemons_silence(door: Door) -> None:
    """As one that watches does."""
    with door.client() as admin:
        before = admin.stats().requests
        assert admin.stats().requests > before


# --- with a known key, but not as an administrator ---------------------------------------------------


SHARD = b.ShardSpec(1, [b.PageSpec(4096)])


def other_requests(token: bytes) -> list[m.AnyRequest]:
    part = m.GroupTransfer(0, keys(1), ids(0))
    tensors = ([MemfdHandle(1, 4096)], [TensorLayout(0, 0, 4096, 1)], [[PageRef(0, 4096)]])
    return [
        m.OpenNamespace(1, token, NAMESPACE, "l", 1, 32, [m.GroupSpec("full", 16)], "{}"),
        m.Register(2, token, NAMESPACE, b"r" * 16, 0, 1, *tensors),
        m.Unregister(3, token, b"r" * 16),
        m.Lookup(4, token, NAMESPACE, 2**32 + 1, [m.GroupKeys(0, keys(1))]),
        m.Release(5, token, [2**32 + 1]),
        m.Invalidate(6, token, NAMESPACE, [m.GroupKeys(0, keys(1))]),
        m.Reset(7, token, NAMESPACE),
        m.Submit(8, token, b"r" * 16, [m.Store(1, [part])]),
        m.Submit(9, token, b"r" * 16, [], [m.Load(1, 2**32 + 1, [part])]),
        m.Cancel(10, token, [1]),
        m.Replay(11, token, 0),
        m.Heartbeat(12, token, 0, []),
        b.DescribeNamespace(13, token, NAMESPACE),
        b.RestoreNamespace(14, token, NAMESPACE, "l", 1, 32, [m.GroupSpec("full", 16)], "{}", [[SHARD]]),
        b.ListBlocks(15, token, NAMESPACE, 0),
        b.GetBlocks(16, token, NAMESPACE, 2**32 + 1, 0, keys(1)),
        b.PutBlocks(17, token, NAMESPACE, 1, 4096, 0, keys(1), [[b.PutShard(0, bytes(8))]]),
        b.PinBlocks(18, token, NAMESPACE, 0, keys(1), True),
        m.AttachDisk(19, token, "/var/cache/kvoffd", 2**40),
        m.DrainDisk(20, token, "/var/cache/kvoffd"),
        m.DetachDisk(21, token, "/var/cache/kvoffd"),
        m.Record(22, token),
        m.ReportEngine(23, token, NAMESPACE, 1000.0, 2000.0),
        m.Hint(24, token, NAMESPACE, [m.GroupKeys(0, keys(1))], 1),
    ]


def test_it_can_do_nothing_else_whatever_token_it_shows(door: Door, raw: zmq.Socket[bytes]) -> None:
    local = {kind for kind, exchange in m.EXCHANGES.items() if not exchange.over_tcp}
    assert {type(request) for request in other_requests(NO_TOKEN)} == local
    with WireClient(door.daemon.directory) as worker:
        worker.open_namespace()
        for token in (NO_TOKEN, worker.token):
            for request in other_requests(token):
                reply = ask(raw, codec.encode(request))
                assert isinstance(reply, m.Error), request
                assert reply.code is ErrorCode.WRONG_ROLE


@pytest.mark.parametrize("role", [m.Role.WORKER, m.Role.SCHEDULER])
def test_it_cannot_become_an_engine(raw: zmq.Socket[bytes], role: m.Role) -> None:
    reply = ask(raw, codec.encode(m.Hello(1, NO_TOKEN, PROTOCOL_VERSION, role, "n", "")))
    assert isinstance(reply, m.Error)
    assert reply.code is ErrorCode.WRONG_ROLE


def test_another_protocol_version_is_told(raw: zmq.Socket[bytes]) -> None:
    reply = ask(raw, codec.encode(m.Hello(1, NO_TOKEN, PROTOCOL_VERSION + 5, m.Role.ADMIN, "n", "")))
    assert isinstance(reply, m.Error)
    assert reply.code is ErrorCode.BAD_VERSION


@pytest.mark.parametrize("frames", [(b"",), (b"\xc1",), (b"a", b"b"), (b"", bytes(8)), (os.urandom(5000),)])
def test_garbage_is_answered_with_an_error(raw: zmq.Socket[bytes], frames: tuple[bytes, ...]) -> None:
    reply = ask(raw, *frames)
    assert isinstance(reply, m.Error)
    assert reply.code is ErrorCode.MALFORMED


def test_a_message_beyond_the_limit_costs_the_connection_only(door: Door, raw: zmq.Socket[bytes]) -> None:
    raw.send(bytes(1 << 20))
    assert not raw.poll(SILENCE_MS)
    is_served(door)


def test_an_administrator_who_floods_and_never_reads_harms_nobody(door: Door, raw: zmq.Socket[bytes]) -> None:
    frame = codec.encode(m.Stats(1, NO_TOKEN))
    for _ in range(20_000):
        try:
            raw.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            break
    is_served(door)


def is_served(door: Door) -> None:
    """An engine is, in seconds also on a busy machine."""
    took = []
    for attempt in range(5):
        started = time.monotonic()
        wanted = [bytes([100 + attempt]) * 32]
        assert door.engine.store(wanted, [0]).ok
        assert door.engine.lookup(wanted) == 1
        assert door.engine.load(wanted, [1]).ok
        took.append(time.monotonic() - started)
    assert min(took) < 5.0


# --- without -----------------------------------------------------------------------------------------


def test_an_unknown_key_is_refused_counted_and_told(door: Door) -> None:
    before = stats(door.daemon.directory).errors.get("forbidden", 0)
    _, secret = zmq.curve_keypair()
    with (
        door.client(secret_key=secret.decode()) as stranger,
        pytest.raises(DaemonUnavailable, match="lacks this") as told,
    ):
        stranger.clear()
    assert zmq.curve_public(secret).decode() in str(told.value)
    assert stats(door.daemon.directory).errors["forbidden"] > before
    door.daemon.wait_log("was refused to the key")


def test_a_daemon_with_another_key_is_not_believed(door: Door) -> None:
    other, _ = zmq.curve_keypair()
    with (
        door.client(server_key=other.decode(), options=QUICK) as admin,
        pytest.raises(DaemonUnavailable, match="another key"),
    ):
        admin.health()


def test_nothing_at_the_address_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        public, secret = (key.decode() for key in zmq.curve_keypair())
        with (
            RemoteAdminClient(address, public, secret, QUICK) as admin,
            pytest.raises(DaemonUnavailable, match="nothing answers there"),
        ):
            admin.health()


@pytest.mark.parametrize("options", [{}, {"PLAIN_USERNAME": b"root", "PLAIN_PASSWORD": b"root"}], ids=["null", "plain"])
def test_without_curve_nothing_is_answered(door: Door, options: dict[str, bytes]) -> None:
    before = stats(door.daemon.directory).requests
    with zmq.Context() as context, dealer(context, door, **options) as stranger:
        for _ in range(5):
            with contextlib.suppress(zmq.Again):
                stranger.send(codec.encode(m.Clear(1, NO_TOKEN)), zmq.NOBLOCK)
        assert not stranger.poll(SILENCE_MS)
    assert stats(door.daemon.directory).requests - before < 5
    is_served(door)


def test_connections_that_say_nothing_or_nonsense_end(door: Door) -> None:
    host, port = door.address.split(":")
    streams = [socket.create_connection((host, int(port))) for _ in range(3 * MAX_CONNECTIONS)]
    for number, stream in enumerate(streams):
        with contextlib.suppress(OSError):
            stream.sendall(
                (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 65536, b"", b"\xff\0\0\0\0\0\0\0\1\x7f\3\0CURVE")[number % 4]
            )
    is_served(door)
    for stream in streams:
        stream.settimeout(20)
        with contextlib.suppress(ConnectionError):
            while stream.recv(4096):
                pass
        stream.close()


def test_a_client_of_tcp_has_no_events_socket(door: Door) -> None:
    """The port is no PUB: a subscriber, even with the key, gets nothing."""
    with zmq.Context() as context, context.socket(zmq.SUB) as tail:
        tail.setsockopt(zmq.LINGER, 0)
        tail.setsockopt(zmq.SUBSCRIBE, b"")
        for option, key in own_keys(door).items():
            tail.setsockopt(getattr(zmq, option), key)
        tail.connect(f"tcp://{door.address}")
        assert door.engine.store([b"e" * 32], [2]).ok
        assert not tail.poll(SILENCE_MS)


# --- the switch --------------------------------------------------------------------------------------


def test_tcp_is_off_by_default(daemon: DaemonProcess) -> None:
    inodes = set()
    for descriptor in Path(f"/proc/{daemon.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{daemon.pid}/net/{table}").read_text().splitlines()[1:]:
            assert line.split()[9] not in inodes


def config(door: Door, **changes: str) -> Config:
    values = {
        "admin_address": "127.0.0.1:0",
        "admin_key_file": str(door.files / "server.key"),
        "admin_clients_file": str(door.files / "clients"),
    }
    return Config(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("setting", "content", "sentence"),
    [
        ("admin_key_file", None, "cannot be read: No such file"),
        ("admin_key_file", "", "holds no secret key"),
        ("admin_key_file", "short\n", "holds no secret key"),
        ("admin_key_file", "x" * 39 + "\xff", "no file of keys"),
        ("admin_key_file", "%" * 40, "refuses the key"),
        ("admin_clients_file", None, "cannot be read: No such file"),
        ("admin_clients_file", "short admin\n", "no public key"),
        ("admin_clients_file", "x" * 39 + "\xff", "no file of keys"),
    ],
)
def test_files_that_hold_no_keys_are_refused(
    door: Door, tmp_path: Path, setting: str, content: str | None, sentence: str
) -> None:
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content.encode("latin-1"))
        file.chmod(0o600)
    with pytest.raises(KvoffdError, match=sentence):
        AdminKeys.read(config(door, **{setting: str(file)}))


def test_a_secret_that_everybody_may_read_is_refused(door: Door, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text((door.files / "server.key").read_text())
    file.chmod(0o644)
    with pytest.raises(KvoffdError, match="a secret key, no public one, and everybody may read it"):
        AdminKeys.read(config(door, admin_key_file=str(file)))


def test_a_daemon_that_cannot_listen_there_does_not_start(door: Door, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvoffd", "serve", "--directory", str(tmp_path / "d"), "--pool-size", "16MiB"]
    command += ["--http-address", "", "--admin-address", door.address]
    command += ["--admin-key-file", str(door.files / "server.key")]
    command += ["--admin-clients-file", str(door.files / "clients")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "cannot be listened on" in result.stderr
    assert "Traceback" not in result.stderr


class Answering:
    """As much of a service as the door needs."""

    def __init__(self) -> None:
        self.answered = 0
        self.sessions = SimpleNamespace(open=lambda lifeline, peer, *, internal: SimpleNamespace(role=None))

    def handle(self, sender: Callable[[bytes], None], frame: bytes, session: object) -> None:
        self.answered += 1
        sender(b"reply")


@pytest.mark.parametrize("judged", [True, False])
def test_while_nobody_judges_keys_nobody_comes_in(
    door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judged: bool
) -> None:
    """ZeroMQ would let everybody in, by default. Besides, a message that nobody vouched for is dropped."""
    service = Answering()
    if not judged:
        monkeypatch.setattr("zmq.auth.thread.ThreadAuthenticator.start", lambda self: None)

    async def knock() -> None:
        opened = AdminServer(service, tmp_path, "127.0.0.1:0", AdminKeys.read(config(door)))  # type: ignore[arg-type]
        opened.open()
        try:
            here = door._replace(address=opened.endpoint.removeprefix("tcp://"))
            with zmq.Context() as context, dealer(context, here, **own_keys(door)) as admin:
                admin.send(b"request")
                for _ in range(2_000 if judged else 100):
                    await asyncio.sleep(0.01)
                    if service.answered:
                        break
        finally:
            opened.close(0)

    asyncio.run(knock())
    assert service.answered == judged


def test_keygen_writes_over_nothing(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    before = (door.files / "admin.key").read_text()
    assert main(["keygen", str(door.files / "admin.key")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert (door.files / "admin.key").read_text() == before
    assert (door.files / "admin.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--address", "h:1", "stats"], "needs --server-key"),
        (["--key", "f", "stats"], "name it with --address"),
        (["--address", "h:1", "--server-key", "/nowhere", "--key", "/nowhere", "stats"], "cannot be read"),
    ],
)
def test_the_command_line_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert main(arguments) == 2
    assert sentence in capsys.readouterr().err


def test_a_refused_request_is_raised(door: Door) -> None:
    with door.client() as admin, pytest.raises(RequestRefused) as refused:
        admin.clear(b"?" * 32)
    assert refused.value.code is ErrorCode.UNKNOWN_NAMESPACE
