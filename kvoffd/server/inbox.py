"""How other threads reach the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from math import inf

logger = logging.getLogger(__name__)

WORK_S = 0.005
"""Time after which sockets are served before more calls are made: hundreds of blocks may be written to disks at once.
"""


class Inbox:
    """Calls on their way from other threads to the loop, one wake-up for many.

    After each wake-up the loop is told to send what the calls have left, once ``on_work`` is set.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], None]] = deque()
        self._woken = False
        self.on_work: Callable[[], None] = lambda: None

    def post(self, call: Callable[[], None]) -> None:
        """Have ``call`` made in the loop's thread. For any thread."""
        self._waiting.append(call)
        if not self._woken:  # asked after the append: the turn has seen the call, or has taken this back before
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._turn)
            except RuntimeError:
                pass  # the loop has ended; so have all sessions

    def work_off(self) -> None:
        """Make the calls that have arrived. What they post has a turn of its own."""
        self._make_calls(inf)

    def _turn(self) -> None:
        self._make_calls(time.monotonic() + WORK_S)
        if self._waiting and not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._turn)

    def _make_calls(self, until: float) -> None:
        self._woken = False
        for _ in range(len(self._waiting)):
            call = self._waiting.popleft()
            try:
                call()
            except Exception:
                logger.exception("The end of a copy, or of a mapping, failed inside the daemon.")
            if time.monotonic() >= until:
                break
        self.on_work()
