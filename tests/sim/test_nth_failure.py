"""Whatever fails, whenever it does: the run goes on, every job ends once, and nothing is left behind.

One operation of a run fails the n-th time it is done, and never again.
"""

from __future__ import annotations

from collections.abc import Callable
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


OPERATIONS: dict[str, tuple[type, str, Callable[[], object] | None]] = {
    "alloc": (WatchedPool, "make", None),
    "alloc finds no room": (WatchedPool, "make", lambda: np.empty(0, np.uint32)),
    "submit": (SimQueue, "submit", None),
    "mmap": (SimDaemon, "map_memfd", None),
    "receive": (Line, "_arrive", bool),
}
"""Methods that may fail, and what they return then: without that they raise. Writes to the slot table do not fail."""
BY_CHANCE: dict[str, tuple[type, str, Callable[[], object] | None]] = {
    "copy": (SimQueue, "_move", None),
    "send a reply": (Dealer, "reply", bool),
    "send a publication": (Subscription, "offer", bool),
    "send a request": (Dealer, "send", bool),
}
"""Those that fail in all runs of the simulator, now and then."""


@pytest.mark.parametrize(
    "operation", [*OPERATIONS, *(pytest.param(one, marks=pytest.mark.nightly) for one in BY_CHANCE)]
)
def test_nth_failure_leaves_everything_in_order(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, instead = (OPERATIONS | BY_CHANCE)[operation]
    real: Callable[..., Any] = getattr(owner, method)
    done, nth = 0, 1

    def sometimes(*args: Any) -> Any:
        nonlocal done
        done += args[1] is not None  # the end of a stream: the kernel always tells it
        if args[1] is None or done != nth:
            return real(*args)
        if instead is None:
            raise Injected(f"{method} fails the {nth}. time")
        return instead()

    monkeypatch.setattr(owner, method, sometimes)
    scenario = Scenario(SEED, check_every=4, max_requests=30, swarm=False).but(*{*CHANCES, *TIMED} - MANNERS)
    while True:
        done = 0
        outcome = run(scenario)
        assert outcome.problem is None, f"{operation} fails at its {nth}. time: {outcome.problem}"
        if done < nth:
            break
        nth += 1 if nth < MOST else nth // 2 if TIMES > 1 else nth
    assert nth > 1, f"{operation} never happens in this run"
