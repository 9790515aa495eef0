"""Eviction policies: one interface, one file each."""

from __future__ import annotations

from collections.abc import Callable

from kvoffd.cache.policies.arc import ArcPolicy
from kvoffd.cache.policies.base import EvictionPolicy
from kvoffd.cache.policies.lru import LruPolicy

_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LruPolicy, "arc": ArcPolicy}

POLICY_NAMES = tuple(_POLICIES)


def make_policy(name: str) -> EvictionPolicy:
    """A new policy by its name. Raises ValueError with the names there are."""
    try:
        return _POLICIES[name]()
    except KeyError:
        raise ValueError(f"There is no eviction policy {name!r}; choose one of {', '.join(POLICY_NAMES)}.") from None


__all__ = ["POLICY_NAMES", "ArcPolicy", "EvictionPolicy", "LruPolicy", "make_policy"]
