"""Dictionaries of limited size, for entries whose number clients or servers choose."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def put_newest(
    known: dict[K, V], key: K, value: V, most: int, stays: Callable[[K], bool] = lambda key: False
) -> V | None:
    """Enter ``key`` as the newest. Beyond ``most`` entries, remove the oldest one that need not stay, and return its
    value; else return None."""
    known.pop(key, None)
    known[key] = value
    if len(known) > most and (oldest := next((one for one in known if not stays(one)), None)) is not None:
        return known.pop(oldest)
    return None
