"""The n-th failure: one operation of a run fails the n-th time it is done, and never again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.sim.clock import Injected
from tests.sim.daemon import SimDaemon
from tests.sim.network import Dealer, Line, Subscription
from tests.sim.pool import WatchedPool
from tests.sim.transfer_engine import SimTransferEngine


@dataclass(frozen=True)
class Operation:
    """Something that can fail: a method that raises then, or does nothing and returns what ``instead`` makes."""

    owner: type
    method: str
    instead: Callable[[], object] | None = None

    @contextmanager
    def failing(self, nth: int) -> Iterator[list[int]]:
        """Have it fail the ``nth`` time. Yields the number of times it was done, as a list of one."""
        real: Callable[..., Any] = getattr(self.owner, self.method)
        done = [0]

        def sometimes(*args: Any, **kwargs: Any) -> Any:
            if args[1] is None:  # the end of a stream: the kernel always tells it
                return real(*args, **kwargs)
            done[0] += 1
            if done[0] != nth:
                return real(*args, **kwargs)
            if self.instead is None:
                raise Injected(f"{self.method} fails the {nth}. time")
            return self.instead()

        setattr(self.owner, self.method, sometimes)
        try:
            yield done
        finally:
            setattr(self.owner, self.method, real)


OPERATIONS = {
    "alloc": Operation(WatchedPool, "take"),
    "alloc finds no room": Operation(WatchedPool, "take", lambda: np.empty(0, np.uint32)),
    "copy": Operation(SimTransferEngine, "_move"),
    "submit": Operation(SimTransferEngine, "submit"),
    "mmap": Operation(SimDaemon, "map_memfd"),
    "send a reply": Operation(Dealer, "reply", bool),
    "send a publication": Operation(Subscription, "offer", bool),
    "send a request": Operation(Dealer, "send", bool),
    "receive": Operation(Line, "_arrive", bool),
}
"""Operations that may fail. Writes to the slot table are not among them: stores to memory do not fail."""
