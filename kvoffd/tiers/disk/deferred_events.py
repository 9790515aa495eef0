"""What a tier tells its listener: in order, and never from within a call of the tier's."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial

from kvoffd.tiers.tier import Tier, TierBlock, TierKey, TierListener

logger = logging.getLogger(__name__)


class DeferredEvents:
    """Keeps what there is to tell until ``deliver``.

    Args:
        wake: has ``deliver`` called soon.
    """

    def __init__(self, tier: Tier, listener: TierListener, wake: Callable[[], None]) -> None:
        self.errors: Counter[str] = Counter()
        self._tier = tier
        self._listener = listener
        self._wake = wake
        self._news: deque[Callable[[], None]] = deque()

    def stored(self, block: TierBlock) -> None:
        """A block can be read."""
        self._say(partial(self._listener.tier_stored, self._tier, block))

    def removed(self, ids: Sequence[TierKey]) -> None:
        """Blocks cannot be read any more."""
        self._say(partial(self._listener.tier_removed, self._tier, ids))

    def error(self, kind: str, sentence: str) -> None:
        """Something was wrong; counted."""
        self.errors[kind] += 1
        self._say(partial(self._listener.tier_error, self._tier, kind, sentence))

    def deliver(self) -> None:
        """Tells what there is to tell."""
        while self._news:
            call(self._news.popleft())

    def _say(self, what: Callable[[], None]) -> None:
        self._news.append(what)
        self._wake()


def call(what: Callable[[], None]) -> None:
    """Calls somebody back, who must not raise."""
    try:
        what()
    except Exception:
        logger.exception("A callback of a disk tier raised; the tier goes on, but its owner has a bug.")
