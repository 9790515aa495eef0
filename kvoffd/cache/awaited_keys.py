"""Keys that hints retain before their blocks are stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from heapq import nlargest
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvoffd.cache.hints import Wish

MAX_AWAITED = 1 << 16
"""Limit of all keys. Beyond it, the session with the most loses those of its giver with the most."""
FORGOTTEN_AT_ONCE = 1024
"""Keys that one step forgets."""
LARGEST = 8
"""Givers that lose keys at once, each half of them at most."""

Name = tuple[int, bytes]
"""A group's number, and a key."""


class Awaited(NamedTuple):
    until: float
    wish: Wish
    names: dict[Name, None]
    """All keys of its session and giver."""


class AwaitedKeys:
    """Wishes by group and key, the oldest first, each until a time."""

    def __init__(self) -> None:
        self._of: dict[Name, Awaited] = {}
        self._of_session: dict[int, dict[int, dict[Name, None]]] = {}
        """Keys by session and giver."""
        self._count: Counter[int] = Counter()
        """Keys by session."""

    def __len__(self) -> int:
        return len(self._of)

    def get(self, name: Name) -> Wish | None:
        return found.wish if (found := self._of.get(name)) is not None else None

    def add(
        self,
        names: Sequence[Name],
        wish: Wish,
        until: float,
        most: int,
        join: Callable[[Wish, Wish], Wish],
    ) -> int:
        """Await keys for a wish, up to ``most`` of its giver. ``join`` makes one wish of an older one and this. Returns
        how many are not awaited."""
        over, session = 0, wish.session
        own = self._of_session.setdefault(session, {}).setdefault(wish.payer, {})
        for name in names:
            if (old := self._of.pop(name, None)) is not None:
                self._of[name] = old._replace(until=until, wish=join(old.wish, wish))
            elif len(own) >= most:
                over += 1
            else:
                self._of[name] = Awaited(until, wish, own)
                own[name] = None
                self._count[session] += 1
        self._drop_empty(session, wish.payer)
        if (excess := len(self._of) - MAX_AWAITED) > 0:
            self._drop(excess)
        return over

    def _drop(self, excess: int) -> None:
        """Drop keys of the session with the most: the last ones of its largest givers, else the oldest."""
        session = max(self._count, key=self._count.__getitem__)
        for names in nlargest(LARGEST, self._of_session[session].values(), key=len):
            for name in list(islice(reversed(names), min(excess, len(names) // 2))):
                self.take(name)
                excess -= 1
        oldest = (name for name, one in self._of.items() if one.wish.session == session)
        for name in list(islice(oldest, excess)):
            self.take(name)

    def take(self, name: Name) -> Wish | None:
        """Remove a key. Returns its wish, if it has one."""
        if (found := self._of.pop(name, None)) is None:
            return None
        del found.names[name]
        wish = found.wish
        self._count[wish.session] -= 1
        self._drop_empty(wish.session, wish.payer)
        return wish

    def _drop_empty(self, session: int, giver: int) -> None:
        if not self._of_session[session][giver]:
            del self._of_session[session][giver]
        if not self._of_session[session]:
            del self._of_session[session], self._count[session]

    def expire(self, now: float) -> None:
        """Forget some keys whose time is over."""
        for name, one in list(islice(self._of.items(), FORGOTTEN_AT_ONCE)):
            if one.until > now:
                break
            self.take(name)
