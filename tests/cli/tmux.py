"""A command in a real terminal: tmux draws what it writes, and its screen can be read and typed into."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from typing import Self

from tests.kit.closing import Starting
from tests.kit.command import environ
from tests.kit.require import require
from tests.kit.waiting import wait_until

PROMPT = "ready> "
SIZE_ASKED = "-u LINES -u COLUMNS"
"""Of the terminal and not of the environment, where pytest-xdist puts a size of its own."""


class Tmux(Starting):
    """A shell in a terminal of that size, in a tmux server of its own, without anybody's configuration."""

    def __init__(self, columns: int = 80, rows: int = 24, **changes: str) -> None:
        require("tmux", shutil.which("tmux"), "tmux is not installed; `make servers` does it")
        self._home = tempfile.mkdtemp(prefix="kvoffd-tmux-", dir="/tmp")  # the socket outlives its server
        self._size = ["-x", str(columns), "-y", str(rows)]
        self._environ = environ(LANG="C.UTF-8", **changes)

    def start(self) -> Self:
        self._tmux(
            "-f",
            "/dev/null",
            "new-session",
            "-d",
            *self._size,
            f"env {SIZE_ASKED} PS1='{PROMPT}' bash --norc --noprofile",
        )
        self.wait_for(PROMPT.strip())
        return self

    def type(self, *keys: str) -> None:
        """Keys by tmux's names: ``q``, ``Enter``, ``C-c``."""
        self._tmux("send-keys", *keys)

    def run(self, *command: str) -> None:
        """Type a command."""
        self._tmux("send-keys", "-l", shlex.join(command))
        self.type("Enter")

    def resize(self, columns: int, rows: int) -> None:
        self._tmux("resize-window", "-x", str(columns), "-y", str(rows))

    def screen(self, *, colours: bool = False) -> str:
        """What is to be seen now, the lines without the spaces at their ends."""
        return self._tmux("capture-pane", "-p", *(["-e"] if colours else []))

    def wait_for(self, *words: str, without: str = "") -> str:
        """Wait until all of the words are on the screen; returns it."""
        seen: Callable[[], str] = self.screen

        def there() -> str:
            text = seen()
            return text if all(word in text for word in words) and not (without and without in text) else ""

        return wait_until(there, explain=lambda: f"of {words} not all came:\n{seen()}", interval_s=0.05)

    def close(self) -> None:
        subprocess.run(["tmux", "-S", f"{self._home}/socket", "kill-server"], capture_output=True, check=False)
        shutil.rmtree(self._home, ignore_errors=True)

    def _tmux(self, *arguments: str) -> str:
        command = ["tmux", "-S", f"{self._home}/socket", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=self._environ, timeout=30).stdout
