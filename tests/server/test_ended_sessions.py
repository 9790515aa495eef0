"""Sessions that ended are counted by the reason, administrators' not at all."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

from kvoffd_client import AdminClient
from kvoffd_client.testing import FakeEngine
from kvoffd_proto.sockets import SocketPaths
from tests.support.daemon import DaemonProcess
from tests.support.waiting import wait_until

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
