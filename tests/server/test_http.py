"""What HTTP answers while the daemon cannot: its loop hangs, it starts, or it fails inside."""

from __future__ import annotations

import asyncio
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from kvoffd.server.http import LOOP_S, HttpServer
from kvoffd_proto.admin import HealthLevel, HealthProblem, HealthReply
from tests.kit.ports import free_port

SENTENCE = "The disk is full."


class FakeDaemon:
    """One that says what it is told to, or fails where that is nothing."""

    def __init__(self, level: HealthLevel | None, unreachable: str = "") -> None:
        self.level = level
        self._unreachable = unreachable

    def health(self) -> HealthReply:
        if self.level is None:
            raise RuntimeError("secret detail")
        return HealthReply(0, self.level, [HealthProblem("disk", SENTENCE)])

    def stats(self) -> None:
        self.health()

    def unreachable(self) -> str:
        return self._unreachable


@contextmanager
def serving(daemon: FakeDaemon, *, hangs: bool = False) -> Iterator[int]:
    """The port of a server whose loop turns, or does not."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    port = free_port()
    server = HttpServer(f"127.0.0.1:{port}", daemon, loop)
    server.start()
    if not hangs:
        thread.start()
    try:
        yield port
    finally:
        server.close()
        if not hangs:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
        loop.close()


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_loop_that_hangs_is_503_for_all_who_ask_at_once() -> None:
    with serving(FakeDaemon(HealthLevel.OK), hangs=True) as port, ThreadPoolExecutor(20) as askers:
        began = time.monotonic()
        answers = set(askers.map(lambda _: get(port, "/healthz"), range(20)))
        assert answers == {(503, "The loop does not answer.\n")}
        assert LOOP_S <= time.monotonic() - began < 3 * LOOP_S


@pytest.mark.parametrize("path", ["/metrics", "/stats.json", "/healthz", "/readyz"])
def test_a_daemon_that_fails_inside_is_503_and_the_server_goes_on(path: str, caplog: pytest.LogCaptureFixture) -> None:
    daemon = FakeDaemon(None)
    with serving(daemon) as port:
        status, body = get(port, path)
        assert (status, "secret" in body) == (503, False)
        assert "secret detail" in caplog.text
        daemon.level = HealthLevel.OK
        end = time.monotonic() + 10.0
        while "failed" in get(port, path)[1]:
            assert time.monotonic() < end


def test_a_daemon_whose_sockets_are_gone_is_not_alive() -> None:
    with serving(FakeDaemon(HealthLevel.OK, "No engine can connect.")) as port:
        for path in ("/healthz", "/readyz"):
            assert get(port, path) == (503, f"not ok\nNo engine can connect.\n{SENTENCE}\n")
