"""The HTTP port answers scrapers and probes, and survives everybody else."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvoffd_client import SharedMemory
from tests.kit.daemon import DaemonProcess
from tests.kit.ports import free_port
from tests.kit.require import require
from tests.kit.waiting import wait_until
from tests.kit.wire import PAGE_BYTES, WireClient, books, keys, refused, store_of

MANY = 100
"""More connections than the daemon has at a time."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """That of a daemon that serves, with a disk that cannot be opened."""
    found = free_port()
    with DaemonProcess(
        "1MiB",
        http_address=f"127.0.0.1:{found}",
        http_hosts="kvoffd.example.com",
        disk="/nowhere/missing=64MiB",
        disk_start="optional",
    ) as daemon:
        daemon.wait_log("Serving ")  # HTTP opens after the sockets
        wait_until(lambda: b"missing" in get(found, "/healthz"))
        yield found
        assert daemon.running


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 30.0)


def answer(connection: socket.socket) -> bytes:
    """All that comes until the daemon closes the connection."""
    with connection:
        received = b""
        try:
            while data := connection.recv(1 << 16):
                received += data
        except ConnectionError:
            pass  # it closed while something of ours was on its way
        return received


def exchange(port: int, request: bytes) -> bytes:
    connection = connect(port)
    try:
        connection.sendall(request)
    except ConnectionError:
        pass  # answered before it was read
    return answer(connection)


def get(port: int, path: str, host: str = "x") -> bytes:
    return exchange(port, f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())


def test_http_metrics_are_what_prometheus_wants(port: int) -> None:
    head, _, body = get(port, "/metrics?all=1").partition(b"\r\n\r\n")
    status, *lines = head.decode().lower().split("\r\n")
    fields = dict(line.split(": ", 1) for line in lines)
    assert status.split()[1] == "200"
    assert fields["content-type"].startswith("text/plain; version=0.0.4")
    assert (fields["content-length"], fields["connection"]) == (str(len(body)), "close")
    assert b"\nkvoffd_pool" in body


def test_http_metrics_satisfy_prometheus_linter(port: int) -> None:
    require("prometheus", shutil.which("promtool"), "promtool is not installed")
    page = get(port, "/metrics").partition(b"\r\n\r\n")[2]
    linted = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, timeout=60)
    assert (linted.returncode, linted.stdout, linted.stderr) == (0, b"", b"")


def test_http_a_page_for_people(port: int) -> None:
    """It needs nothing from elsewhere, and pages from elsewhere read nothing (DNS rebinding)."""
    for host in ("localhost:1", "[::1]:1", "10.1.2.3", "node-7"):
        head, _, body = get(port, "/", host).partition(b"\r\n\r\n")
        assert b"content-type: text/html" in head.lower(), host
        assert b"default-src 'none'" in head
    assert b'fetch("page.json"' in body
    assert b"//" not in body.replace(b"</", b"")
    for path in ("/stats.json", "/page.json"):
        assert b"content-type: application/json" in get(port, path).lower()


def test_http_has_one_rule_for_hosts(port: int) -> None:
    """Addresses, what the public DNS lacks, this machine's names and those of the setting, whatever is asked for."""
    for path in ("/", "/stats.json", "/page.json", "/metrics", "/healthz", "/readyz"):
        for host in (
            *("localhost:1", "[::1]:1", "10.1.2.3", "node-7", "kvoffd.monitoring.svc", "a.b.svc.cluster.local:9464"),
            *("ip-10-0-0-1.ec2.internal.", socket.gethostname(), socket.getfqdn(), "KVOFFD.example.com:443"),
        ):
            assert get(port, path, host).startswith(b"HTTP/1.1 200 "), (path, host)
        for host in ("evil.example.com", "evil.example.com.", "local.example.com", "127.0.0.1.example.com:9464"):
            status, _, body = get(port, path, host).partition(b"\r\n\r\n")
            assert status.startswith(b"HTTP/1.1 403 "), (path, host)
            assert b"http_hosts" in body


def test_http_a_broken_disk_ends_neither_life_nor_service(port: int) -> None:
    """The probes say what is wrong, and that the daemon lives and takes sessions."""
    for path in ("/healthz", "/readyz"):
        status, _, body = get(port, path).partition(b"\r\n\r\n")
        assert status.startswith(b"HTTP/1.1 200 ")
        assert body.startswith(b"ok\n")
        assert b"missing" in body


def test_http_other_requests_get_their_status(port: int) -> None:
    for request, status in (
        (b"GET /stats HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics/ HTTP/1.1\r\n\r\n", 404),
        (b"GET /../etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", 405),
        (b"DELETE /healthz HTTP/1.0\r\n\r\n", 405),
        (b"hello\r\n\r\n", 400),
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET metrics HTTP/1.1\r\n\r\n", 400),
        (b"GET /metrics HTTP/2.0\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 16384 + b"\r\n\r\n", 431),
    ):
        said = exchange(port, request)
        assert said.startswith(f"HTTP/1.1 {status} ".encode()), request[:40]
        assert (b"\r\nAllow: GET\r\n" in said) == (status == 405)


def test_http_idle_connections_give_way_to_probes(port: int) -> None:
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(port)) for _ in range(MANY)]
        for _ in range(20):
            half = stack.enter_context(connect(port))
            half.sendall(b"GET /he")
            assert get(port, "/healthz").startswith(b"HTTP/1.1 200 ")
        assert answer(idle[0]) == b""


def test_http_a_request_that_stays_half_is_408(port: int) -> None:
    with connect(port) as half:
        half.sendall(b"GET /metr")
        assert answer(half).startswith(b"HTTP/1.1 408 ")


def test_http_a_star_is_all_interfaces() -> None:
    """IPv6 too, where the machine has it."""
    found = free_port()
    with DaemonProcess("1MiB", http_address=f"*:{found}") as daemon:
        daemon.wait_log("Serving ")
        for host in ("127.0.0.1", "127.0.0.2", "::1"):
            try:
                with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
                    pass
            except OSError:
                continue  # the machine lacks it
            with socket.create_connection((host, found), 30.0) as connection:
                connection.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
                assert answer(connection).startswith(b"HTTP/1.1 200 "), host


def test_http_not_ready_while_the_daemon_stops() -> None:
    """It lives, which no restart mends, and takes no sessions: traffic is to go elsewhere."""
    found = free_port()
    with (
        DaemonProcess(http_address=f"127.0.0.1:{found}", faults=True) as daemon,
        WireClient(daemon.directory) as worker,
    ):
        daemon.wait_log("Serving ")
        assert get(found, "/readyz").startswith(b"HTTP/1.1 200 ")
        worker.open_namespace()
        with SharedMemory(PAGE_BYTES, "test") as memory, daemon.fault("store slow 3"):
            cache = worker.register(memory)
            worker.submit(cache, [store_of(1, keys(1), [0])])
            wait_until(lambda: books(daemon.directory).store.running_jobs == 1)
            daemon.process.terminate()
            wait_until(lambda: get(found, "/readyz").startswith(b"HTTP/1.1 503 "))
            assert get(found, "/healthz").startswith(b"HTTP/1.1 200 ")
            assert refused(worker.store, cache, keys(2), [0]) == "shutting_down"
            assert refused(worker.open_namespace, bytes(32)) == "shutting_down"
            with WireClient(daemon.directory, None) as newcomer:
                assert newcomer.rejected
                assert newcomer.rejected.code == "shutting_down"
            assert daemon.process.wait(30.0) == 0
