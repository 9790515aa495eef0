"""A queue of several owners' items: the owner that was served least is served next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class FairQueue(Generic[Item]):
    """Items of owners, in the order of each. Every method takes time in proportion to the owners that wait, at most.

    ``charge`` tells what an owner was given, in bytes. An owner that had nothing to do has saved nothing up: it is put
    level with the one that is being served, so that it waits for one slice of each other owner at most. What it was
    given beyond the others is not forgotten before they have had as much. Not for several threads at once.
    """

    def __init__(self) -> None:
        # Items by owner, those who wait longer first.
        self._waiting: dict[Hashable, OrderedDict[Item, None]] = {}
        # What owners were given; those that do not wait, only while it is more than what others were.
        self._given: dict[Hashable, int] = {}
        self._level = 0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Item]:
        for items in self._waiting.values():
            yield from items

    def put(self, owner: Hashable, item: Item, *, first: bool = False) -> None:
        """Queue an item behind the owner's others, or before them."""
        items = self._waiting.get(owner)
        if items is None:
            self._given = {one: given for one, given in self._given.items() if given > self._level}
            items = self._waiting[owner] = OrderedDict()
        assert item not in items, "An item is queued once."
        items[item] = None
        if first:
            items.move_to_end(item, last=False)

    def remove(self, owner: Hashable, item: Item) -> bool:
        """Take an item out of the queue; False when it is not there."""
        items = self._waiting.get(owner, OrderedDict())
        if item not in items:
            return False
        del items[item]
        if not items:
            del self._waiting[owner]
        return True

    def take(self) -> Item | None:
        """Take the next item of the owner whose turn it is."""
        if not self._waiting:
            return None
        owner = min(self._waiting, key=self._given_to)
        items = self._waiting.pop(owner)
        self._level = max(self._level, self._given_to(owner))
        item, _ = items.popitem(last=False)
        if items:  # of owners that were given the same, the one that waits longest is next
            self._waiting[owner] = items
        return item

    def turn(self) -> Iterator[Item]:
        """The items of the owner whose turn it is, in their order. They stay in the queue."""
        if not self._waiting:
            return iter(())
        owner = min(self._waiting, key=self._given_to)
        self._level = max(self._level, self._given_to(owner))
        return iter(self._waiting[owner])

    def charge(self, owner: Hashable, cost: int) -> None:
        """Note that the owner was given ``cost`` more. What nobody else waited for counts for nothing."""
        given = self._given_to(owner) + cost
        if self._waiting.keys() <= {owner}:
            self._level = given
        self._given[owner] = given

    def is_before(self, owner: Hashable) -> bool:
        """Return whether another owner that waits was given no more than ``owner``."""
        given = self._given_to(owner)
        return any(one != owner and self._given_to(one) <= given for one in self._waiting)

    def has_other(self, owner: Hashable) -> bool:
        """Return whether an owner other than ``owner`` waits."""
        return not self._waiting.keys() <= {owner}

    def _given_to(self, owner: Hashable) -> int:
        return max(self._given.get(owner, 0), self._level)
