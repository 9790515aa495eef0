"""A real daemon in a process of its own, for tests."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from kvoffd_client import AdminClient
from kvoffd_proto.sockets import SocketPaths

from .closing import Starting
from .waiting import wait_until

START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 60.0
"""Longer than any machine of CI has kept a process from its CPU: kernels report 39 s for their own threads."""


class DaemonProcess(Starting):
    """``kvoffd serve`` in a short directory of its own. Start, kill, stop and start again as a test likes."""

    def __init__(self, pool_size: str = "64MiB", directory: Path | None = None, **flags: str) -> None:
        # Unix socket paths are limited to 107 bytes, which pytest's own directories may exceed.
        self._own = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="kvoffd-", dir="/tmp"))
        self.flags = {"pool-size": pool_size, "http-address": "", **{k.replace("_", "-"): v for k, v in flags.items()}}
        self.log_path = self.directory / "daemon.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the daemon was never started"
        return self._process

    @property
    def program(self) -> list[str]:
        """The command line up to the subcommand."""
        return [sys.executable, "-m", "kvoffd"]

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables of the daemon besides this process's own."""
        return {}

    @property
    def pass_fds(self) -> tuple[int, ...]:
        """Descriptors that the daemon inherits."""
        return ()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def start(self, *, wait: bool = True) -> Self:
        command = [*self.program, "serve", "--directory", str(self.directory)]
        for name, value in self.flags.items():
            command += [f"--{name}", value]
        with self.log_path.open("ab") as log:
            environ = {k: v for k, v in os.environ.items() if not k.startswith("KVOFFD_")} | self.environ
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environ, pass_fds=self.pass_fds
            )
        if wait:
            self.wait_ready()
        return self

    def wait_ready(self) -> None:
        """Until the lifeline, which is bound first, and the sockets after it can be connected to."""
        paths = SocketPaths(self.directory)

        def ready() -> bool:
            assert self.process.poll() is None, f"the daemon ended with {self.process.returncode}:\n{self.log}"
            return all(_answers(path) for path in (paths.jobs, paths.events, paths.lifeline))

        wait_until(ready, START_DEADLINE_S, explain=lambda: self.log, interval_s=0.01)

    def wait_log(self, text: str) -> None:
        """Until the log holds ``text``."""
        wait_until(
            lambda: text in self.log,
            START_DEADLINE_S,
            explain=lambda: f"the daemon never logged {text!r}:\n{self.log}",
        )

    def kill(self) -> None:
        """End it with SIGKILL."""
        self.process.kill()
        self.process.wait(STOP_DEADLINE_S)

    def stop(self) -> int:
        """End it with SIGTERM. Returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_DEADLINE_S)

    def close(self) -> None:
        """End it in any case and remove its directory."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self.kill()
        if self._own:
            shutil.rmtree(self.directory, ignore_errors=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            state = "runs" if self.running else f"has ended with {self._process and self._process.returncode}"
            error.add_note(f"The daemon {state}. Its log ends so:\n{self.log[-4000:]}")
        super().__exit__(kind, error, trace)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def clear_daemon(daemon: DaemonProcess) -> None:
    """Wait until the sessions of earlier tests have ended, and drop all blocks."""
    with AdminClient(daemon.directory) as admin:
        wait_until(lambda: len(admin.sessions().sessions) == 1, explain=admin.sessions)
        admin.clear()
