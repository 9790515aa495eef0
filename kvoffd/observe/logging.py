"""Log records on stderr, one line each, as text or as JSON; with their priority if the journal reads it.

A thread writes them, so that a stuck reader or a disk that hangs blocks nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
from datetime import UTC, datetime
from typing import Any

# Clients choose some of the logged text, such as their names. Escapes keep them from forging a line or controlling a
# terminal, and make one line of a traceback.
_ESCAPES = {code: ascii(chr(code))[1:-1] for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)}
# Levels of syslog(3), which sd-daemon(3) prints before a line; without them the journal takes all lines for "info".
_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
STDERR = 2
MAX_LINES = 4096
"""Lines that may wait to be written; more are dropped and counted."""
FLUSH_S = 5.0
"""Most time for which an exit waits for the last lines, which say why: a busy disk takes seconds."""


class LineFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.123Z INFO kvoffd.server: text``, with line breaks and control characters escaped; or JSON.

    JSON is one object per line: ``time``, ``level``, ``logger``, ``message`` and, with a traceback, ``exception``.

    Args:
        fd: destination of the lines. They begin with their priority if it is systemd's journal (systemd.exec(5)).
        for_people: ``kvoffd: text`` instead of text with time, level and logger.
    """

    def __init__(self, log_format: str, fd: int, for_people: bool = False) -> None:
        super().__init__()
        self._json, self._for_people = log_format == "json", for_people
        try:
            found = os.fstat(fd)
        except OSError:
            self._to_journal = False
        else:
            self._to_journal = os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        text, trace = record.getMessage(), self.formatException(record.exc_info) if record.exc_info else ""
        if self._json:
            shown = {"time": when, "level": record.levelname.lower(), "logger": record.name, "message": text}
            line = json.dumps(shown | ({"exception": trace} if trace else {}))
        else:
            head = "kvoffd" if self._for_people else f"{when} {record.levelname} {record.name}"
            line = (f"{head}: {text}" + (f"\n{trace}" if trace else "")).translate(_ESCAPES)
        return f"<{_PRIORITIES.get(record.levelno, 6)}>{line}" if self._to_journal else line


class QueuedLines(logging.Handler):
    """Writes records to ``fd`` in a thread, in order. Lines that cannot be written are counted in a later warning.

    The thread uses no Python stream, since the exit of the process would wait for the stream's lock.
    """

    def __init__(self, fd: int, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._fd = fd
        self._dropped = 0
        """Lines that found the queue full. The handler's lock is held where they are counted."""
        self._lines: queue.Queue[str] = queue.Queue(MAX_LINES)
        threading.Thread(target=self._write_lines, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._dropped += 1
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait until all lines are written, for at most FLUSH_S."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, FLUSH_S)

    def _write_lines(self) -> None:
        failed = reported = 0
        while True:
            if not self._write(self._lines.get()):
                failed += 1
            elif (lost := self._dropped + failed - reported) and self._lines.empty():
                text = f"{lost} lines of the log were lost: they could not be written in time."
                if self._write(self.format(logging.LogRecord(__name__, logging.WARNING, "", 0, text, None, None))):
                    reported += lost
            self._lines.task_done()

    def _write(self, line: str) -> bool:
        left = line.encode(errors="backslashreplace") + b"\n"
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:  # no reader, or the disk is full
            return False
        return True


def configure_logging(level: str, log_format: str, fd: int = STDERR) -> None:
    """Send the records of all loggers from ``level`` up to ``fd``, replacing other handlers.

    Args:
        level: value of the setting ``log_level``.
        log_format: value of the setting ``log_format``.
    """
    handler = QueuedLines(fd, LineFormatter(log_format, fd))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def log_what_python_prints() -> None:
    """Log what Python would print on stderr: warnings and uncaught exceptions."""
    logging.captureWarnings(True)
    sys.excepthook = lambda kind, error, trace: _log_uncaught((kind, error, trace))
    threading.excepthook = lambda failed: _log_uncaught((failed.exc_type, failed.exc_value, failed.exc_traceback))


def print_refusal(sentence: str, log_format: str) -> None:
    """Print on stderr why the daemon does not start."""
    record = logging.LogRecord("kvoffd", logging.ERROR, "", 0, sentence, None, None)
    print(LineFormatter(log_format, STDERR, for_people=True).format(record), file=sys.stderr)


def _log_uncaught(failure: Any) -> None:
    logging.getLogger("kvoffd").critical("Uncaught exception.", exc_info=failure)
