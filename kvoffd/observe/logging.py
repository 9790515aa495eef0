"""Log records on stderr, one line each, as text or as JSON; with their priority where the journal reads it."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from kvoffd.observe.log_writer import LogWriter

# A client chooses some of the texts that are logged, such as its name: it must not be able to forge a line, or to
# talk to a terminal. Tracebacks become one line the same way.
_ESCAPES = {code: ascii(chr(code))[1:-1] for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)}
# The levels of syslog(3), as sd-daemon(3) puts them before a line: without them the journal takes all lines for "info".
_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
STDERR = 2
RARE_S = 60.0
"""Between two warnings of one kind."""


class TextFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.123Z INFO kvoffd.server: text``; line breaks and control characters are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        return f"{_time(record)} {record.levelname} {record.name}: {text}".translate(_ESCAPES)


class JsonFormatter(logging.Formatter):
    """One object a line: ``time``, ``level``, ``logger``, ``message`` and, after a failure, ``exception``."""

    def format(self, record: logging.LogRecord) -> str:
        shown = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            shown["exception"] = self.formatException(record.exc_info)
        return json.dumps(shown)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class JournalFormatter(logging.Formatter):
    """Another formatter's line with the record's priority before it, which the journal takes off again."""

    def __init__(self, line: logging.Formatter) -> None:
        super().__init__()
        self._line = line

    def format(self, record: logging.LogRecord) -> str:
        return f"<{_PRIORITIES.get(record.levelno, 6)}>{self._line.format(record)}"


class RareWarnings:
    """Warnings of which one a minute is enough: whoever causes them could fill a disk. The others are for debugging."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._next_at = 0.0

    def warn(self, text: str, *values: object) -> None:
        now = time.monotonic()
        level = logging.WARNING if now >= self._next_at else logging.DEBUG
        if level == logging.WARNING:
            self._next_at = now + RARE_S
        self._logger.log(level, text, *values)


def configure_logging(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Send the records of all loggers from ``level`` up to ``stream``, replacing other handlers.

    Args:
        level: One of ``kvoffd.config.LOG_LEVELS``.
        log_format: One of ``kvoffd.config.LOG_FORMATS``.
        stream: Where to write; stderr where None, which whoever logs does not wait for.
    """
    handler = LogWriter(STDERR) if stream is None else logging.StreamHandler(stream)
    stream = stream if stream is not None else sys.stderr
    handler.setFormatter(_formatter(JsonFormatter() if log_format == "json" else TextFormatter(), stream, os.environ))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def log_what_python_prints() -> None:
    """Make records of what Python itself would print on stderr: warnings, and exceptions that nothing caught."""
    logging.captureWarnings(True)
    sys.excepthook = lambda kind, error, trace: _log_uncaught((kind, error, trace))
    threading.excepthook = lambda failed: _log_uncaught((failed.exc_type, failed.exc_value, failed.exc_traceback))


def print_refusal(sentence: str, log_format: str, stream: TextIO | None = None) -> None:
    """Say on ``stream`` (stderr where None) why the daemon does not start: in text without a time, for people."""
    stream = stream if stream is not None else sys.stderr
    record = logging.LogRecord("kvoffd", logging.ERROR, "", 0, sentence, None, None)
    line = JsonFormatter() if log_format == "json" else logging.Formatter("kvoffd: %(message)s")
    print(_formatter(line, stream, os.environ).format(record), file=stream)


def _formatter(line: logging.Formatter, stream: TextIO, environ: Mapping[str, str]) -> logging.Formatter:
    """``line``, with priorities where systemd says that ``stream`` goes to its journal (systemd.exec(5))."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return line  # no file, or a closed one
    to_journal = environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"
    return JournalFormatter(line) if to_journal else line


def _log_uncaught(failure: Any) -> None:
    logging.getLogger("kvoffd").critical("An exception was not caught.", exc_info=failure)
