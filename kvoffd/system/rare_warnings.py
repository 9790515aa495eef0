"""Warnings that cannot fill a disk."""

from __future__ import annotations

import logging
import time

RARE_S = 60.0
"""Time between two warnings of one kind."""


class RareWarnings:
    """Logs at most one warning a minute, so that no client can fill a disk, and the others at level debug."""

    def __init__(self, logger: logging.Logger, level: int = logging.WARNING) -> None:
        self._logger, self._level = logger, level
        self._next_at = 0.0

    def warn(self, text: str, *values: object, exc_info: bool = False) -> None:
        now = time.monotonic()
        due = now >= self._next_at
        if due:
            self._next_at = now + RARE_S
        self._logger.log(self._level if due else logging.DEBUG, text, *values, exc_info=exc_info)
