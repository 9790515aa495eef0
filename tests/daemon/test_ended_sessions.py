"""Sessions that ended are counted by the reason, administrators' not at all. Nobody waits for their memory."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

from kvoffd_client.testing import FakeEngine
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import LONGER_THAN_A_TEST_S, wait_until
from tests.kit.wire import WireClient, attach_frame, books

ENGINE = """
import sys, time
from kvoffd_client.testing import FakeEngine
with FakeEngine(sys.argv[1]):
    print("ready", flush=True)
    time.sleep(60)
"""

UNCLOSED = """
import multiprocessing, sys
from kvoffd_client.testing import FakeEngine
def make(name):
    global engine
    engine = FakeEngine(sys.argv[1], name)
make("parent")
child = multiprocessing.get_context("fork").Process(target=make, args=["child"])
child.start()
child.join()
"""
"""Two engines that are never closed, and whose processes end in good order."""


def test_ended_sessions_are_counted_by_reason() -> None:
    with DaemonProcess() as daemon:

        def ended() -> dict[str, int]:
            return books(daemon.directory).ended_sessions

        assert ended() == {}
        subprocess.run([sys.executable, "-c", UNCLOSED, str(daemon.directory)], check=True)
        wait_until(lambda: ended() == {"closed": 4}, explain=ended)
        engine = subprocess.Popen([sys.executable, "-c", ENGINE, str(daemon.directory)], stdout=subprocess.PIPE)
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"ready\n"
        engine.send_signal(signal.SIGKILL)
        engine.wait()
        engine.stdout.close()
        wait_until(lambda: ended() == {"closed": 4, "gone": 2}, explain=ended)
        with WireClient(daemon.directory, None) as client:
            client.send_lifeline(bytes(100))
            wait_until(lambda: ended() == {"closed": 4, "gone": 2, "malformed": 1}, explain=ended)
        assert "ended: gone." in daemon.log


def test_ended_sessions_with_much_unread_at_both_ends() -> None:
    """The loop hears only once that the client died, and that may be before what it had sent was read."""
    with DaemonProcess(fork=False) as daemon, WireClient(daemon.directory) as client:  # it is waited for as a child
        client.send_lifeline(attach_frame(1), [os.memfd_create("attached")])
        assert select.select([client.stream], [], [], 30.0)[0]  # the answer, which stays unread
        daemon.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, daemon.pid, os.WSTOPPED | os.WNOWAIT)
        client.leave(200)
        client.close_lifeline()
        daemon.process.send_signal(signal.SIGCONT)
        wait_until(lambda: not books(daemon.directory).sessions)


def test_ended_sessions_memory_keeps_no_other_waiting() -> None:
    """The kernel takes long to unmap much memory; others' requests are answered before it has."""
    with DaemonProcess(releases_slowly_s=LONGER_THAN_A_TEST_S) as daemon:
        with FakeEngine(daemon.directory), WireClient(daemon.directory) as client:
            fd = os.memfd_create("attached", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            client.attach(fd)
            os.close(fd)
        wait_until(lambda: books(daemon.directory).sessions == 0)


def test_unregister_is_answered_when_the_memory_is_released() -> None:
    slow_s = 1.0
    with DaemonProcess(releases_slowly_s=slow_s) as daemon, FakeEngine(daemon.directory) as engine:
        began = time.monotonic()
        assert engine.workers[0].unregister(30.0)
        assert time.monotonic() - began >= slow_s
