"""Switches `learned` to LRU for a while when the curve predicts that LRU would hit more: LEARNED.md, "As an LRU"."""

from __future__ import annotations

from kvoffd.cache.curve import HitRatioCurve
from kvoffd.cache.learned import Learned

LEAST_LEAD = 0.02
"""Least lead of an LRU, as a part of requested tokens: the curve is an estimate, and a switch costs hits."""
JUDGED_AFTER = 8
"""Pool lifetimes after each switch: learned values are worst just after the pool has filled."""
FIRST_STAY, MAX_STAY = 32, 1024
"""Pool lifetimes for which LRU stays on; doubled each time."""
KEPT = 1 - 1 / 16
"""Factor for older counts after each pool lifetime."""


class LruFallback:
    """Judges once per pool lifetime."""

    def __init__(self, curve: HitRatioCurve, policy: Learned) -> None:
        self._curve, self._known = curve, policy.known
        self._last = curve.in_all()
        self._asked = self._lead = 0.0
        """Requested tokens, and those of them that an LRU would have found and the pool did not."""
        self._excess = 0.0
        """Predicted lead while LRU was on, as a part: concurrent requests do not find what the curve expects."""
        self._stay = FIRST_STAY
        self._next_at = self._known.now + self._known.lifetime
        self._change_at = self._known.now + JUDGED_AFTER * self._known.lifetime

    def judge(self) -> None:
        """Judge, if it is time. The curve and the policy must have counted the same requests."""
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
