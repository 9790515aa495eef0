"""Fair shares of a queue: none of its owners waits for all that another one has queued."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from kvoffd.system.newest import put_newest

OwnerT = TypeVar("OwnerT", bound=Hashable)

MAX_OWNERS = 1024
"""Owners whose use is remembered: of more, those that used the resource last."""


class FairShares(Generic[OwnerT]):
    """The order in which owners use a resource: first the one that has used the least of it while others waited.

    This is start-time fair queueing: owners that always wait get equal amounts, as bytes, however large their pieces
    are. What an owner has used counts only as far as it is ahead of the one that began last. So what it used while
    nobody else waited is not held against it, and one that did not wait, or could not begin, has saved up nothing.
    """

    def __init__(self) -> None:
        self._used: dict[OwnerT, int] = {}
        """Amount by owner. One with less than ``_least``, or that is not here, counts as if it had used that."""
        self._least = 0
        """Amount that the owner that began last had used before."""

    def order(self, waiting: Iterable[OwnerT]) -> list[OwnerT]:
        """Return these owners in the order of their turns; those with equal shares stay in the given order."""
        return sorted(waiting, key=lambda owner: max(self._used.get(owner, 0), self._least))

    def use(self, owner: OwnerT, amount: int) -> None:
        """Record that an owner begins to use this amount."""
        self._least = max(self._used.get(owner, 0), self._least)
        put_newest(self._used, owner, self._least + amount, MAX_OWNERS)
