"""The engine of a fleet's node, over this release or an earlier one, in a process of its own."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

from .closing import Starting

MAIN = Path(__file__).with_name("fleet_engine_main.py")
START_S, REPLY_S = 90.0, 60.0


class Served(NamedTuple):
    """What became of a prompt.

    Attributes:
        loaded: leading blocks that were loaded.
        epochs: of these blocks, each once.
        wrong: sentences about blocks with other bytes than were stored.
        stored: whether all others were stored.
    """

    loaded: int
    epochs: list[int]
    wrong: list[str]
    stored: bool = True


class FleetEngine(Starting):
    """The engine of a daemon. Calls of several threads have their turns. See ``fleet_engine_main``.

    Args:
        directory: of the daemon's sockets.
        environ: variables of the process besides those of this one, such as where another release's packages are.
    """

    def __init__(self, directory: Path, environ: dict[str, str] | None = None) -> None:
        self._directory, self._environ = directory, os.environ | (environ or {})
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> FleetEngine:
        with (self._directory / "engine.log").open("ab") as log:
            # -P: the packages are those of PYTHONPATH, not of the directory in which the tests run.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(MAIN), str(self._directory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environ,
                text=True,
                bufsize=1,
            )
        assert self._reply(START_S) == "ready"
        return self

    def serve(self, prompt: int, blocks: int, epoch: int, seconds: float) -> Served:
        """Look a prompt up for this time at most, load what is there, and store the rest as of this epoch."""
        return Served(*self._ask("serve", prompt, blocks, epoch, seconds))

    def find(self, prompt: int, blocks: int, seconds: float) -> Served:
        """Look a prompt up for this time at most, and load what is there."""
        return Served(*self._ask("find", prompt, blocks, seconds))

    def clear(self) -> str:
        """Clear all nodes; return why that was refused, or an empty text."""
        return str(self._ask("clear"))

    def _ask(self, *words: object) -> Any:
        with self._lock:
            assert self._process is not None
            assert self._process.stdin is not None
            print(json.dumps(words), file=self._process.stdin, flush=True)
            return self._reply(REPLY_S)

    def _reply(self, timeout_s: float) -> Any:
        assert self._process is not None
        assert self._process.stdout is not None
        can_read = select.select([self._process.stdout], [], [], timeout_s)[0]
        line = self._process.stdout.readline() if can_read else ""
        assert line, f"the engine does not reply: {(self._directory / 'engine.log').read_text()[-2000:]}"
        return json.loads(line)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
