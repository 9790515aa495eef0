"""``kvoffd-cli`` and ``kvoffd`` as processes: on pipes and on terminals. Commands' names stand here alone."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import kvoffd.cli
import kvoffd_client.cli

from .closing import Closing
from .daemon import DaemonProcess
from .wire import keys

BIN = Path(sys.executable).parent
CLI, DAEMON = str(BIN / "kvoffd-cli"), str(BIN / "kvoffd")
DEADLINE_S = 60.0

CLIENTS = ("clients", "--all")
LABEL = "tiny"
KEYS = keys(*range(1, 9))
BLOCK_BYTES = 4 * 16384
"""What the engine of the command line's tests has stored."""
READING = (("stats",), ("health",), CLIENTS, ("namespaces",))
"""Commands that show something and change nothing."""


def environ(**changes: str) -> dict[str, str]:
    """This process's variables without those that change what is printed."""
    dropped = ("NO_COLOR", "COLUMNS", "FORCE_COLOR", "LC_ALL", "LANG", "KVOFFD_DIRECTORY")
    return {name: value for name, value in os.environ.items() if name not in dropped} | changes


def run_cli(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run ``kvoffd-cli`` to its end. ``changes`` are of the environment."""
    return subprocess.run(
        [CLI, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environ(**changes),
        timeout=DEADLINE_S,
        check=False,
    )


def run_daemon_here(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``kvoffd`` in this process, a hundred times as fast: for commands that start no daemon."""
    return _run_here(kvoffd.cli.main, arguments, variables)


def run_cli_here(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """``kvoffd-cli`` in this process, a hundred times as fast: where a process shows nothing more."""
    return _run_here(kvoffd_client.cli.main, arguments, environ(**changes))


def command(daemon: DaemonProcess, *words: str) -> tuple[int, str]:
    """Run ``kvoffd-cli`` on a daemon, in this process: the exit status, and all that it printed."""
    done = run_cli_here(*words, "--directory", str(daemon.directory))
    return done.returncode, done.stdout + done.stderr


def _run_here(
    main: Callable[[Sequence[str]], int], arguments: Sequence[str], variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    out, err = io.StringIO(), io.StringIO()
    with patch.dict(os.environ, variables, clear=True), redirect_stdout(out), redirect_stderr(err):
        try:
            status = main(arguments)
        except SystemExit as end:
            status = int(end.code or 0)
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def start_cli(*arguments: str, **changes: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [CLI, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ(**changes)
    )


class Done(NamedTuple):
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The one sentence with which it was refused."""
        assert (self.status, self.out, self.err.count("\n")) == (2, "", 1), self
        assert self.err.startswith("kvoffd-cli: "), self
        return self.err


Cli = Callable[..., Done]
"""Runs a command on a daemon, in this process."""


class Terminal(Closing):
    """``kvoffd-cli`` on a terminal of its own."""

    def __init__(self, *arguments: str, columns: int = 80, **changes: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        self.process = subprocess.Popen(
            [CLI, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environ(TERM="xterm-256color", LANG="C.UTF-8") | changes,
        )
        os.close(theirs)
        self.seen = ""

    def read_until(self, enough: Callable[[str], bool]) -> str:
        """Collect output until ``enough`` says so, or the process ends."""
        deadline = time.monotonic() + DEADLINE_S
        while not enough(self.seen):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._ours], [], [], left)[0]:
                raise AssertionError(f"this did not come: {self.seen!r}")
            try:
                self.seen += os.read(self._ours, 65536).decode(errors="replace")
            except OSError:  # EIO: the other side is closed
                break
        return self.seen

    def write(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def interrupt(self) -> int:
        """Ctrl-C; the exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.end()

    def end(self) -> int:
        """Wait for its end; the exit status."""
        self.read_until(lambda _: False)
        return self.process.wait(DEADLINE_S)

    def close(self) -> None:
        os.close(self._ours)
        self.process.kill()
        self.process.wait(DEADLINE_S)
