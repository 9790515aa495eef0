"""What a seed decides: sizes, and which faults happen how often."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

CHANCES = {
    "pub_drop": 0.25,
    "late_subscription": 0.3,
    "request_drop": 0.015,
    "reply_drop": 0.015,
    "slow_message": 0.03,
    "send_refused": 0.01,
    "copy_fail": 0.08,
    "copy_slow": 0.15,
    "copy_stall": 0.04,
    "copy_hang": 0.01,
    "slow_post": 0.1,
    "late_flush": 0.3,
    "disk_slow": 0.15,
    "disk_hang": 0.08,
    "disk_fail": 0.1,
    "disk_corrupt": 0.3,
    "disk_torn": 0.5,
    "torn": 0.003,
    "late_answer": 0.15,
    "abort_request": 0.2,
    "early_reuse": 0.25,
    "beyond_credit": 0.2,
    "partial_store": 0.2,
    "partial_load": 0.25,
    "stale_lease": 0.05,
    "keep_lease": 0.1,
}
"""Faults and bad manners that may happen at each opportunity, with their chance."""

TIMED = {
    "daemon_crash": 1,
    "daemon_stop": 1,
    "lost_pool": 2,
    "squeeze": 12,
    "daemon_pause": 2,
    "client_pause": 3,
    "worker_crash": 1,
    "scheduler_crash": 1,
    "engine_leave": 1,
    "reset": 1,
    "clear": 1,
    "invalidate": 5,
    "lease_storm": 3,
    "hostile": 3,
    "limit": 6,
    "worker_disconnect": 2,
    "disk_stop": 2,
    "shared_stop": 2,
    "wrong_estimate": 2,
}
"""Faults that happen at some time of the run, with how often at most in two seconds."""

KINDS = (*CHANCES, *TIMED)


@dataclass(frozen=True)
class Scenario:
    """One run. ``without`` and the limits are what shrinking takes away; a seed alone is the whole of it."""

    seed: int
    duration_s: float = 2.0
    without: frozenset[str] = frozenset()
    max_engines: int = 3
    max_requests: int = 16
    swarm: bool = True
    """Leave out about half of the faults, others in each run: what masks each other is then seen alone too."""
    check_every: int = 16
    """Steps between two audits of the whole cache."""

    def rng(self, purpose: str) -> random.Random:
        """Randomness of one part of the run, so that leaving another part out does not change it."""
        return random.Random(f"{self.seed}/{purpose}")

    def but(self, *kinds: str) -> Scenario:
        return replace(self, without=self.without | set(kinds))


@dataclass
class Faults:
    """Which faults happen in a run, decided as it goes, and how often each did."""

    scenario: Scenario
    calm: bool = False
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        swarm = self.scenario.rng("swarm")
        self._enabled = {
            kind for kind in KINDS if (swarm.random() < 0.55 or not self.scenario.swarm)
        } - self.scenario.without
        self._rng = {kind: self.scenario.rng(kind) for kind in CHANCES if kind in self._enabled}

    def hit(self, kind: str) -> bool:
        rng = self._rng.get(kind)
        if rng is None or self.calm or rng.random() >= CHANCES[kind]:
            return False
        self.counts[kind] += 1
        return True

    def times(self) -> Iterable[tuple[str, float]]:
        """The timed faults, and when in the run (0 to 1) each happens."""
        for kind, most in TIMED.items():
            if kind in self._enabled:
                rng = self.scenario.rng(kind)
                for _ in range(round(rng.randint(0, most) * max(1.0, self.scenario.duration_s / 2.0))):
                    yield kind, rng.random()
