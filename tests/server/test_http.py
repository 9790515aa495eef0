"""What HTTP answers while the daemon's loop hangs, or the daemon fails inside."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from kvoffd.server import http
from kvoffd.server.http import LOOP_S, HttpServer
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
def serving(daemon: FailingDaemon, *, hangs: bool) -> Iterator[int]:
    """The port of a server whose loop turns, or does not."""
    loop, port = asyncio.new_event_loop(), free_port()
    thread = threading.Thread(target=(lambda: None) if hangs else loop.run_forever)
    server = HttpServer(f"127.0.0.1:{port}", (), daemon, loop)
    server.start()
    thread.start()
    try:
        yield port
    finally:
        server.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


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


@pytest.mark.parametrize("path", ["/metrics", "/stats.json", "/page.json", "/healthz", "/readyz"])
def test_a_daemon_that_fails_inside_is_503_and_the_server_goes_on(path: str, caplog: pytest.LogCaptureFixture) -> None:
    daemon = FailingDaemon()
    with serving(daemon, hangs=False) as port:
        status, body = http_get(port, path)
        assert (status, "secret" in body) == (503, False)
        assert "secret detail" in caplog.text
        daemon.mended = True
        wait_until(lambda: "failed" not in http_get(port, path)[1])
