"""Has the policy ``learned`` do as an LRU for a while, where the hit-ratio curve says that an LRU had more hits.

Loads that no class of keys tells apart are served worse by what was learned of classes.
"""

from __future__ import annotations

from kvoffd.cache.curve import HitRatioCurve
from kvoffd.cache.learned import Learned

LEAST_LEAD = 0.02
"""Of an LRU, as a part of what was asked for: the curve is an estimate, and to change costs hits."""
JUDGED_AFTER = 8
"""Pool lifetimes after each change: what was learned is at its worst when the pool has just become full."""
FIRST_STAY, MAX_STAY = 32, 1024
"""Pool lifetimes for which it is done as an LRU does; twice as long each time."""
KEPT = 1 - 1 / 16
"""Of what was counted, after a pool lifetime."""


class LruFallback:
    """Judges once in a pool lifetime."""

    def __init__(self, curve: HitRatioCurve, policy: Learned) -> None:
        self._curve, self._known = curve, policy.known
        self._last = curve.in_all()
        self._asked = self._lead = 0.0
        """Tokens asked for, and those that an LRU would have found and the pool did not."""
        self._excess = 0.0
        """The same as a part, while it was done as an LRU does: requests that come at once find nothing yet."""
        self._stay = FIRST_STAY
        self._next_at = self._known.now + self._known.lifetime
        self._change_at = self._known.now + JUDGED_AFTER * self._known.lifetime

    def judge(self) -> None:
        """Judge, if it is time. The curve and the policy have noted the same requests."""
        known = self._known
        if known.now < self._next_at:
            return
        self._next_at = known.now + known.lifetime
        last, now = self._last, self._curve.in_all()
        self._last = now
        if now.asked_tokens > last.asked_tokens:  # else the curve halved its counts
            found_by_lru = now.lru_hit_ratio["1"] * now.asked_tokens - last.lru_hit_ratio["1"] * last.asked_tokens
            self._asked = KEPT * self._asked + now.asked_tokens - last.asked_tokens
            self._lead = KEPT * self._lead + found_by_lru - (now.found_tokens - last.found_tokens)
        if known.now < self._change_at or not self._asked:
            return
        lead = self._lead / self._asked
        if known.as_lru:
            self._excess = max(0.0, lead)
            self._change(0, JUDGED_AFTER)
        elif lead > LEAST_LEAD + self._excess:
            self._change(1, self._stay)
            self._stay = min(2 * self._stay, MAX_STAY)

    def _change(self, as_lru: int, lifetimes: int) -> None:
        self._known.as_lru, self._asked, self._lead = as_lru, 0.0, 0.0
        self._change_at = self._known.now + lifetimes * self._known.lifetime
