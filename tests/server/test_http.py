"""The HTTP server answers scrapers and probes, and survives everybody else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import NoReturn

import pytest

from kvoffd.server import self_probe
from kvoffd.server.http import MAX_CONNECTIONS, HttpServer, NotServing
from kvoffd.server.self_probe import ProbeFailed, SelfProbe
from kvoffd.system.directory import DaemonDirectory
from kvoffd_proto.messages import HealthLevel, HealthProblem, HealthReply

DEADLINE_S = 10.0


async def good() -> HealthReply:
    return HealthReply(1, 1, HealthLevel.OK, [])


async def empty() -> bytes:
    return b""


async def three_sessions() -> bytes:
    return b"kvoffd_sessions 3\n"


def on_server(
    scenario: Callable[[HttpServer], Coroutine[None, None, None]],
    *,
    metrics: Callable[[], Awaitable[bytes]] = three_sessions,
    health: Callable[[], Awaitable[HealthReply]] = good,
    deadline_s: float = 5.0,
) -> None:
    async def run() -> None:
        server = HttpServer("127.0.0.1:0", metrics, health, deadline_s)
        await server.start()
        try:
            async with asyncio.timeout(DEADLINE_S):
                await scenario(server)
        finally:
            await server.close()

    asyncio.run(run())


async def exchange(server: HttpServer, request: bytes, *, end: bool = False) -> bytes:
    """Send ``request`` and return all that comes back until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request)
    if end:
        writer.write_eof()
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        await leave(writer)


async def leave(writer: asyncio.StreamWriter) -> None:
    """Close and wait for it: whatever is left open is an error of the test."""
    writer.close()
    try:
        await writer.wait_closed()
    except ConnectionError:
        pass  # the server was faster


async def get(server: HttpServer, path: str) -> tuple[int, dict[str, str], str]:
    answer = await exchange(server, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    head, body = answer.decode().split("\r\n\r\n", 1)
    status, *lines = head.split("\r\n")
    return int(status.split()[1]), dict(line.lower().split(": ", 1) for line in lines), body


def test_metrics_may_be_awaited() -> None:
    async def page() -> bytes:
        return b"later 1\n"

    async def scenario(server: HttpServer) -> None:
        assert (await get(server, "/metrics"))[2] == "later 1\n"

    on_server(scenario, metrics=page)


@pytest.mark.parametrize("level", list(HealthLevel))
def test_a_daemon_that_answers_is_alive_and_one_that_takes_sessions_is_ready(level: HealthLevel) -> None:
    ready = level is not HealthLevel.DOWN

    async def health() -> HealthReply:
        return HealthReply(1, 1, level, [HealthProblem("disk", "The disk is full.")])

    async def scenario(server: HttpServer) -> None:
        status, _, body = await get(server, "/healthz")
        assert (status, body) == (200, "ok\nThe disk is full.\n")
        status, _, body = await get(server, "/readyz")
        assert status == (200 if ready else 503)
        assert body.endswith("ok\nThe disk is full.\n")

    on_server(scenario, health=health)


def test_a_daemon_that_does_not_serve_yet_is_alive_and_not_ready() -> None:
    async def starting() -> NoReturn:
        raise NotServing("The daemon is starting.")

    async def scenario(server: HttpServer) -> None:
        told = [(await get(server, path))[::2] for path in ("/healthz", "/readyz", "/metrics")]
        sentence = "The daemon is starting.\n"
        assert told == [(200, f"ok\n{sentence}"), (503, f"not ok\n{sentence}"), (503, f"not ok\n{sentence}")]

    on_server(scenario, metrics=starting, health=starting)


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz"])
def test_a_callback_that_fails_is_503_and_the_server_goes_on(path: str, caplog: pytest.LogCaptureFixture) -> None:
    broken = True

    async def health() -> HealthReply:
        if broken:
            raise RuntimeError("secret detail")
        return await good()

    async def page() -> bytes:
        return repr(await health()).encode()

    async def scenario(server: HttpServer) -> None:
        nonlocal broken
        status, _, body = await get(server, path)
        assert status == 503
        assert "secret" not in body
        broken = False
        assert (await get(server, path))[0] == 200

    on_server(scenario, health=health, metrics=page)
    assert "secret detail" in caplog.text


def test_a_daemon_that_does_not_answer_in_time_is_503() -> None:
    async def health() -> HealthReply:
        await asyncio.Event().wait()
        raise AssertionError

    async def scenario(server: HttpServer) -> None:
        status, _, body = await get(server, "/healthz")
        assert (status, "in time" in body) == (503, True)

    on_server(scenario, health=health, deadline_s=0.05)


def test_connections_whose_answers_do_not_come_are_bounded() -> None:
    async def never() -> HealthReply:
        await asyncio.sleep(3600)
        return await good()

    async def scenario(server: HttpServer) -> None:
        waiting = []
        for _ in range(2 * MAX_CONNECTIONS):
            waiting.append(await asyncio.open_connection("127.0.0.1", server.port))
            waiting[-1][1].write(b"GET /healthz HTTP/1.1\r\n\r\n")
            await asyncio.sleep(0.01)
        assert await exchange(server, b"GET /metrics HTTP/1.1\r\n\r\n") == b""
        for _, other in waiting:
            await leave(other)

    on_server(scenario, health=never)


async def ended(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True


def test_closing_drops_idle_connections_and_frees_the_port() -> None:
    async def run() -> None:
        server = HttpServer("127.0.0.1:0", empty, good)
        await server.start()
        port = server.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await exchange(server, b"GET /healthz HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(DEADLINE_S):
            await server.close()
            assert await ended(reader)
            await leave(writer)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        await server.close()

    asyncio.run(run())


def test_pages_of_metrics_are_not_made_for_each_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_probe, "render_metrics", lambda reply: reply)
    probe = SelfProbe(None, DaemonDirectory(Path("/nowhere")))  # type: ignore[arg-type]
    pages = iter(range(100))

    async def ask(request: object) -> int:
        await asyncio.sleep(0.1)
        return next(pages)

    monkeypatch.setattr(probe, "_ask", ask)

    async def run() -> None:
        assert set(await asyncio.gather(*(probe.metrics() for _ in range(50)))) == {0}
        assert await probe.metrics() == 0
        probe._page_until = 0.0  # it is old
        for page in (1, 1):
            assert await probe.metrics() == page

    asyncio.run(run())


def test_a_page_that_failed_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = SelfProbe(None, DaemonDirectory(Path("/nowhere")))  # type: ignore[arg-type]

    async def run() -> None:
        for _ in range(2):
            with pytest.raises(
                ProbeFailed, match=r"/nowhere/jobs.sock is not this daemon's socket any more .*restart it"
            ):
                await probe.metrics()
            probe._page_until = 0.0

    asyncio.run(run())
