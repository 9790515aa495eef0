"""What systemd hears from the daemon, on a real datagram socket."""

from __future__ import annotations

import array
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffd.system.systemd import FdStore, Notifier
from tests.kit.open_files import open_files

DEADLINE_S = 10.0


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with (
        tempfile.TemporaryDirectory() as directory,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening,
    ):
        listening.bind(str(Path(directory) / "notify"))
        listening.settimeout(DEADLINE_S)
        yield listening


def environ(listener: socket.socket, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": listener.getsockname(), **more}


def heard(listener: socket.socket) -> dict[str, str]:
    return dict(line.split("=", 1) for line in listener.recv(65536).decode().splitlines())


@pytest.fixture
def notifier(listener: socket.socket) -> Iterator[Notifier]:
    made = Notifier(environ(listener))
    yield made
    made.close()


def test_a_status_cannot_bring_in_another_field(listener: socket.socket, notifier: Notifier) -> None:
    notifier.stopping("a\nREADY=1\r\nb" + "c" * 5000)
    said = heard(listener)
    assert set(said) == {"STOPPING", "STATUS"}
    assert said["STATUS"].startswith("a READY=1 b")
    assert len(said["STATUS"]) == 1024


def test_a_long_start_asks_for_more_time_and_what_is_stored_is_not_watched(
    listener: socket.socket, notifier: Notifier
) -> None:
    """To touch a large pool takes minutes. A descriptor that systemd watches it drops at its EOF."""
    notifier.starting("Touching the pool: 1 of 2.")
    assert heard(listener) == {"EXTEND_TIMEOUT_USEC": "30000000", "STATUS": "Touching the pool: 1 of 2."}
    with open(os.devnull, "rb") as stored:
        notifier.store_fd("pool", stored.fileno())
        assert heard(listener) == {"FDSTORE": "1", "FDNAME": "pool", "FDPOLL": "0"}


@pytest.mark.parametrize("address", ["vsock:2:1", "relative/path"])
def test_an_address_that_cannot_be_used_is_said_and_ignored(address: str, caplog: pytest.LogCaptureFixture) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": address})
    notifier.ready("serving")
    assert address in caplog.text


def test_a_listener_that_is_gone_harms_nobody_and_is_said_once(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")})
    for _ in range(3):
        notifier.ready("serving")
    notifier.close()
    assert len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.WARNING


def test_a_listener_that_does_not_read_never_blocks(listener: socket.socket, notifier: Notifier) -> None:
    for _ in range(5000):  # the queue of an unread unix socket holds far fewer
        notifier.stopping("x" * 1000)
    assert heard(listener)["STATUS"] == "x" * 1000


def test_the_watchdog_is_told_where_systemd_watches_this_process(listener: socket.socket) -> None:
    for variables, wanted in (
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, True),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid() + 1)}, False),
        *(({"WATCHDOG_USEC": text}, False) for text in ("0", "soon", "-5", "9" * 5000)),
    ):
        notifier = Notifier(environ(listener, **variables))
        notifier.watchdog()
        notifier.watchdog()  # not again before half of the timeout is over
        notifier.stopping("")
        heard_of = [heard(listener) for _ in range(1 + wanted)]
        assert [said for said in heard_of if "STOPPING" not in said] == [{"WATCHDOG": "1"}] * wanted, variables
        notifier.close()


def test_a_barrier_waits_until_everything_was_heard(listener: socket.socket, notifier: Notifier) -> None:
    def hear() -> None:
        data, ancillary, _, _ = listener.recvmsg(4096, 1024)
        assert data == b"BARRIER=1"
        os.close(array.array("i", ancillary[0][2])[0])

    before = open_files()
    assert not notifier.wait_until_handled(0.05), "nobody has read the barrier yet"
    assert open_files() <= before
    hear()
    systemd = threading.Thread(target=hear)
    systemd.start()
    assert notifier.wait_until_handled(DEADLINE_S)
    systemd.join()


def test_stored_descriptors_come_by_name_and_are_not_passed_on() -> None:
    # They have the numbers from 3 on, so this takes a process of its own.
    script = """
import os
from kvoffd.system.systemd import take_stored_fds
for place, fd in enumerate([os.memfd_create("x") for _ in range(10)][-3:]):
    os.dup2(fd, 3 + place)
    os.set_inheritable(3 + place, True)
of_another = {"LISTEN_PID": "1", "LISTEN_FDS": "3", "LISTEN_FDNAMES": "a:b:a"}
assert (take_stored_fds(of_another), of_another) == ({}, {})
environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "3", "LISTEN_FDNAMES": "a:b:a", "HOME": "/"}
assert take_stored_fds(environ) == {"a": [3, 5], "b": [4]}
assert environ == {"HOME": "/"}
assert not any(os.get_inheritable(fd) for fd in (3, 4, 5))
short = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "3", "LISTEN_FDNAMES": "a"}
assert take_stored_fds(short) == {"a": [3], "unknown": [4, 5]}, "none stays open unnoticed"
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)


def test_abstract_sockets_are_reached() -> None:
    name = f"kvoffd-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(f"\0{name}")
        listening.settimeout(DEADLINE_S)
        notifier = Notifier({"NOTIFY_SOCKET": f"@{name}"})
        notifier.ready("serving")
        assert heard(listening)["READY"] == "1"
        notifier.close()


@pytest.mark.parametrize(
    ("environ", "keeps"),
    [
        ({}, FdStore.NO),
        ({"FDSTORE": "8"}, FdStore.NO),
        ({"NOTIFY_SOCKET": "/run/systemd/notify"}, FdStore.MAYBE),
        ({"NOTIFY_SOCKET": "/run/user/1000/systemd/notify"}, FdStore.MAYBE),
        ({"NOTIFY_SOCKET": "/run/systemd/notify", "FDSTORE": "8"}, FdStore.YES),
        ({"NOTIFY_SOCKET": "/run/systemd/notify", "FDSTORE": "0"}, FdStore.NO),
        ({"NOTIFY_SOCKET": "/run/crun/notify"}, FdStore.NO),
    ],
)
def test_whether_descriptors_are_kept(environ: dict[str, str], keeps: FdStore) -> None:
    notifier = Notifier(environ)
    assert notifier.fd_store is keeps
    notifier.close()
