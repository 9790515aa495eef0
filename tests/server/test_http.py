"""What HTTP answers while the daemon's loop hangs, the daemon fails inside, or a neighbour asks too often."""

from __future__ import annotations

import asyncio
import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from kvoffd.errors import NoMoreThreads
from kvoffd.server import http
from kvoffd.server.http import LOOP_S, MAX_CONNECTIONS, HttpServer
from kvoffd_proto.admin import HealthLevel, HealthReply
from tests.kit.ports import free_port, http_get
from tests.kit.waiting import LONGER_THAN_A_TEST_S, wait_until


class FailingDaemon:
    """It fails inside until it is mended."""

    mended = False

    def health(self) -> HealthReply:
        if not self.mended:
            raise RuntimeError("secret detail")
        return HealthReply(0, HealthLevel.OK, [])

    def stats(self) -> None:
        self.health()

    def page_facts(self) -> None:
        self.health()

    def unreachable(self) -> str:
        return ""


@contextmanager
def listening(daemon: FailingDaemon, *, hangs: bool) -> Iterator[tuple[HttpServer, int]]:
    """A server that is not started yet, and its port. The daemon's loop turns, or does not."""
    loop, port = asyncio.new_event_loop(), free_port()
    thread = threading.Thread(target=(lambda: None) if hangs else loop.run_forever)
    server = HttpServer(f"127.0.0.1:{port}", (), daemon, loop)
    thread.start()
    try:
        yield server, port
    finally:
        server.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def serving(daemon: FailingDaemon, *, hangs: bool) -> Iterator[int]:
    """The port of a server whose loop turns, or does not."""
    with listening(daemon, hangs=hangs) as (server, port):
        server.start()
        yield port


def test_a_server_that_gets_no_thread_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with listening(FailingDaemon(), hangs=False) as (server, _):
        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(NoMoreThreads):
            server.start()
        for listener in server._listeners:
            listener.close()


class WaitingDaemon(FailingDaemon):
    """It is mended, and says how it is when a test lets it."""

    mended = True

    def __init__(self) -> None:
        self.asked, self.may_answer = threading.Event(), threading.Event()

    def health(self) -> HealthReply:
        self.asked.set()
        assert self.may_answer.wait(60)
        return super().health()


def ask(port: int, path: str, address: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), 60, (address, 0))
    connection.sendall(f"GET {path} HTTP/1.1\r\n\r\n".encode())
    return connection


def received(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    data = b""
    with suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            data += part
    return data


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"])
def test_a_probe_is_answered_whatever_a_neighbour_asks_for(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one at its own address. It was closed as the oldest: with 2,300 new connections a second after 14 ms."""
    monkeypatch.setattr(http, "LOOP_S", 60.0)
    daemon = WaitingDaemon()
    with serving(daemon, hangs=False) as port, ExitStack() as held:
        probe = held.enter_context(ask(port, "/healthz", "127.0.0.1"))
        assert daemon.asked.wait(60)
        others = [held.enter_context(ask(port, "/metrics", address)) for _ in range(2 * MAX_CONNECTIONS)]
        assert received(others[MAX_CONNECTIONS - 1]) == b"", "the limit holds, and the server has seen the last ones"
        daemon.may_answer.set()
        assert received(probe).startswith(b"HTTP/1.1 200 ")
        assert received(others[-1]).startswith(b"HTTP/1.1 503 "), "it has no statistics"


def test_a_probe_is_answered_whatever_else_begins_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was the only connection that did not look like a probe's yet, and was closed before its request arrived."""
    monkeypatch.setattr(http, "REQUEST_S", 60.0)
    daemon = FailingDaemon()
    daemon.mended = True
    with listening(daemon, hangs=False) as (server, port), ExitStack() as held:
        others = [held.enter_context(socket.create_connection(("127.0.0.1", port), 60)) for _ in range(MAX_CONNECTIONS)]
        for other in others:
            other.sendall(b"GET /healthz HTTP/1.1\r\n")
        probe = held.enter_context(socket.create_connection(("127.0.0.1", port), 60))
        server.start()
        closed, _, _ = select.select([*others, probe], [], [], 60)
        assert closed == others[:1]
        probe.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert received(probe).startswith(b"HTTP/1.1 200 ")


def test_of_connections_that_come_at_once_those_of_probes_are_served_and_no_more_than_the_limit_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others cost little: so a thread that is behind catches up."""
    begun = 0
    serve = HttpServer._serve

    async def counted(server: HttpServer, connection: Any) -> None:
        nonlocal begun
        begun += 1
        await serve(server, connection)

    monkeypatch.setattr(HttpServer, "_serve", counted)
    monkeypatch.setattr(http, "ACCEPTED_AT_ONCE", 100)
    daemon = FailingDaemon()
    daemon.mended = True
    with listening(daemon, hangs=False) as (server, port), ExitStack() as held:
        probe = held.enter_context(ask(port, "/healthz", "127.0.0.1"))
        for _ in range(99):
            held.enter_context(ask(port, "/metrics", "127.0.0.1"))
        server.start()
        assert received(probe).startswith(b"HTTP/1.1 200 ")
        assert begun <= 2 * MAX_CONNECTIONS


def test_an_answer_is_made_once_for_all_also_if_who_asked_first_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one that was closed had the next one begin anew: with enough of them nobody was answered."""
    made: list[str] = []
    make = HttpServer._make

    def noted(server: HttpServer, path: str) -> object:
        made.append(path)
        return make(server, path)

    monkeypatch.setattr(HttpServer, "_make", noted)
    monkeypatch.setattr(http, "LOOP_S", 60.0)
    daemon = WaitingDaemon()
    with serving(daemon, hangs=False) as port, ExitStack() as held:
        asking = [held.enter_context(ask(port, "/healthz", "127.0.0.1")) for _ in range(2 * MAX_CONNECTIONS)]
        assert received(asking[0]) == b"", "one that came later may go before it while its request is on its way"
        daemon.may_answer.set()
        assert received(asking[-1]).startswith(b"HTTP/1.1 200 ")
        assert made == ["/healthz"]


def test_a_loop_that_hangs_is_503_for_all_who_ask_at_once() -> None:
    with serving(FailingDaemon(), hangs=True) as port, ThreadPoolExecutor(20) as askers:
        began = time.monotonic()
        answers = set(askers.map(lambda _: http_get(port, "/healthz"), range(20)))
        assert answers == {(503, "The loop does not answer.\n")}
        assert LOOP_S <= time.monotonic() - began < 5 * LOOP_S


def test_a_question_about_this_machines_names_that_hangs_is_waited_for_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a server of names that is gone. Those who ask meanwhile wait for the same question."""
    questions, ended = list[int](), threading.Event()

    def hang() -> str:
        questions.append(1)
        ended.wait(LONGER_THAN_A_TEST_S)
        return "node.example"

    monkeypatch.setattr(http, "NAMES_S", 0.1)
    monkeypatch.setattr(socket, "getfqdn", hang)
    daemon = FailingDaemon()
    daemon.mended = True

    def ask(host: str) -> bytes:
        with socket.create_connection(("127.0.0.1", port), 30.0) as asking:
            asking.sendall(b"GET /healthz HTTP/1.1\r\nHost: %s\r\n\r\n" % host.encode())
            return asking.recv(4096).split(b"\r\n")[0]

    with serving(daemon, hangs=False) as port, ThreadPoolExecutor(4) as askers:
        assert set(askers.map(ask, ["node.example"] * 4)) == {b"HTTP/1.1 403 Forbidden"}
        assert ask("127.0.0.1") == b"HTTP/1.1 200 OK"
        assert questions == [1]
        ended.set()
        wait_until(lambda: ask("node.example") == b"HTTP/1.1 200 OK")


def test_a_machine_whose_name_the_dns_cannot_have_is_asked_for_its_names_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its label is longer than 63 characters. Each request by another name waited for the first question."""
    names = iter(["x" * 64])
    monkeypatch.setattr(http, "NAMES_S", 60.0)
    monkeypatch.setattr(socket, "gethostname", lambda: "node")
    monkeypatch.setattr(socket, "getfqdn", lambda: next(names, "node.example").encode("idna").decode())
    daemon = FailingDaemon()
    daemon.mended = True
    with serving(daemon, hangs=False) as port:
        for answer in (b"HTTP/1.1 403 Forbidden", b"HTTP/1.1 200 OK"):
            with socket.create_connection(("127.0.0.1", port), 30.0) as asking:
                asking.sendall(b"GET /healthz HTTP/1.1\r\nHost: node.example\r\n\r\n")
                assert asking.recv(4096).split(b"\r\n")[0] == answer


def test_a_host_that_may_be_this_machines_is_refused_while_no_thread_can_ask(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection was closed without an answer, and each request logged a traceback."""

    def refuse(_: threading.Thread) -> None:
        raise NoMoreThreads

    daemon = FailingDaemon()
    daemon.mended = True
    monkeypatch.setattr(http, "NAMES_S", 60.0)
    monkeypatch.setattr(socket, "getfqdn", lambda: "node.example")
    with serving(daemon, hangs=False) as port:
        for answer in (b"HTTP/1.1 403 Forbidden", b"HTTP/1.1 200 OK"):
            with socket.create_connection(("127.0.0.1", port), 30.0) as asking, monkeypatch.context() as patched:
                if answer.endswith(b"Forbidden"):
                    patched.setattr(http, "start", refuse)
                asking.sendall(b"GET /healthz HTTP/1.1\r\nHost: node.example\r\n\r\n")
                assert asking.recv(4096).split(b"\r\n")[0] == answer
    assert not caplog.records


@pytest.mark.parametrize("path", ["/metrics", "/stats.json", "/page.json", "/healthz", "/readyz"])
def test_a_daemon_that_fails_inside_is_503_and_the_server_goes_on(path: str, caplog: pytest.LogCaptureFixture) -> None:
    daemon = FailingDaemon()
    with serving(daemon, hangs=False) as port:
        status, body = http_get(port, path)
        assert (status, "secret" in body) == (503, False)
        assert "secret detail" in caplog.text
        daemon.mended = True
        wait_until(lambda: "failed" not in http_get(port, path)[1])
