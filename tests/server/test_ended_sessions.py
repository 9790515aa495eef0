"""Sessions that ended are counted by the reason, administrators' not at all. Nobody waits for their memory."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

from kvoffd_client import AdminClient
from kvoffd_client.testing import FakeEngine
from kvoffd_proto.lifeline import Attached
from kvoffd_proto.sockets import SocketPaths
from tests.kit.daemon import DaemonProcess
from tests.kit.struct_wire import WireClient, stats
from tests.kit.waiting import wait_until

ENGINE = """
import sys, time
from kvoffd_client.testing import FakeEngine
with FakeEngine(sys.argv[1]):
    print("ready", flush=True)
    time.sleep(60)
"""


def test_who_left_and_why(daemon: DaemonProcess) -> None:
    def ended() -> dict[str, int]:
        with AdminClient(daemon.directory) as admin:
            return admin.stats().ended_sessions

    assert ended() == {}
    with FakeEngine(daemon.directory):
        pass
    wait_until(lambda: ended() == {"closed": 2}, 10)
    engine = subprocess.Popen([sys.executable, "-c", ENGINE, str(daemon.directory)], stdout=subprocess.PIPE)
    assert engine.stdout.readline() == b"ready\n"
    engine.send_signal(signal.SIGKILL)
    engine.wait()
    engine.stdout.close()
    wait_until(lambda: ended() == {"closed": 2, "gone": 2}, 10)
    with socket.socket(socket.AF_UNIX) as stream:
        stream.connect(str(SocketPaths(daemon.directory).lifeline))
        stream.sendall(bytes(100))
        wait_until(lambda: ended() == {"closed": 2, "gone": 2, "malformed": 1}, 10)
    assert "ended: gone." in daemon.log


SLOW_S = 2.0


def test_others_are_served_while_the_memory_of_who_left_is_let_go_of() -> None:
    with DaemonProcess(releases_slowly_s=SLOW_S) as daemon:
        with FakeEngine(daemon.directory), WireClient(daemon.directory) as client:
            fd = os.memfd_create("attached", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            assert isinstance(client.attach(fd, 1), Attached)
            os.close(fd)
        wait_until(lambda: stats(daemon.directory).sessions == 1, 10)
        assert stats(daemon.directory).loop_blocked_maximum_seconds < SLOW_S / 2


def test_memory_is_let_go_of_before_that_is_said() -> None:
    with DaemonProcess(releases_slowly_s=SLOW_S) as daemon, FakeEngine(daemon.directory) as engine:
        began = time.monotonic()
        assert engine.workers[0].unregister(10.0)
        assert time.monotonic() - began >= SLOW_S
