"""Helpers for tests: a daemon that ends with the test, and an engine with real memory and sockets but no model."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvoffd_client.errors import DaemonUnavailable
from kvoffd_client.fake_engine import EngineResult as EngineResult
from kvoffd_client.fake_engine import FakeEngine as FakeEngine
from kvoffd_client.health_request import ask_health

START_DEADLINE_S, STOP_DEADLINE_S = 30.0, 15.0
START_PAUSE_S = 0.02


@contextmanager
def running_daemon(pool_size: str = "64MiB", **settings: str) -> Iterator[Path]:
    """Run ``kvoffd serve``; yield the directory of its sockets.

    Args:
        settings: the daemon's settings, such as ``log_level="debug"``. HTTP is off unless ``http_address`` is given.

    Raises:
        DaemonUnavailable: it did not start; the message has the end of its log.
    """
    flags = {"pool_size": pool_size, "http_address": "", **settings}
    options = [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", value)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVOFFD_")}
    # Not pytest's directories: they may be too long for a socket's path.
    with tempfile.TemporaryDirectory(prefix="kvoffd-", dir="/tmp") as name:
        directory, log = Path(name), Path(name, "daemon.log")
        command = [sys.executable, "-m", "kvoffd", "serve", "--directory", name, *options]
        with log.open("wb") as file:
            daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environ)
        try:
            deadline = time.monotonic() + START_DEADLINE_S
            while ask_health(directory) is None:
                if daemon.poll() is not None or time.monotonic() >= deadline:
                    raise DaemonUnavailable(f"The daemon did not start:\n{log.read_text(errors='replace')[-2000:]}")
                time.sleep(START_PAUSE_S)
            yield directory
        finally:
            daemon.terminate()
            try:
                daemon.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
