"""``kvoffd-cli health``, as probes run it: exit statuses of two meanings, little to import, and never for long."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvoffd_client.cli import main
from tests.kit.command import DEADLINE_S, Cli
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until
from tests.kit.wire import books

PROBES = ((), ("--live",), ("--ready",))
HEAVY = {"asyncio", "numpy", "rich", "typer", "kvoffd_proto.messages", "kvoffd_client.admin_client"}
"""ZeroMQ is not among them: a probe asks as engines do, so that it proves what they need. It costs 16 ms of CPU."""


def test_a_healthy_daemon_is_status_0(cli: Cli) -> None:
    for probe in PROBES:
        status, out, err = cli("health", *probe)
        assert (status, err) == (0, "")
        assert out.startswith("ok")
    found = json.loads(cli("health", "--json").out)
    assert (found["level"], found["causes"]) == ("ok", [])
    assert cli("health", "--live", "--ready").status == 2, "one at a time"


def test_a_degraded_daemon_is_alive_and_ready(cli: Cli, tmp_path: Path) -> None:
    """It serves without its disk: neither a restart nor other nodes would help."""
    with DaemonProcess("8MiB", disk=f"{tmp_path / 'missing'}=64MiB") as daemon:
        wait_until(lambda: books(daemon.directory).health == "degraded")
        assert [cli("health", *probe, on=daemon).status for probe in PROBES] == [1, 0, 0]
        out = cli("health", on=daemon).out
        assert out.startswith("degraded")
        assert "missing" in out
        found = json.loads(cli("health", "--json", on=daemon).out)
        assert [cause["reason"] for cause in found["causes"]] == ["disk_failed"]


@contextmanager
def impostor(directory: Path, serve: Callable[[socket.socket], None]) -> Iterator[None]:
    """Somebody else has bound the daemon's sockets, and serves one connection of each."""
    threads = []
    for name in ("jobs.sock", "lifeline.sock"):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(directory / name))
        listener.listen()
        listener.settimeout(5.0)

        def accept(listener: socket.socket = listener) -> None:
            with listener:
                try:
                    there, _ = listener.accept()
                except TimeoutError:
                    return
                with there:
                    serve(there)

        threads.append(threading.Thread(target=accept))
        threads[-1].start()
    yield
    for thread in threads:
        thread.join()


def flood(there: socket.socket) -> None:
    until = time.monotonic() + 5.0
    try:
        while time.monotonic() < until:
            there.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 100)
    except OSError:
        pass  # it was not read to the end


def test_somebody_else_at_the_socket_is_no_health(short_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with impostor(short_directory, flood):
        started = time.monotonic()
        assert main(["health", "--live", "--directory", str(short_directory)]) == 2
        assert time.monotonic() - started < 50.0, "an operator waits 10 s at most"
    assert capsys.readouterr().err.count("\n") == 1


def test_a_probe_imports_nothing_heavy(shared_daemon: DaemonProcess) -> None:
    """Probes run every few seconds, beside engines."""
    script = (
        "import json, sys; from kvoffd_client.cli import main; "
        "status = main(sys.argv[1:]); print(json.dumps([status, sorted(sys.modules)]))"
    )
    for probe in ([], ["--live"], ["--json"]):
        command = [sys.executable, "-c", script, "health", *probe, "--directory", str(shared_daemon.directory)]
        said, imported = subprocess.check_output(command, text=True, timeout=DEADLINE_S).splitlines()
        status, modules = json.loads(imported)
        assert (said.startswith(("ok", '{"level": "ok"')), status) == (True, 0)
        assert HEAVY.isdisjoint(modules)
