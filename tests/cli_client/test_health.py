"""``kvoffd-cli health`` as probes run it: little to import, and exit statuses of two meanings."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest
import zmq

from kvoffd_client.admin_client import ask_health
from kvoffd_client.cli import main
from kvoffd_client.cli.health import health_lines, health_status
from kvoffd_proto.admin import HealthLevel, HealthProblem, HealthReply
from tests.kit.daemon import DaemonProcess


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


@pytest.mark.parametrize("answer", [None, b"", b"\xc1", b"x" * (2 << 20)], ids=["none", "empty", "garbage", "too long"])
def test_who_answers_with_no_health_is_not_waited_for(tmp_path: Path, answer: bytes | None) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as there:
        there.setsockopt(zmq.LINGER, 0)
        there.bind(f"ipc://{tmp_path / 'jobs.sock'}")
        stop = threading.Event()

        def serve() -> None:
            while not stop.is_set():
                if there.poll(10) and answer is not None:
                    route, _ = there.recv_multipart()
                    there.send_multipart([route, answer])

        server = threading.Thread(target=serve)
        server.start()
        began = time.monotonic()
        assert ask_health(tmp_path, 0.5) is None
        assert time.monotonic() - began < 10
        stop.set()
        server.join()


def test_where_nobody_listens_there_is_no_answer(tmp_path: Path) -> None:
    assert ask_health(tmp_path) is None
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "jobs.sock"))
    assert ask_health(tmp_path) is None
