"""The demo's child processes: the daemon and the engines, each in a process group of its own with a log file."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from tests.support.ports import free_port

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOG_TAIL_LINES = 25
POLL_S = 0.2
STOP_TIMEOUT_S = 20.0
ABORT_TIMEOUT_S = 5.0


class DemoFailed(Exception):
    """The demo cannot go on; the text says why, with the tail of the log that explains it."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put off what interrupts the demo: a process that was started is known before."""
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for one in came:
        signal.raise_signal(one)


class Child:
    """A process with its children in one group, so that nothing is left behind however it ends."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self._log = log
        with log.open("wb") as log_file:
            # A session of its own: Ctrl-C at the terminal reaches the demo alone, which then stops all in order.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                env=dict(environment),
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._unread = b""
        self._ended = False

    def failure(self, what: str) -> DemoFailed:
        """An exception that tells what went wrong with this process and shows the end of its log."""
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return DemoFailed(f"{self.name} {what}. The end of {self._log}:\n\n" + "\n".join(lines))

    def check_alive(self) -> None:
        """Raise DemoFailed when the process has ended."""
        if (status := self._process.poll()) is not None:
            raise self.failure(f"ended unasked, with status {status}")

    def send(self, message: Mapping[str, object]) -> None:
        """Write one line of JSON to the process."""
        try:
            self._stdin.write(json.dumps(message).encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError:
            raise self.failure("does not listen any more") from None

    def receive(self, timeout_s: float) -> dict[str, object]:
        """Read one line of JSON from the process. Raises DemoFailed when it ends or says nothing in time."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            if time.monotonic() > deadline:
                raise self.failure(f"said nothing for {timeout_s:.0f} s")
            if select.select([self._stdout], [], [], POLL_S)[0]:
                piece = os.read(self._stdout.fileno(), 65536)
                self._unread += piece
                if not piece:
                    self._wait(ABORT_TIMEOUT_S)
                    self.check_alive()
            else:
                # A grandchild may hold the pipe open after the process has gone.
                self.check_alive()
        line, self._unread = self._unread.split(b"\n", 1)
        return cast(dict[str, object], json.loads(line))

    def stop(self) -> None:
        """End the process in good order, or by force where that takes too long."""
        if self._process.poll() is None:
            self.ask_to_stop()
            self._wait(STOP_TIMEOUT_S)
        self.abort()

    def ask_to_stop(self) -> None:
        """Tell the process to end."""
        self._process.terminate()

    def abort(self) -> None:
        """End the whole group soon, also what a dead leader left in it. Does nothing the second time."""
        if self._ended:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._signal_group(number)
            self._wait(ABORT_TIMEOUT_S)
        self._ended = True
        for stream in (self._stdin, self._stdout):
            try:
                stream.close()
            except BrokenPipeError:
                pass  # what was not flushed has no reader any more

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass  # nobody is left in it

    def _wait(self, timeout_s: float) -> None:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass  # kill() comes next, or the caller reports what poll() says


class Daemon(Child):
    """`kvoffd serve` as a user would start it. ``shared`` is the URL of a store that nodes share; empty for none."""

    def __init__(self, directory: Path, pool_size: str, log: Path, shared: str = "") -> None:
        command = [script("kvoffd"), "serve", "--directory", str(directory), "--pool-size", pool_size]
        # No HTTP: its port may be taken on the machine of whoever tries the demo.
        command += ["--http-address", ""]
        if shared:  # the deadlines are for a machine that is busy with other things, as the client's are
            command += ["--shared", shared, "--shared-ask-deadline", "1s", "--shared-deadline", "10s"]
        super().__init__("The daemon", command, log, own_environment())


class SharedServer(Child):
    """A Valkey or Redis server that keeps nothing on disk."""

    @staticmethod
    def program() -> str | None:
        """The first of both that is installed."""
        return shutil.which("valkey-server") or shutil.which("redis-server")

    def __init__(self, program: str, log: Path) -> None:
        port = free_port()
        self.url = f"redis://127.0.0.1:{port}"
        options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        super().__init__("The shared server", [program, *options], log, own_environment())


class Engine(Child):
    """A vLLM engine of ``engine.py``."""

    def __init__(self, name: str, arguments: Mapping[str, object], log: Path) -> None:
        environment = {
            **own_environment(),
            # Block hashes begin with it: equal in every engine, or nothing is found again.
            "PYTHONHASHSEED": "0",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # With fewer cores than it would reserve, vLLM reserves none, and its threads fight with the daemon's.
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
        }
        super().__init__(name, [sys.executable, "-m", "tests.demo.engine", json.dumps(arguments)], log, environment)

    def ask(self, message: Mapping[str, object], timeout_s: float) -> dict[str, object]:
        """Send a request and wait for its answer."""
        self.send(message)
        return self.receive(timeout_s)

    def ask_to_stop(self) -> None:
        """End of file lets vLLM shut down by itself; SIGTERM would interrupt it anywhere."""
        try:
            self._stdin.close()
        except BrokenPipeError:
            pass  # it is ending already


def script(name: str) -> str:
    """A command of this Python's environment, whether or not it is activated."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise DemoFailed(f"{path} is missing. Build the environment with `make venv`, or `pip install --editable .`.")
    return str(path)


def own_environment() -> dict[str, str]:
    """This process's environment without kvoffd's variables, which are meant for the user's own daemon."""
    return {name: text for name, text in os.environ.items() if not name.startswith("KVOFFD_")}
