"""A real daemon in a process of its own, for tests."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from kvoffd_proto.paths import SocketPaths

from .closing import Starting
from .forked import Forked, fork_server
from .launcher import run_forked
from .service_manager import LAUNCH_WITH_FDS, ServiceManager
from .waiting import wait_until

LAUNCHER = Path(__file__).with_name("launcher.py")
POLICIES = "kvoffd.cache.arc", "kvoffd.cache.learned", "kvoffd.cache.lru"
"""Modules that every daemon imports while it starts."""
_IMPORTS = "kvoffd.cli", "kvoffd.server.daemon", run_forked.__module__, *POLICIES
_SERVER = fork_server(*_IMPORTS)
_SERVER_WITH_NIXL = fork_server(*_IMPORTS, f"{__package__}.forked_helper")
"""For daemons with peers, which fork their helpers."""
START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 180.0
"""Longer than any machine of CI has kept a process from its CPU: kernels report 53 s and more for their own threads."""


class DaemonProcess(Starting):
    """``kvoffd serve`` in a short directory of its own. Start, kill, stop and start again as a test likes.

    It is forked from a process that has imported kvoffd, unless what is asked for needs a start as users have it.

    Args:
        pool_size: of the daemon.
        directory: of its sockets and its log; None for one of its own, which is removed at the end.
        manager: the service manager that keeps its descriptors.
        watchdog_s: how long it may be silent to ``manager``; 0 for any time.
        faults: its copies and disks obey ``fault``.
        dies_slowly: the CUDA library over which its death takes most of a second: its lifelines first, its GPU's copies
            last. ``kill`` then returns when the process is gone.
        releases_slowly_s: how long the kernel takes to close or unmap an engine's memory.
        hosts: a file that it has in place of ``/etc/hosts``. For root.
        before: a command before its own, which runs what follows it.
        program: its command line up to the subcommand; this Python's ``kvoffd`` where none is given.
        environ: variables of the daemon besides those of this process.
        fork: False for a start as users have it, whatever is asked for.
        limits: what replaces constants of ``kvoffd.config.ServerLimits``, by name.
        flags: settings, by name.
    """

    def __init__(
        self,
        pool_size: str = "64MiB",
        directory: Path | None = None,
        *,
        manager: ServiceManager | None = None,
        watchdog_s: float = 0.0,
        faults: bool = False,
        dies_slowly: str = "",
        releases_slowly_s: float = 0.0,
        hosts: Path | None = None,
        before: Sequence[str] = (),
        program: Sequence[str] = (),
        environ: dict[str, str] | None = None,
        fork: bool = True,
        limits: dict[str, float] | None = None,
        **flags: str,
    ) -> None:
        # Unix socket paths are limited to 107 bytes, which pytest's own directories may exceed.
        self._own = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="kvoffd-", dir="/tmp"))
        self.flags = {"pool-size": pool_size, "http-address": "", **{k.replace("_", "-"): v for k, v in flags.items()}}
        self.log_path = self.directory / "daemon.log"
        self.manager = manager
        self._environ = environ or {}
        self._fault_file = self.directory / "fault" if faults else None
        self._dies_slowly = bool(dies_slowly)
        options = {
            "faults": str(self._fault_file or ""),
            "dies_slowly": dies_slowly,
            "releases_slowly": str(releases_slowly_s or ""),
            "hosts": str(hosts or ""),
            "limits": limits or {},
        }
        self._options = {name: value for name, value in options.items() if value}
        launcher = [str(LAUNCHER), json.dumps(self._options)] if self._options else ["-m", "kvoffd"]
        self._command = [*before, *(program or [sys.executable, *launcher])]
        self._fork = fork and not (before or program)
        if watchdog_s:
            self._environ = {**self._environ, "WATCHDOG_USEC": str(round(watchdog_s * 1e6))}
        self._process: subprocess.Popen[bytes] | Forked | None = None

    @property
    def process(self) -> subprocess.Popen[bytes] | Forked:
        assert self._process is not None, "the daemon was never started"
        return self._process

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
        flags = [part for name, value in self.flags.items() for part in (f"--{name}", value)]
        arguments = ["serve", "--directory", str(self.directory), *flags]
        command = [*self._command, *arguments]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("KVOFFD_")} | self._environ
        fds: tuple[int, ...] = ()
        if self.manager is not None:
            stored = self.manager.stored_fds
            fds = tuple(fd for _, fd in stored)
            command = [sys.executable, "-c", LAUNCH_WITH_FDS, ",".join(str(fd) for _, fd in stored), *command]
            environ |= {"NOTIFY_SOCKET": self.manager.address, "FDSTORE": "8"}
            if stored:
                names = ":".join(name for name, _ in stored)
                environ |= {"LISTEN_FDS": str(len(stored)), "LISTEN_FDNAMES": names}
        has_peers = bool(self.flags.keys() & {"peers", "peer-listen"})
        server = _SERVER_WITH_NIXL if has_peers else _SERVER
        options = self._options | {"forks_helpers": has_peers}
        with self.log_path.open("ab") as log:
            self._log_begins_at = log.tell()
            self._process = (
                Forked(server, run_forked, arguments, options, environ, str(self.log_path), fds=fds)
                if self._fork
                else subprocess.Popen(
                    command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environ, pass_fds=fds
                )
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
        if self._command[1:] == ["-m", "kvoffd"] and "log-level" not in self.flags:  # the launcher writes at once
            wait_until(lambda: b"Serving" in self.log_path.read_bytes()[self._log_begins_at :], START_DEADLINE_S)

    def wait_log(self, text: str) -> None:
        """Until the log holds ``text``."""
        wait_until(
            lambda: text in self.log,
            START_DEADLINE_S,
            explain=lambda: f"the daemon never logged {text!r}:\n{self.log}",
        )

    def kill(self) -> None:
        """End it with SIGKILL, or as slowly as was asked for; it is gone then."""
        if self._dies_slowly:
            self.process.send_signal(signal.SIGUSR1)
            try:
                self.process.wait(STOP_DEADLINE_S)
                return
            except subprocess.TimeoutExpired:
                pass
        self.process.kill()
        self.process.wait(STOP_DEADLINE_S)

    @contextmanager
    def fault(self, words: str) -> Iterator[None]:
        """Every copy that starts within fails, lies or is slow: ``load fails``, ``load lies``, ``store slow 0.5``.

        ``store waits``: it begins when this ends, if it was not stopped before.
        ``store first 3``: three copies are made, the others wait. Within ``store waits`` the one that waits is the
        first of them.
        ``commit fails``: a store that has copied everything meets a bug of the daemon.
        ``disk hangs DIRECTORY``: no read of this disk ends.
        """
        assert self._fault_file is not None, "a daemon that obeys is made with faults=True"
        file, before = self._fault_file, self._fault_file.read_text() if self._fault_file.exists() else ""

        def write(words: str) -> None:  # at once: a copy may read it at any time
            (new := file.with_suffix(".new")).write_text(words)
            new.replace(file)

        write(words)
        try:
            yield
        finally:
            if before:
                write(before)
            else:
                file.unlink()

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


def refusal_to_serve(*arguments: str, before: Sequence[str] = ()) -> str:
    """The one sentence with which ``kvoffd serve`` ends. It has no HTTP port, since another daemon may have it."""
    command = ["serve", "--http-address", "", *arguments]
    if before:
        program = [*before, sys.executable, "-m", "kvoffd", *command]
        done = subprocess.run(program, capture_output=True, text=True, timeout=START_DEADLINE_S, check=False)
        status, sentence = done.returncode, done.stderr
    else:
        with tempfile.NamedTemporaryFile("r") as said:
            status = Forked(_SERVER, run_forked, command, {}, dict(os.environ), said.name).wait(START_DEADLINE_S)
            sentence = said.read()
    assert status == 2, sentence
    assert sentence.startswith("kvoffd: ")
    assert sentence.count("\n") == 1, sentence
    return sentence


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
