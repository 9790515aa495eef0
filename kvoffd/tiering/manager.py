"""The tiers below the pool, as one thing: found by lookups, brought up, written to, kept true to invalidations."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from operator import itemgetter
from typing import TYPE_CHECKING

from kvoffd.cache.block import Block
from kvoffd.cache.listener import TierEvents
from kvoffd.cache.namespace import Namespace
from kvoffd.tiering.budget import WriteBudget
from kvoffd.tiering.demotion import Demoter, WriteMode
from kvoffd.tiering.promotion import Promoter
from kvoffd.tiering.runs import prefix_run, run_end, window_run
from kvoffd.tiering.transfers import id_of
from kvoffd.tiers.tier import Tier, TierBlock, TierKey
from kvoffd_proto.messages import ABSENT, PENDING

if TYPE_CHECKING:
    from kvoffd.cache.cache import BlockCache

logger = logging.getLogger(__name__)

MAX_TOLD = 1000
"""Blocks of a namespace just opened that are told of in one turn."""


@dataclass(frozen=True)
class TieringSettings:
    """How much of what may happen at once.

    Attributes:
        mode: what is written.
        per_day_bytes, per_second_bytes: bounds on writing; 0 for none.
        deadline_s: what is wanted and not up after so many seconds is absent.
        max_promoting_bytes: bound on the pool bytes that promotions hold, beside an eighth of the pool.
        max_writing_bytes: bound on the bytes that are being written, beside a sixteenth of the pool.
        trickle_bytes: what is written from one tick to the next while engines copy, which goes first.
    """

    mode: WriteMode = WriteMode.REUSE
    per_day_bytes: int = 0
    per_second_bytes: int = 0
    deadline_s: float = 5.0
    max_promoting_bytes: int = 2**30
    max_writing_bytes: int = 16 * 2**20
    trickle_bytes: int = 8 * 2**20


class TieringManager:
    """Looks after one tier, which may be made of several, for one cache. See ``TieringHooks`` for what the cache calls.

    ``pump`` begins what lookups asked for, once their replies are out; ``tick`` is for deadlines and the cold end.
    """

    def __init__(
        self,
        cache: BlockCache,
        tier: Tier,
        events: TierEvents,
        clock: Callable[[], float],
        settings: TieringSettings,
        engines_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._cache = cache
        self.tier = tier
        self._events = events
        pool_bytes = cache.slots.pool_bytes
        self.promoter = Promoter(
            cache.exchange,
            tier,
            clock,
            min(pool_bytes // 8, settings.max_promoting_bytes),
            pool_bytes // 2,
            settings.deadline_s,
        )
        self.demoter = Demoter(
            cache.exchange,
            tier,
            cache.policy,
            lambda: cache.slots.free_bytes,
            settings.mode,
            WriteBudget(settings.per_day_bytes, settings.per_second_bytes, clock),
            min(pool_bytes // 16, settings.max_writing_bytes),
            pool_bytes // 16,
            lambda: not self.promoter.busy,
            engines_busy,
            settings.trickle_bytes,
        )
        self.errors: Counter[str] = Counter()
        """What was wrong with the tier, by kind."""
        self._told: dict[tuple[Namespace, int], set[bytes]] = {}
        """What the events so far fold to."""
        self._untold: dict[tuple[Namespace, int], dict[bytes, None]] = {}
        """Blocks that were there before their namespace was opened, and that no event has told of yet."""
        self._evicted: list[Block] = []
        self._stopped = False
        self.directory_attached()

    # --- what the cache calls --------------------------------------------------------------------

    def find(
        self, namespace: Namespace, groups: Sequence[tuple[int, list[bytes]]], states: Sequence[bytes]
    ) -> list[bytes]:
        """See TieringHooks. Groups that need their whole past go first: they say how far windows are of use."""
        told = [bytearray(state) for state in states]
        limit_tokens: int | None = None
        windows: list[int] = []
        for number, (group, keys) in enumerate(groups):
            spec = namespace.groups[group]
            if spec.window_tokens or "mamba" in spec.kind:
                windows.append(number)
                continue
            available = self._available(namespace, group)
            places = prefix_run(states[number], keys, available) if available is not None else []
            self._want(namespace, group, keys, places, told[number])
            end = run_end(told[number]) * spec.tokens_per_block
            limit_tokens = end if limit_tokens is None else min(end, limit_tokens)
        for number in windows:
            group, keys = groups[number]
            spec = namespace.groups[group]
            known = limit_tokens is not None and spec.tokens_per_block
            limit = limit_tokens // spec.tokens_per_block if known and limit_tokens is not None else len(keys)
            if (available := self._available(namespace, group)) is not None:
                places = window_run(states[number], keys, spec, limit, available)
                self._want(namespace, group, keys, places, told[number])
        return list(map(bytes, told))

    def used(self, blocks: Sequence[Block]) -> None:
        """See TieringHooks."""
        self.demoter.used(blocks)

    def stored(self, blocks: Sequence[Block]) -> None:
        """See TieringHooks."""
        self.demoter.stored(blocks)

    def evicted(self, blocks: Sequence[Block]) -> None:
        """See TieringHooks. The tier's own order goes on where the pool's ends, by the next tick: a store waits here."""
        self._evicted += blocks

    def forget(self, namespace: Namespace, group: int, keys: Iterable[bytes]) -> None:
        """See TieringHooks."""
        names = list(keys)
        for key in names:
            self.promoter.forget(namespace, group, key)
        self.tier.remove([TierKey(namespace.fingerprint, group, key) for key in names])
        self._tell_removed(namespace, group, names)

    def forget_all(self, namespace: Namespace) -> int:
        """See TieringHooks. The caller's event tells of it."""
        self.promoter.forget_all(namespace)
        for group in range(len(namespace.groups)):
            self._told.pop((namespace, group), None)
            self._untold.pop((namespace, group), None)
        return self.tier.remove_namespace(namespace.fingerprint)

    def forget_unopened(self) -> int:
        """Forget what belongs to namespaces that nobody has opened since the start. Returns how many blocks."""
        names = {fingerprint for fingerprint, _ in self.tier.groups()}
        return sum(map(self.tier.remove_namespace, names - {space.fingerprint for space in self._cache.namespaces}))

    def has(self, namespace: Namespace, group: int, key: bytes) -> bool:
        """See TieringHooks."""
        return key in self.tier.index(namespace.fingerprint, group)

    # --- what the daemon calls -------------------------------------------------------------------

    def pump(self) -> None:
        """Begin what was asked for, and go on writing. For when the replies are out."""
        if not self._stopped:
            self.promoter.pump()
            self.demoter.pump()

    def stop(self) -> None:
        """Begin nothing any more."""
        self._stopped = True
        self.promoter.stop()
        self.demoter.stop()

    def tick(self) -> None:
        """A few times a second: deadlines, the cold end of the pool, events."""
        evicted, self._evicted = self._evicted, []
        self.tier.touch(map(id_of, evicted))
        self.tier.tick()
        self.promoter.tick()
        self.demoter.tick()
        self.tell()

    def namespace_opened(self, namespace: Namespace) -> None:
        """A namespace was opened: what is there of it already is told of by and by."""
        for group in range(len(namespace.groups)):
            untold = dict.fromkeys(self.tier.index(namespace.fingerprint, group))
            for key in self._told.get((namespace, group), ()):
                untold.pop(key, None)
            if untold:
                self._untold[namespace, group] = untold

    def directory_attached(self) -> None:
        """The tier has blocks that it was not told to write, as those of a directory that was attached."""
        for namespace in self._cache.namespaces:
            self.namespace_opened(namespace)

    def directory_detached(self, tier: Tier) -> None:
        """Part of the tier, such as a directory, is not there any more, nor are its blocks."""
        for fingerprint, group in tier.groups():
            namespace = self._cache.find_namespace(fingerprint)
            if namespace is not None and group < len(namespace.groups):
                keys = tier.index(fingerprint, group)
                self._tell_removed(namespace, group, [key for key in keys if not self.has(namespace, group, key)])

    def tell(self) -> None:
        """Tell of some of what was there already."""
        for (namespace, group), untold in list(self._untold.items()):
            keys = list(islice(untold, MAX_TOLD))
            for key in keys:
                del untold[key]
            if not untold:
                del self._untold[namespace, group]
            self._tell_stored(namespace, group, [key for key in keys if self.has(namespace, group, key)])
            return

    # --- what the tier calls ---------------------------------------------------------------------

    def tier_stored(self, tier: Tier, block: TierBlock) -> None:
        """See TierListener."""
        namespace = self._namespace(block.id)
        if namespace is not None and self.has(namespace, block.id.group, block.id.key):
            self._tell_stored(namespace, block.id.group, [block.id.key])

    def tier_removed(self, tier: Tier, ids: Sequence[TierKey]) -> None:
        """See TierListener. What was forgotten from here is told of already."""
        # A reset removes all of a namespace at once, and nothing of that is left to tell: it must not take long.
        for (fingerprint, group), same in groupby(ids, itemgetter(0, 1)):
            namespace = self._cache.find_namespace(fingerprint)
            told = self._told.get((namespace, group)) if namespace is not None else None
            if namespace is not None and told:
                keys = [one.key for one in same if one.key in told]
                self._tell_removed(namespace, group, [key for key in keys if not self.has(namespace, group, key)])

    def tier_error(self, tier: Tier, kind: str, sentence: str) -> None:
        """See TierListener."""
        if not self.errors[kind]:
            logger.warning("%s: %s", tier.name, sentence)
        self.errors[kind] += 1

    # --- inside ----------------------------------------------------------------------------------

    def _tell_stored(self, namespace: Namespace, group: int, keys: Sequence[bytes]) -> None:
        told = self._told.setdefault((namespace, group), set())
        if (untold := self._untold.get((namespace, group))) is not None:
            for key in keys:
                untold.pop(key, None)
        fresh = [key for key in keys if key not in told]
        told.update(fresh)
        if fresh:
            self._events.stored_in_tier(namespace, group, fresh)

    def _tell_removed(self, namespace: Namespace, group: int, keys: Iterable[bytes]) -> None:
        told = self._told.get((namespace, group), set())
        gone = [key for key in dict.fromkeys(keys) if key in told]
        told.difference_update(gone)
        if gone:
            self._events.removed_from_tier(namespace, group, gone)

    def _namespace(self, block_id: TierKey) -> Namespace | None:
        namespace = self._cache.find_namespace(block_id.fingerprint)
        return namespace if namespace is not None and block_id.group < len(namespace.groups) else None

    def _available(self, namespace: Namespace, group: int) -> Callable[[bytes], bool] | None:
        """Says of a key that is not ready whether it is coming or could come; None where no key of the group is."""
        coming = self.promoter.coming(namespace, group)
        index = self.tier.readable(namespace.fingerprint, group)
        if not index and not coming:
            return None
        pool = namespace.index[group]
        return lambda key: key in coming or (key in index and key not in pool)

    def _want(
        self, namespace: Namespace, group: int, keys: Sequence[bytes], places: Iterable[int], told: bytearray
    ) -> None:
        """Mark what comes as PENDING, and ask for what does not come yet; up to the first that cannot."""
        coming = self.promoter.coming(namespace, group)
        index = self.tier.readable(namespace.fingerprint, group)
        for place in places:
            key = keys[place]
            if key not in coming and not (told[place] == ABSENT and self.promoter.want(namespace, index[key])):
                return
            told[place] = PENDING


__all__ = ["TieringManager", "TieringSettings"]
