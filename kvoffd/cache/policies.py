"""The policies by name."""

from __future__ import annotations

from kvoffd.cache.arc import Arc
from kvoffd.cache.learned import Learned
from kvoffd.cache.lru import Lru
from kvoffd.cache.policy import Policy


def make_policy(name: str, pool_bytes: int, slots: int) -> Policy:
    """Make a policy, one of ``kvoffd.cache.POLICY_NAMES``, for a pool with this many bytes and slot numbers. Raises
    ValueError for an unknown name."""
    if name == "learned":
        return Learned(pool_bytes)
    if name == "lru":
        return Lru(slots)
    if name == "arc":
        return Arc(pool_bytes, slots)
    raise ValueError(f"There is no policy {name!r}.")
