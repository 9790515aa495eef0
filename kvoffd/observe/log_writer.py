"""Writes log lines in a thread of its own: a reader that does not read, or a disk that hangs, keeps nobody waiting."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque

MOST_LINES = 4096
"""Lines that wait; more are lost, and counted."""
FLUSH_S = 1.0


class LogWriter(logging.Handler):
    """Writes records to a descriptor. Where it cannot be written to, lines are lost; the log says so when it can."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._changed = threading.Condition()
        self._lines: deque[str] = deque()
        self._lost = 0
        threading.Thread(target=self._run, name="kvoffd-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        with self._changed:
            if len(self._lines) < MOST_LINES:
                self._lines.append(line)
                self._changed.notify_all()
            else:
                self._lost += 1

    def flush(self) -> None:
        """Wait until all lines are out, but not for long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lines, FLUSH_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                line = self._lines[0]
            written = self._write(line)
            with self._changed:
                self._lines.popleft()
                if not written:
                    self._lost += 1
                elif self._lost:
                    self._lines.append(self._lost_lines())
                    self._lost = 0
                self._changed.notify_all()

    def _lost_lines(self) -> str:
        text = f"{self._lost} lines of the log were lost: they could not be written, or not in time."
        return self.format(logging.LogRecord(__name__, logging.WARNING, "", 0, text, None, None))

    def _write(self, line: str) -> bool:
        left = line.encode(errors="backslashreplace") + b"\n"
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:  # nobody reads it, or the disk is full
            return False
        return True
