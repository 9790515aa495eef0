"""Work that takes long, such as freeing the blocks of a namespace: done step by step while requests are served."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator

from kvoffd.cache.cache import Steps
from kvoffd.errors import KvoffdError

logger = logging.getLogger(__name__)


class Work:
    """One piece of background work.

    Attributes:
        done: no step is left; ``count`` or ``error`` says how it ended.
        count: what its steps and ``then`` returned.
        error: what one of its steps raised.
    """

    def __init__(self, steps: Steps, then: Callable[[int], int] | None) -> None:
        self._steps = self._run(steps, then)
        self.done = False
        self.count = 0
        self.error: Exception | None = None

    def step(self) -> None:
        """Do a part of it, of about a millisecond."""
        next(self._steps, None)

    def _run(self, steps: Steps, then: Callable[[int], int] | None) -> Iterator[None]:
        try:
            self.count = yield from steps
            if then is not None:
                self.count = then(self.count)
        except Exception as error:
            self.error = error
            if not isinstance(error, KvoffdError):
                logger.exception("Background work failed inside the daemon.")
        self.done = True


class Background(deque[Work]):
    """The work that is not done yet. All pieces of it advance in turn."""

    def add(self, steps: Steps, then: Callable[[int], int] | None = None, *, at_once: bool = False) -> Work:
        """Have the steps made, whatever becomes of who asked for it, and then ``then`` called with what they returned.

        ``at_once``: all of it now. For what is no more work than a request may make.
        """
        work = Work(steps, then)
        while at_once and not work.done:
            work.step()
        if not work.done:
            self.append(work)
        return work

    def step(self) -> None:
        """Do one step of the piece whose turn it is."""
        if self:
            self[0].step()
            if self[0].done:
                self.popleft()
            else:
                self.rotate(-1)
