"""Whatever fails, whenever it does: the run goes on, every job ends once, and nothing is left behind.

One operation of a run fails the n-th time it is done, and never again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.kit.amount import TIMES
from tests.sim.clock import Injected
from tests.sim.daemon import SimDaemon
from tests.sim.network import Dealer, Line, Subscription
from tests.sim.pool import WatchedPool
from tests.sim.scenario import CHANCES, TIMED, Scenario
from tests.sim.transfer_engine import SimQueue
from tests.sim.world import run

SEED = 7
MOST = 2 if TIMES == 1 else 5
"""Up to this number every failure is tried; of later ones fewer and fewer, some five or ten in all."""
MANNERS = {"partial_store", "partial_load", "early_reuse", "beyond_credit", "invalidate", "reset"}
"""What happens besides: no faults, but all that changes what a store or load finds."""


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
    "copy": Operation(SimQueue, "_move"),
    "submit": Operation(SimQueue, "submit"),
    "mmap": Operation(SimDaemon, "map_memfd"),
    "send a reply": Operation(Dealer, "reply", bool),
    "send a publication": Operation(Subscription, "offer", bool),
    "send a request": Operation(Dealer, "send", bool),
    "receive": Operation(Line, "_arrive", bool),
}
"""Operations that may fail. Writes to the slot table are not among them: stores to memory do not fail."""


@pytest.mark.parametrize("operation", OPERATIONS)
def test_nth_failure_leaves_everything_in_order(operation: str) -> None:
    scenario = Scenario(SEED, check_every=4, max_requests=30, swarm=False).but(*{*CHANCES, *TIMED} - MANNERS)
    nth = 1
    while True:
        with OPERATIONS[operation].failing(nth) as done:
            outcome = run(scenario)
        assert outcome.problem is None, f"{operation} fails at its {nth}. time: {outcome.problem}"
        if done[0] < nth:
            break
        nth += 1 if nth < MOST else nth // 2 if TIMES > 1 else nth
    assert nth > 1, f"{operation} never happens in this run"
