"""Warnings that cannot fill a disk."""

from __future__ import annotations

import logging
import time

RARE_S = 60.0
"""Time between two warnings of one kind."""
USUAL = 256
"""Lines a minute about what clients normally do: enough for all of them, and a limit for one that does it in a loop."""


class RareWarnings:
    """Logs one warning a minute, or ``most``, so that no client can fill a disk, and the others at level debug."""

    def __init__(self, logger: logging.Logger, level: int = logging.WARNING, most: int = 1) -> None:
        self._logger, self._level, self._most = logger, level, most
        self._next_at, self._left = 0.0, 0

    def warn(self, text: str, *values: object, exc_info: bool = False) -> None:
        now = time.monotonic()
        if now >= self._next_at:
            self._next_at, self._left = now + RARE_S, self._most
        level = logging.DEBUG
        if self._left > 0:
            self._left -= 1
            level = self._level
        self._logger.log(level, text, *values, exc_info=exc_info)
