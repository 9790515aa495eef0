"""A queue of several owners' items, who take turns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class Turns(Generic[Item]):
    """Items of owners, in the order of each. Whose turn it was comes after all others that wait by then.

    So nobody waits for more than one turn of each other owner. Not for several threads at once.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[Hashable, OrderedDict[Item, None]] = OrderedDict()
        self._last: Hashable = None

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Item]:
        for items in self._waiting.values():
            yield from items

    def put(self, owner: Hashable, item: Item, *, first: bool = False) -> None:
        """Queue an item behind the owner's others, or before them."""
        items = self._waiting.setdefault(owner, OrderedDict())
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

    def turn(self) -> Iterator[Item]:
        """The items of the owner whose turn it is, in their order. They stay in the queue."""
        if self._last in self._waiting:
            self._waiting.move_to_end(self._last)
        return iter(next(iter(self._waiting.values()), ()))

    def end_turn(self, owner: Hashable) -> None:
        """Have others be next."""
        self._last = owner

    def take(self) -> Item | None:
        """Take the next item of the owner whose turn it is, and end the turn."""
        if self._last in self._waiting:
            self._waiting.move_to_end(self._last)
        owner = next(iter(self._waiting), None)
        if owner not in self._waiting:
            return None
        item = next(iter(self._waiting[owner]))
        self.remove(owner, item)
        self.end_turn(owner)
        return item

    def has_other(self, owner: Hashable) -> bool:
        """Return whether an owner other than ``owner`` waits."""
        return not self._waiting.keys() <= {owner}
