"""Log records on stderr, one line each, as text or as JSON."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

# A client chooses some of the texts that are logged, such as its name: it must not be able to forge a line, or to
# talk to a terminal. Tracebacks become one line the same way.
_ESCAPES = {code: ascii(chr(code))[1:-1] for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)}


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


def configure_logging(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Send the records of all loggers from ``level`` up to ``stream`` (stderr where None), replacing other handlers.

    Args:
        level: One of ``kvoffd.config.LOG_LEVELS``.
        log_format: One of ``kvoffd.config.LOG_FORMATS``.
        stream: Where to write.
    """
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
