"""``kvoffd-cli health`` as probes run it: little to import, and exit statuses of two meanings."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvoffd_client.cli import main
from kvoffd_client.cli.health import health_lines, health_status
from kvoffd_client.health_request import ask_health
from kvoffd_proto.messages import HealthLevel, HealthProblem, HealthReply
from kvoffd_proto.zmtp import encode_command, opening
from tests.kit.daemon import DaemonProcess

PING = encode_command(b"PING", bytes(2))


@pytest.mark.parametrize(
    ("level", "expected"),
    [(HealthLevel.OK, (0, 0, 0)), (HealthLevel.DEGRADED, (1, 0, 0)), (HealthLevel.DOWN, (2, 0, 2))],
)
def test_what_is_worse_is_neither_death_nor_refusal(level: HealthLevel, expected: tuple[int, ...]) -> None:
    """The statuses without an option, with --live and with --ready."""
    reply = HealthReply(1, 1, level, [HealthProblem("disk", "The disk is \x1b[31mfull.")])
    found = [
        health_status(reply, live=live, ready=want) for live, want in ((False, False), (True, False), (False, True))
    ]
    assert tuple(found) == expected
    first, *rest = health_lines(reply)
    assert first.startswith(f"{level.value}: ")
    assert rest == ["- disk: The disk is ?[31mfull."]


def test_both_ways_say_the_same(shared_daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """``--directory=...`` is left to the whole command line."""
    directory = str(shared_daemon.directory)
    for option in (["--directory", directory], [f"--directory={directory}"]):
        for probe in ([], ["--live"], ["--ready"]):
            assert main(["health", *probe, *option]) == 0
            assert capsys.readouterr() == ("ok: the daemon takes sessions and jobs\n", "")


@contextmanager
def served(directory: Path, serve: Callable[[socket.socket], None]) -> Iterator[None]:
    """Somebody else is at ``jobs.sock``, and serves one connection."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "jobs.sock"))
        listener.listen()
        listener.settimeout(5)
        server = threading.Thread(target=lambda: serve(listener.accept()[0]))
        server.start()
        yield
        server.join()


def test_who_sends_without_end_and_answers_nothing_does_not_hold_it(tmp_path: Path) -> None:
    closed = threading.Event()

    def flood(there: socket.socket) -> None:
        until = time.monotonic() + 3.0
        with there:
            there.sendall(opening(b"ROUTER"))
            try:
                while time.monotonic() < until:
                    there.sendall(PING * 100)
            except OSError:
                closed.set()

    with served(tmp_path, flood):
        assert ask_health(tmp_path, time.monotonic() + 0.3) is None
    assert closed.is_set()
