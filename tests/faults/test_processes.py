"""Daemons and engines that are stopped, killed and kept from the CPU or memory: nobody is stuck, no byte is wrong."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack, closing

import pytest

from tests.faults.checked import CheckedEngine, Truth
from tests.faults.daemons import Command
from tests.faults.linux import cgroup
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until
from tests.kit.wire import VERSION, Refused, WireClient, refused

BLOCKS = 128
ALL = range(BLOCKS)


# --- sessions --------------------------------------------------------------------------------------


def test_health_is_not_ok_while_sessions_are_refused(command: Command) -> None:
    with DaemonProcess("16MiB", max_sessions="8") as daemon, ExitStack() as running:
        for number in range(8):
            running.enter_context(closing(WireClient(daemon.directory, name=f"{number}")))
        with WireClient(daemon.directory, None) as more:
            refused(more.hello, "worker")
        status, text = command(daemon, "health")
        assert status != 0, text
        assert "session" in text


def test_an_engine_of_another_protocol_is_logged(lasting: DaemonProcess) -> None:
    with WireClient(lasting.directory, None, name="older engine") as engine, pytest.raises(Refused):
        engine.hello("worker", version=VERSION - 1)
    wait_until(lambda: re.search(r"(version|protocol).*\b" + str(VERSION - 1) + r"\b", lasting.log), 5.0)
    with WireClient(lasting.directory, None) as engine:  # it does not speak the greeting's, and says that it leaves
        engine.leave()
    wait_until(lambda: f"(pid {os.getpid()}, uid {os.getuid()}) left without a request" in lasting.log, 5.0)


# --- limits of the machine -------------------------------------------------------------------------


def test_a_daemon_with_hardly_any_cpu_serves_right_bytes() -> None:
    """A twentieth of one CPU: slow, and right."""
    limits = {"cpu.max": "5000 100000", "cpu.cfs_quota_us": "5000"}
    with DaemonProcess("16MiB") as daemon, CheckedEngine(daemon, Truth()) as engine:
        engine.put(ALL)
        with cgroup("cpu", "cpu", limits) as group:
            try:
                group.take(daemon.pid)
                engine.put(range(BLOCKS, BLOCKS + 16))
                assert engine.get(range(64), 30.0) == list(range(64))
            finally:
                group.release(daemon.pid)
        assert engine.get(ALL) == list(ALL)


def test_a_pool_larger_than_the_memory_that_it_may_have() -> None:
    """Refused at the start, with both numbers."""
    limits = {"memory.max": str(48 << 20), "memory.limit_in_bytes": str(48 << 20)}
    with cgroup("memory", "memory", limits) as group, closing(DaemonProcess("64MiB", before=group.command)) as daemon:
        assert daemon.start(wait=False).process.wait(60) != 0
        assert "64.0 MiB" in daemon.log
        assert "48.0 MiB" in daemon.log
