"""vLLM's OpenAI server in a process group of its own, started as users start it."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from .closing import Starting
from .engine import ANSWER_DEADLINE_S, START_DEADLINE_S, STOP_DEADLINE_S, session_pids
from .forked import Forked
from .ports import free_port
from .waiting import wait_until


class OpenAiServer(Starting):
    """A server on a free port of 127.0.0.1.

    Args:
        program: the command up to its flags.
        flags: its flags by name, besides host and port; an empty text for a flag without a value.
        environ: its environment. What it sets beside this process's own is up to the caller.
    """

    def __init__(self, program: Sequence[str], flags: Mapping[str, str], environ: Mapping[str, str]) -> None:
        self._own = Path(tempfile.mkdtemp(prefix="kvoffd-server-", dir="/tmp"))
        self.log_path = self._own / "log"
        self.port = free_port()
        all_flags = {"host": "127.0.0.1", "port": str(self.port), **flags}
        self._command = [
            *program,
            *(word for name, value in all_flags.items() for word in (f"--{name}", value) if word),
        ]
        self._environ = {**os.environ, **environ}
        self._process: subprocess.Popen[bytes] | Forked | None = None

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    @property
    def pids(self) -> list[int]:
        """The ids of all its processes."""
        return session_pids(self._process.pid) if self._process else []

    def start(self) -> Self:
        """Start and wait until it serves."""
        self.launch()
        return self.wait_ready()

    def launch(self) -> Self:
        """Start without waiting; nothing where it was launched before."""
        if self._process is None:
            self._process = self._begin()
        return self

    def _begin(self) -> subprocess.Popen[bytes] | Forked:
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=self._environ,
                start_new_session=True,
            )

    def wait_ready(self) -> Self:
        """Until it serves. Raises AssertionError with the end of its log when it does not."""

        def serves() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, f"the server ended:\n{self.log[-5000:]}"
            try:
                return self.ask("GET", "/health")[0] == 200
            except OSError:
                return False

        wait_until(serves, START_DEADLINE_S, explain=lambda: self.log[-5000:], interval_s=0.1)
        return self

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """Status and body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_DEADLINE_S)
        try:
            text = json.dumps(body) if body is not None else None
            connection.request(method, path, text, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def forget(self, connector: bool = False) -> None:
        """Clear the engine's own prefix cache, so that only the daemon has the blocks; and the connector's if asked.

        The server must have ``VLLM_SERVER_DEV_MODE``.
        """
        path = f"/reset_prefix_cache?reset_external={str(connector).lower()}"

        def cleared() -> bool:
            status, answer = self.ask("POST", path)
            assert status == 200, answer
            return bool(json.loads(answer)["success"])

        wait_until(cleared, interval_s=0.05)

    def stop(self) -> None:
        """End it; by force where that takes too long. It can be started again."""
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_DEADLINE_S)
            self.kill()

    def kill(self) -> None:
        """SIGKILL to all its processes. It can be started again."""
        if self._process is not None:
            self._process.kill()  # it may have no session of its own yet
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(STOP_DEADLINE_S)
            self._process = None

    def close(self) -> None:
        """End it and remove what it left."""
        self.stop()
        shutil.rmtree(self._own, ignore_errors=True)
