"""Keys that hints retain before their blocks are stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from heapq import nlargest
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from kvoffd.cache.retentions import Wish

MAX_AWAITED = 1 << 16
"""Limit of all keys. Beyond it, the session with the most loses those of its giver with the most."""
FORGOTTEN_AT_ONCE = 1024
"""Keys that one step forgets."""
LARGEST = 8
"""Givers that lose keys at once, each half of them at most."""

GroupKey: TypeAlias = tuple[int, bytes]
"""A group's number, and a key."""


class Awaited(NamedTuple):
    until: float
    wish: Wish
    of_giver: dict[GroupKey, None]
    """All awaited keys of its session and giver, this one included."""


class AwaitedKeys(dict[GroupKey, Awaited]):
    """Awaited keys, the oldest first, each for a wish and until a time. Only its methods change it."""

    def __init__(self) -> None:
        super().__init__()
        self._of_session: dict[int, dict[int, dict[GroupKey, None]]] = {}
        """Keys by session and giver."""
        self._count: Counter[int] = Counter()
        """Number of keys by session."""

    def add(
        self,
        keys: Sequence[GroupKey],
        wish: Wish,
        until: float,
        most: int,
        join: Callable[[Wish, Wish], Wish],
    ) -> int:
        """Await keys for a wish, up to ``most`` of its giver. ``join`` makes one wish of an older one and this, with
        the older one's session and payer: the key still counts for them. Returns how many are not awaited."""
        over, session = 0, wish.session
        of_giver = self._of_session.setdefault(session, {}).setdefault(wish.payer, {})
        for key in keys:
            if (old := self.pop(key, None)) is not None:
                self[key] = old._replace(until=until, wish=join(old.wish, wish))
            elif len(of_giver) >= most:
                over += 1
            else:
                self[key] = Awaited(until, wish, of_giver)
                of_giver[key] = None
                self._count[session] += 1
        self._drop_empty(session, wish.payer)
        if (excess := len(self) - MAX_AWAITED) > 0:
            self._drop(excess)
        return over

    def _drop(self, excess: int) -> None:
        """Drop keys of the session with the most: the last ones of its largest givers, else the oldest."""
        session = max(self._count, key=self._count.__getitem__)
        for of_giver in nlargest(LARGEST, self._of_session[session].values(), key=len):
            for key in list(islice(reversed(of_giver), min(excess, len(of_giver) // 2))):
                self.take(key)
                excess -= 1
        oldest = (key for key, one in self.items() if one.wish.session == session)
        for key in list(islice(oldest, excess)):
            self.take(key)

    def take(self, key: GroupKey) -> Wish | None:
        """Remove a key. Returns its wish, if it has one."""
        if (found := self.pop(key, None)) is None:
            return None
        del found.of_giver[key]
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
        for key, one in list(islice(self.items(), FORGOTTEN_AT_ONCE)):
            if one.until > now:
                break
            self.take(key)
